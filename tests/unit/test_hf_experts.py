"""Experts in a Hugging Face folder: each in its place, and what balances them as exact as it was."""

import torch
from safetensors.torch import load_file
from tests.shapes import MIXTRAL, experts_shape, latent_shape
from tests.shelves import export, load, random_weights
from tests.unit.test_hf_folder import rewrite


def test_a_bias_that_balances_experts_is_written_in_32_bits_and_its_counters_begin_at_zero(tmp_path):
    shape = latent_shape()
    weights = random_weights(shape)
    weights["layers.2.mlp.gate.tokens_per_expert"] += 7
    path = export(tmp_path / "model", shape, weights, dtype="bf16")
    written = load_file(path / "model.safetensors")

    wide = {name: value for name, value in written.items() if value.dtype == torch.float32}
    assert wide.keys() == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    found = load(path, shape)
    name = "layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(found[name], weights[name])
    assert found["layers.2.mlp.gate.tokens_per_expert"].tolist() == [0] * 8


def test_an_expert_out_of_its_place_shows(tmp_path):
    """The planted fault of the round trip: two experts change places in the files."""
    shape = experts_shape(MIXTRAL)
    weights = random_weights(shape)
    path = export(tmp_path / "model", shape, weights, dtype="fp32")
    one, other = (f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight" for e in (0, 4))
    rewrite(path / "model.safetensors", lambda files: files.update({one: files[other], other: files[one]}))

    found = load(path, shape)
    changed = {name for name, value in weights.items() if not torch.equal(found[name], value)}
    assert changed == {"layers.1.mlp.experts.down_proj"}
    assert torch.equal(found["layers.1.mlp.experts.down_proj"][4], weights["layers.1.mlp.experts.down_proj"][0])
