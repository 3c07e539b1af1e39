"""The weights in a Hugging Face folder as a shelf: one file, or shards under an index."""

from collections.abc import Mapping
from pathlib import Path

import torch

from dynatrain.execute.shelf import Shelf, Stored
from dynatrain.execute.tensor_file import WeightsError, open_tensors
from dynatrain.observe.objects import ObjectError, read_object
from dynatrain.space.blocks import COUNTERS
from dynatrain.space.box import whole, within
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.hf_config import ModelError
from dynatrain.space.hf_names import HEAD, FilePart, file_parts, located

SINGLE = "model.safetensors"
"""All weights in one file."""
INDEX = "model.safetensors.index.json"
"""Which shard has which tensor."""


def open_folder(path: Path, shape: DecoderShape) -> Shelf:
    """The tensors of a model as a folder has them, to be read: parameters, and buffers where the model has some.

    Args:
        path: the folder.
        shape: what its ``config.json`` says (:meth:`DecoderShape.read_config`).

    Raises:
        WeightsError: files that are missing, cut short, or no safetensors files; tensors that are not those of
            ``shape``. All of them, by name.
    """
    tensors = read_tensors(path)
    kinds = {
        name: (str(stored.tensor.dtype).removeprefix("torch."), tuple(stored.tensor.shape))
        for name, stored in tensors.items()
    }
    try:
        names = located(shape, kinds)
    except ModelError as error:
        raise WeightsError(f"the weights in {path} are not those of its config.json", error.problems) from None
    shelf = {**shelf_of(shape, {written: tensors[name] for written, name in names.items()}), **_counters(shape, path)}
    if shape.tie_word_embeddings and HEAD in names:
        head, (embedding,) = tensors[names[HEAD]], shelf["embed_tokens.weight", "param"]
        if head.tensor.dtype != embedding.tensor.dtype or not torch.equal(head.tensor, embedding.tensor):
            rule = f"{HEAD} is not the embedding, and config.json says that they are one: tie_word_embeddings is true"
            raise WeightsError(f"the weights in {path} cannot be used", (rule,))
    return shelf


def read_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a folder by its name in the files, whatever the model.

    Raises:
        WeightsError: files that are missing, cut short, or no safetensors files.
    """
    if (path / SINGLE).is_file():
        return open_tensors(path / SINGLE)
    places = _indexed(path)
    tensors: dict[str, Stored] = {}
    problems = []
    for shard in sorted(set(places.values())):
        try:
            opened = open_tensors(path / shard)
        except WeightsError as error:
            problems += [f"{shard}: {problem}" for problem in error.problems]
            continue
        # A shard may say more than the index; where two shards have one name, the index decides.
        tensors |= {name: stored for name, stored in opened.items() if places.get(name, shard) == shard}
        gone = [name for name, place in places.items() if place == shard and name not in opened]
        problems += [f"{shard} has no tensor {name}, which the index places there" for name in gone]
    if problems:
        raise WeightsError(f"the weights in {path} cannot be used", tuple(problems))
    return tensors


def shelf_of(shape: DecoderShape, tensors: Mapping[str, Stored]) -> Shelf:
    """The logical tensors that files have, as views of file tensors, which go by their names as they are written."""
    parts = file_parts(shape)
    return {
        (tensor.name, tensor.states[0].name): tuple(_seen_as(part, tensors[part.tensor]) for part in parts[tensor.name])
        for tensor in catalogue(shape, optimizer="")
        if tensor.name in parts
    }


def _counters(shape: DecoderShape, path: Path) -> Shelf:
    """What no file has, since it begins at zero."""
    return {
        (tensor.name, tensor.states[0].name): (Stored(whole(tensor.shape), torch.zeros(tensor.shape).long(), path),)
        for tensor in catalogue(shape, optimizer="")
        if tensor.name.endswith(COUNTERS)
    }


def _seen_as(part: FilePart, stored: Stored) -> Stored:
    view = stored.tensor[within(part.file_box, whole(tuple(stored.tensor.shape)))]
    view = view.T if part.transposed else view
    return Stored(part.box, view[None] if len(part.box) > view.ndim else view, stored.path)


def _indexed(path: Path) -> dict[str, str]:
    """The index: which shard has which tensor."""
    what = f"the weights in {path} cannot be used"
    try:
        index = read_object(path / INDEX)
    except FileNotFoundError:
        others = sorted(one.name for one in path.glob("*") if one.suffix in {".bin", ".safetensors", ".pt", ".pth"})
        seen = f"; there are {', '.join(others[:3])}" if others else ""
        rule = f"a folder with {SINGLE}, or with {INDEX} and its shards, is needed{seen}"
        raise WeightsError(what, (rule,)) from None
    except ObjectError as error:
        raise WeightsError(what, (str(error),)) from None
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise WeightsError(what, (f"{INDEX} has no weight_map from names of tensors to names of shards",))
    shards = sorted(set(places.values()))
    outside = [f"{INDEX} names {shard!r}; a shard lies in the folder" for shard in shards if Path(shard).name != shard]
    missing = [f"{INDEX} names {shard}, which is missing" for shard in shards if not (path / shard).is_file()]
    if outside or missing:
        raise WeightsError(what, tuple(outside or missing))
    return places
