"""From a corpus to the files of a run folder: ``tokenizer.json``, ``tokens_*.npy``, ``documents_*.npy``, ``data.json``.

The work is done by a child process, because training and batch encoding of tokenizers start threads, and the process
that asks may have to fork later. ``data.json`` is written last: where it is there, the files beside it are whole and
are used again without reading the corpus.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dynatrain.config.own import TOKENIZER
from dynatrain.data.corpus import DataError, already_tokenised, held_out, read_documents, split
from dynatrain.data.indexed import misfit, open_indexed
from dynatrain.data.samples import Samples, write_tokens
from dynatrain.data.tokenizer import byte_tokenizer, encode, end_marker, load_tokenizer, train_bpe, vocabulary
from dynatrain.observe.objects import ObjectError, read_object

RECORD = "data.json"
_TRAIN, _VALIDATION = "train", "validation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What decides the tokens of a run.

    Attributes:
        paths: as of :func:`dynatrain.data.corpus.read_documents`, or of :func:`dynatrain.data.indexed.open_indexed`.
        text_column: name under which rows and records have their text.
        tokenizer: ``bpe``, ``bytes``, or ``model`` for one that lies in the folder already; unused where the paths are
            tokens already.
        vocab_size: entries of the BPE, at most; unused with bytes. Of tokens that are there, the number that they all
            must be below.
        validation: share of documents held out.
        seed: of the run; decides which documents are held out.
    """

    paths: tuple[str, ...] = ()
    text_column: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation: float = 0.05
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a run folder holds of its data.

    Attributes:
        request: what was asked for.
        vocab_size: larger than every token, the end marker included; the model needs at least as many entries.
        documents: training and validation documents.
        tokens: training and validation tokens.
    """

    request: Request
    vocab_size: int
    documents: tuple[int, int]
    tokens: tuple[int, int]


def prepare(request: Request, folder: Path) -> Prepared:
    """Have the files of ``request`` in the existing ``folder``, made by a child process where they are not there.

    A ``tokenizer.json`` that is already there is used and not trained again.

    Raises:
        DataError: the data cannot be read or split, or the folder was prepared from another request.
    """
    record = folder / RECORD
    if record.exists():
        prepared = _parse(record)
        if prepared.request != request:
            raise DataError(f"{record} was made from other settings", _differences(prepared.request, request))
        return prepared
    task = json.dumps({"request": asdict(request), "folder": str(folder)})
    # The child finds the modules where this process does, whatever put them there.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "dynatrain.data.prepare"]
    child = subprocess.run(command, input=task, capture_output=True, text=True, env=environment, check=False)
    if child.returncode == 2:
        answer = json.loads(child.stdout)
        raise DataError(answer["what"], tuple(answer["problems"]))
    if child.returncode:
        raise RuntimeError(f"preparing the data ended with exit code {child.returncode}:\n{child.stderr[-4000:]}")
    return _parse(record)


def open_samples(folder: Path, sequence: int, *, document_mask: bool = False) -> Samples:
    """Training samples of a prepared folder; with ``document_mask`` they know where documents begin.

    Raises:
        DataError: the text is too short for one sample of ``sequence`` tokens.
    """
    return _open(folder, _TRAIN, sequence, document_mask)


def open_validation(folder: Path, sequence: int, *, document_mask: bool = False) -> Samples:
    """Samples of the documents that were held out, as :func:`open_samples`.

    Raises:
        DataError: none were, or too few for one sample of ``sequence`` tokens.
    """
    if not _parse(folder / RECORD).documents[1]:
        raise DataError("there is nothing to validate on", ("data.validation = 0 holds out no document; give 0.05",))
    return _open(folder, _VALIDATION, sequence, document_mask)


def _open(folder: Path, side: str, sequence: int, document_mask: bool) -> Samples:
    path, starts = _files(folder, side)
    samples = Samples.open(path, sequence, starts if document_mask else None)
    written = _parse(folder / RECORD).tokens[(_TRAIN, _VALIDATION).index(side)]
    if len(samples.tokens) != written:
        seen = f"{path} has {len(samples.tokens):,} tokens, and {RECORD} says that {written:,} were written"
        raise DataError("the prepared data is not what it was", (f"{seen}; bring the file back, or begin a new run",))
    return samples


def _files(folder: Path, side: str) -> tuple[Path, Path]:
    """Where the tokens of one side lie, and where its documents begin."""
    return folder / f"tokens_{side}.npy", folder / f"documents_{side}.npy"


def _make(request: Request, folder: Path) -> None:
    """Write all files. Starts threads where it has to tokenise."""
    prepared = _from_tokens(request, folder) if already_tokenised(request.paths) else _from_texts(request, folder)
    _write_whole(folder / RECORD, json.dumps(asdict(prepared), indent=2) + "\n")


def _from_texts(request: Request, folder: Path) -> Prepared:
    documents = read_documents(request.paths, request.text_column)
    train, held = split(documents, seed=request.seed, validation=request.validation)
    texts = tuple(document.text for document in train)
    path = folder / TOKENIZER
    if path.exists():
        tokenizer = load_tokenizer(path)
    else:
        tokenizer = train_bpe(texts, request.vocab_size) if request.tokenizer == "bpe" else byte_tokenizer()
        _write_whole(path, tokenizer.to_str())
    vocab_size, end = vocabulary(tokenizer), end_marker(path)
    return Prepared(
        request=request,
        vocab_size=vocab_size,
        documents=(len(train), len(held)),
        tokens=(
            write_tokens(*_files(folder, _TRAIN), encode(tokenizer, texts, end), vocab_size),
            write_tokens(*_files(folder, _VALIDATION), encode(tokenizer, tuple(d.text for d in held), end), vocab_size),
        ),
    )


def _from_tokens(request: Request, folder: Path) -> Prepared:
    """Copy documents that are tokens already to their side of the split."""
    corpora = open_indexed(request.paths)
    filled = [(name, corpus, place) for name, corpus in corpora for place in range(len(corpus)) if corpus.size(place)]
    if not filled:
        raise DataError("the data cannot be read", (f"{', '.join(request.paths)}: no document with a token in it",))
    names = (f"{name}#{place + 1}" for name, _, place in filled)
    out = held_out(names, seed=request.seed, validation=request.validation)
    problems: dict[str, str] = {}

    def side(wanted: bool) -> Iterator[NDArray[Any]]:
        for (name, corpus, place), away in zip(filled, out, strict=True):
            if away == wanted and name not in problems:
                tokens = corpus.document(place)
                if wrong := misfit(tokens, request.vocab_size):
                    problems[name] = f"{corpus.path}: document {place + 1} {wrong}"
                else:
                    yield tokens

    tokens = [
        write_tokens(*_files(folder, name), side(wanted), request.vocab_size)
        for name, wanted in ((_TRAIN, False), (_VALIDATION, True))
    ]
    if problems:
        raise DataError("the tokens do not fit the model", tuple(problems.values()))
    return Prepared(
        request=request,
        vocab_size=request.vocab_size,
        documents=(len(out) - sum(out), sum(out)),
        tokens=(tokens[0], tokens[1]),
    )


def _write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _parse(record: Path) -> Prepared:
    """The contents of a ``data.json``.

    Raises:
        DataError: it was damaged.
    """
    try:
        read = read_object(record)
        return Prepared(
            request=_request(read["request"]),
            vocab_size=read["vocab_size"],
            documents=tuple(read["documents"]),
            tokens=tuple(read["tokens"]),
        )
    except (OSError, ObjectError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the prepared data cannot be used", (f"{record} was damaged: {error}",)) from None


def _request(fields: dict[str, object]) -> Request:
    """A request from its JSON, where lists stand for tuples."""
    return Request(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})  # type: ignore[arg-type]


def _differences(old: Request, new: Request) -> tuple[str, ...]:
    """Each setting that differs, with both values."""
    before, after = asdict(old), asdict(new)
    return tuple(
        f"{name} was {before[name]!r} and is now {after[name]!r}; use the former or another run folder"
        for name in before
        if before[name] != after[name]
    )


def _main() -> int:
    """The child process: a task on standard input, files in its folder; 2 and the problems for unusable data."""
    task = json.loads(sys.stdin.read())
    try:
        _make(_request(task["request"]), Path(task["folder"]))
    except DataError as error:
        sys.stdout.write(json.dumps({"what": str(error).split("\n", 1)[0], "problems": error.problems}))
        return 2
    except OSError as error:  # what cannot be read is a DataError
        sys.stdout.write(json.dumps({"what": "the prepared data cannot be written", "problems": [str(error)]}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
