"""Models that are not ours, in loops that are not ours: a run whose layout changes is the run of one that does not."""

import io
import os
import runpy
from contextlib import redirect_stdout

import pytest
import torch
import transformers
from tests import ranks
from tests.cli import ROOT
from tests.dist.foreign import settle_in
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def trained(size, recipe, *args, **more):
    """``[(layout, loss)]`` of each step of ``recipes/RECIPE.py`` on so many ranks."""

    def work(world):
        settle_in()
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(world.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with redirect_stdout(io.StringIO()):
            return runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))["main"](*args, **more)

    found = ranks.run(size, work, 100)
    assert all(isinstance(one, list) for one in found), found
    assert all(one == found[0] for one in found)
    return found[0]


def compare(switched, plain, layouts):
    """Layouts in their order, losses to 1e-12, and something was learned."""
    assert list(dict.fromkeys(layout for layout, _ in switched)) == list(dict.fromkeys(layouts))
    assert [loss for _, loss in switched] == pytest.approx([loss for _, loss in plain], rel=0, abs=1e-12)
    assert plain[-1][1] < 0.9 * plain[0][1]


def weights(folder, kind):
    """What plain transformers reads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(model) is kind
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", LlamaForCausalLM), pytest.param("qwen3_moe", Qwen3MoeForCausalLM, marks=pytest.mark.sweep)],
    ids=["llama", "qwen3_moe"],
)
def test_a_model_of_transformers_trains_through_its_own_tp_plan_as_one_process(tmp_path, name, kind):
    """Gradient checkpointing and tied embeddings; experts with gate and up in one."""
    switched = trained(2, "hf_models", name, folder=str(tmp_path / "two"))
    plain = trained(1, "hf_models", name, "dp1", (), folder=str(tmp_path / "one"))
    compare(switched, plain, ["fsdp2", "tp2"])
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


@pytest.mark.sweep
def test_hugging_faces_trainer_trains_the_same_whether_its_layout_changes_or_not():
    pytest.importorskip("accelerate", reason="Trainer needs it: pip install accelerate")
    switched, plain = trained(2, "hf_trainer"), trained(2, "hf_trainer", switches=())
    assert [layout for layout, _ in switched] == [*3 * ["fsdp2"], *3 * ["dp2"], *3 * ["fsdp2"], "end"]
    # It logs in single precision; what it has trained is compared in double.
    assert [loss for _, loss in switched] == pytest.approx([loss for _, loss in plain], rel=0, abs=1e-6)
    assert switched[-1][1] == pytest.approx(plain[-1][1], rel=1e-12)
    assert plain[-2][1] < 0.9 * plain[0][1]


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
