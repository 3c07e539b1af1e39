"""Holds ``dynatrain simulate``'s model of one machine against real switches: what it is fitted to, and what it is not.

    python benchmarks/simulated.py                   # measures on 4 ranks, some ten minutes, then prints the tables
    python benchmarks/simulated.py --models 25m --repeats 1   # one of them, once more: added to what is in the file
    python benchmarks/simulated.py --models ""       # the tables alone

The costs of processors are fitted (``simulate.fit.from_switches``) to the switches of CALIBRATION and NARROW, at the
rates of a probe; then the seconds of all others are foretold, other pairs of layouts and another model, and those of
three plans that were made bad on purpose. Seconds are those of ``move`` on the slowest rank, the least of the repeats,
because what disturbs only slows; every outcome is checked by digests, as in any switch. Everything is added to
``simulated.json``.
"""

import argparse
import contextlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from dynatrain.app import planned
from dynatrain.app.planned import change_of_model
from dynatrain.execute import wire
from dynatrain.layout.text import parse_layout
from dynatrain.plan.plan import Schedule
from dynatrain.plan.sources import Cut, Family
from dynatrain.simulate.clock import run
from dynatrain.simulate.fit import from_switches, one_machine, work_of
from dynatrain.simulate.floor import floor_parts
from dynatrain.simulate.links import Links
from dynatrain.simulate.traffic import transfers
from dynatrain.space.presets import resolve_model
from dynatrain.space.tensor import ITEMSIZE
from dynatrain.train import bench, bench_rank, blueprint
from dynatrain.train.probe import probe

RANKS = 4
SHAPES = {name: resolve_model(name) for name in ("25m", "200m")}
SHAPES["narrow"] = replace(SHAPES["25m"], hidden_size=96, intermediate_size=304, head_dim=12, vocab_size=1024)
"""``narrow`` has as many pieces as 25m, of few bytes: what a piece costs, and what a byte, are told apart by it."""
MESSAGE_BYTES = {"": wire.BUNDLE_BYTES, "shorter messages": 1 << 16, "messages of 4 KB": 1 << 12}
CALIBRATION = (
    ("fsdp4", "fsdp2.tp2", ""),
    ("fsdp4", "dp4", ""),
    ("pp2.fsdp2", "fsdp4", ""),
    ("dp4", "dp2.fsdp2", ""),
    ("dp2.fsdp2", "fsdp4", ""),
    ("tp4", "dp2.tp2", ""),
    ("dp2.fsdp2", "fsdp4", "shorter rounds"),
    ("dp2.fsdp2", "fsdp4", "shorter messages"),
)
NARROW = (
    ("fsdp4", "dp4", ""),
    ("dp2.fsdp2", "fsdp4", ""),
    ("dp4", "dp2.fsdp2", ""),
    ("fsdp4", "fsdp2.tp2", ""),
)
HELD_OUT = (
    ("tp4", "fsdp4", ""),
    ("fsdp4", "pp2.fsdp2", ""),
    ("fsdp2.tp2", "dp2.tp2", ""),
    ("pp4", "fsdp4", ""),
    ("dp2.fsdp2", "dp4", ""),
    ("pp2.tp2", "fsdp2.tp2", ""),
    ("dp4", "fsdp4", ""),
)
LARGER = (("fsdp4", "fsdp2.tp2", ""), ("fsdp4", "pp2.fsdp2", ""), ("dp2.fsdp2", "fsdp4", ""))
BAD = (
    ("dp4", "fsdp4", "one sender"),
    ("fsdp4", "fsdp2.tp2", "messages of 4 KB"),
    ("pp4", "fsdp4", "unbalanced rounds"),
)
"""The first sends from rank 0 what its targets hold themselves; in the last one stage at a time has something to do."""
SWITCHES = {"narrow": NARROW, "25m": (*CALIBRATION, *HELD_OUT, *BAD), "200m": LARGER}
FITTED_TO = {*(("narrow", *switch) for switch in NARROW), *(("25m", *switch) for switch in CALIBRATION)}
WANTED = 0.25


def _alone(catalogue, *_):
    """A round for each granule, in the order of names."""
    granules = ((at, state) for at, tensor in enumerate(catalogue) for state in range(len(tensor.states)))
    return Schedule(rounds=tuple((granule,) for granule in granules), mode="keep")


def _short(catalogue, _bytes, sides):
    """As the planner's own rounds, 16 times as many."""
    return _keep_schedule(catalogue, 1 << 24, sides)


def _to_all(self, _cell, targets):
    """Whatever they hold, unless it stays where it lies."""
    return (target for target in targets if not self.keeps(target))


def _first(self, cell, *_):
    """The first holder, whatever others there are, and whoever asks."""
    return self.old.owners(cell)[:1], 0


def _from_first(self, cell, box, *_):
    return Cut(box, cell, *_first(self, cell))


_keep_schedule = planned.keep_schedule


@contextlib.contextmanager
def planted(what):
    """Inside it plans are made, and carried out, as ``what`` says."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(wire, "BUNDLE_BYTES", MESSAGE_BYTES.get(what, wire.BUNDLE_BYTES)))
        if what == "one sender":
            for name, rule in (("_cut", _from_first), ("_senders", _first), ("_lacking", _to_all)):
                stack.enter_context(patch.object(Family, name, rule))
        if schedule := {"unbalanced rounds": _alone, "shorter rounds": _short}.get(what):
            stack.enter_context(patch.object(planned, "keep_schedule", schedule))
            stack.enter_context(patch.object(blueprint, "keep_schedule", schedule))
        yield


class Planted(bench_rank.Bench):
    """A rank that probes once in a while, and makes plans as it is told."""

    def samples(self, case, methods):
        for method in methods:
            if method == "probe":
                rates = probe(self._probes, self._device, nbytes=bench_rank.PROBE_BYTES, repeats=3)
                yield bench_rank.Sample(case=case, method=method, probed=bench_rank._in_gb_s(rates, 0.0))
                continue
            transport, what = method
            if self._text != case[0]:
                self._switch(case[0], "keep")
            with planted(what):
                sample = self._dynatrain(case, "keep", "gloo" if transport == "gloo" else "")
            yield sample


def measure(model, repeats, found):
    """Add samples of all switches of ``model`` to ``found``, and the best rates of the probes between them."""
    switches = SWITCHES[model]
    schedule = []
    for _ in range(repeats):
        schedule.append((switches[0][:2], ("probe",)))
        for old, new, what in switches:
            ways = ("gloo",) if "messages" in what else ("memory", "gloo")
            schedule += [((old, new), ((way, what),)) for way in ways]
    seconds, rates = found["seconds"], found["probed"]
    with tempfile.TemporaryDirectory(dir=bench.TMPFS) as folder, patch.object(bench, "Bench", Planted):
        everywhere = bench._everywhere(SHAPES[model], schedule, RANKS, Path(folder) / "unused")
        for (case, (method,)), samples in zip(schedule, everywhere, strict=True):
            if method == "probe":
                for name, rate in samples[0].probed.items():
                    rates[name] = max(rates.get(name, 0.0), rate)
                continue
            assert samples[0].transport == method[0], f"{samples[0].transport} carried the moves, not {method[0]}"
            taken = max(sample.seconds for sample in samples)
            seconds.setdefault("|".join((model, *case, *method)), []).append(taken)
            print(*case, *method, f"{taken:.3f} s", flush=True)


def rounds_of(model, old, new, what):
    """The transfers of each round of a plan, bad as it may be; and the floor's parts of the good one, of machines."""
    layouts = parse_layout(old), parse_layout(new)
    good = change_of_model(SHAPES[model], layouts, mode="keep")
    with planted(what):
        change = change_of_model(SHAPES[model], layouts, mode="keep")
        plan = change.whole()
    number = {granule: at for at, granules in enumerate(plan.schedule.rounds) for granule in granules}
    moves, rows = plan.moves, []
    for row, (tensor, group, volume) in enumerate(zip(moves.tensor, moves.group, moves.volume, strict=True)):
        for state in moves.groups[group]:
            size = int(volume) * ITEMSIZE[change.catalogue[tensor].states[state].dtype]
            rows.append((number[int(tensor), state], int(moves.src[row]), int(moves.dst[row]), size))
    at, src, dst, nbytes = np.array(rows).T
    rounds = [transfers(src[at == one], dst[at == one], nbytes[at == one]) for one in np.unique(at)]
    return rounds, lambda machines: max(floor_parts(good.catalogue, good.by_family(), machines, RANKS).values())


def machines_of(found, transport, message_bytes):
    """One machine as the probe saw it, without what processors need beside copies."""
    rates, memory = found["probed"], transport == "memory"
    link, wires = ("copy", "copy") if memory else ("group_link", "group_wire")
    machines = one_machine(
        ranks=RANKS,
        link_bytes_per_second=rates[link] * 1e9,
        wire_bytes_per_second=rates[wires] * 1e9,
        copy_bytes_per_second=rates["copy"] * 1e9,
        processors=min(RANKS, found["processors"]),
    )
    # Through memory a message is a word about where things lie, whatever their length.
    return replace(machines, message_bytes=1 << 40 if memory else message_bytes)


def foretell(found, transport):
    """The fitted machine, and by switch: planned rounds, seconds foretold and measured, and the floor."""
    plans, samples = {}, []
    for name, measured in found["seconds"].items():
        model, old, new, way, what = name.split("|")
        if way != transport:
            continue
        machines = machines_of(found, transport, MESSAGE_BYTES.get(what, MESSAGE_BYTES[""]))
        rounds, floor = rounds_of(model, old, new, what)
        plans[model, old, new, what] = rounds, floor(machines), machines.message_bytes, measured
        if (model, old, new, what) in FITTED_TO:
            work = work_of(rounds, RANKS, processors=machines.processors, message_bytes=machines.message_bytes)
            samples.append((work, min(measured)))
    fitted = from_switches(machines_of(found, transport, MESSAGE_BYTES[""]), samples, reads=transport == "memory")
    rows = {}
    for switch, (rounds, floor, message_bytes, measured) in plans.items():
        links = Links(replace(fitted, message_bytes=message_bytes), RANKS)
        rows[switch] = run(rounds, links, RANKS).seconds, min(measured), floor, len(measured)
    return fitted, rows


def tables(found):
    """Lines for people: what was fitted, how far off each prediction is, and both as times of the floor."""
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in found["probed"].items() if rate)
    loads = f"load {min(found['loads']):.1f} to {max(found['loads']):.1f} before and after"
    yield f"{found['processors']} processors, {loads}"
    yield f"probed, GB/s: {rates}"
    for transport in ("memory", "gloo"):
        fitted, rows = foretell(found, transport)
        yield ""
        yield (
            f"{transport}: switch {fitted.switch_us / 1e3:.1f} ms, round {fitted.round_us:.0f} us, "
            f"message {fitted.message_us:.1f} us, piece {fitted.piece_us:.1f} us, "
            f"sends at {fitted.send_gb_s:.2f} and receives at {fitted.receive_gb_s:.2f} GB/s (0: no work)"
        )
        yield f"{'':44}{'foretold':>11}{'measured':>10}{'error':>8}{'floors':>14}"
        errors = []
        for (model, old, new, what), (seconds, measured, floor, _) in rows.items():
            error, known = seconds / measured - 1, (model, old, new, what) in FITTED_TO
            bad = (old, new, what) in BAD
            errors += [] if known or bad else [abs(error)]
            role = "calibration" if known else "bad" if bad else "held out"
            name = f"{model} {old} -> {new}" + (f", {what}" if what else "")
            times = f"{seconds / floor:.1f}, {measured / floor:.1f}"
            yield f"{name:44}{seconds * 1e3:8.0f} ms{measured * 1e3:7.0f} ms{error:+8.0%}{times:>14}  {role}"
        within = sum(error <= WANTED for error in errors)
        if errors:
            yield f"held out: {within} of {len(errors)} within {WANTED:.0%}, the worst {max(errors):.0%} off"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SWITCHES), help="which are measured now")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    found = {"seconds": {}, "probed": {}, "loads": [], "processors": len(os.sched_getaffinity(0))}
    if given.file.exists():
        found = json.loads(given.file.read_text(encoding="utf-8"))
    for model in filter(None, given.models.split(",")):
        found["loads"].append(os.getloadavg()[0])
        try:
            measure(model, given.repeats, found)
        finally:
            found["loads"].append(os.getloadavg()[0])
            given.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(*tables(found), sep="\n")


if __name__ == "__main__":
    main()
