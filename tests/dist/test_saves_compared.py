"""A save holds what ranks have in common against each other: what differs is refused by name, and training goes on."""

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere, switcher, whole
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.saving import Saves


class Noted(nn.Linear):
    """Has extra state, and buffers that each forward puts in the place of the last ones."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("n", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x):
        self.n = self.n + 1
        return super().forward(x)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


class Cursor:
    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def builds(*order, wrap=True):
    """``build`` with the parameter groups in this order."""

    def build(mesh, _layout):
        if torch.empty(0).device.type != "meta":
            torch.manual_seed(0)
        model = Noted()
        if wrap:
            fully_shard(model, mesh=mesh["dp", "fsdp"])
        groups = {
            "decay": {"params": [model.weight], "weight_decay": 0.1, "lr": 1e-2},
            "none": {"params": [model.bias], "weight_decay": 0.0, "lr": 1e-3},
            "empty": {"params": [], "weight_decay": 0.5, "lr": 5e-3},
            "all": {"params": [model.weight, model.bias], "lr": 1.0},
        }
        return model, torch.optim.AdamW([groups[name] for name in order])

    return build


def train(sw, until):
    for _ in sw.steps(until=until):
        sw.model(torch.ones(2, 4)).sum().backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()


def options(sw):
    names = {id(param): name for name, param in sw.model.named_parameters()}
    return [([names[id(p)] for p in g["params"]], g["lr"], g["weight_decay"]) for g in sw.optimizer.param_groups]


def test_what_differs_between_ranks_fails_the_save_by_name_and_training_goes_on(tmp_path):
    build = builds("decay", "none", wrap=False)

    def work(world):
        cursor, saves = Cursor(), Saves(root=tmp_path)
        sw, said = switcher(world, build, "dp2", state={"cursor": cursor}, saves=saves), []
        train(sw, 1)
        said.append(sw.save_now())
        cursor.at = world.rank
        train(sw, 2)
        said.append(sw.save_now())
        cursor.at, sw.model.scale = 0, 1.0 + world.rank
        train(sw, 3)
        said.append(sw.save_now())
        sw.model.scale = 1.0
        moment = sw.optimizer.state[sw.model.weight]["exp_avg"]
        kept = moment.clone()
        moment.view(-1)[3] += world.rank
        said.append(sw.save_now())
        moment.copy_(kept)
        sw.model.n += world.rank
        said.append(sw.save_now())
        sw.optimizer.param_groups[1]["lr"] = 0.5 + world.rank
        said.append(sw.save_now())
        return said, sw.step

    for said, step in everywhere(2, work):
        assert step == 3
        assert said[0].startswith("saved in ")
        for text, what in zip(
            said[1:],
            (
                "the common state of cursor is not equal on all ranks: ranks [1] differ from rank 0",
                "the extra state of the model is not equal on all ranks: ranks [1] differ from rank 0",
                "weight exp_avg is not equal in all copies: ranks [1] differ from rank 0",
                "n buffer is not equal in all copies: ranks [1] differ from rank 0",
                "the options of parameter group 1 is not equal on all ranks: ranks [1] differ from rank 0",
            ),
            strict=True,
        ):
            assert text == f"not saved: {what}"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_the_first_copy_is_saved_whole_where_the_job_says_so(tmp_path):
    def work(world):
        sw = switcher(
            world,
            builds("decay", "none", wrap=False),
            "dp2",
            saves=Saves(root=tmp_path),
            unequal_copies="owner",
        )
        train(sw, 1)
        for param in sw.model.parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                sw.optimizer.state[param][moment].fill_(world.rank)
        said = sw.save_now()
        sw.close()
        other = switcher(world, builds("decay", "none"), "fsdp2", name="other")
        other.load(tmp_path / "step_00000001")
        return said, [
            whole(s[m]).unique().tolist() for s in other.optimizer.state.values() for m in ("exp_avg", "exp_avg_sq")
        ]

    for said, moments in everywhere(2, work):
        assert said.startswith("saved in ")
        assert moments == [[0.0]] * 4


def test_parameter_groups_are_loaded_by_what_is_in_them_and_buffers_as_they_are_now(tmp_path):
    def work(world):
        saves, books = Saves(root=tmp_path), Books()
        sw = switcher(world, builds("decay", "empty", "none"), "dp2", saves=saves)
        train(sw, 2)
        sw.optimizer.param_groups[0]["lr"] = 0.25
        assert sw.save_now().startswith("saved in ")
        sw.close()
        other = switcher(world, builds("none", "decay", "empty"), "fsdp2", name="other", recorder=books)
        other.model(torch.ones(2, 4))  # a forward before the load: its buffer is another
        other.load(tmp_path / "step_00000002")
        found = options(other), other.model.n.item()
        other.request("dp2", at=4)
        train(other, 6)
        counted, ended = other.model.n.item(), books.ends
        other.close()
        problems = []
        for name, order in (("a", ("all",)), ("b", ("all", "empty", "empty")), ("c", ("none", "empty", "empty"))):
            another = switcher(world, builds(*order), "fsdp2", name=name)
            with pytest.raises(SwitchAbortedError) as refused:
                another.load(tmp_path / "step_00000002")
            another.close()
            problems.append(str(refused.value))
        return found, counted, ended, problems

    for (groups, loaded), counted, ended, problems in everywhere(2, work):
        assert groups == [(["bias"], 1e-3, 0.0), (["weight"], 0.25, 0.1), ([], 5e-3, 0.5)]
        assert (loaded, counted) == (2.0, 6.0)
        assert ended == [("dp2", "committed", "")]
        assert "it has 3 parameter groups, the optimizer here 1" in problems[0]
        assert "parameter group 0 here has weight, of its group 0, and bias, of its group 2" in problems[1]
        assert "it has optim.state.weight.exp_avg, which nothing here takes" in problems[2]


def test_a_tensor_that_some_ranks_of_a_stage_lack_is_refused_at_the_start(tmp_path):
    def build(_mesh, _layout):
        model = nn.ModuleDict({"common": nn.Linear(4, 4), f"expert{dist.get_rank()}": nn.Linear(4, 4)})
        return model, torch.optim.AdamW(model.parameters())

    def work(world):
        with pytest.raises(ValueError, match="expert") as refused:
            switcher(world, build, "dp2", saves=Saves(root=tmp_path))
        return str(refused.value)

    first, second = everywhere(2, work)
    assert first == second
    assert "expert0.weight: of one stage ranks [0] hold it and ranks [1] do not" in first
    assert "expert1.bias: of one stage ranks [1] hold it and ranks [0] do not" in first


def test_a_save_that_cannot_even_begin_on_one_rank_fails_alone(tmp_path):
    def work(world):
        done = []
        saves = Saves(root=tmp_path, every=2)
        sw = switcher(world, builds("all"), "dp2", saves=saves, on_saved=done.append)
        if world.rank == 1:
            sw.model.register_buffer("late", torch.zeros(2))
        train(sw, 5)
        sw._saver.finish()
        return sw.step, [(saved.step, saved.outcome, saved.message) for saved in done]

    for step, saves in everywhere(2, work):
        assert step == 5
        assert saves[0][0] == 2
        assert {outcome for _, outcome, _ in saves} == {"failed"}
        assert "rank 1: UnknownStateError: late: added or replaced after build" in saves[0][2]
