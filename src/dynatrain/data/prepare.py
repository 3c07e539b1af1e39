"""From a corpus to the files of a run folder: ``tokenizer.json``, ``tokens_*.npy``, ``data.json``.

The work is done by a child process, because training and batch encoding of tokenizers start threads, and the process
that asks may have to fork later. ``data.json`` is written last: where it is there, the files beside it are whole and
are used again without reading the corpus.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from dynatrain.data.corpus import DataError, read_documents, split
from dynatrain.data.samples import Samples, write_tokens
from dynatrain.data.tokenizer import byte_tokenizer, encode, load_tokenizer, train_bpe

RECORD = "data.json"
TOKENIZER = "tokenizer.json"
_TRAIN, _VALIDATION = "tokens_train.npy", "tokens_validation.npy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What decides the tokens of a run.

    Attributes:
        paths: as of :func:`dynatrain.data.corpus.read_documents`.
        tokenizer: ``bpe`` or ``bytes``.
        vocab_size: entries of the BPE, at most; unused with bytes.
        validation: share of documents held out.
        seed: of the run; decides which documents are held out.
    """

    paths: tuple[str, ...] = ()
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation: float = 0.05
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a run folder holds of its data.

    Attributes:
        request: what was asked for.
        vocab_size: entries of the tokenizer, the end marker included; the model needs at least as many.
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


def open_samples(folder: Path, sequence: int) -> tuple[Samples, Samples | None]:
    """Training and validation samples of a prepared folder; None where no document was held out.

    Raises:
        DataError: a side is too short for one sample of ``sequence`` tokens.
    """
    held_out = _parse(folder / RECORD).documents[1] > 0
    train = Samples.open(folder / _TRAIN, sequence)
    return train, Samples.open(folder / _VALIDATION, sequence) if held_out else None


def _make(request: Request, folder: Path) -> None:
    """Write all files. Starts threads."""
    train, held_out = split(read_documents(request.paths), seed=request.seed, validation=request.validation)
    texts = tuple(document.text for document in train)
    path = folder / TOKENIZER
    if path.exists():
        tokenizer = load_tokenizer(path)
    else:
        tokenizer = train_bpe(texts, request.vocab_size) if request.tokenizer == "bpe" else byte_tokenizer()
        _write_whole(path, tokenizer.to_str())
    vocab_size = tokenizer.get_vocab_size()
    prepared = Prepared(
        request=request,
        vocab_size=vocab_size,
        documents=(len(train), len(held_out)),
        tokens=(
            write_tokens(folder / _TRAIN, encode(tokenizer, texts), vocab_size),
            write_tokens(folder / _VALIDATION, encode(tokenizer, tuple(d.text for d in held_out)), vocab_size),
        ),
    )
    _write_whole(folder / RECORD, json.dumps(asdict(prepared), indent=2) + "\n")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _parse(record: Path) -> Prepared:
    """The contents of a ``data.json``."""
    read = json.loads(record.read_text(encoding="utf-8"))
    return Prepared(
        request=_request(read["request"]),
        vocab_size=read["vocab_size"],
        documents=tuple(read["documents"]),
        tokens=tuple(read["tokens"]),
    )


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
    return 0


if __name__ == "__main__":
    sys.exit(_main())
