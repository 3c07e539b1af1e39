"""Pages open with code that the tests run, and claim what tests show."""

import re

import pytest
from tests.cli import ROOT

OPENING = {
    "your-model.md": "your_model.py",
    "hugging-face.md": "hf_llama.py",
    "checkpoints.md": "from_checkpoint.py",
    "workers.md": "cluster.py",
    "guarantees.md": "same_bits.py",
}
"""One page for each kind of user, and the recipe that it opens with."""


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OPENING)
def test_a_page_opens_with_the_file_that_the_tests_run(name):
    before, code = page(name).split("```python\n", 1)

    assert code.split("```")[0] == (ROOT / "recipes" / OPENING[name]).read_text(encoding="utf-8")
    assert len(before.splitlines()) < 8
    run_by = [path for path in (ROOT / "tests" / "dist").glob("*recipes.py") if OPENING[name][:-3] in path.read_text()]
    assert run_by


def test_the_readme_leads_to_each_of_them():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [name for name in OPENING if f"(docs/{name})" not in readme] == []


def test_each_guarantee_names_a_test_that_exists_and_where_it_stops():
    rows = re.findall(r"^\| ([A-Z].*) \| (.+) \| `(tests/[\w/]+\.py)::(\w+)` \|$", page("guarantees.md"), re.MULTILINE)

    assert len(rows) >= 10
    for *_, file, name in rows:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_the_page_of_publishing_opens_with_the_loop_that_the_tests_run():
    page = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")
    code = (ROOT / "recipes" / "rl_miniature.py").read_text(encoding="utf-8")
    loop = page.split("```python\n")[1].split("```")[0]
    assert loop.startswith("def learn(")
    assert f"\n\n\n{loop}\n\ndef main(" in code
