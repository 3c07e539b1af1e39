import json

import pytest
from tests.shapes import MIXTRAL, experts_shape, latent_shape

from dynatrain.config.errors import ConfigError
from dynatrain.config.load import load_config
from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import MOST_RANKS
from dynatrain.layout.text import parse_layout
from dynatrain.space.presets import PRESETS
from dynatrain.space.run_check import check_run


def checked(*flags):
    return check_run(load_config(None, list(flags)).config)


def refusals(*flags):
    with pytest.raises(ConfigError) as caught:
        checked(*flags)
    return caught.value.problems


def test_the_defaults_are_a_run_that_fits():
    run = checked()

    assert (run.shape, run.layout, run.switches) == (PRESETS["tiny"], parse_layout("dp1"), ())
    assert (run.config.world.size, run.config.model.dropout) == (1, 0.0)


def test_what_was_left_open_is_filled_in_and_layouts_are_canonical():
    run = checked("--layout=pp4_1_1_1_1", '--switch=[{step=3, layout="pp3.order_0_1_2"}]', "--layout=pp3")

    assert run.config.world.size == 3
    assert (run.config.layout, run.config.switch[0].layout) == ("pp3_1_2_1", "pp3_1_2_1")
    assert run.switches == ((3, run.layout),)
    assert check_run(run.config) == run


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (50, 5), (100, 10), (1000, 10)])
def test_a_run_of_any_length_has_a_warm_up_that_fits(steps, warmup):
    assert checked(f"--steps={steps}").config.optimizer.warmup_steps == warmup
    assert checked(f"--steps={steps}", "--optimizer.warmup_steps=1").config.optimizer.warmup_steps == 1


def test_the_cosine_ends_where_the_steps_do_unless_it_is_said_otherwise():
    assert checked("--steps=50").config.optimizer.decay_steps == 50
    assert checked("--steps=50", "--optimizer.decay_steps=80").config.optimizer.decay_steps == 80
    longer = checked("--steps=50").config.model_copy(update={"steps": 900})
    assert check_run(longer).config.optimizer.decay_steps == 50, "what was filled in stands"
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps = 6: at most optimizer.decay_steps = 5"):
        checked("--optimizer.warmup_steps=6", "--optimizer.decay_steps=5")


def test_selective_recomputation_of_compiled_blocks_is_refused_with_what_is_near():
    with pytest.raises(ConfigError, match=r"blocks.recompute = 'selective' .*nearest: 'none' or 'full'"):
        checked("--blocks.compile=true", "--blocks.recompute=selective")


def test_blocks_that_stay_eager_beside_compiled_ones_are_told():
    switches = '{step=1, layout="fsdp2"}, {step=4, layout="tp2-sp"}, {step=7, layout="pp2-zb"}, {step=10, layout="tp2"}'
    flags = ["--layout=tp2", f"--switch=[{switches}]", "--steps=11"]

    assert checked(*flags).notes == ()
    assert [note.partition(":")[0] for note in checked("--blocks.compile=true", *flags).notes] == [
        "blocks stay eager in tp2",
        "blocks stay eager in tp2-sp",
        "blocks stay eager in pp2-zb",
    ]


def test_the_dropout_of_the_model_holds_unless_the_run_sets_one(tmp_path):
    config = PRESETS["tiny"].to_config() | {"resid_pdrop": 0.25}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert checked(f"--model.config={tmp_path}").shape.dropout == 0.25
    assert checked(f"--model.config={tmp_path}", "--model.dropout=0.0").shape.dropout == 0.0
    assert checked(f"--model.config={tmp_path}", "--model.attention_dropout=0.5").config.model.attention_dropout == 0.5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--layout=tp3", "--world.size=4"], "nearest legal: tp4, dp2.tp2, fsdp2.tp2"),
        (["--layout=tp6"], "layout: tp6 is not legal here"),
        (["--layout=dp2x"], "layout: 'dp2x' is not a layout"),
        (["--layout=dp2", '--switch=[{step=3, layout="dp4"}]'], "switch.0.layout: dp4 is not legal here"),
        (["--layout=dp2", '--switch=[{step=3, layout="fsdp2.ep2"}]'], "ep2 deals out experts, and the model has none"),
        (["--layout=pp4.dp4", "--batch.global_sequences=16"], "each needs at least 4"),
        (["--layout=tp2-sp", "--data.sequence=63"], "does not divide the sequence length (-sp), 63"),
        (["--batch.micro_sequences=3"], "3 does not divide batch.global_sequences = 16; nearest: 2 or 4"),
        (["--batch.micro_sequences=3", "--batch.global_sequences=1000000000"], "nearest: 2 or 4"),
        (["--layout=pp9"], "nearest legal: pp4, "),
        (["--layout=pp5.fsdp9"], "nearest legal: fsdp8, pp2.fsdp4, pp4.fsdp2"),
        (["--layout=dp7", "--world.size=37"], "no layout of world.size = 37 ranks is legal\nnearest legal: dp7"),
        (["--layout=dp2", '--switch=[{step=3, layout="pp9"}]'], "nearest legal: "),
        (["--steps=5", "--optimizer.warmup_steps=6"], "optimizer.warmup_steps = 6: at most steps = 5"),
        (['--switch=[{step=200, layout="dp1"}]'], "switch.0.step = 200: below steps = 200"),
        (
            ["--layout=dp2", '--switch=[{step=3, layout="tp2", after_micro_batches=8}]'],
            "switch.0.after_micro_batches = 8: below the 8 of a step; nearest: 7",
        ),
        (
            ['--switch=[{step=7, layout="dp1"}, {step=9, layout="dp1"}]'],
            "switch.1.step = 9: 3 steps or more behind the switch before it, at step 7; nearest: 10",
        ),
        (["--data.vocab_size=5000"], "makes 5000 tokens; at most the model's vocabulary, 4096"),
        (["--data.sequence=4096"], "at most the model's longest sequence, 2048"),
        (["--model.config=tny"], "model.config: there is no model 'tny'"),
    ],
)
def test_parts_that_do_not_fit_are_named_with_the_rule_and_what_is_near(flags, named):
    (problem,) = refusals(*flags)

    assert named in problem


def test_a_world_is_no_larger_than_a_layout_may_be():
    with pytest.raises(ConfigError, match=f"world.size = {MOST_RANKS + 1} .*{MOST_RANKS}"):
        checked(f"--world.size={MOST_RANKS + 1}")
    assert "no layout of world.size = 65536 ranks is legal" in refusals(f"--world.size={MOST_RANKS}")[0]


def test_the_rules_of_a_pipeline_are_those_of_the_runs_own_schedule():
    five = ["--batch.global_sequences=10"]

    assert "in 2 rounds" in refusals("--layout=pp2v2", *five)[0]
    run = checked("--layout=pp2v2", "--pipeline.schedule=gpipe", *five)
    assert run.legal(parse_layout("pp2_1_3")) == parse_layout("pp2_1_3")
    with pytest.raises(LayoutError, match="in 2 rounds"):
        run.legal(parse_layout("pp2v2-zb"))


def test_everything_that_does_not_fit_is_reported_at_once():
    switches = '--switch=[{step=300, layout="dp4"}, {step=5, layout="tp3"}, {step=9, layout="x"}]'

    assert len(refusals("--layout=tp8", "--world.size=2", "--batch.micro_sequences=5", switches)) == 7


def test_of_tokens_that_are_there_no_vocabulary_is_made():
    assert refusals("--data.vocab_size=9000")
    assert checked("--data.vocab_size=9000", "--data.paths=['x.bin']").shape == PRESETS["tiny"]


def test_a_model_without_room_for_bytes_is_refused(tmp_path):
    config = PRESETS["tiny"].to_config() | {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))

    (problem,) = refusals(f"--model.config={tmp_path}", "--data.tokenizer=bytes")

    assert "makes 257 tokens" in problem


@pytest.mark.parametrize("shape", [experts_shape(MIXTRAL), latent_shape()], ids=["experts", "latent"])
def test_experts_are_routed_by_tp_ranks_that_share_the_tokens_out(shape, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape.to_config()))
    given = [f"--model.config={tmp_path}", "--data.tokenizer=bytes", "--data.paths=['x.bin']"]

    assert checked(*given, "--data.sequence=16", "--layout=fsdp2.tp2.ep2").shape == shape
    (problem,) = refusals(*given, "--data.sequence=15", "--layout=fsdp2.tp2")
    assert "tp2 does not divide the sequence length (of which each routes a share to experts), 15" in problem
