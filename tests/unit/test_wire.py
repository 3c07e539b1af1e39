"""Messages derived from moves: the same at both ends, bounded, consecutive."""

import itertools
import random

from tests.stamped import job, owns, schedule

from dynatrain.execute import wire
from dynatrain.execute.wire import BUNDLE_BYTES, FAN, PACK_BYTES, bundles, frames, routes, tiles
from dynatrain.plan.build import rank_plan
from dynatrain.plan.schedule import STAGING_BYTES
from dynatrain.space.box import volume

JOB = job()


def places(box):
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


def test_tiles_are_consecutive_stretches_within_the_limit():
    draw = random.Random(5)
    for _ in range(60):
        box = tuple((low, low + draw.randint(1, 6)) for low in (draw.randint(0, 3) for _ in range(draw.randint(0, 4))))
        limit = 8 * draw.randint(1, 30)
        cut = list(tiles(box, 8, limit))
        assert [place for tile in cut for place in places(tile)] == places(box)
        assert all(volume(tile) * 8 <= limit for tile in cut)


def test_all_staging_fits_into_what_the_plan_leaves_to_it():
    assert 2 * wire.DEPTH * FAN * BUNDLE_BYTES <= STAGING_BYTES
    assert BUNDLE_BYTES % 8 == 0
    assert PACK_BYTES <= BUNDLE_BYTES


def test_small_parts_share_messages_and_large_ones_do_not():
    small, large = PACK_BYTES // 16, 3 * BUNDLE_BYTES + 4
    items = [wire.Item((number, 0), ((0, size // 4),), 4) for number, size in enumerate([small, large, small, small])]
    made = list(frames(items))
    assert [len(frame.parts) for frame in made] == [1, 1, 1, 4]
    assert sum(frame.nbytes for frame in made) == sum(item.nbytes for item in items)
    assert [bundle.nbytes for bundle in bundles(1, items)][:3] == [BUNDLE_BYTES] * 3
    assert len(list(bundles(1, items))) == 4


def test_both_ends_of_every_pair_derive_the_same_messages_in_waves_that_are_bounded(monkeypatch):
    monkeypatch.setattr(wire, "BUNDLE_BYTES", 96)
    monkeypatch.setattr(wire, "PACK_BYTES", 32)
    for texts in (("fsdp8", "pp2.dp2.tp2"), ("dp4", "fsdp3"), ("tp4.dp2", "fsdp2.tp4")):
        old, new = (owns(JOB, text) for text in texts)
        plans = [rank_plan(JOB, old, new, rank, schedule(JOB, "keep", per_round=17)) for rank in range(8)]
        everybody = [routes(plan, JOB, 8) for plan in plans]
        for by_rank in zip(*everybody, strict=True):
            sent, received = {}, {}
            for rank, route in enumerate(by_rank):
                for wave in route.waves:
                    assert max(len(wave.sends), len(wave.receives)) <= FAN
                    for bundle in (*wave.sends, *wave.receives):
                        assert bundle.nbytes <= 96
                    for bundle in wave.sends:
                        sent.setdefault((rank, bundle.peer), []).append(bundle.frames)
                    for bundle in wave.receives:
                        received.setdefault((bundle.peer, rank), []).append(bundle.frames)
            assert sent == received
            assert finishes(by_rank)


def finishes(by_rank):
    """Whether everything arrives when each rank posts a wave only after its last one is done."""
    left = [list(route.waves) for route in by_rank]
    while any(left):
        now = [waves[0] if waves else wire.Wave((), ()) for waves in left]
        sent = {(rank, bundle.peer, bundle.frames) for rank, wave in enumerate(now) for bundle in wave.sends}
        taken = {(bundle.peer, rank, bundle.frames) for rank, wave in enumerate(now) for bundle in wave.receives}
        if not sent & taken:
            return False
        for rank, (wave, waves) in enumerate(zip(now, left, strict=True)):
            sends = tuple(b for b in wave.sends if (rank, b.peer, b.frames) not in sent & taken)
            takes = tuple(b for b in wave.receives if (b.peer, rank, b.frames) not in sent & taken)
            if waves:
                waves[:1] = [wire.Wave(sends, takes)] if sends or takes else []
    return True
