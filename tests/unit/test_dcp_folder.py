"""Tensors inside what ``torch.save`` writes, seen as views of its bytes; and what is none of that."""

import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from torch.distributed import checkpoint

from dynatrain.execute.dcp_folder import METADATA, DcpFolder, FolderError, _view_of


def saved(tensor, **options):
    """The archive, in memory that can be written."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer, **options)
    return memoryview(bytearray(buffer.getvalue()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10.0),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(20, dtype=torch.bfloat16).reshape(4, 5)[1:, 2:4],
        torch.tensor([True, False]),
    ],
    ids=["plain", "scalar", "empty", "transposed", "part of a storage", "bool"],
)
def test_a_tensor_is_seen_as_it_was_saved_without_a_copy(tensor):
    archive = saved(tensor)
    view = _view_of(archive)

    assert torch.equal(view, tensor)
    assert (view.dtype, view.stride()) == (tensor.dtype, tensor.stride())
    if tensor.numel():
        view.zero_()
        assert not _view_of(archive).any()


def test_the_directory_of_an_archive_of_more_than_four_gigabytes_is_found():
    """Its place stands in the 64-bit form of the end alone: the short form says so."""
    archive = saved(torch.arange(10.0))
    archive[-6:-2] = b"\xff" * 4

    assert torch.equal(_view_of(archive), torch.arange(10.0))


@pytest.mark.parametrize("end", [0, 10, 30, 400, -1])
def test_what_was_cut_off_is_no_archive(end):
    with pytest.raises((ValueError, struct.error)):
        _view_of(saved(torch.arange(10.0))[:end])


def test_what_is_compressed_or_no_tensor_is_refused():
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to,
        zipfile.ZipFile(io.BytesIO(saved(torch.zeros(9)))) as frm,
    ):
        for name in frm.namelist():
            to.writestr(name, frm.read(name))

    with pytest.raises(ValueError, match="compressed"):
        _view_of(memoryview(bytearray(packed.getvalue())))
    with pytest.raises((pickle.UnpicklingError, KeyError)):
        _view_of(saved({"a": print}))


class Bomb:
    """What a stranger's pickle may have torch's own reader do."""

    def __init__(self, call, *words):
        self.call, self.words = call, words

    def __reduce__(self):
        return self.call, self.words


@pytest.mark.parametrize("call", [os.mkdir, eval, getattr], ids=["os", "builtins", "attributes"])
def test_a_foreign_metadata_runs_nothing(tmp_path, call):
    words = {os.mkdir: (str(tmp_path / "made"),), eval: (f"__import__('os').mkdir({str(tmp_path / 'made')!r})",)}
    bomb = Bomb(call, *words.get(call, ("text", "upper")))
    (tmp_path / METADATA).write_bytes(pickle.dumps(bomb))

    with pytest.raises(FolderError, match="is not part of a checkpoint's metadata"):
        DcpFolder(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_itself_saves_is_read(tmp_path):
    kinds = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]
    state = {f"deep.{kind}": torch.zeros(2, 3, dtype=kind) for kind in kinds} | {"extra": {"a": [1, "b"]}}
    checkpoint.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)

    folder = DcpFolder(tmp_path / "saved")
    assert set(folder.dtypes.values()) == set(kinds)
    assert all(shape == (2, 3) for shape in folder.shapes.values())
    (stored,) = folder.stored("deep.torch.uint8")
    assert torch.equal(stored.tensor, torch.zeros(2, 3, dtype=torch.uint8))
