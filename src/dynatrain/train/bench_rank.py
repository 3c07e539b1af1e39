"""One rank of a bench: holds the state of a model, switches it to and fro, and does the same by other means.

Nothing is trained: state is generated, and a step is one all-reduce of one number. What is measured is how state gets
from one layout to another; that it arrived is checked by digests after every single measurement.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.execute.census import compare, digest_vector
from dynatrain.execute.transport import GroupTransport
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.models.initial import initial_box
from dynatrain.plan.schedule import default_budget
from dynatrain.plan.storage import storage
from dynatrain.plan.summary import PlanSummary, floor_seconds
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.ownership import Ownership
from dynatrain.train import baselines, hand_written
from dynatrain.train.attempt import Attempt
from dynatrain.train.baselines import CannotError, Held
from dynatrain.train.bench_state import MOMENTS, bind, digests, forget_peak, held_by, resident, room
from dynatrain.train.blueprint import may_adopt
from dynatrain.train.install import make_world
from dynatrain.train.live import box_of, cuts_of
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision
from dynatrain.train.probe import Rates, digest_rate, probe
from dynatrain.train.restart_order import Order
from dynatrain.train.states import optimizer_states
from dynatrain.train.switcher import Switcher
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.trainer import Job
from dynatrain.train.world import World

Case = tuple[str, str]
"""``(from, to)``, as layout texts."""

RESTART = "restart"
"""The method that ends the ranks: the last that is asked of them."""

SOME_STEP = 7.0
DEADLINE = 300.0
PROBE_BYTES = 64 << 20
"""More than caches hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement, as one rank saw it.

    Attributes:
        case: from where to where.
        method: see :data:`dynatrain.train.bench.METHODS`.
        mode: of ``dynatrain``; empty for the others.
        transport: of ``dynatrain``: what carried the moves; empty for the others.
        seconds: of the move of the state alone; None where there is none.
        stall_seconds: in which nothing could have been trained.
        bytes: that must change ranks in this case, whatever the method; rank 0 alone knows.
        floor_seconds: at the rates measured just before; rank 0 alone knows.
        digest_seconds: of ``seconds``, what checksums took on this rank; 0 for other methods.
        digest_floor_seconds: what two checksums of ``bytes`` take all ranks together, at a rate measured just before.
        peak_bytes: most resident memory, beyond what the process takes without state.
        counted_bytes: most bytes of pieces and staging at one time by the count of the pool; 0 for other methods.
        allowed_bytes: what ``tight`` promises: max(old, new) + budget; 0 elsewhere.
        phases: seconds of a switch's phases.
        probed: rates measured just before, in GB/s: see :class:`dynatrain.train.bench.Row`.
        saved_at: of ``restart``: reading of the clock, which all processes share, when this rank's save was complete.
        problem: why there is no measurement, or what did not arrive.
    """

    case: Case
    method: str
    mode: str = ""
    transport: str = ""
    seconds: float | None = None
    stall_seconds: float | None = None
    bytes: int = 0
    floor_seconds: float = 0.0
    digest_seconds: float = 0.0
    digest_floor_seconds: float = 0.0
    peak_bytes: int = 0
    counted_bytes: int = 0
    allowed_bytes: int = 0
    phases: Mapping[str, float] | None = None
    probed: Mapping[str, float] | None = None
    saved_at: float = 0.0
    problem: str = ""


class _Books:
    """Keeps how the last switch ended: the place of a run's recorder."""

    def __init__(self) -> None:
        self.last: tuple[Attempt, str, str] | None = None

    def announced(self, *_: Any) -> None:
        """Nothing to keep."""

    def step_ended(self, _now: float) -> None:
        """Nothing to keep."""

    def ended(self, attempt: Attempt, outcome: str, reason: str, *_: Any) -> None:
        """A switch is over."""
        self.last = (attempt, outcome, reason)


class Bench:
    """State of one model on one rank. Needs no default group yet; makes it.

    Args:
        shape: of the model.
        store: shared by the ranks.
        rank: this one.
        ranks: how many.
        folder: for checkpoints, on tmpfs; made and removed here.
        start: first layout.
    """

    def __init__(
        self, shape: DecoderShape, store: dist.Store, *, rank: int, ranks: int, folder: Path, start: str
    ) -> None:
        self.rank, self._folder, self._device = rank, folder, torch.device("cpu")
        self._shape = shape
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("default", store),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=DEADLINE),
        )
        self._probes = dist.new_group()
        self._books = _Books()
        job = Job(
            shape=shape,
            seed=1,
            precision=Precision(),
            optimizer=OptimizerSettings(),
            global_sequences=ranks,
            micro_sequences=1,
        )
        self._switcher = Switcher(
            job.build,
            layout=start,
            initial=job.initial,
            names=canonical_name,
            deadline=DEADLINE,
            # Connections apart: a group being made would keep the board waiting.
            board=Board(dist.PrefixStore("board", store.clone()), ranks),
            store=store,
            recorder=self._books,  # type: ignore[arg-type]
            data_parallel="free",
            legal=lambda text, _: resolve(parse_layout(text), shape.num_hidden_layers),
        )
        self._party = self._switcher._party  # noqa: SLF001 - the bench looks behind the face it measures
        self._edges = self._switcher.steps(until=1 << 40)
        self._text = start
        self._summaries: dict[Case, PlanSummary] = {}
        self._ownerships: dict[str, Ownership] = {}
        self._fill_moments()

    def samples(self, case: Case, methods: Sequence[str]) -> Iterator[Sample]:
        """Measure each of ``methods`` once, in their order; the state is in the case's first layout before each."""
        old = case[0]
        if self._text != old:
            self._switch(old, "keep")
        for method in methods:
            rates = probe(self._probes, self._device, nbytes=PROBE_BYTES, repeats=2)
            digests = digest_rate(self._probes, self._device, nbytes=PROBE_BYTES, repeats=2)
            if method.startswith("dynatrain"):
                sample = self._dynatrain(case, *method.split("/")[1:])
                self._switch(old, "keep")
            elif method == RESTART:
                sample = self._save_and_leave(case)
            else:
                sample = self._other(case, method)
            sample = replace(sample, probed=_in_gb_s(rates, digests))
            summary = self._summaries.get(case)
            if summary is not None:
                twice = 2 * summary.moved / digests
                floor = _floor(summary, rates)
                sample = replace(sample, bytes=summary.moved, floor_seconds=floor, digest_floor_seconds=twice)
            yield sample

    def _fill_moments(self) -> None:
        world = self._switcher.world
        for name, values in optimizer_states(world.optimizer, world.found).items():
            value = world.found[name].value
            shape = tuple(value.shape)
            box = box_of(shape, cuts_of(value), world.layout, self.rank)
            by_name = {state.name: held for state, held in values.items()}
            for state in MOMENTS:
                made = initial_box(1, f"{name}/{state}", shape, box, rule=0.02, dtype=torch.float32)
                local_tensor(by_name[state]).copy_(made)
            by_name["step"].fill_(SOME_STEP)

    # By dynatrain.

    def _dynatrain(self, case: Case, mode: str, backend: str = "") -> Sample:
        memory = self._party.memory
        memory.peak = memory.held
        without_state = self._without_state()
        before = self._switcher.world
        nearest = self._party.transport
        self._party.transport = GroupTransport if backend else nearest
        attempt = self._switch(case[1], mode)
        self._party.transport = nearest
        peak = resident("VmHWM") - without_state
        return Sample(
            case=case,
            method="dynatrain",
            mode=mode,
            transport=attempt.carried_by,
            seconds=attempt.seconds["move"],
            stall_seconds=attempt.seconds["stall"],
            digest_seconds=attempt.digest_seconds,
            peak_bytes=peak,
            counted_bytes=memory.peak,
            allowed_bytes=self._allowed(before, self._switcher.world) if mode == "tight" else 0,
            phases=dict(attempt.seconds),
        )

    def _switch(self, to: str, mode: str) -> Attempt:
        """Switch at the next edge at which all are ready. Its own check has compared the digests when it returns."""
        self._books.last = None
        self._switcher.request(to, mode=mode)
        while self._books.last is None:
            next(self._edges)
            dist.all_reduce(torch.ones(1))
            time.sleep(0.005)  # a step: what is built beside it needs the processor
        attempt, outcome, reason = self._books.last
        if outcome != "committed":
            raise RuntimeError(f"the switch to {to} was {outcome}: {reason}")
        assert attempt.blueprint is not None
        if attempt.blueprint.summary is not None:
            self._summaries[self._text, to] = attempt.blueprint.summary
        self._text, self._ownerships[to] = to, _owner(self._switcher.world)
        return attempt

    def _allowed(self, before: World, after: World) -> int:
        owners = _owner(before), _owner(after)
        table = storage(before.catalogue, *owners, adoptable=may_adopt(before, owners[1]))
        return int(max(table.old[self.rank], table.new[self.rank])) + default_budget(table)

    # By other means.

    def _other(self, case: Case, method: str) -> Sample:
        old, owner = self._switcher.world, self._ownerships[case[1]]
        layout = self._switcher._read(case[1], self._party.world_size)  # noqa: SLF001
        new = make_world(self._party, self._party.groups, layout, on_meta=True)
        source = held_by(old)
        sample = Sample(case=case, method=method)
        without_state = self._without_state()
        try:
            if method == "reload":
                target, seconds, stall = self._reload(source, new)
            elif method == "hand_written":
                target, seconds, stall = self._by_hand(source, new, owner)
            else:
                target = room(new.found, touched=True)
                seconds = stall = self._timed(self._method(case, method, (source, target), (old, new)))
        except CannotError as reason:  # on all ranks alike
            return replace(sample, problem=str(reason))
        peak = resident("VmHWM") - without_state
        baselines.remove(self._folder)
        after, before = digests(target, old.catalogue, owner), self._live_digests(owner)
        equal = compare(before, after, old.catalogue, _owner(old), owner).equal
        problem = "" if equal else "the state that arrived is another"
        return replace(sample, seconds=seconds, stall_seconds=stall, peak_bytes=peak, problem=problem)

    def _method(
        self, case: Case, method: str, ends: tuple[Held, Held], worlds: tuple[World, World]
    ) -> Callable[[], None]:
        if method == "dcp":
            return partial(baselines.through_files, *ends, self._folder)
        if method == "full_tensor":
            return partial(baselines.through_whole_tensors, *ends, worlds[0].catalogue, self._ownerships[case[1]])
        return partial(baselines.through_redistribute, *ends, (worlds[0].mesh, worlds[1].mesh))

    def _without_state(self) -> int:
        """Resident bytes now that are not state, by the pool's count; the kernel counts the most from here on."""
        forget_peak()
        return resident("VmRSS") - self._party.memory.held

    def _timed(self, work: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        with torch.no_grad():
            work()
        return time.perf_counter() - began

    def _reload(self, source: Held, new: World) -> tuple[Held, float, float]:
        """What a loop without live switches does in one process: save, build anew, load. The old state stays here."""
        found: list[Held] = []
        files = 0.0

        def work() -> None:
            nonlocal files
            began = time.perf_counter()
            baselines.dcp_save(source, self._folder)
            files += time.perf_counter() - began
            world = make_world(self._party, self._party.groups, new.layout, on_meta=True)
            target = room(world.found, touched=True)
            began = time.perf_counter()
            baselines.dcp_load(target, self._folder)
            files += time.perf_counter() - began
            bind(world.parts, world.found, world.optimizer, target)
            found.append(target)

        stall = self._timed(work)
        return found[0], files, stall

    def _by_hand(self, source: Held, new: World, owner: Ownership) -> tuple[Held, float, float]:
        """Model and plan are there beforehand, as ours are; new tensors and what fills them are the seconds."""
        world = self._switcher.world
        target: dict[tuple[str, str], torch.Tensor] = {}
        plan = hand_written.plan_by_hand(world.catalogue, _owner(world), owner)

        def work() -> None:
            target.update(room(new.found, touched=False))
            hand_written.carry_out(plan, source, target)

        seconds = self._timed(work)
        return target, seconds, seconds + self._timed(partial(bind, new.parts, new.found, new.optimizer, target))

    def _save_and_leave(self, case: Case) -> Sample:
        """The old ranks' part of a restart: a checkpoint, and beside it what new ranks have to know and to hold."""
        self._switch(case[1], "keep")  # it tells who holds what then, and the floor
        self._switch(case[0], "keep")
        world, owner = self._switcher.world, self._ownerships[case[1]]
        before = self._live_digests(owner)
        if self.rank == 0:
            Order(
                shape=self._shape,
                layout=case[1],
                catalogue=world.catalogue,
                old=_owner(world),
                new=owner,
                digests=tuple(before.tolist()),
            ).write(self._folder.parent)
        seconds = self._timed(partial(baselines.dcp_save, held_by(world), self._folder))
        return Sample(case=case, method=RESTART, seconds=seconds, saved_at=time.perf_counter())

    def _live_digests(self, owner: Ownership) -> torch.Tensor:
        """Of what the live world holds, by the cells of ``owner``; of all ranks, on all ranks."""
        world = self._switcher.world
        live = world.pieces(self.rank, self._device)
        vector = digest_vector(live, world.catalogue, _owner(world), owner, self.rank)
        dist.all_reduce(vector)
        return vector


def _owner(world: World) -> Ownership:
    assert world.ownership is not None
    return world.ownership


def _floor(summary: PlanSummary, rates: Rates) -> float:
    return floor_seconds(
        summary,
        link_bytes_per_second=rates.link_bytes_per_second,
        wire_bytes_per_second=rates.wire_bytes_per_second,
        copy_bytes_per_second=rates.copy_bytes_per_second,
    )


def _in_gb_s(rates: Rates, digests: float) -> dict[str, float]:
    return {
        "link": rates.link_bytes_per_second / 1e9,
        "wire": rates.wire_bytes_per_second / 1e9,
        "copy": rates.copy_bytes_per_second / 1e9,
        "group_link": rates.group_link_bytes_per_second / 1e9,
        "group_wire": rates.group_wire_bytes_per_second / 1e9,
        "digest": digests / 1e9,
    }
