"""``export``, ``import``, ``generate``, ``status`` and ``check`` on a run that was imported: no rank is started."""

import json
import pickle
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.shapes import small_shape
from tests.shelves import export, load, random_weights
from tests.unit.test_cli import call
from torch.distributed.checkpoint import FileSystemReader

from dynatrain.app.chosen import choose, kept, wanted
from dynatrain.app.imports import import_run
from dynatrain.app.mistake import MistakeError
from dynatrain.app.resume import reopened, resume
from dynatrain.app.start import anywhere
from dynatrain.config.load import load_config
from dynatrain.config.own import load_own
from dynatrain.config.run import Switch
from dynatrain.data.prepare import Request, prepare
from dynatrain.data.tokenizer import byte_tokenizer
from dynatrain.observe.checkpoints import MANIFEST, File, newest
from dynatrain.observe.mark import AgentMark
from dynatrain.observe.requests import Answer
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import check_run
from dynatrain.train.rank import job_of

SHAPE = small_shape(vocab_size=257, dropout=0.0)
SETTINGS = ["--data.sequence=16", "--data.validation=0.0", "--layout=dp2"]


def settings(place, *more):
    return [f"--data.paths=['{place / 'text'}']", *SETTINGS, *more]


def make(place, source, name, *more):
    return import_run(None, settings(place, *more), place / source, place / "runs" / name)


def hurt(place, name, change):
    """A copy of the run ``one`` with something changed in its checkpoint."""
    shutil.copytree(place / "runs" / "one", place / "runs" / name)
    change(place / "runs" / name / "checkpoints" / "step_00000000")


def flip_a_bit(checkpoint):
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)


def cut_short(checkpoint):
    data = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(data[:-7])


def halve_a_tensor(entries):
    (chunk,) = entries["model.norm.weight"].chunks
    entries["model.norm.weight"].chunks[0] = replace(chunk, sizes=torch.Size([32]))


def double_a_tensor(entries):
    entries["model.norm.weight"].chunks *= 2


def forget_a_tensor(entries):
    del entries["model.norm.weight"]


def reshape_a_tensor(entries):
    """As a whole it is another than the bytes are."""
    (chunk,) = entries["model.norm.weight"].chunks
    entries["model.norm.weight"].chunks[0] = replace(chunk, sizes=torch.Size([32]))
    entries["model.norm.weight"].size = torch.Size([32])


def told_otherwise(change):
    """Change what the metadata say, and have the manifest agree."""

    def changed(checkpoint):
        metadata = FileSystemReader(checkpoint).read_metadata()
        change(metadata.state_dict_metadata)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
        rehash(checkpoint)

    return changed


def rehash(checkpoint):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"] = [asdict(File.of(checkpoint / file["name"])) for file in manifest["files"]]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


HURT = {
    "flipped": flip_a_bit,
    "short": cut_short,
    "halved": told_otherwise(halve_a_tensor),
    "doubled": told_otherwise(double_a_tensor),
    "lacking": told_otherwise(forget_a_tensor),
    "reshaped": told_otherwise(reshape_a_tensor),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Text, Hugging Face folders, and runs: ``one`` imported, ``bare`` without a checkpoint, others damaged."""
    folder = tmp_path_factory.mktemp("faces")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("There is enough of it here. " * 50)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    export(folder / "hf", SHAPE, random_weights(SHAPE), folder / "tokenizer.json", dtype="fp32")
    export(folder / "mute", SHAPE, random_weights(SHAPE), dtype="fp32")
    small = replace(SHAPE, vocab_size=100)
    export(folder / "small", small, random_weights(small), folder / "tokenizer.json", dtype="fp32")
    for name, text in (("odd", '{"architectures": ["MambaForCausalLM"]}'), ("endless", None), ("gone", None)):
        shutil.copytree(folder / "hf", folder / name)
        if text:
            (folder / name / "config.json").write_text(text)
    (folder / "endless" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    weights = load_file(folder / "gone" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "gone" / "model.safetensors")
    make(folder, "hf", "one")
    for name, change in HURT.items():
        hurt(folder, name, change)
    hurt(folder, "bare", lambda checkpoint: shutil.rmtree(checkpoint.parent))
    hurt(folder, "garbled", lambda checkpoint: (checkpoint.parents[1] / "tokenizer.json").write_text("{"))
    hurt(folder, "wordless", lambda checkpoint: (checkpoint.parents[1] / "tokenizer.json").unlink())
    shutil.copytree(folder / "runs" / "one" / "checkpoints" / "step_00000000", folder / "loose" / "step_00000000")
    return folder


@pytest.fixture
def said(place, monkeypatch, capsys):
    """Calls a command in the folder: ``(code, out, err)``."""
    monkeypatch.chdir(place)
    return lambda *words: call(monkeypatch, capsys, *words)


REFUSED = {
    "export of no run": (["export", "nosuch", "out"], ["No run 'nosuch'", "Nearest: "]),
    "export without a checkpoint": (["export", "bare", "out"], ["no checkpoint that can be used", "save bare"]),
    "export into a folder that is taken": (["export", "one", "hf"], ["hf is taken; nearest free place", "hf-2"]),
    "export of an unknown type": (["export", "one", "out", "--dtype", "fp64"], ["'fp64'; one of bf16, fp32, fp16"]),
    "export of everything wrong": (
        ["export", "nosuch", "hf", "--dtype", "int3"],
        ["No run 'nosuch'", "hf is taken", "'int3'; one of"],
    ),
    "export in files of no size": (["export", "one", "out", "--max-shard", "lots"], ["'lots'", "such as 5GB"]),
    "export in files of nothing": (
        ["export", "one", "out", "--max-shard", "0GB"],
        ["is 0; at least 1"],
    ),
    "export of no such step": (["export", "one", "out", "--step", "7"], ["no checkpoint of step 7", "--step 0"]),
    "export of a changed bit": (["export", "flipped", "out"], ["__0_0.distcp has hash", "no other"]),
    "export of a short file": (["export", "short", "new/out"], ["__0_0.distcp has", "bytes, written were"]),
    "export of half a tensor": (["export", "halved", "out"], ["norm.weight param", "32 of 64 elements missing"]),
    "export of another shape": (["export", "reshaped", "out"], ["norm.weight has shape (32,), the model's is (64,)"]),
    "export of a missing tensor": (["export", "lacking", "out"], ["it has no model.norm.weight"]),
    "export of a checkpoint without its run": (["export", "loose/step_00000000", "out"], ["is no run", "--step"]),
    "export of words that are none": (["export", "garbled", "new/out"], ["the tokenizer cannot be exported"]),
    "two steps": (["export", "runs/one/checkpoints/step_00000000", "out", "--step", "3"], ["is step 0", "--step is 3"]),
    "import of no folder": (["import", "nosuch", "two"], ["nosuch is no folder", "config.json and model.safetensors"]),
    "import of an unknown architecture": (["import", "odd", "two"], ["MambaForCausalLM", "built are LlamaForCausalLM"]),
    "import over a run": (["import", "hf", "one"], ["already holds a run"]),
    "import of everything wrong": (
        ["import", "nosuch", "one", "--layot=x"],
        ["nosuch is no folder", "already holds a run", "layot (flag) is not a key; nearest: layout"],
    ),
    "import of another's words": (
        ["import", "small", "two"],
        ["tokens up to number 256", "vocabulary, 100"],
    ),
    "import of words without an end": (["import", "endless", "two"], ["has no token </s>", "eos_token"]),
    "import with more words than fit": (["import", "mute", "two"], ["makes 4096 tokens", "vocabulary, 257"]),
    "import with no words to take": (["import", "mute", "two", "--data.tokenizer=model"], ["there is no", "'bytes'"]),
    "import of lacking weights": (["import", "gone", "two"], ["model.norm.weight is missing"]),
    "import without data": (["import", "hf", "two", "--data.paths=['nosuch']"], ["nosuch", "does not exist"]),
    "import into a layout": (["import", "hf", "two", "--layout=tp3"], ["tp3", "nearest legal"]),
    "import of two models": (["import", "hf", "two", "--model.config=tiny"], ["model.config (flag)", "Leave it out"]),
    "generate of no run": (["generate", "nosuch", "x"], ["No run 'nosuch'"]),
    "generate without words": (["generate", "wordless", "x"], ["wordless/tokenizer.json", "Put the tokenizer.json"]),
    "generate from half a letter": (["generate", "one", "a\udcff"], ["the prompt is not UTF-8 at character 2"]),
    "generate out of range": (
        ["generate", "one", "x", "--tokens", "0", "--temperature", "-1", "--top-k", "-2", "--seed", "-3"],
        ["--tokens is 0; at least 1", "--temperature is -1", "--top-k is -2", "--seed is -3"],
    ),
    "generate of damage": (["generate", "flipped", "x"], ["__0_0.distcp has hash"]),
    "export in files of more bytes than there are": (
        ["export", "one", "out", "--max-shard", "9" * 400 + "GB"],
        ["more bytes", "5GB"],
    ),
    "train under no name": (["train", "--run", ""], ["--run is empty", "leave --run out"]),
    "train of nothing": (["train"], ["needs a CONFIG.toml", "--run NAME"]),
    "train on of no run": (["train", "--run", "nosuch"], ["No run 'nosuch'"]),
    "train on without a checkpoint": (["train", "--run", "bare"], ["no checkpoint", "--run bare-2"]),
    "a preset's words": (["train", "run.toml", "--data.tokenizer=model"], ["the preset tiny has none", "'bpe'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_code_2_the_nearest_choice_and_leaves_nothing(case, place, said):
    words, named = REFUSED[case]
    (place / "run.toml").write_text("")
    if words[0] == "import":
        words = [*words[:3], *settings(place), *words[3:]]
    before = {path: path.stat().st_size for path in place.rglob("*")}
    code, out, err = said(*words)
    assert code == 2, out + err
    text = " ".join((out + err).split())
    assert [name for name in named if name not in text] == []
    assert {path: path.stat().st_size for path in place.rglob("*")} == before


def test_what_was_imported_is_exported_with_its_bits_and_its_tokenizer(place, said, tmp_path):
    code, out, _ = said("export", "one", str(tmp_path / "out"), "--dtype", "fp32", "--json")
    assert (code, json.loads(out)["step"]) == (0, 0)
    named = said("export", "runs/one/checkpoints/step_00000000", str(tmp_path / "new" / "parts"), "--max-shard=100kB")
    assert named[0] == 0, named
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (place / "hf" / name).read_bytes()
    assert len(list((tmp_path / "new" / "parts").glob("model-*.safetensors"))) > 1
    right = load(place / "hf", SHAPE, torch.bfloat16)
    found = load(tmp_path / "new" / "parts", SHAPE, torch.bfloat16)
    assert all(torch.equal(found[name], value) for name, value in right.items())


def test_a_run_stands_alone_also_where_it_is_moved(place, said, tmp_path):
    make(place, "hf", "two")
    moved = tmp_path / "moved"
    shutil.move(place / "runs" / "two", moved)
    text = (moved / "config.toml").read_text()
    assert 'config = "./config.json"' in text
    assert str(place / "hf") not in text
    assert said("check", str(moved))[0] == 0
    assert said("export", str(moved), str(tmp_path / "out"))[0] == 0


def test_an_end_marker_is_the_one_that_the_tokenizer_s_settings_name(tmp_path):
    made = byte_tokenizer()
    made.add_special_tokens(["</s>"])
    (tmp_path / "a.txt").write_text("live")
    for number, (settings, end) in enumerate([("{}", 256), ('{"eos_token": {"content": "</s>"}}', 257)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(settings)
        prepare(Request(paths=(str(tmp_path / "a.txt"),), tokenizer="model", validation=0.0), folder)
        assert np.load(folder / "tokens_train.npy").tolist() == [*b"live", end]


def test_an_import_that_the_disk_does_not_take_leaves_nothing(place, said, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dynatrain.train.weights.write_chunks", full)
    before = set(place.rglob("*"))
    code, _, err = said("import", "hf", "new/two", *settings(place))
    assert (code, "No space left on device. Four bytes" in err) == (2, True), err
    assert set(place.rglob("*")) == before


def test_a_run_goes_on_with_its_model_wherever_that_is_described(place, monkeypatch):
    monkeypatch.chdir(place)
    path = place / "runs" / "one"
    asked = settings(place, "--data.tokenizer=model")

    def go_on(model):
        return resume(anywhere(load_config(None, [*asked, f"--model.config={model}"]).config), path, layout_named=False)

    found = go_on("hf")
    assert (found.step, found.config.layout) == (0, "dp2"), "what was imported is in no layout yet"
    assert found.config.model.config == str(path / "config.json")
    with pytest.raises(MistakeError, match=r"model\.config was .*one/config\.json.* and is now .*small"):
        go_on("small")


def test_a_run_that_is_driven_keeps_its_configuration_when_another_start_of_it_is_refused(place, said):
    hurt(place, "driven", lambda _: None)
    run = RunFolder.find("driven")
    AgentMark.mine(0).write(run.path)
    before = run.config.read_text()
    code, _, err = said("train", "--run", "driven", "--layout=dp1", "--steps=77")
    assert (code, "is driven by process" in err) == (2, True), err
    assert run.config.read_text() == before


def test_a_run_is_asked_for_something_else_only_where_it_can_begin(place, monkeypatch):
    monkeypatch.chdir(place)
    path = place / "runs" / "one"
    before = (path / "config.toml").read_text()
    asked = load_config(path / "config.toml", [f"--model.config={path / 'config.json'}", "--steps=77"]).config

    def begin():
        with reopened(resume(asked, path, layout_named=False)):
            assert load_config(path / "config.toml", []).config.steps == 77
            raise MistakeError("no device")

    with pytest.raises(MistakeError, match="no device"):
        begin()
    assert (path / "config.toml").read_text() == before


def test_what_was_damaged_since_or_is_past_holds_up_no_resume(place, monkeypatch):
    hurt(place, "later", lambda _: None)
    path = place / "runs" / "later"
    for step in (5, 9):
        folder = shutil.copytree(path / "checkpoints" / "step_00000000", path / "checkpoints" / f"step_0000000{step}")
        manifest = json.loads((folder / "manifest.json").read_text()) | {"step": step}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    flip_a_bit(folder)  # of the newest: its files have their sizes
    asked = load_own(path, ["--steps=20", "--layout=fsdp2"]).config
    switches = tuple(Switch(step=step, layout="tp2") for step in (3, 5, 7))
    monkeypatch.chdir(place)

    found = resume(asked.model_copy(update={"switch": switches}), path, layout_named=True)
    assert (found.step, [switch.step for switch in found.config.switch]) == (5, [5, 7])
    assert "step_00000009: __0_0.distcp has hash" in found.note
    assert "past are left out: of step 3" in found.note
    with reopened(found):
        assert newest(path / "checkpoints") == (path / "checkpoints" / "step_00000005", ()), "as the ranks look"
    assert (path / "checkpoints" / "damaged_step_00000009").is_dir()


def test_more_steps_leave_the_learning_rate_as_the_run_was_begun_with(place, monkeypatch):
    hurt(place, "longer", lambda _: None)
    path = place / "runs" / "longer"
    monkeypatch.chdir(place)
    began = load_own(path).config.steps

    def go_on(*flags):
        return resume(load_own(path, list(flags)).config, path, layout_named=False)

    fresh = go_on("--steps=50")
    assert fresh.config.optimizer.decay_steps == 50, "nothing was trained yet: the run begins now"
    assert "cosine" not in fresh.note
    assert go_on("--steps=50", "--optimizer.decay_steps=70").config.optimizer.decay_steps == 70
    folder = shutil.copytree(path / "checkpoints" / "step_00000000", path / "checkpoints" / "step_00000001")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"step": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MistakeError, match=rf"optimizer.decay_steps was {began} and is now 70"):
        go_on("--optimizer.decay_steps=70")
    text = (path / "config.toml").read_text()
    assert f"decay_steps = {began}\n" in text
    for written in (
        text,
        text.replace(f"decay_steps = {began}\n", ""),
    ):  # and of a run from before there was the setting
        (path / "config.toml").write_text(written)
        found = go_on("--steps=50")
        assert (found.config.steps, found.config.optimizer.decay_steps) == (50, began)
        assert job_of(check_run(found.config)).optimizer.total_steps == began
        assert f"the cosine of the learning rate ends at step {began}, steps are 50" in found.note


def generated(said, *words, prompt="There is"):
    code, out, err = said("generate", "one", prompt, "--tokens", "12", "--json", *words)
    assert code == 0, err
    return json.loads(out)["tokens"]


def test_a_text_is_a_function_of_the_seed(said):
    assert generated(said) == generated(said) != generated(said, "--seed", "1")
    assert generated(said, "--temperature", "0") == generated(said, "--temperature", "0", "--seed", "1")
    assert generated(said, "--top-k", "1", "--seed", "3") == generated(said, "--temperature", "0")


def test_a_temperature_near_0_is_0(said):
    assert generated(said, "--temperature=1e-310") == generated(said, "--temperature=0")


def test_a_text_goes_on_past_the_longest_sequence_and_begins_from_nothing(said):
    past = "There is more of it than the model knows. " * 4
    assert len(past) > SHAPE.max_position_embeddings
    last = past[-SHAPE.max_position_embeddings :]
    assert generated(said, "--temperature", "0", prompt=past) == generated(said, "--temperature", "0", prompt=last)
    assert generated(said, prompt="")
    code, out, _ = said("generate", "one", "There is", "--tokens", "3")
    assert (code, out[:8]) == (0, "There is")


def test_status_shows_the_newest_checkpoint(said):
    assert "saved at step 0, weights only  (" in said("status", "one")[1]
    saved = json.loads(said("status", "one", "--json")[1])["checkpoint"]
    assert (saved["step"], saved["weights_only"]) == (0, True)
    assert 0 <= saved["age_seconds"] < 1000
    assert json.loads(said("status", "bare", "--json")[1])["checkpoint"] is None


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ("flipped", "__0_0.distcp has hash"),
        ("short", "__0_0.distcp has"),
        ("halved", "norm.weight param: 32 of 64 elements missing"),
        ("doubled", "norm.weight param: ((0, 64),) comes twice"),
        ("lacking", "norm.weight param: the run's model has it, the files not"),
        ("reshaped", "has shape (64,), .metadata says (32,)"),
    ],
)
def test_a_checkpoint_that_is_not_whole_does_not_pass_the_check(said, run, problem):
    for what in (run, f"runs/{run}/checkpoints/step_00000000"):
        code, out, _ = said("check", what)
        assert code == 3
        assert out.startswith("NOT SOUND")
        assert problem in out


def test_a_whole_checkpoint_passes_the_check(said):
    code, out, _ = said("check", "one")
    assert (code, out) == (0, "sound  step_00000000: step 0, weights only, 2 files, written in dp1\n")
    assert said("check", "loose/step_00000000")[0] == 0


def test_a_checkpoint_that_its_run_removes_meanwhile_is_told_so(place, monkeypatch):
    monkeypatch.chdir(place)
    hurt(place, "passing", lambda _: None)
    asked = wanted("passing")
    chosen = choose(asked, 1.0)
    shutil.rmtree(chosen.folder)
    with pytest.raises(MistakeError, match=r"removed meanwhile.*keeps the last 2"), kept(chosen, asked):
        (chosen.folder / "__0_0.distcp").read_bytes()


def test_a_run_that_runs_is_saved_first_and_where_it_cannot_be_the_steps_that_are_there_are_told(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("dynatrain.app.chosen._runs", lambda _: True)
    asked = wanted("one")
    with pytest.raises(MistakeError, match="one is not running"):
        choose(asked, 1.0)
    monkeypatch.setattr("dynatrain.app.chosen.ask", lambda *_: ("id", Answer(outcome="failed", message="planted")))
    with pytest.raises(MistakeError, match=r"could not be saved: planted\. There: --step 0\."):
        choose(asked, 1.0)
    folder = RunFolder.find("one").checkpoints / "step_00000000"
    monkeypatch.setattr("dynatrain.app.chosen.ask", lambda *_: ("id", Answer(outcome="done", message=str(folder))))
    assert choose(asked, 1.0).folder == folder
