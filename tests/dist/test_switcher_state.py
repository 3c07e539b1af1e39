"""What a foreign loop owns goes with it from layout to layout: nothing lost, nothing fresh, nothing half-carried."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import (
    Books,
    Net,
    Scaler,
    Shadow,
    batch,
    build_net,
    everywhere,
    groups_of,
    idle,
    shard,
    switcher,
    until_ended,
    whole,
)
from tests.faces import Counting
from tests.ledgers import registered_groups
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from dynatrain.observe.checkpoints import newest
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.schema import SCHEMAS
from dynatrain.train.saving import Saves

STEPS = 12


def make_schedule(optimizer):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def build_wrapped(mesh, layout):
    """The same net, its blocks checkpointed in one of the layouts: canonical names do not care."""
    if layout.size("dp") == 1:
        return build_net(mesh, layout)
    net = Net().double()
    net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in net.blocks)
    shard(net, mesh)
    return net, torch.optim.AdamW(groups_of(net), betas=(0.8, 0.9))


def canonical(path):
    return path.replace("_checkpoint_wrapped_module.", "")


class Loop:
    """A loop with one of everything that can be registered; zeroes gradients at the start of a step, not at its end."""

    def __init__(self, world, tour, mode="keep", layout="fsdp2", **more):
        self.rank = world.rank
        self.calls = []
        self.books = Books()
        settings = {"state": {"lr": make_schedule}, "recorder": self.books, "mode": mode} | more
        self.sw = switcher(world, build_wrapped, layout, schedule=tour, **settings)
        self.local = self.sw.register("local", Shadow(self.sw.model, local=True))
        self.shared = self.sw.register("shared", Shadow(self.sw.model, local=False))
        self.scaler = self.sw.register("scaler", Scaler())
        block = self.sw.model.blocks[0]
        block.register_forward_hook(lambda *_, **__: self.calls.append("forward"), with_kwargs=True)
        block.register_forward_pre_hook(lambda *_: self.calls.append("before"))
        block.register_full_backward_hook(lambda *_: self.calls.append("backward"))
        self.sw.optimizer.register_step_post_hook(lambda *_: self.calls.append("stepped"))

    def run(self, until=STEPS):
        log = []
        for step in self.sw.steps(until=until):
            at_start = self.state()
            net, optimizer = self.sw.model, self.sw.optimizer
            optimizer.zero_grad()
            inputs, targets = batch(step, self.rank)
            loss = functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            self.sw.state["lr"].step()
            for shadow in (self.local, self.shared):
                shadow.update(net)
            self.scaler.update()
            calls, self.calls[:] = list(self.calls), []
            log.append((loss.item(), at_start, self.state(), calls))
        return log, self.books.ends

    def state(self):
        """Everything, in full tensors and numbers."""
        found = {}
        world = self.sw.world
        for name, entry in world.found.items():
            found[name] = whole(entry.value)
            for key, value in world.optimizer.state.get(entry.value, {}).items():
                found[name, key] = whole(value)
        found |= {("shared", canonical(path)): whole(value) for path, value in self.shared.entries.items()}
        places = dict(self.sw.model.named_parameters())
        for path, value in self.local.entries.items():
            like = places[path]
            found["local", canonical(path)] = whole(
                torch.distributed.tensor.DTensor.from_local(
                    value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
                )
            )
        found["notes"] = [shadow.notes["seen"]["updates"].clone() for shadow in (self.local, self.shared)]
        found["scaler"] = (self.scaler.scale.clone(), self.scaler.good_steps)
        found["options"] = [{k: v for k, v in g.items() if k != "params"} for g in world.optimizer.param_groups]
        found["sizes"] = [len(group["params"]) for group in world.optimizer.param_groups]
        found["lr"] = self.sw.state["lr"].get_last_lr()
        found["schedule"] = self.sw.state["lr"].last_epoch
        return found


def equal(one, other):
    """What differs, in any bit."""
    assert one.keys() == other.keys()

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(a, b)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return a == b

    return [key for key in one if not same(one[key], other[key])]


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_switch_changes_no_bit_of_anything_and_the_loop_goes_on_as_without_it(mode):
    tour = {3: "dp2", 6: "fsdp2", 9: "dp2"}

    def work(world):
        log, ends = Loop(world, tour, mode).run()
        return log, ends

    def plain(world):
        return Loop(world, {}).run()

    moved, stayed = everywhere(2, work), everywhere(2, plain)
    for (log, ends), (expected, _) in zip(moved, stayed, strict=True):
        assert [end[:2] for end in ends] == [(layout, "committed") for layout in tour.values()]
        for step, (loss, at_start, at_end, calls) in enumerate(log):
            if step:
                assert equal(at_start, log[step - 1][2]) == [], f"step {step}"  # whatever happened at the edge
            assert loss == pytest.approx(expected[step][0], rel=0, abs=1e-12)
            for key, value in at_end.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(value, expected[step][2][key], rtol=0, atol=1e-12)
                else:
                    assert value == expected[step][2][key]
            hooks = [call for call in calls if call != "forward"]
            assert hooks[-1] == "stepped"
            assert calls.count("forward") == 1  # on the wrapper, where a layout has one: it runs its inside twice
            assert {"before", "backward"} <= set(calls)
            assert calls.count("stepped") == 1


def test_a_third_moment_and_options_that_the_user_changed_go_along():
    def build(mesh, layout):
        net, _ = build_net(mesh, layout)
        return net, torch.optim.AdamW(groups_of(net), betas=(0.8, 0.9), amsgrad=True)

    changed = {"betas": (0.7, 0.95), "weight_decay": 0.25, "lr": 3e-3, "eps": 1e-6}

    def work(world, tour):
        sw = switcher(world, build, "fsdp2", schedule=tour, recorder=(books := Books()))
        for number, group in enumerate(sw.optimizer.param_groups):  # others than build makes, and than their neighbours
            group["betas"] = (changed["betas"][0] + number / 100, changed["betas"][1])
            group["weight_decay"] = changed["weight_decay"] + number / 10
            group |= {"lr": changed["lr"], "eps": changed["eps"]}
        losses = []
        for step in sw.steps(until=6):
            inputs, targets = batch(step, world.rank)
            loss = functional.mse_loss(sw.model(inputs), targets)
            loss.backward()
            sw.optimizer.step()
            sw.optimizer.zero_grad()
            losses.append(loss.item())
            dist.barrier()
        held = {
            (name, key): whole(value)
            for name, entry in sw.world.found.items()
            for key, value in {"param": entry.value, **sw.optimizer.state.get(entry.value, {})}.items()
        }
        options = [{k: v for k, v in group.items() if k != "params"} for group in sw.optimizer.param_groups]
        return losses, held, options, [end[1] for end in books.ends]

    moved, stayed = (everywhere(2, lambda world, t=tour: work(world, t)) for tour in ({3: "dp2"}, {}))
    for (losses, held, options, ends), (expected, kept, as_set, _) in zip(moved, stayed, strict=True):
        assert ends == ["committed"]
        assert losses == pytest.approx(expected, rel=0, abs=1e-12)
        assert options == as_set
        assert [group["betas"][0] for group in options] == [0.7, 0.71, 0.72]
        assert any(key == "max_exp_avg_sq" for _, key in held)
        for key, value in kept.items():
            torch.testing.assert_close(held[key], value, rtol=0, atol=1e-12)


def test_a_count_on_the_optimizer_itself_goes_along_and_into_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMAS, Counting, lambda _group, param: momentum_of(param))

    def build(mesh, layout):
        net, _ = build_net(mesh, layout)
        return net, Counting(groups_of(net))

    def work(world, tour, *, until=9, path=None, saves=None):
        sw = switcher(world, build, "fsdp2", schedule=tour, recorder=(books := Books()), saves=saves)
        losses = [0.0] * (sw.load(path) if path else 0)
        for step in sw.steps(until=until):
            inputs, targets = batch(step, world.rank)
            loss = functional.mse_loss(sw.model(inputs), targets)
            loss.backward()
            sw.optimizer.step()
            sw.optimizer.zero_grad()
            losses.append(loss.item())
            dist.barrier()
        if saves:
            sw.save_now()
        return losses, sw.optimizer.t, [end[1] for end in books.ends]

    stayed = everywhere(2, lambda world: work(world, {}))
    moved = everywhere(2, lambda world: work(world, {3: "dp2", 6: "fsdp2"}))
    everywhere(2, lambda world: work(world, {}, until=4, saves=Saves(root=tmp_path, every=9)))
    gone_on = everywhere(2, lambda world: work(world, {6: "dp2"}, path=newest(tmp_path)[0]))
    for (expected, _, _), (losses, t, ends), (rest, last, _) in zip(stayed, moved, gone_on, strict=True):
        assert ends == ["committed", "committed"]
        assert (t, last) == (9, 9)
        assert losses == pytest.approx(expected, rel=0, abs=1e-12)
        assert rest[4:] == pytest.approx(expected[4:], rel=0, abs=1e-12)


def momentum_of(param):
    return (State("exp_avg", str(param.dtype).removeprefix("torch.")),)


def test_counters_keep_their_form_and_share_no_memory():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        forms = []
        for target in ("dp2", "fsdp2"):
            steps = {name: sw.optimizer.state[entry.value] for name, entry in sw.world.found.items()}
            steps = {name: state["step"] for name, state in steps.items() if state}
            for number, counter in enumerate(steps.values()):
                counter.fill_(number)
            forms.append([(str(c.dtype), tuple(c.shape), c.device.type, type(c).__name__) for c in steps.values()])
            before = [int(counter) for counter in steps.values()]
            sw.request(target)
            until_ended(sw, books)
            after = {name: sw.optimizer.state[entry.value] for name, entry in sw.world.found.items()}
            counters = [state["step"] for state in after.values() if state]
            assert [int(counter) for counter in counters] == before
            assert len({counter.untyped_storage().data_ptr() for counter in counters}) == len(counters)
            counters[0].add_(100)
            assert [int(counter) for counter in counters[1:]] == before[1:]
            frozen = sw.model.frozen.weight
            assert not sw.optimizer.state.get(frozen)
            assert not frozen.requires_grad
        return forms, books.ends

    for (first, second), ends in everywhere(2, work):
        assert [end[1] for end in ends] == ["committed", "committed"]
        assert first == second == [("torch.float32", (), "cpu", "Tensor")] * len(first)


def test_the_first_update_of_created_state_is_that_of_a_plain_optimizer():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        sw.request("dp2")
        until_ended(sw, books)
        torch.manual_seed(3)
        net = Net().double()
        plain = torch.optim.AdamW(groups_of(net), betas=(0.8, 0.9))
        for model, optimizer in ((sw.model, sw.optimizer), (net, plain)):
            for rank in range(2) if model is net else (world.rank,):
                inputs, targets = batch(0, rank)
                share = 2 if model is net else 1
                (functional.mse_loss(model(inputs), targets) / share).backward()
            optimizer.step()
        return [
            (whole(p) - q.detach()).abs().max().item()
            for p, q in zip(sw.model.parameters(), net.parameters(), strict=True)
        ]

    for apart in everywhere(2, work):
        assert max(apart) < 1e-15


def test_a_switch_waits_for_the_step_that_uses_gathered_gradients():
    def train(world, tour, *, synchronise):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books, schedule=tour)
        losses, layouts = [], []
        for step in sw.steps(until=9):
            sw.model.set_requires_gradient_sync(synchronise or step % 3 == 2)
            inputs, targets = batch(step, world.rank)
            loss = functional.mse_loss(sw.model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            layouts.append(sw.layout.size("dp"))
            if step % 3 == 2:
                sw.optimizer.step()
                sw.optimizer.zero_grad()
            dist.barrier()  # the losses are not exchanged, so that nothing else couples the ranks
        return losses, layouts, [end[1] for end in books.ends]

    for synchronise in (True, False):
        switched = everywhere(2, lambda world, s=synchronise: train(world, {4: "dp2"}, synchronise=s))
        plain = everywhere(2, lambda world, s=synchronise: train(world, {}, synchronise=s))
        for (losses, layouts, ends), (expected, _, _) in zip(switched, plain, strict=True):
            assert ends == ["committed"]
            assert layouts == [1] * 6 + [2] * 3
            assert losses == pytest.approx(expected, rel=0, abs=1e-12)


def test_handles_from_before_a_switch_fail_with_their_names():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books, state={"lr": make_schedule})
        model, optimizer, schedule = sw.model, sw.optimizer, sw.state["lr"]
        weight, buffer, head = model.blocks[0][0].weight, model.scale, model.out
        moment = optimizer.state[weight]["exp_avg"]
        inputs, _ = batch(0, 0)
        sw.request("dp2")
        until_ended(sw, books)
        uses = {
            "model part": lambda: model(inputs),
            "the optimizer": optimizer.step,
            "the optimizer and its groups": lambda: optimizer.param_groups[0].update(lr=0.1),
            "the optimizer as a dict": optimizer.state_dict,
            "lr": schedule.step,
            "model part 0 of a validation": model.eval,
            "model part 0 of a save": model.state_dict,
            "blocks.0.0.weight": lambda: weight + 1,
            "blocks.0.0.weight of a DTensor": weight.full_tensor,
            "its shard": weight.to_local,
            "scale": buffer.sum,
            "a part of it": lambda: head(torch.zeros(1, 6).double()),
            "one gathered by hand": model.blocks[0].unshard,
            "exp_avg of blocks.0.0.weight": lambda: moment * 2,
        }
        said = {}
        for name, use in uses.items():
            try:
                use()
                said[name] = "nothing"
            except Exception as error:  # noqa: BLE001 - its kind is what is tested
                said[name] = f"{type(error).__name__}: {error}"
        for _ in idle(sw, 1):
            sw.model(inputs)
        return said

    for said in everywhere(2, work):
        for name, text in said.items():
            assert text.startswith("RetiredHandleError"), (name, text)
            assert "switch 1 to dp2" in text
        for name in ("model part", "the optimizer", "lr", "blocks.0.0.weight", "scale", "exp_avg of blocks.0.0.weight"):
            assert name in said[name]
        assert "module out " in said["a part of it"]
        assert "module blocks.0 " in said["one gathered by hand"]


def build_mixed(mesh, _layout):
    """Computes in bf16; what is kept is fp32."""
    net = Net()
    net.scale = net.scale.bfloat16()
    for module in (*net.blocks, net):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh["dp", "fsdp"], mp_policy=policy)
    return net, torch.optim.AdamW(groups_of(net))


def counted():
    """Groups, descriptors and threads of this process."""
    return registered_groups(), *(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))


def test_twenty_switches_leave_masters_alone_and_keep_groups_descriptors_and_threads_flat():
    def work(world):
        books = Books()
        sw = switcher(world, build_mixed, "fsdp2", recorder=books)
        seen = []
        sw.model(batch(0, world.rank)[0].float()).float().sum().backward()
        sw.optimizer.step()  # now the masters have bits that bf16 has not
        sw.optimizer.zero_grad()
        masters = [whole(p) for p in sw.model.parameters()]
        assert any(not torch.equal(p, p.bfloat16().float()) for p in masters)
        for number in range(22):
            sw.request("dp2" if number % 2 == 0 else "fsdp2")
            until_ended(sw, books)
            seen.append(counted())
            late = time.monotonic() + 2
            while len(seen) > 2 and seen[-1] != seen[1] and time.monotonic() < late:  # a thread that is just ending
                time.sleep(0.02)
                seen[-1] = counted()
        assert all(map(torch.equal, masters, map(whole, sw.model.parameters())))
        assert {value.dtype for state in sw.optimizer.state.values() for value in state.values()} == {torch.float32}
        return seen, [end[1] for end in books.ends]

    for seen, ends in everywhere(2, work):
        assert ends == ["committed"] * 22
        assert seen[2:] == [seen[1]] * 20
