"""The publishes of one job, to any number of engines: begun at a step edge, ended in the background."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynatrain.execute.engine_client import EngineClient, HttpEngine
from dynatrain.execute.hf_export import WRITTEN_DTYPES
from dynatrain.plan.publish import Publication, round_bytes_at
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.engine import FUSED, Engine
from dynatrain.space.hf_config import ModelError
from dynatrain.space.ownership import Ownership
from dynatrain.train.drawn import Base, Drawn, Held
from dynatrain.train.party import Party
from dynatrain.train.publishing import Publishing
from dynatrain.train.world import World


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineTarget:
    """An inference engine that is published to; made once for many publishes. Equal on all ranks, but ``host``.

    Attributes:
        engine: its address, or who makes its calls: see :class:`~dynatrain.execute.engine_client.EngineClient`.
        config: Hugging Face's ``config.json`` of the model, parsed (``config.to_dict()`` in ``transformers``).
        layout: of the engine's ranks, such as ``tp2``, ``dp2.tp4`` (two replicas) or ``tp4.ep4`` (experts dealt out).
        dtype: of its weights: ``bf16``, ``fp16`` or ``fp32``. A router's bias has at least 32 bits.
        fused: name of each module that it fuses, and the modules in it, in their order; ``{}`` for none, as the files
            have it. ``experts.NAME`` is a stack of all experts of a layer.
        mib_per_second: most that each rank sends; 0 for no bound.
        round_bytes: bytes of tensors, in the run's dtype, that one ``update_weights`` brings; at least one tensor, and
            fewer where ``mib_per_second`` would have that call take more than some ten seconds.
        host: the address of this rank's machine for the engine's.
        deadline: seconds that a publish may take.
    """

    engine: str | EngineClient
    config: Mapping[str, Any]
    layout: str = "dp1"
    dtype: str = "bf16"
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FUSED)
    mib_per_second: float = 0.0
    round_bytes: int = 1 << 28
    host: str = "127.0.0.1"
    deadline: float = 600.0

    @property
    def client(self) -> EngineClient:
        """Who makes the engine's calls."""
        return HttpEngine(self.engine, self.deadline) if isinstance(self.engine, str) else self.engine


@dataclass(slots=True)
class _Known:
    """What is kept of one engine between publishes."""

    ownership: Ownership | None = None
    drawn: Drawn | None = None
    base: Base | None = None
    held: Held = field(default_factory=Held)
    greeted: bool = False


class Publisher:
    """Publishes the worlds of one job.

    Args:
        party: this rank.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._known: dict[EngineTarget, _Known] = {}
        self._under_way: tuple[Publishing, _Known] | None = None
        self._number = 0

    @property
    def busy(self) -> bool:
        """Whether a publish is under way."""
        return self._under_way is not None and not self._under_way[0].done

    def publish(self, world: World, version: int, target: EngineTarget, *, changes: bool) -> Publishing:
        """Begin; on all ranks at the same edge. One that is under way is waited for."""
        self._settle()
        known = self._known.setdefault(target, _Known())
        self._number += 1
        publishing = Publishing(
            self._party,
            target.client,
            lambda: self._draw(world, target, known),
            world,
            version=version,
            topic=f"publish-{self._number}",
            base=known.base,
            changes=changes,
            held=known.held,
            mib_per_second=target.mib_per_second,
            host=target.host,
            deadline=target.deadline,
            greet=not known.greeted,
        )
        self._under_way = publishing, known
        publishing.start()
        return publishing

    def before_a_write(self) -> None:
        """Return when nothing that is about to be written is still to be copied."""
        if self._under_way is not None:
            self._under_way[0].wait_copied()

    def give_up(self, why: str) -> None:
        """End the publish that is under way: not all who take part in it are there any more."""
        if self._under_way is not None:
            self._under_way[0].give_up(why)
            self._under_way = None
        self._known.clear()

    def cross(self) -> None:
        """In another world publishes are counted anew, as its newcomers know of none."""
        self._under_way = None
        self._known.clear()
        self._number = 0

    def _settle(self) -> None:
        """Wait for the end of the one before, and keep what it leaves."""
        if self._under_way is None:
            return
        publishing, known = self._under_way
        publishing.join()
        known.base, self._under_way = publishing.base, None
        known.greeted = publishing.published is not None

    def _draw(self, world: World, target: EngineTarget, known: _Known) -> Drawn:
        """The plan from a world to an engine, made anew where either is another.

        Raises:
            LayoutError, ModelError: there can be none, by name.
        """
        assert world.ownership is not None
        if known.drawn is None or known.ownership is not world.ownership:
            if target.dtype not in WRITTEN_DTYPES:
                rule = f"dtype is {target.dtype!r}; one of {', '.join(WRITTEN_DTYPES)}"
                raise ModelError("these weights cannot be published like this", (rule,))
            shape = DecoderShape.from_config(dict(target.config), to_train=False)
            dtype = str(WRITTEN_DTYPES[target.dtype]).removeprefix("torch.")
            engine = Engine.of(shape, target.layout, world.catalogue, dtype=dtype, fused=target.fused)
            rate, layouts = target.mib_per_second * (1 << 20), (world.ownership.layout, engine.ownership.layout)
            plan = Publication.of(engine, world.ownership, round_bytes_at(rate, *layouts, target.round_bytes))
            known.ownership, known.drawn = world.ownership, Drawn(plan, self._party.rank)
        return known.drawn
