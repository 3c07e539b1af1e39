"""Publishes of a run whose members come, go and are lost: each is of one world, and the next world publishes anew."""

import time

import pytest
import torch
from tests.crossings import SHALLOW, STEPS_EACH, Member, Stop, case_of, travel
from tests.engines import Folder, whole_weights
from tests.survivors import Fall, survive

from dynatrain.space.hf_names import file_shapes
from dynatrain.train.publisher import EngineTarget
from dynatrain.train.publishing import PublishError

SLOW = 0.08
"""MiB a second: seconds for half of the model."""


def target(folder, rate=0.0):
    given = {"fused": {}, "dtype": "fp32", "round_bytes": 1 << 16, "deadline": 20.0}
    return EngineTarget(engine=folder, config=SHALLOW.to_config(), mib_per_second=rate, **given)


def same(folder, weights):
    """Whether a folder has what the files would have of these weights."""
    named = {name if name == "lm_head.weight" else f"model.{name}": value for name, value in weights.items()}
    assert named.keys() == file_shapes(SHALLOW).keys()
    return all(torch.equal(folder.tensors[name], value.float()) for name, value in named.items())


class Publishing(Member):
    """Begins to publish, slowly, right before it asks for the next world."""

    under_way = None

    def go_on(self):
        told = self.found.setdefault("told", [])
        if self.in_world == 1 and self.under_way is not None:
            told.append(self.ended())
        if self.in_world == STEPS_EACH:
            self.weights, self.folder, self.steps_before = whole_weights(self.sw), Folder(), len(self.found["steps"])
            last = self.sw.generation + 1 == len(self.stops)
            self.under_way = self.sw.publish(target(self.folder, 0.0 if last else SLOW))
            if last:
                told.append(self.ended())
        super().go_on()

    def ended(self):
        """Whether it was over, the version, steps made beside it, and on rank 0 whether the engine has the weights."""
        over, done = self.under_way.done, self.under_way.wait()
        right = same(self.folder, self.weights) if self.folder.tensors else None
        return over, done.version, len(self.found["steps"]) - self.steps_before, right


def test_members_that_come_wait_for_a_publish_and_take_part_in_the_next():
    stops = (Stop("fsdp2", (0, 1)), Stop("fsdp3", (0, 1, 2)))

    one, other, comer = travel(case_of(3000, shape=SHALLOW), stops, (), member=Publishing)

    (over, version, beside, right), (_, then, _, again) = one["told"]
    assert (over, version, right, again) == (True, STEPS_EACH, True, True)
    assert beside > 2  # it went on meanwhile, in the world that publishes
    assert then == version + beside - 1 + STEPS_EACH
    assert [told[1] for told in other["told"]] == [version, then]
    assert [told[1] for told in comer["told"]] == [then]
    assert one["switches"][0][0] == "committed"


def test_a_publish_is_given_up_where_a_rank_is_lost_and_those_that_are_left_publish_anew():
    case = case_of(4, shape=SHALLOW)
    falls = (Fall(3, 1, "totals", "fsdp3", (0, 1, 2)),)
    kept = {}

    def beside(sw, step, found):
        if step == 0:
            kept["target"] = target(Folder(), SLOW)
            kept["publishing"] = sw.publish(kept["target"])
        if step == 1:
            began = time.monotonic()
            with pytest.raises(PublishError) as caught:
                kept["publishing"].wait()
            found["waited"] = time.monotonic() - began
            weights, folder = whole_weights(sw), kept["target"].engine
            done = sw.publish(kept["target"]).wait()
            found["told"] = str(caught.value), done.version, same(folder, weights) if folder.tensors else None

    found = survive(case, "dp2.fsdp2", 4, falls, (), beside=beside)

    assert found[3] is None
    said = {result["told"][0] for result in found[:3]}
    assert all(text.startswith("version 1 was not published: ") for text in said), said
    assert [result["told"][1:] for result in found[:3]] == [(2, True), (2, None), (2, None)]
    assert all(result["worlds"] == [4, 3, 3, 3] for result in found[:3])
    assert max(result["waited"] for result in found[:3]) < 10  # the publish itself had 20 s, and its questions more
