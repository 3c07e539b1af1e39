"""The same weights give the same logits here and in ``transformers``, whichever side made them."""

import json

import pytest
import torch
from tests.shapes import MIXTRAL, QWEN3_MOE, experts_shape, latent_shape, small_shape
from tests.shelves import export, load, random_weights
from tests.unit.test_cli import call

from dynatrain.data.tokenizer import byte_tokenizer
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.space.blocks import COUNTERS
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.tensor import State
from dynatrain.train.segments import Segments

UNLIKE_DEFAULTS = {"norm_eps": 3e-4, "dropout": 0.1}
GPT2 = {"family": "gpt2", "num_key_value_heads": 4, **UNLIKE_DEFAULTS}
SHAPES = {
    "llama": small_shape(rope_theta=777.0, **UNLIKE_DEFAULTS),
    "llama, tied": small_shape(tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3": small_shape(qk_norm=True, head_dim=32, rope_theta=777.0, **UNLIKE_DEFAULTS),
    "qwen3, tied": small_shape(qk_norm=True, tie_word_embeddings=True, num_key_value_heads=1),
    "mixtral": experts_shape(MIXTRAL, rope_theta=777.0, **UNLIKE_DEFAULTS),
    "qwen3 moe": experts_shape(QWEN3_MOE, qk_norm=True, head_dim=32, rope_theta=777.0, **UNLIKE_DEFAULTS),
    "deepseek v3": latent_shape(rope_theta=777.0, **UNLIKE_DEFAULTS),
    "kimi k2, tied": latent_shape(n_group=1, topk_group=1, tie_word_embeddings=True),
    "gpt2": small_shape(**GPT2),
    "gpt2, tied": small_shape(tie_word_embeddings=True, **GPT2 | {"intermediate_size": 256}),
}
TOKENS = torch.arange(2 * 40).view(2, 40) * 7 % 61
cases = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def logits_of(shape, weights):
    part = DecoderPart(shape, range(shape.num_hidden_layers), first=True, last=True, streams=KeyedStream(seed=0))
    part.load_state_dict(weights, assign=True, strict=not shape.tie_word_embeddings)
    part.tie()
    with torch.no_grad():
        return part.eval()(TOKENS, torch.arange(2))


def largest_difference(shape, weights, model):
    with torch.no_grad():
        theirs = model.eval()(TOKENS).logits
    assert theirs.abs().max() > 0.1
    return (theirs - logits_of(shape, weights)).abs().max().item()


@cases
def test_our_export_is_their_model(transformers, tmp_path, shape):
    weights = random_weights(shape)
    path = export(tmp_path / "model", shape, weights, dtype="fp32", max_shard_bytes=50_000)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)

    assert {key: found for key, found in told.items() if found} == {}
    assert largest_difference(shape, weights, model) <= 1e-5


@cases
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 50_000}], ids=["one file", "shards"])
def test_their_model_is_ours_after_import(transformers, tmp_path, shape, options):
    config = transformers.AutoConfig.for_model(**shape.to_config(), bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        biases = [value for name, value in model.named_buffers() if name.endswith("correction_bias")]
        for value in [*model.parameters(), *biases]:  # biases and norms start at zeros and ones there
            value.normal_(0, 0.1)
    model.save_pretrained(tmp_path, **options)

    read = DecoderShape.read_config(tmp_path)
    assert largest_difference(read, load(tmp_path, read), model) <= 1e-5


@cases
def test_a_weight_out_of_place_shows(shape):
    """The planted fault of the tests above: the rows of one tensor move up by one."""
    weights = random_weights(shape)
    right = logits_of(shape, weights)
    moved = {name: logits_of(shape, weights | {name: value.roll(-1, 0)}) for name, value in weights.items()}
    unseen = {name for name, logits in moved.items() if (logits - right).abs().max() < 5e-5}

    # What is added to every key alike is added to every score of a query alike; counters say what was, not what is.
    assert unseen == {name for name in weights if name.endswith(("k_proj.bias", COUNTERS))}


def test_an_export_with_its_tokenizer_generates(transformers, tmp_path):
    shape = small_shape(vocab_size=257)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    path = export(tmp_path / "model", shape, random_weights(shape), tmp_path / "tokenizer.json")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    assert (model.dtype, model.generation_config.eos_token_id, tokenizer.eos_token_id) == (torch.bfloat16, 256, 256)
    prompt = tokenizer("live", return_tensors="pt")
    assert prompt.input_ids.tolist() == [list(b"live")]
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=256).shape[1] > 4


@pytest.mark.parametrize(
    "shape",
    [
        small_shape(vocab_size=257),
        small_shape(vocab_size=257, family="gpt2", num_key_value_heads=4, tie_word_embeddings=True),
        latent_shape(vocab_size=257),
    ],
    ids=["llama", "gpt2", "deepseek v3"],
)
def test_a_run_writes_what_their_model_writes_of_its_export(transformers, tmp_path, monkeypatch, capsys, shape):
    (tmp_path / "a.txt").write_text("There is enough of it here. " * 20)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    export(tmp_path / "source", shape, random_weights(shape), tmp_path / "tokenizer.json", dtype="fp32")
    given = [f"--data.paths=['{tmp_path}/a.txt']", "--data.validation=0.0", "--data.sequence=16"]
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, capsys, "import", "source", "run", *given)[0] == 0
    assert call(monkeypatch, capsys, "check", "runs/run/checkpoints/step_00000000")[0] == 0
    words = ("generate", "run", "live", "--tokens", "24", "--temperature", "0", "--json")
    found = json.loads(call(monkeypatch, capsys, *words)[1])["tokens"]
    assert call(monkeypatch, capsys, "export", "run", "model", "--dtype", "fp32")[0] == 0

    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    prompt = transformers.AutoTokenizer.from_pretrained("model")("live", return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=256)[0, 4:].tolist()
    assert found == theirs


@pytest.mark.parametrize("shape", [SHAPES["mixtral"], SHAPES["qwen3 moe"]], ids=["mixtral", "qwen3 moe"])
def test_gate_and_up_in_one_stack_of_theirs_are_our_two_as_segments(transformers, tmp_path, shape):
    weights, width = random_weights(shape), shape.experts.moe_intermediate_size
    path = export(tmp_path / "model", shape, weights, dtype="fp32", max_shard_bytes=50_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    segments = Segments(fused={"experts.gate_up_proj": {"experts.gate_proj": width, "experts.up_proj": width}})
    seen = []
    for name, value in model.named_parameters():
        for slot in segments.slots(name, tuple(value.shape), (), {}, 0):
            seen.append(slot.name.removeprefix("model."))
            held = slot.view(value, State("param", "float32"), slot.shape)
            assert torch.equal(held, weights[seen[-1]])
    assert len(seen) == 2 * shape.num_hidden_layers
