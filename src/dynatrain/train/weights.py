"""Weights between a checkpoint, a Hugging Face folder and a model, in one process and without any layout.

All are shelves: boxes are copied, from view to view. A whole model is in memory only where it is to compute.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import dynatrain
from dynatrain.execute.dcp_folder import DcpFolder, FolderError
from dynatrain.execute.dcp_save import Chunk, write_chunks, write_metadata
from dynatrain.execute.hf_export import Export
from dynatrain.execute.hf_folder import open_folder
from dynatrain.execute.shelf import Shelf, Stored, boxes_of, copy
from dynatrain.judge.shelves import judge_shelf
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.observe.checkpoints import (
    SCHEMA,
    WEIGHTS_ONLY,
    CheckpointError,
    File,
    Manifest,
    checkpoint_name,
    complete,
    damaged,
    partial_folder,
)
from dynatrain.space.box import whole
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.tensor import Tensor
from dynatrain.train.keys import flat, granule_path


def open_checkpoint(path: Path, shape: DecoderShape) -> Shelf:
    """The parameters of a model as a checkpoint of ours has them, once nothing was found wrong with any file.

    Raises:
        CheckpointError: a file is not what was written.
        FolderError: tensors are missing, of another shape, or not there whole and once; all of them, by name.
    """
    if problems := damaged(path, Manifest.read(path).files):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    folder = DcpFolder(path)
    tensors = catalogue(shape, optimizer="")
    shelf, wrong = {}, []
    for tensor in tensors:
        key = _key(tensor.name)
        if (found := folder.shapes.get(key)) is None:
            wrong.append(f"it has no {key}")
        elif found != tensor.shape:
            wrong.append(f"{key} has shape {found}, the model's is {tensor.shape}")
        else:
            shelf[tensor.name, tensor.states[0].name] = folder.stored(key)
    wrong += [] if wrong else judge_shelf(tensors, boxes_of(shelf, tensors))
    if wrong:
        raise FolderError(f"{path} does not have the weights of this model", tuple(wrong))
    return shelf


def export(source: Shelf, target: Export, tokenizer: Path | None) -> None:
    """Fill a laid-out folder and put it in its place, or leave nothing.

    Raises:
        WeightsError: it cannot be written, or the tokenizer not be used.
    """
    try:
        copy(source, target.open())
        target.finish(tokenizer)
    except BaseException:
        target.discard()
        raise


def import_weights(source: Path, shape: DecoderShape, root: Path, *, run_id: str, dtype: torch.dtype) -> Path:
    """Write the first checkpoint of a run out of a Hugging Face folder: parameters, and nothing else.

    Args:
        source: the folder.
        shape: of its model.
        root: where the run's checkpoints are.
        run_id: of the run.
        dtype: in which the run keeps parameters.

    Returns:
        The checkpoint.

    Raises:
        WeightsError: the folder cannot be used.
        OSError: the checkpoint cannot be written; nothing is left of it.
    """
    shelf = open_folder(source, shape)
    folder = root / checkpoint_name(0)
    draft = partial_folder(folder)
    try:
        draft.mkdir(parents=True)
        told = write_chunks(draft, 0, list(_chunks(shelf, shape, dtype)), {})
        write_metadata(draft, [told], {_key(name): ("model", name) for name, _ in shelf})
        manifest = Manifest(
            schema=SCHEMA,
            run_id=run_id,
            step=0,
            layout="dp1",
            world_size=1,
            states=WEIGHTS_ONLY,
            objects=(),
            files=tuple(map(File.of, sorted(draft.iterdir()))),
            versions={"dynatrain": dynatrain.__version__, "torch": torch.__version__},
        )
        complete(draft, folder, manifest)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def read_model(source: Shelf, shape: DecoderShape, dtype: torch.dtype) -> DecoderPart:
    """The whole model on the CPU, to compute with and not to train."""
    with torch.device("meta"):
        model = DecoderPart(shape, range(shape.num_hidden_layers), first=True, last=True, streams=KeyedStream(seed=0))
    tensors = catalogue(shape, _name_of(dtype), optimizer="")
    values = {tensor: torch.empty(tensor.shape, dtype=_dtype_of(tensor)) for tensor in tensors}
    copy(source, {(tensor.name, tensor.states[0].name): (_in_memory(value),) for tensor, value in values.items()})
    named = {tensor.name: value for tensor, value in values.items()}
    model.load_state_dict(named, assign=True, strict=not shape.tie_word_embeddings)
    model.tie()
    return model.eval().requires_grad_(requires_grad=False)


def _in_memory(value: torch.Tensor) -> Stored:
    return Stored(whole(tuple(value.shape)), value, Path())


def _key(name: str) -> str:
    return flat(granule_path(name, "param", first=True, forms={}))


def _chunks(shelf: Shelf, shape: DecoderShape, dtype: torch.dtype) -> Iterator[Chunk]:
    """What a checkpoint has of each box; converted when it is written, one at a time."""
    for tensor in catalogue(shape, _name_of(dtype), optimizer=""):
        for stored in shelf[tensor.name, tensor.states[0].name]:
            data = partial(_converted, stored, _dtype_of(tensor))
            yield Chunk(_key(tensor.name), tensor.shape, _dtype_of(tensor), stored.box, data)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(tensor: Tensor) -> torch.dtype:
    """Element type of its value."""
    return getattr(torch, tensor.states[0].dtype)


def _converted(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    return stored.tensor.to(dtype).contiguous()
