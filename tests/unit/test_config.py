from pathlib import Path

import pytest
from pydantic import ValidationError

from dynatrain.config.errors import ConfigError
from dynatrain.config.explain import keys
from dynatrain.config.load import load_config
from dynatrain.config.run import RunConfig, Switch
from dynatrain.config.toml import to_toml


@pytest.fixture
def written(tmp_path):
    """Write a TOML file; gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusals(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_without_file_and_flags_everything_is_default():
    loaded = load_config(None, [])

    assert loaded.config == RunConfig()
    assert set(loaded.origins.values()) == {"default"}
    assert set(loaded.origins) == set(keys(RunConfig))


def test_a_flag_beats_the_file_and_the_file_beats_the_default_and_each_origin_is_kept(written):
    path = written('layout = "dp2"\nseed = 1\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n')

    loaded = load_config(path, ["--layout=fsdp2.tp2", "--optimizer.lr", "3e-4", "--data.paths", '["a.txt"]'])

    assert (loaded.config.layout, loaded.config.seed, loaded.config.optimizer.lr) == ("fsdp2.tp2", 1, 3e-4)
    assert (loaded.config.optimizer.betas, loaded.config.data.paths) == ((0.8, 0.9), ("a.txt",))
    assert {key: origin for key, origin in loaded.origins.items() if origin != "default"} == {
        "layout": "flag",
        "seed": f"file {path}",
        "optimizer.betas": f"file {path}",
        "optimizer.lr": "flag",
        "data.paths": "flag",
    }


def test_a_flag_sets_a_negative_looking_text_a_truth_value_and_an_optional_number():
    overrides = ["--model.config=200m", "--optimizer.exact_norm=true", "--world.size=4", "--model.dropout=0.5"]

    config = load_config(None, overrides).config

    assert (config.model.config, config.optimizer.exact_norm) == ("200m", True)
    assert (config.world.size, config.model.dropout) == (4, 0.5)


def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted():
    assert load_config(None, ["--model.config=1e5"]).config.model.config == "1e5"


def test_scheduled_switches_are_tables_in_a_file_and_one_toml_array_in_a_flag(written):
    wanted = (Switch(step=4, layout="dp2"), Switch(step=8, layout="tp2"))
    path = written('[[switch]]\nstep = 4\nlayout = "dp2"\n[[switch]]\nstep = 8\nlayout = "tp2"\n')

    by_file = load_config(path, [])
    by_flag = load_config(None, ['--switch=[{step=4, layout="dp2"}, {step=8, layout="tp2"}]'])

    assert by_file.config.switch == by_flag.config.switch == wanted
    assert by_file.origins["switch"] == f"file {path}"


@pytest.mark.parametrize(
    ("text", "flags", "named"),
    [
        ("stepz = 3", [], "stepz (file {path}) is not a key; nearest: steps"),
        ("[optimiser]\nlr = 1", [], "optimiser (file {path}) is not a key; nearest: optimizer"),
        ("[optimizer]\nlrr = 1", [], "optimizer.lrr (file {path}) is not a key; nearest: optimizer.lr"),
        (
            "[[switch]]\nstep = 3\nlayout = 'dp2'\nlayuot = 'dp2'",
            [],
            "switch.0.layuot (file {path}) is not a key; nearest: switch.0.layout",
        ),
        ("[[switch]]\nstep = 3", [], "switch.0.layout (file {path}) is missing"),
        ("steps = '9'", [], "steps = '9' (file {path}): should be a valid integer"),
        ("steps = 0", [], "steps = 0 (file {path}): should be greater than or equal to 1"),
        ("data = 3", [], "data = 3 (file {path}): should be a table"),
        ("[data]\npaths = 'x'", [], "data.paths = 'x' (file {path}): should be a list"),
        ("[optimizer]\nlr = inf", [], "optimizer.lr = inf (file {path})"),
        ("", ["--lr=3"], "lr (flag) is not a key; nearest: optimizer.lr"),
        ("", ["--switch.0.step=3"], "one value, --switch='[{{step=3, layout=\"tp2\"}}]'"),
        ("", [f"--steps={'9' * 5000}"], "steps = '9999"),
        ("", [f"--data.paths={'[' * 20_000}"], "data.paths = '[[["),
        ("", [f"--steps={2**31}"], "should be less than or equal to 2147483647"),
        ("", ["--save.grace_seconds=1e300"], "should be less than or equal to 1000000000"),
        ("", ["--world=3"], "world (flag) is a section; its keys are world.size"),
        ("", ["--steps"], "--steps: a value is needed"),
        ("", ["steps=3"], "'steps=3': a setting is --key=value"),
        ("", ["--switching.mode=keeep"], "should be 'keep', 'tight' or 'auto'; nearest: keep"),
        ("", ["--optimizer.lr=fast"], "optimizer.lr = 'fast' (flag): should be a valid number"),
    ],
)
def test_a_mistake_is_refused_with_key_value_origin_rule_and_what_is_near(written, text, flags, named):
    path = written(text)

    (problem,) = refusals(path, flags)

    assert named.format(path=path) in problem


def test_all_mistakes_of_file_and_flags_are_reported_at_once(written):
    path = written("stepz = 1\n[data]\nsequence = 1\n[batch]\nmicro_sequences = 'x'\n")

    assert len(refusals(path, ["--bogus=1", "--seed=-1"])) == 5


def test_a_flag_below_something_that_is_no_table_does_not_hide_the_mistake(written):
    (problem,) = refusals(written("data = 3"), ["--data.sequence=4"])

    assert "data = 3" in problem


def test_a_missing_file_and_a_file_that_is_not_toml_are_refused_with_their_path(tmp_path, written):
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load_config(tmp_path / "nowhere.toml", [])
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML"):
        load_config(written("= 3"), [])


def test_a_file_without_end_is_refused_with_its_path(written):
    path = written("a = " + "[" * 100_000)

    with pytest.raises(ConfigError, match="is not TOML that can be read") as refused:
        load_config(path, [])

    assert str(path) in str(refused.value)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        RunConfig().steps = 3  # type: ignore[misc]


def test_every_key_says_what_it_is():
    fields = [*keys(RunConfig).items(), *Switch.model_fields.items()]

    assert [key for key, field in fields if not field.description] == []


def test_what_is_written_lists_every_value(written):
    config = load_config(
        None,
        [
            "--world.size=2",
            "--model.dropout=0.0",
            "--model.attention_dropout=0.0",
            "--optimizer.warmup_steps=3",
            "--optimizer.decay_steps=9",
            '--switch=[{step=4, layout="dp2"}]',
        ],
    ).config

    loaded = load_config(written(to_toml(config)), [])

    assert loaded.config == config
    assert "default" not in loaded.origins.values()
