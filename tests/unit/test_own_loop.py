"""A loop of the user's own: found in its file, asked for what a run needs of it, and configured without data."""

import sys
from types import SimpleNamespace

import pytest

from dynatrain.app.chosen import wanted
from dynatrain.app.mistake import MistakeError
from dynatrain.app.prints import prints_of
from dynatrain.app.start import ENTRY, anywhere, entry_of, make
from dynatrain.config.errors import ConfigError
from dynatrain.config.load import load_config
from dynatrain.config.own import load_own
from dynatrain.observe.log import Tail
from dynatrain.space.run_check import check_run
from dynatrain.train import own_loop
from dynatrain.train.own_loop import LoopError, LoopRun

LOOP = """
from beside import SEEN

def learn(run):
    SEEN.append(run)

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A loop's file, and one beside it that it imports."""
    (tmp_path / "beside.py").write_text("SEEN = []\n")
    (tmp_path / "my_policy.py").write_text(LOOP)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "my_policy.py"
    for name in ("beside", "my_policy"):
        sys.modules.pop(name, None)


def config_of(*flags):
    return load_config(None, list(flags)).config


def test_each_rank_runs_the_function_of_the_file_and_imports_what_lies_beside_it(file, monkeypatch):
    checked = check_run(config_of(f"--loop={file}:learn"))
    monkeypatch.setattr(own_loop, "take_part", lambda context, train: train(context, checked, "device"))
    rank = own_loop.entry(checked.config.loop)

    with pytest.raises(LoopError, match=r"my_policy.py:learn has ended without run.switcher\(build\)"):
        rank("its seat")

    (run,) = sys.modules["beside"].SEEN
    assert (run.steps, run.device) == (checked.config.steps, "device")


@pytest.mark.parametrize("name", ["teach", "NUMBER"])
def test_a_file_without_that_function_is_named(file, name):
    with pytest.raises(LoopError, match=f"my_policy.py has no function {name}"):
        own_loop.entry(f"{file}:{name}")


def test_a_run_has_one_switcher_and_notes_are_rank_0s_lines(tmp_path):
    seat = SimpleNamespace(context=SimpleNamespace(folder=SimpleNamespace(metrics=tmp_path / "m"), attempt=2))
    run = LoopRun(seat, None, None)
    run.note(reward=0.1)  # before there is a step
    run.trained = SimpleNamespace(rank=1, step=3, generation=4, layout=check_run(config_of()).layout)
    run.note(reward=0.2)
    run.trained.rank = 0
    run.note(reward=0.3)
    with pytest.raises(LoopError, match="a run under the agent has one job"):
        run.switcher(None)

    (line,) = Tail(tmp_path / "m").new()
    told = {key: line[key] for key in ("kind", "step", "layout", "reward", "generation", "attempt")}
    assert told == {"kind": "loop", "step": 3, "layout": "dp1", "reward": 0.3, "generation": 4, "attempt": 2}


class Ended:
    """A ``Switcher`` behind its loop; each of ``back`` is a loss, and the step from which the others go on."""

    stopped = left = False
    unsaved = ""

    def __init__(self, step, back):
        self.step, self.back, self.saved = step, [*back], []

    def save_now(self):
        self.saved.append(self.step)

    def meet(self):
        if self.back:
            self.step = self.back.pop(0)
            return False
        return True


def behind(step, *back):
    trained = Ended(step, back)
    own_loop._train(lambda run: setattr(run, "trained", trained), None, check_run(config_of()), None)
    return trained.saved


def test_ranks_that_are_lost_behind_the_loop_have_the_others_save_again_or_say_what_is_missing():
    assert behind(7) == [7]
    assert behind(7, 7) == [7, 7]
    with pytest.raises(LoopError, match="lost behind the loop, and of step 7 not everything is left, but of 5"):
        behind(7, 5)


def test_the_run_is_made_without_data_and_its_ranks_know_the_file_anywhere(file, tmp_path):
    config = anywhere(config_of("--loop=my_policy.py:learn", "--data.paths=[]", "--data.sequence=1000000"))
    run = make(check_run(config), tmp_path / "run")
    again = load_own(run.path).config

    assert again.loop == f"{file}:learn"
    assert entry_of(again, ENTRY) == f"dynatrain.train.own_loop:entry {file}:learn"
    assert entry_of(config_of(), ENTRY) == ENTRY
    assert sorted(path.name for path in run.path.iterdir() if path.is_file()) == ["config.toml", "environment.json"]


def test_agents_with_another_file_are_told_apart(file):
    checked = check_run(config_of(f"--loop={file}:learn"))
    before = prints_of(checked)
    file.write_text(file.read_text() + "# changed")

    assert {key for key, value in prints_of(checked).items() if before[key] != value} == {"loop"}
    assert prints_of(check_run(config_of())).keys() == before.keys() - {"loop"}


def test_what_its_checkpoints_hold_is_not_guessed_by_what_writes_or_reads_weights(file, tmp_path):
    run = make(check_run(anywhere(config_of(f"--loop={file}:learn"))), tmp_path / "run")
    with pytest.raises(MistakeError, match=r"trains in a loop of its own, .*my_policy.py:learn, which alone knows"):
        wanted(str(run.path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("my_policy.py", "it names no function; FILE.py:FUNCTION, for example train.py:main"),
        ("my_policy.py:", "it names no function"),
        ("nowhere.py:learn", "there is no file nowhere.py"),
    ],
)
def test_a_loop_that_cannot_be_found_is_refused_before_anything_starts(file, text, said):
    assert file.exists()
    with pytest.raises(ConfigError, match=said):
        check_run(config_of(f"--loop={text}"))


def test_batches_and_sequences_of_a_loop_bound_no_layout(file):
    flags = ("--layout=dp64", "--batch.global_sequences=2", "--batch.micro_sequences=1")
    with pytest.raises(ConfigError, match="micro-batches"):
        check_run(config_of(*flags))
    assert check_run(config_of(*flags, f"--loop={file}:learn")).layout.world_size == 64
