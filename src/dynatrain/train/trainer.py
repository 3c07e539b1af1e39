"""The built-in trainer: our decoder, our data, on the ``Switcher`` face alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from dynatrain.data.order import batch_ids
from dynatrain.execute.pieces import Pool
from dynatrain.layout.layout import Layout
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.initial import initial_box, initial_rule
from dynatrain.models.routing import balance, drop_counts, loads, total_counts
from dynatrain.space.decoder import DecoderShape
from dynatrain.train.adopt import adopt
from dynatrain.train.live import box_of, cuts_of
from dynatrain.train.optimizer import Counted, OptimizerSettings, clip, lr_factor, optimizer_of, step_totals
from dynatrain.train.parallel import Precision, build_parts
from dynatrain.train.step import Data, MicroBatch, Sharing, StepRunner
from dynatrain.train.switcher import Switcher
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.validation import Validation, ValidationResult, Validator
from dynatrain.train.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained and how, whatever the layout.

    Attributes:
        shape: the model.
        seed: of initial weights, dropout and sample order.
        precision: compute precision.
        optimizer: its settings.
        global_sequences: samples of one step.
        micro_sequences: samples of one micro-batch; divides ``global_sequences``.
        schedule: pipeline schedule, ``1f1b`` or ``gpipe``.
        recompute: activation checkpointing of each block: ``none``, ``full`` or ``selective``.
        compile_with: backend of ``torch.compile`` for each block that tp does not cut; empty for none.
    """

    shape: DecoderShape
    seed: int
    precision: Precision
    optimizer: OptimizerSettings
    global_sequences: int
    micro_sequences: int
    schedule: str = "1f1b"
    recompute: str = "none"
    compile_with: str = ""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step, over all data ranks."""
        return self.sharing.num_micro_batches

    @property
    def sharing(self) -> Sharing:
        """How a step's samples are cut into micro-batches."""
        return Sharing(
            global_sequences=self.global_sequences, micro_sequences=self.micro_sequences, schedule=self.schedule
        )

    def build(self, mesh: DeviceMesh, layout: Layout) -> tuple[list[DecoderPart], torch.optim.Optimizer]:
        """The ``Switcher``'s build."""
        parts = build_parts(
            self.shape,
            layout,
            mesh,
            seed=self.seed,
            precision=self.precision,
            recompute=self.recompute,
            compile_with=self.compile_with,
        )
        return parts, optimizer_of(parts, self.optimizer)

    def initial(self, world: World, memory: Pool) -> None:
        """Fill a first world: each box is generated alone, as a function of (seed, name, global index)."""
        rank = dist.get_rank()
        flats = {}
        for name, entry in world.found.items():
            shape = tuple(entry.value.shape)
            box = box_of(shape, cuts_of(entry.value), world.layout, rank)
            rule, dtype = initial_rule(name, self.shape), entry.value.dtype
            values = initial_box(self.seed, name, shape, box, rule=rule, dtype=dtype).flatten()
            flat = torch.zeros(entry.stored, dtype=dtype, device=memory.device)
            flat[: values.numel()] = values
            flats[name] = flat
        world.found = adopt(world.parts, world.found, flats, [world.optimizer])

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The learning-rate schedule, in steps."""
        return LambdaLR(optimizer, lr_factor(self.optimizer))


BALANCE_RATE = 1e-3
"""By which the biases of routers move after each step: DeepSeek-V3's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step in numbers, equal on all ranks whatever the layout.

    Attributes:
        step: its number.
        loss: mean over the global batch's tokens.
        grad_norm: global norm before clipping.
        lr: learning rate that the step used.
        tokens: targets in the global batch.
        seconds: wall time of the step on this rank.
        ids: sample ids of the global batch, in order.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    ids: np.ndarray


class Trainer:
    """Trains ``job`` on ``data`` through a ``Switcher`` that was made with the job's build.

    Args:
        job: what is trained.
        data: the samples.
        switcher: with ``state={"schedule": job.scheduler, ...}``.
        after_step: called with each step's result, for metrics and registered objects.
        validation: what to validate on, and when; None for never.
        after_validation: called with the result of each.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        switcher: Switcher,
        after_step: Callable[[StepResult], None] = lambda _result: None,
        *,
        validation: Validation | None = None,
        after_validation: Callable[[ValidationResult], None] = lambda _result: None,
    ) -> None:
        self.job = job
        self.data = data
        self.switcher = switcher
        self._after_step = after_step
        self._validation = validation
        self._after_validation = after_validation
        self._bound: _Bound | None = None
        self._losses: dict[int, torch.Tensor] = {}

    def run(self, until: int) -> None:
        """Train up to step ``until`` (exclusive), or until the run is asked to stop."""
        for step in self.switcher.steps(until=until):
            with self.switcher.survivable():
                self._step(step)

    def _part(self, step: int, ids: np.ndarray, part: range) -> tuple["_Bound", int]:
        """Forward and backward of a part of a step, in the present layout; the number of targets in the whole batch."""
        bound, sharing = self._bound, self.job.sharing
        if bound is None or bound.world is not self.switcher.world:
            self._bound = bound = _Bound(self.job, self.switcher.world, self._validation)
        device = bound.world.mesh.device_type
        batches, tokens = sharing.micro_batches(self.data, ids, bound.layout, bound.at, device, part)
        # By the micro-batches before: a step that comes again inside finds there what it had.
        before = self._losses[part.start] if part.start else 0
        self._losses[part.stop] = before + bound.forward_backward(step, batches, tokens, part)
        return bound, tokens

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        ids = batch_ids(self.job.seed, step, self.job.global_sequences, len(self.data))
        for part in self.switcher.step_parts(self.job.num_micro_batches):
            bound, tokens = self._part(step, ids, part)
        routed = loads(nn.ModuleList(bound.parts), bound.over_data_ranks)
        # The last collective of the step: behind it every rank can make the update by itself.
        loss, norm = self.switcher.couple(lambda: bound.totals(self._losses[self.job.num_micro_batches]))
        clip(bound.params, norm, self.job.optimizer.clip_norm)
        optimizer = self.switcher.optimizer
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.switcher.state["schedule"].step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        if self.switcher.doomed:
            return  # it comes again
        if routed is not None:
            balance(nn.ModuleList(bound.parts), lambda _counts: routed, BALANCE_RATE)
        self._after_step(
            StepResult(step=step, loss=loss, grad_norm=norm, lr=rate, tokens=tokens, seconds=seconds, ids=ids)
        )
        if self._validation is not None and self._validation.due(step):
            assert bound.validator is not None
            self._after_validation(bound.validator.run(step))


class _Bound:
    """What one world's steps need, made once."""

    def __init__(self, job: Job, world: World, validation: Validation | None) -> None:
        assert world.ownership is not None
        self.job = job
        self.world = world
        self.layout = world.layout
        self.parts: list[Any] = world.parts
        self.rank = dist.get_rank()
        self.at = self.layout.coordinates(self.rank)
        self.runner = StepRunner(
            self.parts,
            self.layout,
            world.mesh,
            num_micro_batches=job.num_micro_batches,
            schedule=job.schedule,
            reduce_tied=self._reduce_tied,
        )
        self.validator = (
            Validator(validation, job.seed, self.parts, self.layout, world.mesh, job.sharing) if validation else None
        )
        self.params = [entry.value for entry in world.found.values()]
        self._counted, self._slots = self._count(exact=job.optimizer.exact_norm)
        self._tied = [
            (entry.value, world.ownership.placements[name].stages)
            for name, entry in world.found.items()
            if len(world.ownership.placements[name].stages) > 1
        ]

    def _count(self, *, exact: bool) -> tuple[list[Counted], int]:
        """Each tensor counts once, whoever holds copies of it."""
        ownership = self.world.ownership
        assert ownership is not None
        counted, row = [], 0
        for slot, tensor in enumerate(self.world.catalogue):
            rows = tensor.shape[0] if tensor.shape else 1
            if tensor.name in self.world.found:
                box = ownership.box(tensor, self.rank)
                assert box is not None
                mine = ownership.copy_index(tensor, self.rank) == 0
                start = row + (box[0][0] if box else 0)
                counted.append(Counted(self.world.found[tensor.name].value, mine, start, slot))
            row += rows
        return counted, row if exact else len(self.world.catalogue)

    def forward_backward(self, step: int, batches: list[MicroBatch], tokens: int, part: range) -> torch.Tensor:
        """Gradients of the step up to this part into ``.grad``; the losses that this rank is to tell."""
        model = nn.ModuleList(self.parts)
        if part.start and (self.at.dp, self.at.fsdp, self.at.cp, self.at.tp) != (0, 0, 0, 0):
            drop_counts(model)  # each holds the count of all ranks, and ranks' counts are added up
        streams = self.parts[0].streams  # one for all parts of a rank
        streams.step, streams.token_weight = step, 1 / tokens
        losses = self.runner.run(batches, tokens, part.start)
        if self.at.tp != 0:
            losses.zero_()  # tp ranks share the micro-batches of their data rank: one of them tells
        if part.stop < self.job.num_micro_batches:
            total_counts(model, self.over_data_ranks)
        return losses

    def totals(self, losses: torch.Tensor) -> tuple[float, float]:
        """The step's loss and global norm, equal on all ranks."""
        return step_totals(losses, self._counted, self._slots, dist.group.WORLD, exact=self.job.optimizer.exact_norm)

    def over_data_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """``counts``, summed in place over all ranks of the stage: each routes tokens of its own, also those of tp."""
        for axis in ("dp", "fsdp", "tp"):
            dist.all_reduce(counts, group=self.world.mesh.get_group(axis))
        return counts

    def _reduce_tied(self) -> None:
        """Add up the gradients of a tensor that two stages hold: equal slices, exchanged by the two holders."""
        group = self.world.mesh.get_group("pp")
        for param, stages in self._tied:
            grad = local_tensor(param.grad)
            theirs = torch.empty_like(grad)
            other = next(stage for stage in stages if stage != self.at.pp)
            peer = self.layout.rank_at(replace(self.at, pp=other))
            works = [dist.irecv(theirs, peer, group=group), dist.isend(grad, peer, group=group)]
            for work in works:
                work.wait()
            grad += theirs
