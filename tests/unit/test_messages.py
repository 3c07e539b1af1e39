"""Messages to an engine: what its own code makes of them, bit by bit, and at what rate they come."""

import importlib.util
import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from tests.cli import ROOT

from dynatrain.execute.digest import digest_piece
from dynatrain.execute.message import Content, message
from dynatrain.execute.serve import MessageServer, Pace
from dynatrain.space.box import whole

pytestmark = pytest.mark.clock

SHAPES = {"a": (4, 6), "b": (5,), "c": (3, 3)}


@pytest.fixture(scope="module")
def rank_module():
    """The engine's own code, which forbids itself to import dynatrain."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "dynatrain"}
    spec = importlib.util.spec_from_file_location("tiny_engine_rank", ROOT / "recipes" / "tiny_engine_rank.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert sys.modules["dynatrain"] is None
    sys.modules |= ours
    return module


def receiver(module, folder, dtype):
    made = module.Receiver(0, folder, SHAPES, dtype, {"copy": 0, "version": None})
    made.start({})
    return made


def body(found):
    return bytearray(b"".join(found.stretches))


def bits(value):
    return value.contiguous().view(torch.uint8).tolist()


def contents(values, before=None):
    """``a`` in two boxes of columns, which are strided in it, and all of ``b``."""
    boxes = [("a", ((0, 4), (0, 2))), ("a", ((0, 4), (2, 6))), ("b", ((0, 5),))]
    for name, box in boxes:
        at = tuple(slice(*ends) for ends in box)
        cut = [None if one is None else one[name][at].contiguous() for one in (values, before)]
        yield Content(name, box, *cut)


def drawn(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_engine_reads_whole_values_and_changes_bit_by_bit(rank_module, tmp_path, dtype):
    taker = receiver(rank_module, tmp_path, dtype)
    values = drawn(dtype, 0)
    taker.base = None
    taker.put(body(message(contents(values), 1, None)))
    tensors = taker.copies[1].tensors
    assert all(bits(tensors[name]) == bits(values[name]) for name in "ab")
    newer = {name: value.clone() for name, value in values.items()}
    newer["a"][1, 1], newer["a"][3, 5], newer["a"][0, 3] = 7.0, math.nan, -0.0
    newer["a"][0, 4] = values["a"][0, 4] = tensors["a"][0, 4] = 0.0
    newer["a"][0, 4] = -0.0  # equal as numbers
    found = message(contents(newer, values), 2, 1)
    taker.put(body(found))
    assert all(bits(tensors[name]) == bits(newer[name]) for name in "ab")
    header = json.loads(body(found)[8 : 8 + int.from_bytes(body(found)[:8], "little")])
    assert header["__metadata__"]["base_version"] == "1"
    assert not any(name.startswith("2") for name in header)  # nothing of b has changed


def test_a_message_is_a_safetensors_file():
    values = drawn(torch.bfloat16, 0)
    read = safetensors.torch.load(bytes(body(message(contents(values), 1, None))))
    assert torch.equal(read["1"], values["a"][:, 2:])
    assert torch.equal(read["2"], values["b"])


def test_what_changed_in_most_places_is_sent_whole_and_nothing_made_for_it():
    values, other = drawn(torch.bfloat16, 0), drawn(torch.bfloat16, 1)
    all_of_it, changes = message(contents(values), 1, None), message(contents(values, other), 1, 0)
    assert (all_of_it.made, changes.made) == (0, 0)
    assert sorted(safetensors.torch.load(bytes(body(changes)))) == ["0", "1", "2"]
    few = {name: value.clone() for name, value in values.items()}
    few["a"][0, 0] = 9.0
    assert message(contents(few, values), 1, 0).made == 4 + 2


def test_places_are_right_beyond_the_block_that_is_compared_at_once():
    before = torch.zeros(3 << 16).bfloat16()
    value = before.clone()
    value[[5, (1 << 16) - 1, 1 << 16, (3 << 16) - 1]] = 1.0
    read = safetensors.torch.load(bytes(body(message([Content("a", ((0, 3 << 16),), value, before)], 1, 0))))
    assert read["0.indices"].tolist() == [5, (1 << 16) - 1, 1 << 16, (3 << 16) - 1]


def test_a_bit_that_flips_on_the_way_is_seen(rank_module, tmp_path):
    taker = receiver(rank_module, tmp_path, torch.bfloat16)
    spoilt = body(message(contents(drawn(torch.bfloat16, 0)), 1, None))
    spoilt[-1] ^= 16
    with pytest.raises(ValueError, match="checksum"):
        taker.put(spoilt)


def test_the_digests_of_an_engine_are_those_that_we_compute(rank_module):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for value in drawn(dtype, 3).values():
            assert rank_module.digest(value) == digest_piece(value, whole(tuple(value.shape)))


def test_a_rate_holds_for_all_who_send_together():
    pace, began = Pace(1e6), time.monotonic()
    senders = [threading.Thread(target=lambda: [pace.wait(25_000) for _ in range(5)]) for _ in range(2)]
    for one in senders:
        one.start()
    for one in senders:
        one.join()
    assert time.monotonic() - began >= 0.225 - 0.001  # the last of ten begins when nine are through


def test_messages_are_for_those_who_know_the_secret():
    @contextmanager
    def made(number, rank):
        yield [memoryview(f"{number} for {rank}".encode())]

    server = MessageServer(made, "127.0.0.1", 0, lambda: None)
    try:
        with urllib.request.urlopen(f"{server.url}/3/1", timeout=10) as answer:  # noqa: S310
            assert answer.read() == b"3 for 1"
        assert server.sent == len(b"3 for 1")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url[:-4]}oops/3/1", timeout=10)  # noqa: S310
    finally:
        server.close()


def test_an_engine_of_another_layout_refuses_before_anything_is_sent(rank_module, tmp_path):
    taker = receiver(rank_module, tmp_path, torch.bfloat16)
    taker.init({"dtype": "bfloat16", "shapes": {"0": {name: list(shape) for name, shape in SHAPES.items()}}})
    for info, says in (
        ({"dtype": "float32", "shapes": {"0": SHAPES}}, "float32 for torch.bfloat16"),
        ({"dtype": "bfloat16", "shapes": {"0": SHAPES | {"a": (2, 6)}}}, r"a: \(2, 6\) for \(4, 6\)"),
        ({"dtype": "bfloat16", "shapes": {"0": SHAPES | {"d": (1,)}}}, r"d: \(1,\) for None"),
        ({"dtype": "bfloat16", "shapes": {"1": SHAPES}}, r"b: None for \(5,\)"),
    ):
        with pytest.raises(ValueError, match=says):
            taker.init(info)


def test_changes_of_a_version_that_does_not_serve_are_refused(rank_module, tmp_path):
    taker = receiver(rank_module, tmp_path, torch.bfloat16)
    taker.version = 3
    with pytest.raises(ValueError, match="changes since version 2, and version 3 serves"):
        taker.update({"base_version": 2, "messages": {}})
