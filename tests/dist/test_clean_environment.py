"""A recipe is a file: copied alone to an empty folder it runs under torchrun, with only the installed package."""

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tests.cli import ROOT

import dynatrain

RECIPES = [
    ("same_bits.py", [], 12, 2),
    ("your_model.py", [], 0, 2),
    ("vit.py", [], 12, 2),
    ("lora.py", [], 12, 2),
    ("compiled_blocks.py", ["aot_eager"], 9, 2),
    ("from_checkpoint.py", ["fsdp2", "checkpoints", "3"], 0, 2),
    ("hf_llama.py", ["saved"], 0, 2),
    ("hf_models.py", ["qwen3_moe"], 9, 2),
    ("hf_models.py", ["gpt2"], 9, 2),
    ("megatron_style.py", [], 9, 2),
    ("titan_style.py", [], 12, 4),
    ("fsdp2_plain.py", [], 24, 2),
    ("fsdp2_switched.py", [], 24, 4),
    ("hf_trainer.py", [], 9, 2),
    ("hf_accelerate.py", [], 18, 2),
    ("hf_peft.py", [], 9, 2),
]
"""Files, arguments, lines that tell of a step, and ranks; the first is run by `make test`, too."""

ENGINE = ("tiny_engine.py", "tiny_engine_rank.py")
DRIVERS = {"cluster.py": (), "rl_miniature.py": ("hf_models.py", *ENGINE)}
"""Programs that drive a run, and what of the recipes lies beside them."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A Python with what this one has installed, and the package as a wheel would install it, not as a link here."""
    place = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    shutil.copytree(
        Path(dynatrain.__file__).parent, packages / "dynatrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    # Folders that .pth files name are not searched for further ones, so an editable install there leads nowhere.
    others = [path for path in sys.path if path in site.getsitepackages() or path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return place / "bin" / "python"


def run(python, folder, *words, timeout=200):
    """``words`` after ``python -I`` in an empty folder, which no environment variable leads out of."""
    kept = {
        key: os.environ[key]
        for key in ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS", "RES_OPTIONS")
        if key in os.environ
    }
    kept |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [python, "-I", *words], cwd=folder, env=kept, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def under_torchrun(python, folder, recipe, *words, nproc=2):
    shutil.copy(ROOT / "recipes" / recipe, folder)
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "--no-python"]
    return run(python, folder, *started, str(python), "-I", recipe, *words)


def test_nothing_of_the_repository_is_in_reach_there(clean, tmp_path):
    look = (
        "import dynatrain, importlib.util as u; print(dynatrain.__file__, u.find_spec('tests'), u.find_spec('recipes'))"
    )
    where, *others = run(clean, tmp_path, "-c", look).split()

    assert Path(where).is_relative_to(clean.parents[1])
    assert others == ["None", "None"]


@pytest.mark.parametrize(
    ("recipe", "words", "lines", "nproc"),
    [RECIPES[0], *(pytest.param(*row, marks=pytest.mark.sweep) for row in RECIPES[1:])],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_recipe_runs_alone_under_torchrun(clean, tmp_path, recipe, words, lines, nproc):
    for needed in ("accelerate", "peft"):
        if needed in recipe or (needed, recipe) == ("accelerate", "hf_trainer.py"):
            pytest.importorskip(needed, reason="pip install dynatrain[hf]")

    said = under_torchrun(clean, tmp_path, recipe, *words, nproc=nproc)

    assert len(re.findall(r"^(?:step \d+ |loss \d)", said, re.MULTILINE)) == lines


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recipe", "begins", "lines"), [("cluster.py", "done", 5), ("rl_miniature.py", "published", 6)]
)
def test_the_programs_that_drive_a_run_run_alone(clean, tmp_path, recipe, begins, lines):
    for file in (recipe, *DRIVERS[recipe]):
        shutil.copy(ROOT / "recipes" / file, tmp_path)
    said = run(clean, tmp_path, recipe)

    assert [line.split()[0] for line in said.splitlines()] == [begins] * lines


def test_every_recipe_is_among_them():
    there = {path.name for path in (ROOT / "recipes").glob("*.py")}

    assert {file for file, *_ in RECIPES} | {*DRIVERS, *ENGINE} == there
