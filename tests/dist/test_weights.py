"""Weights out of a checkpoint that many ranks wrote, and into a run that many ranks load: every bit, no more."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.cli import environment
from tests.dist.foreign import everywhere
from tests.dist.trained import SHAPE, switcher, train
from tests.shelves import export as laid_out
from tests.shelves import random_weights
from tests.unit.test_cli import call
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dynatrain.cluster.causes import SAVED
from dynatrain.data.tokenizer import byte_tokenizer
from dynatrain.execute.hf_export import WRITTEN_DTYPES, Export
from dynatrain.observe.checkpoints import MANIFEST, Manifest, newest
from dynatrain.observe.log import Tail
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.saving import Saves
from dynatrain.train.weights import export, import_weights, open_checkpoint


def saved(root, layout, size):
    """A checkpoint of three steps of training."""

    def work(world):
        sw = switcher(world, layout, saves=Saves(root=root))
        train(sw, lambda _: None, until=3)
        return sw.save_now()

    everywhere(size, work)
    return newest(root)[0]


def tensors_of(checkpoint):
    """What PyTorch's own reader finds there, whole."""
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata.items()
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def test_an_imported_run_is_trained_and_while_it_runs_exported_and_made_to_write(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("There is enough of it here. " * 50)
    shape = replace(SHAPE, vocab_size=257, dropout=0.0)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    laid_out(tmp_path / "hf", shape, random_weights(shape), tmp_path / "tokenizer.json", dtype="fp32")
    words = ["--data.paths=['a.txt']", "--data.validation=0.0", "--data.sequence=16", "--steps=1000000"]
    assert call(monkeypatch, capsys, "import", "hf", "it", *words, "--batch.global_sequences=2")[0] == 0
    command = [sys.executable, "-m", "dynatrain", "train", "--run", "it"]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        metrics = Tail(tmp_path / "runs" / "it" / "metrics.jsonl")
        end = time.monotonic() + 60
        while not any(line["step"] > 1 for line in metrics.new()) and time.monotonic() < end:
            time.sleep(0.05)
        code, out, err = call(monkeypatch, capsys, "export", "it", "out", "--dtype", "fp32", "--json")
        assert (code, run.poll()) == (0, None), err
        code, said, err = call(monkeypatch, capsys, "generate", "it", "There", "--tokens", "4", "--json")
        assert (code, run.poll()) == (0, None), err
    finally:
        run.send_signal(signal.SIGTERM)
        told, _ = run.communicate(timeout=60)
    assert run.returncode == SAVED
    assert "go on with it:  dynatrain train --run it" in told
    assert json.loads(said)["step"] > json.loads(out)["step"] > 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"]), "it was trained"
    assert call(monkeypatch, capsys, "check", "it")[0] == 0


def exported(checkpoint, path, dtype="fp32"):
    export(open_checkpoint(checkpoint, SHAPE), Export.create(path, SHAPE, dtype=dtype), None)
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_has_the_bits_of_a_checkpoint_that_is_cut_both_ways(tmp_path):
    checkpoint = saved(tmp_path / "saved", "fsdp2.tp2", 4)
    right = {key.removeprefix("model."): v for key, v in tensors_of(checkpoint).items() if key.startswith("model.")}
    dcp_to_torch_save(checkpoint, tmp_path / "whole.pt")
    plain = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(plain["model"][name], value) for name, value in right.items()), "for PyTorch's own tool, too"
    for dtype in ("fp32", "bf16"):
        found = load_file(exported(checkpoint, tmp_path / dtype, dtype) / "model.safetensors")
        assert {name.removeprefix("model.") for name in found} == right.keys()
        for name, value in found.items():
            assert torch.equal(value, right[name.removeprefix("model.")].to(WRITTEN_DTYPES[dtype])), name


def imported(tmp_path):
    """A folder of Hugging Face's, and the checkpoint that it becomes."""
    source = laid_out(tmp_path / "source", SHAPE, random_weights(SHAPE), dtype="fp32")
    return source, import_weights(source, SHAPE, tmp_path / "imported", run_id="it", dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_imported_loaded_saved_and_exported_has_the_same_bytes(tmp_path):
    source, checkpoint = imported(tmp_path)
    assert Manifest.read(checkpoint).states == ("param",)

    def work(world):
        sw = switcher(world, "pp2", saves=Saves(root=tmp_path / "saved"))
        step = sw.load(checkpoint)
        sw.save_now()
        return step

    assert everywhere(2, work) == [0, 0]
    written = newest(tmp_path / "saved")[0]
    begun = [value for key, value in tensors_of(written).items() if key.startswith("optim.")]
    assert begun
    assert not any(value.any() for value in begun)
    for one in (checkpoint, written):
        again = exported(one, tmp_path / f"again-{one.parent.name}")
        assert (again / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        assert (again / "config.json").read_bytes() == (source / "config.json").read_bytes()


def without_optimizer(tmp_path):
    """The manifest of a whole checkpoint over files that have weights alone."""
    _, checkpoint = imported(tmp_path)
    manifest = Manifest.read(checkpoint)
    replace(manifest, states=("param", "exp_avg", "exp_avg_sq", "step")).write(checkpoint)
    return checkpoint


def of_somebody_else(tmp_path):
    _, checkpoint = imported(tmp_path)
    (checkpoint / MANIFEST).unlink()
    return checkpoint


def without_a_weight(tmp_path):
    """The weights of a model with one layer less."""
    less = replace(SHAPE, num_hidden_layers=1)
    source = laid_out(tmp_path / "less", less, random_weights(less), dtype="fp32")
    return import_weights(source, less, tmp_path / "imported", run_id="it", dtype=torch.float32)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (without_optimizer, "it has no optim.state.embed_tokens.weight.exp_avg"),
        (of_somebody_else, "it has no optim.state.embed_tokens.weight.exp_avg"),
        (without_a_weight, "it has no model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_nothing_is_invented_for_what_a_checkpoint_lacks(tmp_path, made, said):
    checkpoint = made(tmp_path)

    def work(world):
        sw = switcher(world, "dp1")
        with pytest.raises(SwitchAbortedError) as refusal:
            sw.load(checkpoint)
        return str(refusal.value)

    (words,) = everywhere(1, work)
    assert said in words


def test_a_manifest_that_says_weights_only_is_believed_of_files_that_have_no_more(tmp_path):
    """The control of the test above: the same files load once the manifest says what they are."""
    checkpoint = without_optimizer(tmp_path)
    record = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(record | {"states": ["param"]}))
    assert everywhere(1, lambda world: switcher(world, "dp1").load(checkpoint)) == [0]
