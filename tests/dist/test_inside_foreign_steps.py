"""A loop that is not ours accumulates with FSDP2's own means, and is switched between its micro-batches."""

import torch
from tests.dist.foreign import Books, Net, batch, build_net, everywhere, groups_of, switcher, whole
from torch.nn import functional

MICRO_BATCHES, STEPS = 8, 12


def alone():
    """The parameters after the run on one process."""
    torch.manual_seed(3)
    net = Net().double()
    optimizer = torch.optim.AdamW(groups_of(net), betas=(0.8, 0.9))
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            inputs, targets = batch(step, number)
            (functional.mse_loss(net(inputs), targets) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}


class PlantedError(Exception):
    pass


def test_gradients_in_grad_go_on_in_the_new_layout_and_come_back_from_an_aborted_one():
    def work(world):
        def fail_once(event, _round, switch):
            if (event, switch, world.rank) == ("check", 1, 2):
                raise PlantedError

        sw = switcher(world, build_net, "fsdp4", data_parallel="free", recorder=(books := Books()), hook=fail_once)
        for at, layout, mode in ((3, "dp2.tp2", "tight"), (6, "dp2.tp2", "keep"), (9, "dp2.fsdp2", "tight")):
            sw.request(layout, at=at, after=4, mode=mode)
        walked = []
        for step in sw.steps(until=STEPS):
            for part in sw.step_parts(MICRO_BATCHES):
                at, ranks = sw.layout.coordinates(world.rank), sw.layout.data_ranks
                for number in part[at.dp * sw.layout.size("fsdp") + at.fsdp :: ranks]:
                    inputs, targets = batch(step, number)
                    (functional.mse_loss(sw.model(inputs), targets) * ranks / MICRO_BATCHES).backward()
                walked.append((step, part))
            sw.optimizer.step()
            sw.optimizer.zero_grad()
        return books.ends, walked, {name: whole(param) for name, param in sw.model.named_parameters()}

    first, rest = range(4), range(4, 8)
    parts = {3: [first, rest, rest], 6: [first, rest], 9: [first, rest]}
    right = alone()
    for ends, walked, found in everywhere(4, work):
        assert [(layout, outcome) for layout, outcome, _ in ends] == [
            ("dp2.tp2", "aborted"),
            ("dp2.tp2", "committed"),
            ("dp2.fsdp2", "committed"),
        ]
        assert walked == [(step, part) for step in range(STEPS) for part in parts.get(step, [range(8)])]
        for name, value in right.items():
            assert (found[name] - value).abs().max() <= 1e-12


def test_gradients_that_are_not_reduced_yet_are_refused_by_name_and_the_step_goes_on():
    def work(world):
        sw = switcher(world, build_net, "fsdp2", data_parallel="free", recorder=(books := Books()))
        sw.request("dp2", at=1, after=1)
        for step in sw.steps(until=3):
            for part in sw.step_parts(2):
                sw.model.set_requires_gradient_sync(part.stop == 2)
                inputs, targets = batch(step, world.rank)
                functional.mse_loss(sw.model(inputs), targets).backward()
            sw.optimizer.step()
            sw.optimizer.zero_grad()
        return books.ends, sw.layout.size("fsdp")

    for ((_, outcome, reason),), size in everywhere(2, work):
        assert (outcome, size) == ("aborted", 2)
        assert "inside.weight" in reason
        assert "the gradient after this part of the step is not reduced" in reason
