"""A loop without an agent leaves the books of a run in a folder that it names."""

import pytest
from tests.cli import dynatrain, switch_rows
from tests.dist.foreign import build_net, everywhere, idle, switcher
from tests.dist.test_switcher_state import Loop


def train(path, tour):
    def work(world):
        loop = Loop(world, tour, recorder=None, folder=path)
        loop.run()
        for _ in idle(loop.sw, 12):  # what is lost is known some steps later
            pass
        return loop.sw._course._turns.switches

    return everywhere(2, work)


def test_every_switch_of_a_loop_of_ones_own_can_be_listed_and_checked_offline_and_a_second_start_counts_on(tmp_path):
    path = tmp_path / "runs" / "mine"
    assert train(path, {3: "dp2", 7: "fsdp2"}) == [2, 2]
    assert train(path, {4: "dp2"}) == [3, 3]

    rows = switch_rows(dynatrain("history", str(path), cwd=tmp_path).out)
    assert [row[1] for row in rows] == ["fsdp2 -> dp2", "dp2 -> fsdp2", "fsdp2 -> dp2"]
    checked = dynatrain("check", str(path), "--json", cwd=tmp_path)
    assert checked.code == 0, checked
    assert [one["what"] for one in checked.record["checked"]] == ["001", "002", "003"]
    assert "announce" in dynatrain("events", str(path), cwd=tmp_path).out
    assert dynatrain("status", str(path), cwd=tmp_path).code == 0


def test_a_folder_beside_a_recorder_or_one_that_cannot_be_made_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def work(world):
        said = []
        for number, given in enumerate(({"recorder": object(), "folder": "x"}, {"folder": tmp_path / "file" / "mine"})):
            with pytest.raises(ValueError, match=r"folder|file") as refused:
                switcher(world, build_net, "fsdp2", name=f"job{number}", **given)
            said.append(str(refused.value))
        return said

    for neither, unmade in everywhere(2, work):
        assert "neither a recorder nor dynatrain's agent" in neither
        assert "file" in unmade
