"""A run on CUDA devices with NCCL, through the real command line. Never executed where no device is: see the README."""

import pytest
import torch
from tests.cli import dynatrain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

CONFIG = """
layout = "{layout}"
steps = 12
device = "cuda"
[data]
sequence = 64
[batch]
global_sequences = 8
micro_sequences = 1
{switch}
"""


def run(place, layout, switch=""):
    path = place / "run.toml"
    path.write_text(CONFIG.format(layout=layout, switch=switch))
    return dynatrain("train", str(path), "--run=gpu", "--json", cwd=place, timeout=280)


def test_one_device_trains(tmp_path):
    said = run(tmp_path, "dp1")
    assert said.code == 0, said.err


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a switch needs two CUDA devices")
def test_two_devices_switch_over_nccl_with_equal_digests(tmp_path):
    said = run(tmp_path, "dp2", '[[switch]]\nstep = 6\nlayout = "fsdp2"')
    assert said.code == 0, said.err
    checked = dynatrain("check", "gpu", "--json", cwd=tmp_path)
    assert checked.code == 0, checked.err
    assert len(checked.record["checked"]) == 1
