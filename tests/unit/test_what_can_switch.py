"""The tables of docs/what-can-switch.md are those of the code."""

import pathlib
import re

from dynatrain.space.optimizers import OPTIMIZERS

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "what-can-switch.md").read_text(encoding="utf-8")
MATRIX, VECTOR = ("layers.0.mlp.up_proj.weight", (6, 512)), ("norm.weight", (6,))


def rows(heading):
    """The cells of the first table under a heading."""
    lines = PAGE.split(f"## {heading}\n")[1].splitlines()
    table = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table[1:]]


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
