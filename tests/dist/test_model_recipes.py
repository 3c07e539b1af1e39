"""Models that are not ours, in loops that are not ours: a run whose layout changes is the run of one that does not."""

import pytest
import torch
import transformers
from tests.recipes import compare, trained
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def weights(folder, kind):
    """What plain transformers reads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(model) is kind
    return model.state_dict()


each_model = pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", LlamaForCausalLM),
        pytest.param("qwen3_moe", Qwen3MoeForCausalLM, marks=pytest.mark.sweep),
        pytest.param("gpt2_without_dropout", GPT2LMHeadModel, marks=pytest.mark.sweep),
    ],
    ids=["llama", "qwen3_moe", "gpt2"],
)


@each_model
def test_a_model_of_transformers_trains_under_tp_as_one_process(tmp_path, name, kind):
    """Gradient checkpointing and tied embeddings; experts with gate and up in one; q, k and v in one ``Conv1D``."""
    switched = trained(2, "hf_models", name, folder=str(tmp_path / "two"))
    plain = trained(1, "hf_models", name, "dp1", (), folder=str(tmp_path / "one"))
    compare(switched, plain, ["fsdp2", "tp2"])
    one, two = (weights(tmp_path / folder, kind) for folder in ("one", "two"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-12)


@each_model
def test_a_model_whose_first_layout_has_tp_is_saved_as_one_process_has_it(tmp_path, name, kind):
    """The first layout alone is built with values: later ones are built on meta, and filled."""
    first = trained(2, "hf_models", name, "tp2", (), folder=str(tmp_path / "two"))
    plain = trained(1, "hf_models", name, "dp1", (), folder=str(tmp_path / "one"))
    compare(first, plain, ["tp2"])
    one, two = (weights(tmp_path / folder, kind) for folder in ("one", "two"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-12)


@pytest.mark.sweep
def test_what_a_rank_drops_is_the_same_whether_its_layout_changes_or_not(tmp_path):
    """GPT-2 with ``nn.Dropout``, whose streams go on; saved under dp."""
    switched = trained(2, "hf_models", "gpt2", switches=((3, "dp2"),), folder=str(tmp_path / "switched"))
    plain = trained(2, "hf_models", "gpt2", switches=(), folder=str(tmp_path / "plain"))
    compare(switched, plain, ["fsdp2", "dp2"])
    one, two = (weights(tmp_path / folder, GPT2LMHeadModel) for folder in ("plain", "switched"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "layouts"),
    [
        ("your_model", ["fsdp2", "tp2", "dp2"]),
        pytest.param("vit", ["fsdp2", "tp2"], marks=pytest.mark.sweep),
        ("megatron_style", ["dp2", "tp2"]),
        ("titan_style", ["fsdp4", "pp2.fsdp2", "fsdp2.tp2", "pp2.tp2"]),
    ],
)
def test_a_recipe_trains_through_switches_as_one_process(recipe, layouts):
    ranks_needed = 4 if layouts[0].endswith("4") else 2
    compare(trained(ranks_needed, recipe), trained(1, recipe, layout="dp1", switches=()), layouts)
