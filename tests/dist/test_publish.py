"""An engine that cannot import dynatrain gets a named step's weights beside training, or keeps what it has."""

import functools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests import oracle
from tests.engines import Listening, ask, engine, right_digests, whole_weights
from tests.jobs import Case, everywhere, switcher
from tests.shapes import small_shape

from dynatrain.execute import message as messages
from dynatrain.execute.serve import MessageServer
from dynatrain.train.publisher import EngineTarget
from dynatrain.train.publishing import PublishError, Publishing
from dynatrain.train.snapshot import Snapshot
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.trainer import Trainer

SHAPE = small_shape(dropout=0.0, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TOKENS = [[5, 17, 3, 42, 8, 60, 0, 33]]
ROUND, RATE = 1 << 15, 1 << 17
"""Bytes of a round; bytes a second of the slow publish."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with engine(tmp_path_factory.mktemp("engine"), SHAPE, tp=2, dtype="bfloat16") as url:
        yield url


def target(url, client=None, **more):
    options = {"layout": "tp2", "dtype": "bf16", "round_bytes": ROUND, "deadline": 30.0}
    return EngineTarget(engine=client or url, config=SHAPE.to_config(), **options | more)


def run(world, until, publish, *, tour=("fsdp2", "tp2"), each=3):
    """Train; ``publish(sw, step)`` is called before each step on every rank. The losses, and what it returned."""
    case = Case(tour=tour, size=2, steps_each=each, shape=SHAPE, compute="fp32", micro_batches=2)
    job, losses, told = case.job(), [], []
    sw = switcher(job, world, tour[0])
    for number, layout in enumerate(tour[1:], 1):
        sw.request(layout, at=number * each)
    trainer = Trainer(job, case.data(), sw, lambda result: losses.append(result.loss))
    for step in range(until):
        told.append(publish(sw, step))
        trainer.run(step + 1)
    return losses, told


def test_the_weights_of_a_named_step_are_served_while_training_goes_on(served, monkeypatch):
    def work(world):
        monkeypatch.setattr(Snapshot, "_copy", functools.partialmethod(late, Snapshot._copy))
        trained, ends = threading.Event(), []
        client = Listening(served, lambda path, _: path == "update_weights" and trained.wait(20))
        to, slowly = target(served, client), target(served, client, mib_per_second=RATE / (1 << 20))

        def publish(sw, step):
            if step in {2, 5}:
                trained.clear()
                ends.append((sw.publish(to if step == 2 else slowly), whole_weights(sw)))
            if step in {4, 6}:  # two steps later, or one
                beside = not ends[-1][0].done
                trained.set()
                done = ends[-1][0].wait()
                return done, client.digests[-1] if world.rank == 0 else None, ends[-1][1], beside
            return None

        losses, told = run(world, 7, publish)
        scores = ask(served, "score", tokens=TOKENS)["log_probabilities"] if world.rank == 0 else None
        return losses, [one for one in told if one], scores

    plain = everywhere(2, lambda world: run(world, 7, lambda *_: None))[0][0]
    found = everywhere(2, work)
    losses, told, scores = found[0]
    assert losses == plain  # to the bit
    assert [one.version for one, *_ in told] == [2, 5]  # in fsdp2, and in tp2
    for done, digests, weights, beside in told:
        assert beside  # whole steps were trained while it went on
        assert digests == right_digests(SHAPE, "tp2", weights, torch.bfloat16)
        assert (done.base, len(done.measured)) == (None, 2)
        assert all(0 < measured <= predicted for measured, predicted in zip(done.measured, done.predicted, strict=True))
        elements = sum(value.numel() for value in weights.values())
        assert 2 * elements < done.nbytes < 2.5 * elements + 20_000
        assert max(done.measured) < 1.3 * elements  # bf16 over two ranks: nobody has the whole model
    slow, _, weights, _ = told[-1]
    assert slow.seconds > (slow.nbytes / 2 - ROUND) / RATE
    status = ask(served, "status")
    assert (status["weight_version"], status["paused"]) == (5, False)
    for rank in status["ranks"]:  # two copies of half of the model, and one message
        assert 0 < rank["peak_bytes"] - 2 * elements < ROUND
    rounded = {name: value.bfloat16().float() for name, value in weights.items()}
    with torch.no_grad():
        logits = oracle.logits(rounded, SHAPE, torch.tensor([0]), torch.tensor(TOKENS), "")
    right = logits.log_softmax(-1)[:, :-1].gather(2, torch.tensor(TOKENS)[:, 1:, None]).squeeze(2)
    assert scores[0] == pytest.approx(right[0].tolist(), abs=1e-5)


def late(self, copy, key, tensor):
    """Copies that an update which does not wait for them would spoil."""
    time.sleep(0.01)
    copy(self, key, tensor)


def flip(stretches):
    """One bit of the data, behind the checksum."""
    spoilt = bytearray(stretches[-1])
    spoilt[0] ^= 1
    stretches[-1] = memoryview(spoilt)


class Fault:
    """What is done to one publish, on every rank."""

    def __init__(self, name, served):
        self.name, self.armed = name, False
        self.pids = ask(served, "status")["pids"]

    def before(self, path, _client):
        if self.armed and path == "update_weights":
            self.armed = False
            threading.Timer(0.05, os.kill, (self.pids[1], signal.SIGKILL)).start()

    def plant(self, patch, world, params):
        self.armed = self.name == "killed"
        if self.armed:
            patch.setattr(MessageServer, "_send", functools.partialmethod(slow, MessageServer._send))
        if world.rank:
            return
        if self.name == "checksum":
            made = messages.message

            def spoilt(*given):
                found = made(*given)
                flip(found.stretches)
                return found

            patch.setattr("dynatrain.train.publishing.message", spoilt)
        elif self.name == "digest":
            made = messages.message

            def other(contents, *given):
                return made([one if i else zeroed(one) for i, one in enumerate(contents)], *given)

            patch.setattr("dynatrain.train.publishing.message", other)
        elif self.name == "written":
            start = Publishing.start

            def written_first(publishing):
                with torch.no_grad():
                    for param in params:
                        param.mul_(0.5).mul_(2.0)
                start(publishing)

            patch.setattr(Publishing, "start", written_first)
        elif self.name == "lost":
            patch.setattr(MessageServer, "_send", half)


def slow(self, send, request, stretches):
    time.sleep(0.2)
    send(self, request, stretches)


def half(_self, request, stretches):
    request.send_response(200)
    request.send_header("Content-Length", str(sum(one.nbytes for one in stretches)))
    request.end_headers()
    request.wfile.write(stretches[0])


def zeroed(content):
    return messages.Content(content.tensor, content.box, torch.zeros_like(content.value))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("checksum", "checksum"),
        ("digest", "not what version"),
        ("lost", "IncompleteRead"),
        ("written", "param was written between the step's edge and its optimizer.step()"),
        ("killed", "rank 1: has ended"),
    ],
)
def test_what_goes_wrong_leaves_the_old_version_serving_and_training_going_on(served, monkeypatch, fault, says):
    def work(world):
        planted = Fault(fault, served)
        client = Listening(served, planted.before)
        to, said = target(served, client), []

        def publish(sw, step):
            if step == 0:
                sw.publish(to).wait()
                return scores()
            if step == 1:
                with monkeypatch.context() as patch:
                    planted.plant(patch, world, list(sw.model.parameters()))
                    with pytest.raises(PublishError) as caught:
                        sw.publish(to).wait()
                said.append(str(caught.value))
                return scores()
            if step == 2:
                sw.publish(to).wait()
            return scores()

        def scores():
            dist.barrier()
            found = [ask(served, "score", tokens=TOKENS), ask(served, "status")] if world.rank == 0 else None
            dist.barrier()
            return found

        losses, told = run(world, 3, publish, tour=("fsdp2",))
        return losses, told, said

    found = everywhere(2, work)
    (losses, told, said), (_, _, other) = found
    assert says in said[0]
    assert said == other
    assert len(losses) == 3
    (before, first), (after, second), (newer, third) = told
    assert [one["weight_version"] for one in (first, second, third)] == [0, 0, 2]
    assert before == after != newer
    assert not third["paused"]


def test_changes_of_one_percent_are_sent_in_less_than_five_and_are_the_same_bits(tmp_path):
    shape = small_shape(dropout=0.0, hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=256)

    def work(world, url):
        client = Listening(url)
        to = EngineTarget(engine=client, config=shape.to_config(), dtype="bf16")
        job = Case(tour=(), size=2, shape=shape, compute="fp32").job()
        sw = switcher(job, world, "fsdp2")
        ends = []
        for step in sw.steps(until=4):
            dist.barrier()  # every training step couples all ranks
            publish = sw.publish(to, changes=step < 3)
            before = client.nbytes
            done = publish.wait()
            digests = client.digests[-1] if world.rank == 0 else None
            ends.append((done, digests, whole_weights(sw), client.nbytes - before))
            dist.barrier()
            for entry in sw.world.found.values():
                change(local_tensor(entry.value), step)
        return ends

    def change(value, step):
        """Other bits in bf16 of every hundredth value."""
        with torch.no_grad():
            flat = value.view(-1)
            flat[step::100] = (flat[step::100].bfloat16() * 1.5 + 1.0).float()

    with engine(tmp_path, shape, tp=1, dtype="bfloat16") as url:
        ends = everywhere(2, lambda world: work(world, url))[0]
        assert ask(url, "status")["weight_version"] == 3
    (full, _, _, _), (one, _, _, calls), (two, _, _, _), (again, _, _, _) = ends
    assert [done.base for done, _, _, _ in ends] == [None, 0, 1, None]
    for done, digests, weights, _ in ends:
        assert digests == right_digests(shape, "dp1", weights, torch.bfloat16)
        assert all(measured <= predicted for measured, predicted in zip(done.measured, done.predicted, strict=True))
    assert 0 < one.nbytes + calls < 0.05 * full.nbytes
    assert 0 < two.nbytes < 0.05 * full.nbytes
    assert again.nbytes == pytest.approx(full.nbytes, rel=0.01)


def test_an_engine_that_sleeps_holds_no_weights_and_takes_none_before_it_is_woken(served):
    def work(world):
        to, told = target(served), []

        def alone(*calls):
            dist.barrier()
            if world.rank == 0:
                told.extend(ask(served, *call) if isinstance(call, tuple) else call() for call in calls)
            dist.barrier()

        def publish(sw, step):
            if step == 0:
                return sw.publish(to).wait().base
            alone(("sleep",), ("status",))
            with pytest.raises(PublishError, match="the engine sleeps; wake_up comes first"):
                sw.publish(to, changes=True).wait()
            alone(("wake_up",))
            base = sw.publish(to, changes=True).wait().base
            alone(lambda: ask(served, "score", tokens=TOKENS), ("status",))
            return base

        return *run(world, 2, publish, tour=("fsdp2",)), told

    (_, bases, (_, asleep, _, scores, awake)), (_, others, _) = everywhere(2, work)

    assert bases == others == [None, None]  # all is sent again: what was there is gone
    assert (asleep["weight_version"], asleep["held_bytes"]) == (None, 0)
    assert (awake["weight_version"], awake["held_bytes"] > 0) == (1, True)
    assert len(scores["log_probabilities"][0]) == len(TOKENS[0]) - 1
