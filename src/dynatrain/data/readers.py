"""The texts of one file, by the kind of file.

==============  =================================================================================================
``.txt``        one document, UTF-8 (here and below with a byte order mark or without)
``.py``         one document, in the encoding that it declares
``.jsonl``      one document a line: an object with a string under the text column's name
``.parquet``    one document a row, from the text column; needs pyarrow
``.tar``        WebDataset: members that share their path up to the first dot of the file's name are one document:
                the member ``.txt``, else the string under the text column's name in the member ``.json``
==============  =================================================================================================

Texts are numbered from 1 where a file holds many; those of a ``.tar`` go by their key.
"""

import json
import tarfile
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

Texts = Iterator[tuple[str, str]]
"""``(what follows the file's name in the document's, text)``."""

_TEXT = "utf-8-sig"
"""UTF-8; a byte order mark in front is none of the text."""

_BLOCK = 512
"""Bytes of a block of a tar file; two empty ones close it."""


class UnreadableError(ValueError):
    """A file that is not what its name says; the text has the reason and not the file's name."""


def texts_in(file: Path, column: str) -> Texts:
    """The texts of a file whose suffix is one of :data:`SUFFIXES`, in the file's own order.

    Args:
        file: exists.
        column: name under which a row, line or record has its text.

    Raises:
        UnreadableError: the content is not of the kind that the suffix says, or a record has no text.
        OSError, UnicodeDecodeError, SyntaxError: the file cannot be read, or not as text.
    """
    for place, text in _READERS[file.suffix.lower()](file, column):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell what no UTF-8 can
            half = f"U+{ord(text[error.start]):04X}, half of a surrogate pair, as character {error.start + 1}"
            raise UnreadableError(f"text {place or '#1'} has {half}; a text is whole characters") from None
        yield place, text


def _plain(file: Path, _column: str) -> Texts:
    yield "", file.read_bytes().decode(_TEXT)  # line ends stay as they are


def _python(file: Path, _column: str) -> Texts:
    with file.open("rb") as source:
        encoding, _ = tokenize.detect_encoding(source.readline)  # a Python file says its own
    yield "", file.read_bytes().decode(encoding)


def _json_lines(file: Path, column: str) -> Texts:
    for number, line in enumerate(file.read_text(encoding=_TEXT).split("\n"), start=1):
        if line.strip():
            yield f"#{number}", _text_of(line, f"line {number}", column)


def _parquet(file: Path, column: str) -> Texts:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional, and slow to import
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise UnreadableError("parquet needs pyarrow, which is not installed: pip install 'dynatrain[data]'") from None
    try:
        with pq.ParquetFile(file) as table:
            kinds = {field.name: field.type for field in table.schema_arrow}
            if column not in kinds:
                raise UnreadableError(f"no column {column!r}; {_has(kinds)}")
            if not (pa.types.is_string(kinds[column]) or pa.types.is_large_string(kinds[column])):
                raise UnreadableError(f"column {column!r} is {kinds[column]}, and a column of strings is wanted")
            number = 0
            for batch in table.iter_batches(columns=[column], use_threads=False):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield f"#{number}", text or ""  # a null is an empty text
    except pa.ArrowException as error:
        raise UnreadableError(f"is not whole parquet: {str(error).splitlines()[0]}") from None


def _web_dataset(file: Path, column: str) -> Texts:
    for key, members in _samples_of(file).items():
        if "txt" in members:
            try:
                yield f"#{key}", members["txt"].decode(_TEXT)
            except UnicodeDecodeError as error:
                raise UnreadableError(f"member {key}.txt: byte {error.start} is not UTF-8") from None
        elif "json" in members:
            yield f"#{key}", _text_of(members["json"], f"member {key}.json", column)
        else:
            raise UnreadableError(f"sample {key} has neither {key}.txt nor {key}.json")


def _samples_of(file: Path) -> Mapping[str, Mapping[str, bytes]]:
    """``{key: {extension: content}}`` in the order of the file; content only of what can hold a text."""
    samples: dict[str, dict[str, bytes]] = {}
    end = 0
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                path = PurePosixPath(member.name)
                stem, dot, extension = path.name.partition(".")
                if not (member.isfile() and stem and dot) or stem.startswith("__"):
                    continue  # folders, hidden files, and notes of the archive, by the convention
                key, extension = str(path.with_name(stem)), extension.lower()
                sample = samples.setdefault(key, {})
                if extension in sample:
                    raise UnreadableError(f"member {member.name} comes twice; each sample has a key of its own")
                content = tar.extractfile(member) if extension in {"txt", "json"} else None
                sample[extension] = content.read() if content else b""
    except tarfile.TarError as error:
        raise UnreadableError(f"is no whole tar file: {error}") from None
    with file.open("rb") as raw:
        raw.seek(end)
        if raw.read(2 * _BLOCK) != bytes(2 * _BLOCK):
            raise UnreadableError(f"ends after {end:,} bytes without the two empty blocks that close a tar: cut short")
    return samples


def _text_of(source: str | bytes, where: str, column: str) -> str:
    """The text of a JSON object."""
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of too many digits or brackets
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8, or without end"
        raise UnreadableError(
            f"{where} is not JSON ({reason}); it is to be an object with a string under {column!r}"
        ) from None
    if not isinstance(value, dict) or not isinstance(text := value.get(column), str):
        has = f"; {_has(value)}" if isinstance(value, dict) else ""
        raise UnreadableError(f"{where} has no string under {column!r}{has}")
    return text


def _has(columns: Mapping[str, object]) -> str:
    """The names that are there, as a way out."""
    return f"there are {', '.join(map(repr, columns)) or 'none'}; data.text_column says which to take"


_READERS: Mapping[str, Callable[[Path, str], Texts]] = {
    ".txt": _plain,
    ".py": _python,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".tar": _web_dataset,
}
SUFFIXES = tuple(_READERS)
"""The kinds of files that hold texts."""
