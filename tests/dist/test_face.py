"""A foreign model is never switched wrongly without a word: what is no tensor goes along, or is refused by name."""

import time

import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere, switcher, until_ended, whole
from tests.faces import (
    DTYPES,
    Attribute,
    Half,
    at_high_precision,
    build_with,
    count_it_otherwise,
    draws,
    facts,
    hook_the_reduction,
    in_16_bits_for_a_while,
    on_an_axis_of_its_own,
    put_a_main_grad,
    put_a_tensor,
    reversed_mesh,
    seeds,
    set_up,
    with_a_pending_sum,
)


def refused(act):
    """What ``act`` says when it refuses; empty where it does not."""
    try:
        act().close()
    except ValueError as error:
        return str(error)
    return ""


AT_START = {
    "a mesh in another order": (reversed_mesh, "fsdp2", ["weight: axis fsdp", "at place", "mesh that build is given"]),
    "a build that seeds": (seeds, "fsdp2", ["build seeds", "on meta", "Seed before Switcher"]),
    "a build that draws": (draws, "fsdp2", ["draws from", "random streams"]),
    "a build in 16 bits": (
        in_16_bits_for_a_while,
        "fsdp2",
        ["default dtype to torch.bfloat16 for a while", "all threads", "dtype=torch.get_default_dtype()"],
    ),
    "a plain tensor": (build_with(make=Attribute), "fsdp2", ["freqs: plain tensors", "register buffers"]),
    "an unknown type": (build_with(make=Half), "fsdp2", ["table: buffer has dtype complex32", "float8_e4m3fn"]),
    "of no layout": (
        on_an_axis_of_its_own,
        "fsdp2",
        ["weight: axis rows shards it; only ep, etp, tp, efsdp, fsdp may"],
    ),
    "a pending sum": (with_a_pending_sum, "fsdp2", ["total: its value is a pending sum over axis fsdp"]),
    "no dp": (build_with(axes=("fsdp",)), "dp2", ["out.weight: nothing reduces its gradient over dp", "'own'"]),
}


def test_a_foreign_model_that_would_be_switched_wrongly_is_refused_at_the_start():
    def work(world):
        torch.manual_seed(0)  # as the build does that seeds
        said = {
            name: refused(lambda b=build, t=layout, n=name: switcher(world, b, t, name=n))
            for name, (build, layout, _) in AT_START.items()
        }
        own = build_with(axes=("fsdp",))
        said["own"] = refused(lambda: switcher(world, own, "dp2", name="own", data_parallel="own"))
        said["precision"] = refused(lambda: switcher(world, at_high_precision, "fsdp2", name="precision"))
        torch.manual_seed(5)
        switcher(world, build_with(), "dp2", name="streams").close()
        drawn = torch.rand(1)
        torch.manual_seed(5)
        return said, drawn.equal(torch.rand(1))

    for said, undrawn in everywhere(2, work):
        assert {n: said[n] for n, (*_, words) in AT_START.items() if not all(w in said[n] for w in words)} == {}
        assert said["own"] == said["precision"] == ""
        assert undrawn


def one(sw, seed):
    """A forward and backward, whose dropout draws what ``seed`` says."""
    torch.manual_seed(seed)
    return sw.model(torch.ones(2, 6)).square().sum().backward()


def gradients(sw):
    one(sw, 3)
    found = {name: whole(p.grad) for name, p in sw.model.named_parameters() if p.grad is not None}
    sw.optimizer.zero_grad()
    return found


def test_what_a_loop_has_set_since_build_holds_in_the_next_layouts():
    def mark(net, _layout):
        net.inside.weight.shared = "built"

    def work(world):
        torch.manual_seed(1)
        sw = switcher(world, build_with(mark), "dp2", recorder=(books := Books()))
        one(sw, 1)
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        set_up(sw.model)
        before, grads = facts(sw), gradients(sw)
        for layout in ("fsdp2", "dp2"):
            sw.request(layout)
            until_ended(sw, books)
        after, then = facts(sw), gradients(sw)
        equal = {name: torch.equal(value, after["buffers"][name]) for name, value in before.pop("buffers").items()}
        after.pop("buffers")
        same = {name: torch.equal(value, then[name]) for name, value in grads.items()}
        return books.ends, (before, after), equal, same, grads.keys() == then.keys(), sw.model.out.bias[0].item()

    for ends, (before, after), equal, same, keys, bias in everywhere(2, work):
        assert [end[:2] for end in ends] == [("fsdp2", "committed"), ("dp2", "committed")], ends
        assert before == after
        assert before["marks"]["inside.weight"] == (True, "built")
        assert set(equal) == set(DTYPES)
        assert all(equal.values()), equal
        assert all(same.values()), same
        assert keys
        assert bias != 7.0  # its flag says that it was initialised long ago


AT_THE_SWITCH = {
    "a tensor since build": (put_a_tensor, ["seen of module inside is a tensor", "register a buffer"]),
    "a tensor on a parameter": (put_a_main_grad, ["main_grad of parameter out.weight is a tensor"]),
    "a hook of the reduction": (hook_the_reduction, ["all_reduce_hook of FSDP unit (the model)", "set it in build"]),
    "what build sets as well": (count_it_otherwise, ["ways of module (the model) was set to 5", "makes it 1", "2 in"]),
}


def test_what_cannot_go_along_refuses_the_switch_by_name_and_the_run_goes_on():
    def ways(net, layout):
        net.ways = layout.size("fsdp")

    def late(net, layout):
        """A build that goes wrong in one layout alone."""
        if layout.size("dp") > 1:
            net.freqs = torch.zeros(3)

    def work(world):
        said, ends = {}, []
        for name, (act, _) in AT_THE_SWITCH.items():
            sw = switcher(world, build_with(ways), "dp2", name=name, recorder=(books := Books()))
            act(sw.model)
            sw.request("fsdp2")
            ends += until_ended(sw, books)
            said[name] = books.ends[-1][2]
            sw.close()
        builds = {
            "no dp": build_with(axes=("fsdp",)),
            "mesh": reversed_mesh,
            "late": build_with(late),
        }
        for name, build in builds.items():
            first, then = ("dp2", "fsdp2") if name == "mesh" else ("fsdp2", "dp2")
            sw = switcher(world, build, first, name=name, recorder=(books := Books()))
            sw.request(then)
            ends += until_ended(sw, books)
            said[name] = books.ends[-1][2]
            sw.close()
        return said, [outcome for _, outcome, _ in ends]

    for said, outcomes in everywhere(2, work):
        assert outcomes == ["aborted"] * 7
        expected = {name: words for name, (_, words) in AT_THE_SWITCH.items()} | {
            "no dp": ["out.weight: nothing reduces its gradient over dp"],
            "mesh": ["weight: axis fsdp of its mesh"],
            "late": ["freqs: plain tensors"],
        }
        assert {n: said[n] for n, words in expected.items() if not all(w in said[n] for w in words)} == {}


def test_thawed_parameters_whose_moments_came_late_and_edges_with_gradients_refuse_by_name():
    def work(world):
        sw = switcher(world, build_with(), "dp2", recorder=(books := Books()), deadline=1.0)
        sw.model.frozen.requires_grad_(requires_grad=True)
        one(sw, 1)
        sw.optimizer.step()
        sw.request("fsdp2")
        until_ended(sw, books)
        sw.request("fsdp2")
        began = time.monotonic()
        for _ in sw.steps(until=sw.step + 100_000):
            one(sw, 2)
            sw.optimizer.step()
            sw.optimizer.zero_grad()
            sw.model(torch.ones(2, 6))  # a validation that forgot no_grad
            flag = torch.tensor(float(len(books.ends) > 1 or time.monotonic() - began > 30))
            dist.all_reduce(flag)
            if flag == 2:
                break
        return books.ends

    for (_, thawed, why), (_, starved, reason) in everywhere(2, work):
        assert (thawed, starved) == ("aborted", "aborted")
        assert all(word in why for word in ("frozen.0.weight", "requires_grad", "Let build train"))
        assert "gradients are pending at every edge" in reason
        assert "torch.no_grad()" in reason
