"""The tables of docs/what-can-switch.md are those of the code, and each of their cells is a test."""

import ast
import pathlib
import re

import pytest
import torch
from tests.cells import AXES, EXACT, HOME, STATES
from tests.dist import test_every_cell

from dynatrain.layout.form import CP_METHODS, SCHEDULES, LayoutError
from dynatrain.layout.layout import AXES as RANK_AXES
from dynatrain.layout.layout import EXPERT_AXES
from dynatrain.layout.legality import check
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.space.optimizers import OPTIMIZERS
from dynatrain.train.optimizers.schema import kept

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "what-can-switch.md").read_text(encoding="utf-8")
MATRIX, VECTOR = ("layers.0.mlp.up_proj.weight", (6, 512)), ("norm.weight", (6,))
CASE = test_every_cell.CASE


def refuse_unfit(text):
    """Hold a layout of the cells' model to what every run is held to."""
    layout = resolve(parse_layout(text), CASE.shape.num_hidden_layers)
    check(layout, CASE.shape.limits(), num_microbatches=CASE.micro_batches, sequence=CASE.tokens)


def keep_unknown():
    list(kept(torch.optim.Rprop([torch.nn.Parameter(torch.ones(2))])))


RULES = {
    "zero bubble with FSDP settings that give wrong gradients": lambda: refuse_unfit("pp2-zb.fsdp2"),
    "fewer rows than heads or experts to split": lambda: refuse_unfit("tp16"),
    "an optimizer without a schema": keep_unknown,
}
"""All that may be refused, each with something that breaks it."""


def rows(heading, number=0):
    """The cells of a table under a heading, without its titles; the first table is number 0."""
    lines = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", lines, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in tables[number].splitlines()[2:]]


def titles(heading, number):
    lines = PAGE.split(f"\n## {heading}\n")[1]
    first = re.findall(r"(?:^\|.*\n)+", lines, re.MULTILINE)[number].splitlines()[0]
    return [cell.strip(" `") for cell in first.strip("| ").split(" | ")]


def form(state):
    return " (reduced)" * bool(state.reduced) + " (blockwise)" * bool(state.block)


def test_each_optimizer_has_a_row_with_its_states_and_their_forms():
    found = {row[0].strip("`"): row[2:4] for row in rows("Optimizers")}
    assert found == {
        name: [
            ", ".join(f"`{state.name}`{form(state)}" for state in kept(*tensor, "float32"))
            for tensor in (MATRIX, VECTOR)
        ]
        for name, kept in OPTIMIZERS.items()
    }


def test_every_form_has_a_row():
    names = " ".join(row[0] for row in rows("Forms of state"))
    for word in ("parameter-shaped", "reduced", "blockwise", "scalar"):
        assert re.search(rf"\b{word}\b", names)


def test_every_axis_and_every_option_of_one_is_a_column():
    layouts = [parse_layout(text) for text in AXES.values()]
    assert {axis for layout in layouts for axis in (*RANK_AXES, *EXPERT_AXES) if layout.size(axis) > 1} == {
        *RANK_AXES,
        *EXPERT_AXES,
    }
    assert {layout.schedule for layout in layouts} == {"", *SCHEDULES}
    assert {layout.cp_method for layout in layouts} == set(CP_METHODS)
    assert {layout.zero for layout in layouts} == {1, 2, 3}
    assert {(layout.chunks > 1, layout.sp) for layout in layouts} >= {(True, False), (False, True)}
    assert any(layout.etp != layout.size("tp") for layout in layouts if layout.etp > 1)
    assert HOME.keys() <= AXES.keys()
    assert all(HOME.get(axis, "fsdp2") != text for axis, text in AXES.items())


@pytest.mark.parametrize(("number", "bounds"), [(0, EXACT), (1, STATES)])
def test_every_cell_is_there_and_says_what_its_test_holds(number, bounds):
    assert titles("Axis by axis", number)[1:] == list(AXES)
    assert rows("Axis by axis", number) == [[row, *[bound] * len(AXES)] for row, bound in bounds.items()]
    assert EXACT.keys() == OPTIMIZERS.keys()


def values(test, name):
    """What a test is parametrised with under ``name``."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize" and mark.args[0] == name)
    return [getattr(value, "values", (value,))[0] for value in mark.args[1]]


@pytest.mark.parametrize(
    ("test", "row", "bounds"),
    [(test_every_cell.test_each_optimizer, "optimizer", EXACT), (test_every_cell.test_each_state, "state", STATES)],
)
def test_every_cell_is_a_row_of_a_test(test, row, bounds):
    assert test.__name__ in PAGE
    assert values(test, "axis") == list(AXES)
    assert values(test, row) == list(bounds)


def test_every_claim_names_a_test_that_exists():
    claimed = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file, _ in claimed}
    there = {(file, node.name) for file, tree in trees.items() for node in tree.body if hasattr(node, "name")}

    assert len(claimed) > 15
    assert claimed - there == set()


@pytest.mark.parametrize("axis", AXES)
def test_no_cell_is_refused(axis):
    for text in (AXES[axis], HOME.get(axis, "fsdp2")):
        refuse_unfit(text)


def test_the_page_names_the_rules_that_refuse_and_no_others():
    refused = rows("Refused")

    assert {rule for _, rule, _ in refused} == RULES.keys()
    assert all(re.fullmatch(r"`tests/[\w/]+\.py::\w+`", test) for *_, test in refused)
    for broken in RULES.values():
        with pytest.raises((LayoutError, LookupError)):
            broken()


def test_the_page_says_which_cells_run_every_time():
    (said,) = re.findall(r"`make test` runs the cells of the second table under ([^;]*);", PAGE)

    assert tuple(re.findall(r"`([\w-]+)`", said)) == test_every_cell.TRIED_ALWAYS
    assert "sweep" in {mark.name for mark in test_every_cell.test_each_optimizer.pytestmark}


TRAIN = {file: ast.parse(file.read_text(encoding="utf-8")) for file in ROOT.glob("src/dynatrain/train/**/*.py")}
PIECES = ast.parse((ROOT / "src/dynatrain/execute/pieces.py").read_text(encoding="utf-8"))
REFUSALS = {"UnplacedTensorError", "UnknownStateError", "UnknownHookError"}


def words(node):
    """The texts in a piece of code, docstrings apart."""
    documented = [one for one in ast.walk(node) if isinstance(one, ast.FunctionDef | ast.ClassDef | ast.Module)]
    documentation = {ast.get_docstring(one, clean=False) for one in documented}
    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [text for text in texts if text not in documentation]


def refusing():
    """Functions of the library face that refuse a model or a loop, and what they say."""
    for file, tree in TRAIN.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
            if any(isinstance(one, ast.Call) and getattr(one.func, "id", "") in REFUSALS for one in raised):
                said = words(function)
                if any(len(text) > 12 for text in said):  # else it only passes on what others say
                    yield f"{file.stem}.{function.name}", said


def test_every_refusal_of_a_loop_of_ones_own_is_listed_with_the_words_of_the_code():
    listed = [row[0].strip("`") for row in rows("In a loop of your own", 1)]
    said = [text for tree in (*TRAIN.values(), PIECES) for text in words(tree)]

    assert [text for text in listed if not any(text in one for one in said)] == []
    assert len(set(listed)) == len(listed)


def test_no_function_refuses_a_loop_of_ones_own_without_a_line_in_the_list():
    listed = [row[0].strip("`") for row in rows("In a loop of your own", 1)]
    functions = dict(refusing())

    assert len(functions) > 20
    assert [name for name, said in functions.items() if not any(row in one for row in listed for one in said)] == []
