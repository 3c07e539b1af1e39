from pathlib import Path

import pytest
from tests.cli import ROOT

import dynatrain
from dynatrain.config.load import load_config
from dynatrain.layout.text import print_layout
from dynatrain.space.run_check import check_run

DEMO = Path(dynatrain.__file__).parent / "app" / "demo.toml"


@pytest.mark.parametrize("path", [DEMO, *sorted((ROOT / "recipes").glob("*.toml"))], ids=lambda path: path.stem)
def test_every_recipe_can_start(path):
    assert check_run(load_config(path, []).config).shape


def test_the_demo_visits_seven_layouts_of_every_kind():
    run = check_run(load_config(DEMO, []).config)
    layouts = {print_layout(layout) for layout in (run.layout, *(layout for _, layout in run.switches))}
    assert len(layouts) >= 7
    assert {"dp4", "fsdp4", "pp4", "tp4-sp"} <= layouts
    assert sum("." in text for text in layouts) >= 3
