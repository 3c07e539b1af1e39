"""Tensors inside what ``torch.save`` writes, seen as views of its bytes; and what is none of that."""

import io
import pickle
import struct
import zipfile

import pytest
import torch

from dynatrain.execute.dcp_folder import _view_of


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
