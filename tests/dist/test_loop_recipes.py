"""What loops hang around models: adapters, compiled and checkpointed blocks, saves, Hugging Face's loops."""

import itertools
import runpy
import weakref

import pytest
import torch
import transformers
from tests.cli import ROOT, environment
from tests.recipes import compare, load, on_ranks, trained
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def close(one, other):
    """Equal names, values to 1e-12, and there are some."""
    assert one.keys() == other.keys() != set()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12)


def test_adapters_on_a_frozen_checkpointed_model_train_through_switches_as_one_process(tmp_path):
    """L4: none is missing from what is saved."""
    switched = trained(2, "lora", path=str(tmp_path / "two"))
    plain = trained(1, "lora", "dp1", (), path=str(tmp_path / "one"))

    compare(switched, plain, ["fsdp2", "tp2", "dp2"])
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    places = [
        f"{number}.{layer}.{part}.weight" for number in (1, 2) for layer in ("one", "two") for part in ("down", "up")
    ]
    assert sorted(one) == places
    close(one, two)


@pytest.mark.sweep
def test_compiled_checkpointed_blocks_that_drop_train_the_same_whether_their_layout_changes_or_not():
    """L2: names of what is compiled are the same before and after."""
    switched = trained(2, "compiled_blocks", "aot_eager")
    compare(switched, trained(2, "compiled_blocks", "aot_eager", switches=()), ["fsdp2", "dp2"])
    compare(switched, trained(2, "compiled_blocks", "eager", switches=()), ["fsdp2", "dp2"])


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2_without_dropout"])
def test_save_pretrained_under_tp_writes_one_processs_weights_and_holds_one_whole_tensor_at_a_time(tmp_path, name):
    def work(world):
        alive, most = [], []
        gather = DTensor.full_tensor

        def counted(value):
            most.append(sum(ref() is not None for ref in alive))
            whole = gather(value)
            alive.append(weakref.ref(whole))
            return whole

        DTensor.full_tensor = counted
        load(world, "hf_models")["main"](name, switches=((3, "tp2"),), folder=str(tmp_path / "two"))
        return len(most), max(most)

    gathered, together = on_ranks(2, work)
    trained(1, "hf_models", name, "dp1", (), folder=str(tmp_path / "one"))

    assert gathered > 10
    assert together == 0
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / which, dtype=torch.float64) for which in ("one", "two"))
    close(one.state_dict(), two.state_dict())
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "recipe", [["your_model"], ["vit"], ["lora"], ["hf_models", "gpt2_without_dropout"]], ids=lambda recipe: recipe[-1]
)
def test_every_tp_degree_of_an_example_is_one_process(recipe):
    """D8; of GPT-2 also D2: queries, keys and values in one parameter."""
    switched = trained(4, *recipe, layout="fsdp4", switches=((3, "fsdp2.tp2"), (6, "tp4")))
    compare(switched, trained(1, *recipe, layout="dp1", switches=()), ["fsdp4", "fsdp2.tp2", "tp4"])


@pytest.mark.sweep
def test_pefts_adapters_train_through_switches_and_load_into_plain_peft(tmp_path):
    """L5: what is frozen is placed, what is trained is saved."""
    peft = pytest.importorskip("peft", reason="pip install dynatrain[hf]")
    switched = trained(2, "hf_peft", folder=str(tmp_path / "two"))
    plain = trained(1, "hf_peft", "dp1", (), folder=str(tmp_path / "one"))

    compare(switched, plain, ["fsdp2", "dp2"])
    base = transformers.LlamaForCausalLM
    small = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, **small)
    held = {}
    for which in ("one", "two"):
        torch.manual_seed(0)
        model = peft.PeftModel.from_pretrained(base(config).double(), tmp_path / which, autocast_adapter_dtype=False)
        held[which] = model.state_dict()
    assert any("lora_B" in name and value.any() for name, value in held["one"].items())
    close(held["one"], held["two"])


@pytest.mark.sweep
def test_hugging_faces_trainer_trains_the_same_whether_its_layout_changes_or_not():
    pytest.importorskip("accelerate", reason="pip install dynatrain[hf]")
    switched, plain = trained(2, "hf_trainer"), trained(2, "hf_trainer", switches=())
    assert [layout for layout, _ in switched] == [*3 * ["fsdp2"], *3 * ["dp2"], *3 * ["fsdp2"], "end"]
    # It logs in single precision; what it has trained is compared in double.
    assert [loss for _, loss in switched] == pytest.approx([loss for _, loss in plain], rel=0, abs=1e-6)
    assert switched[-1][1] == pytest.approx(plain[-1][1], rel=1e-12)
    assert plain[-2][1] < 0.9 * plain[0][1]


@pytest.mark.sweep
def test_a_loop_of_accelerate_trains_the_same_under_its_own_ddp_and_through_switches():
    """The loop is one function for both; micro-batches are accumulated, gradients clipped, rates scheduled."""
    pytest.importorskip("accelerate", reason="pip install dynatrain[hf]")
    layouts, switched = trained(2, "hf_accelerate")
    _, plain = trained(2, "hf_accelerate", "plain")

    assert layouts == [*3 * ["fsdp2"], *3 * ["dp2"], *3 * ["fsdp2"]]
    assert switched == pytest.approx(plain, rel=0, abs=1e-12)
    assert plain[-1] < 0.9 * plain[0]


def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    first = trained(2, "from_checkpoint", "fsdp2", str(tmp_path / "two"), "5")
    then = trained(2, "from_checkpoint", "tp2", str(tmp_path / "two"), "9")
    plain = trained(1, "from_checkpoint", "dp1", str(tmp_path / "one"), "9")

    compare(first + then, plain, ["fsdp2", "tp2"])


def test_pytorchs_own_gathers_see_no_bit_change_at_an_edge():
    found = trained(2, "same_bits")

    assert [layout for layout, _ in itertools.groupby(found, lambda one: one[0])] == ["fsdp2", "tp2", "dp2", "fsdp2"]
    assert [rest for _, *rest in found] == [[True, 20]] * 12


@pytest.mark.sweep
def test_a_llama_of_transformers_trains_through_switches_as_one_process(tmp_path):
    switched = trained(2, "hf_llama", str(tmp_path / "two"))
    compare(switched, trained(1, "hf_llama", str(tmp_path / "one"), "dp1", ()), ["fsdp2", "tp2", "dp2"])
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / which, dtype=torch.float64) for which in ("one", "two"))
    close(one.state_dict(), two.state_dict())


@pytest.mark.sweep
def test_a_run_is_driven_by_a_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    answers, code = runpy.run_path(str(ROOT / "recipes" / "cluster.py"))["main"](tmp_path)

    assert answers == ["done"] * 5
    assert code == 75  # ended before its last step, saved
