"""A new Hugging Face folder, written by many ranks at once and there whole or not at all.

Shapes, element type and shard size decide every byte but the data, so the files are laid out before anything is
written, under a temporary name. Each rank then writes its own boxes into the mapped files, and one of them ends it.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer

from dynatrain.config.own import TOKENIZER
from dynatrain.data.tokenizer import END, SETTINGS, copy_tokenizer
from dynatrain.execute.hf_folder import INDEX, SINGLE, shelf_of
from dynatrain.execute.shelf import Shelf, Stored
from dynatrain.execute.tensor_file import Looks, WeightsError, allocate, open_to_fill
from dynatrain.observe.atomic import sync_folder
from dynatrain.space.blocks import BIAS
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.hf_config import read_json
from dynatrain.space.hf_names import file_shapes

WRITTEN_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
"""Element types that can be asked for, by the names that a run's config has for them."""

_LARGEST_SHARD = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A folder in the making; a plain value, which the rank that made it hands to the others.

    All ranks are on one machine, or on one file system that keeps what is written under a mapping. An export that is
    killed leaves its draft beside the place, under a hidden name.

    Attributes:
        path: where the folder will be.
        draft: where its files are meanwhile.
        shape: of the model.
        dtype: element type of the parameters in the files, a key of :data:`WRITTEN_DTYPES`.
        max_shard_bytes: bytes of data up to which tensors share a file; a longer one has a file of its own.
    """

    path: Path
    draft: Path
    shape: DecoderShape
    dtype: str
    max_shard_bytes: int

    @classmethod
    def create(
        cls, path: Path, shape: DecoderShape, *, dtype: str = "bf16", max_shard_bytes: int = _LARGEST_SHARD
    ) -> Self:
        """Lay all files out, by one rank. Their space is taken; nothing is at ``path`` yet.

        Raises:
            WeightsError: the place is taken or cannot be written, the disk is too small, or an option is not legal.
        """
        path = path.absolute()
        require_writable(path, dtype, max_shard_bytes)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".draft", dir=path.parent))
        except OSError as error:
            raise _unwritable(path, error) from None
        made = cls(path=path, draft=draft, shape=shape, dtype=dtype, max_shard_bytes=max_shard_bytes)
        try:
            draft.chmod(0o755)
            for name, tensors in made._files():
                allocate(draft / name, tensors)
        except OSError as error:
            made.discard()
            raise _unwritable(path, error) from None
        return made

    def open(self) -> Shelf:
        """The parameters as views to be filled, each box by one rank; casting is the copy's."""
        tensors: dict[str, Stored] = {}
        for name, _ in self._files():
            tensors |= open_to_fill(self.draft / name)
        return shelf_of(self.shape, tensors)

    def finish(self, tokenizer: Path | None = None) -> None:
        """Put the folder in its place, by one rank, once every rank has filled its boxes.

        Args:
            tokenizer: a ``tokenizer.json``, or a folder with one; what belongs to it and lies beside it goes along.

        Raises:
            WeightsError: no tokenizer is there, the place was taken meanwhile, or it cannot be written. The draft
                stays, to be finished otherwise or discarded.
        """
        try:
            self._write_words(tokenizer)
            _sync(self.draft)
            self.draft.rename(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def discard(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.draft, ignore_errors=True)

    def _files(self) -> list[tuple[str, dict[str, Looks]]]:
        """Name of each file, and its tensors; a function of the attributes alone."""
        shards: list[dict[str, Looks]] = [{}]
        room = self.max_shard_bytes
        for name, shape in file_shapes(self.shape).items():
            # A bias that balances experts moves by steps that 16 bits would lose, and nobody reads it in them.
            looks = (torch.float32 if name.endswith(BIAS) else WRITTEN_DTYPES[self.dtype], shape)
            if (size := _bytes(looks)) > room and shards[-1]:
                shards.append({})
                room = self.max_shard_bytes
            shards[-1][name] = looks
            room -= size
        if len(shards) == 1:
            return [(SINGLE, shards[0])]
        count = len(shards)
        return [(f"model-{n:05d}-of-{count:05d}.safetensors", shard) for n, shard in enumerate(shards, 1)]

    def _write_words(self, tokenizer: Path | None) -> None:
        """Everything but the weights."""
        words: dict[str, Any] = {}
        end = None
        if tokenizer is not None:
            end, words = _tokenizer_words(tokenizer, self.draft, self.shape.max_position_embeddings)
        dtype = str(WRITTEN_DTYPES[self.dtype]).removeprefix("torch.")
        marks = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
        words["config.json"] = {**self.shape.to_config(), "dtype": dtype, **marks}
        if not (self.draft / "generation_config.json").exists():
            words["generation_config.json"] = {"eos_token_id": end}
        files = self._files()
        if len(files) > 1:
            tensors = [looks for _, shard in files for looks in shard.values()]
            total = {
                "total_parameters": sum(torch.Size(shape).numel() for _, shape in tensors),
                "total_size": sum(map(_bytes, tensors)),
            }
            words[INDEX] = {"metadata": total, "weight_map": {name: file for file, shard in files for name in shard}}
        for name, content in words.items():
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            (self.draft / name).write_text(text, encoding="utf-8")


def require_writable(path: Path, dtype: str, max_shard_bytes: int) -> None:
    """Refuse what :meth:`Export.create` would refuse, before there is anything to export.

    Raises:
        WeightsError: the place is taken, or an option is not legal.
    """
    problems = [] if _is_free(path) else [f"{path} is taken; nearest free place: {_free_place(path)}"]
    if dtype not in WRITTEN_DTYPES:
        problems.append(f"dtype is {dtype!r}; one of {', '.join(WRITTEN_DTYPES)}")
    if max_shard_bytes < 1:
        problems.append(f"max_shard_bytes is {max_shard_bytes}; at least 1")
    if problems:
        raise WeightsError("nothing can be exported like this", tuple(problems))


def _bytes(looks: Looks) -> int:
    dtype, shape = looks
    return dtype.itemsize * torch.Size(shape).numel()


def _tokenizer_words(source: Path, target: Path, longest: int) -> tuple[int | None, dict[str, Any]]:
    """Copy a tokenizer with what lies beside it; gives its end marker, and the settings that it came without."""
    file = source / TOKENIZER if source.is_dir() else source
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise WeightsError("the tokenizer cannot be exported", (f"{file}: {error}",)) from None
    copy_tokenizer(file, target)
    settings = target / SETTINGS
    if settings.exists():
        marker = read_json(settings).get("eos_token")
        marker = marker.get("content") if isinstance(marker, dict) else marker
        return (tokenizer.token_to_id(marker) if marker else None), {}
    end = tokenizer.token_to_id(END)
    known = {} if end is None else {"eos_token": END}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return end, {settings.name: {**kind, **known, "model_max_length": longest}}


def _is_free(path: Path) -> bool:
    """Whether a folder can be put there: nothing is, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _free_place(path: Path) -> Path:
    places = (path.with_name(f"{path.name}-{number}") for number in range(2, 1 << 30))
    return next(place for place in places if _is_free(place))


def _unwritable(path: Path, error: OSError) -> WeightsError:
    rule = f"{error.strerror or error}; a place is needed that this user may write to, with room for all of it"
    return WeightsError(f"{path} cannot be written", (rule,))


def _sync(folder: Path) -> None:
    """Have everything in a folder on the disk, what was written under a mapping included."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
