"""The life of a training rank under dynatrain's agent: from its run folder to its last step."""

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynatrain.cluster.causes import SAVED
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.seat import Seat, take_seat
from dynatrain.config.own import load_own
from dynatrain.config.run import RunConfig
from dynatrain.data.prepare import open_samples, open_validation
from dynatrain.data.samples import Samples
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.observe.checkpoints import newest
from dynatrain.observe.log import Log
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import CheckedRun, check_run
from dynatrain.train.announcement import NotAdmittedError
from dynatrain.train.keeping import Keeps
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision
from dynatrain.train.party import ENDS, PHASES
from dynatrain.train.probe import Rates, probe
from dynatrain.train.record import Recorder
from dynatrain.train.saving import Saves
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Job, StepResult, Trainer
from dynatrain.train.validation import Validation, ValidationResult
from dynatrain.train.world import Build


class NotSavedError(RuntimeError):
    """The run ends, and what it has trained since its last checkpoint is lost."""


PROBE_BYTES = 32 << 20
"""More than caches hold, little enough to take a moment at the start."""

TOLD_SAMPLES = 256
"""Sequences of a step whose ids are written down; those of larger batches would be most of a run's folder.

They are a function of seed and step anyhow: :func:`dynatrain.data.order.batch_ids`.
"""


def main(context: RankContext) -> None:
    """The rank's entry function."""
    take_part(context, _train)


def take_part(context: RankContext, train: Callable[[Seat, CheckedRun, torch.device], Switcher]) -> None:
    """A rank's way into its run and out of it.

    Args:
        context: its place.
        train: trains, as long as this rank is in its world; returns what it has trained with.
    """
    torch.set_num_threads(1)
    # DTensor and FSDP2 warn at every new module of what they do on purpose here; said once in the docs, not per step.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    with take_seat(context) as seat:
        context = seat.context
        checked = check_run(load_own(context.folder.path).config)
        device = torch.device(context.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if context.interface:
            os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), context.interface)
        elif context.store_host == "127.0.0.1" and device.type != "cuda":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not context.joins:  # a newcomer's is that of the world to come, which the Switcher makes
            dist.init_process_group(
                context.backend,
                store=dist.PrefixStore("default", seat.store),
                rank=context.rank,
                world_size=context.world_size,
                timeout=timedelta(minutes=30),
            )
        try:
            switcher = train(seat, checked, device)
        except NotAdmittedError as refused:
            with Log(context.folder.events, generation=context.generation, attempt=context.attempt) as log:
                log.write("not_admitted", member=context.member, reason=str(refused))
            return
        if switcher.stopped and not switcher.left:
            dist.barrier()
    if switcher.stopped and switcher.saved == switcher.step:
        raise SystemExit(SAVED)


def _train(seat: Seat, checked: CheckedRun, device: torch.device) -> Switcher:
    """Train to the end of the run, to its stop, or as long as this rank is in its world."""
    context, config = seat.context, checked.config
    samples = samples_of(checked, context.folder.path)
    job = job_of(checked)
    recorder = recorder_of(seat, device, global_sequences=config.batch.global_sequences)
    switcher, progress = begin(
        *(seat, checked, device, recorder, job.build),
        state={"schedule": job.scheduler},
        initial=job.initial,
        names=canonical_name,
    )
    with Log(context.folder.metrics, generation=context.generation, attempt=context.attempt) as log:

        def after_step(result: StepResult) -> None:
            progress.step(result.step)
            if switcher.rank == 0:
                log.write(
                    "step",
                    generation=switcher.generation,
                    step=result.step,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=result.lr,
                    tokens=result.tokens,
                    tokens_per_second=result.tokens / result.seconds,
                    seconds=result.seconds,
                    layout=print_layout(switcher.layout),
                    **({"samples": result.ids.tolist()} if len(result.ids) <= TOLD_SAMPLES else {}),
                )

        def after_validation(result: ValidationResult) -> None:
            recorder.apart(result.seconds)
            if switcher.rank == 0:
                log.write(
                    "validation", generation=switcher.generation, **asdict(result), layout=print_layout(switcher.layout)
                )

        validation = validation_of(checked, context.folder.path)
        trainer = Trainer(job, samples, switcher, after_step, validation=validation, after_validation=after_validation)
        while True:
            trainer.run(config.steps)
            save_end(switcher, config)
            # Where the others train on, they meet without this one.
            if switcher.left or switcher.stopped or switcher.meet():
                break
    require_saved(switcher)
    return switcher


def begin(
    seat: Seat, checked: CheckedRun, device: torch.device, recorder: Recorder, build: Build, **of_the_job: Any
) -> tuple[Switcher, "_Progress"]:
    """What a rank trains with, at the step at which its run goes on; and what tells the agent of it.

    Args:
        seat: the rank's.
        checked: the run.
        device: where state lies.
        recorder: keeps the books.
        build: as of :class:`~dynatrain.train.switcher.Switcher`.
        **of_the_job: likewise, what the run does not say.
    """
    context = seat.context
    progress = _Progress(seat)
    switcher = _switcher(seat, checked, device, recorder, progress, build, **of_the_job)
    progress.layout = lambda: print_layout(switcher.layout)
    if not context.joins:
        # Decided once: a rank that looked a moment later could find another.
        found, _ = newest(context.folder.checkpoints)
        if start := seat.board.decide("resume", found.name if found else ""):
            step = switcher.load(context.folder.checkpoints / start)
            recorder.loaded(step, start, switcher.layout)
        progress.begin()
    return switcher, progress


def save_end(switcher: Switcher, config: RunConfig) -> None:
    """Behind the last step: save it, unless the run goes on without this rank, or was stopped."""
    if config.save.at_end and not (switcher.left or switcher.stopped):
        switcher.save_now()


def require_saved(switcher: Switcher) -> None:
    """The run ends: refuse to do so as if all were well.

    Raises:
        NotSavedError: its last step was to be saved, and is not.
    """
    if switcher.unsaved and not switcher.left:
        raise NotSavedError(f"step {switcher.step}, the last one, is not saved: {switcher.unsaved}")


def recorder_of(seat: Seat, device: torch.device, *, global_sequences: int = 0) -> Recorder:
    """Keeps the books of the run; measures for them what the links and the memory can do."""
    context = seat.context
    return Recorder(
        context.folder,
        seat.worlds.board(),
        rank=context.rank,
        generation=context.generation,
        attempt=context.attempt,
        rates=None if context.joins else _rates(context, device),
        global_sequences=global_sequences,
    )


def _rates(context: RankContext, device: torch.device) -> Rates:
    return probe(dist.group.WORLD, device, nbytes=PROBE_BYTES, repeats=3, ranks_per_node=context.ranks_per_node)


def _switcher(
    seat: Seat,
    checked: CheckedRun,
    device: torch.device,
    recorder: Recorder,
    progress: "_Progress",
    build: Build,
    **of_the_job: Any,
) -> Switcher:
    context, config = seat.context, checked.config
    return Switcher(
        build,
        **of_the_job,
        layout=print_layout(checked.layout),
        mode=config.switching.mode,
        deadline=config.switching.deadline_seconds,
        budget=config.switching.budget_mib << 20,
        unequal_copies=config.switching.unequal_copies,
        schedule={step: print_layout(layout) for step, layout in checked.switches},
        inside={switch.step: switch.after_micro_batches for switch in config.switch},
        worlds=seat.worlds,
        recorder=recorder,
        legal=lambda text, world_size: checked.legal(parse_layout(text), world_size),
        device=device,
        hook=progress.event,
        ranks_per_node=context.ranks_per_node,
        saves=_saves(config, context.folder),
        keeps=Keeps(every=config.loss.snapshot_steps, bytes_per_second=config.loss.snapshot_mib_per_second * (1 << 20)),
        save_at_stop=config.save.at_end,
        on_saved=recorder.saved,
        switches_before=context.folder.last_switch,
    )


def _saves(config: RunConfig, folder: RunFolder) -> Saves:
    """How a run is saved."""
    return Saves(
        root=folder.checkpoints,
        run_id=folder.name,
        every=config.save.every,
        keep_last=config.save.keep_last,
        budget=config.save.snapshot_mib << 20,
        deadline=config.save.deadline_seconds,
    )


class _Progress:
    """Tells the agent what this rank is at, from whichever thread.

    While a switch is prepared beside training, its phase is what is told: that is what a rank's end then concerns.

    Attributes:
        layout: gives the present layout's text; empty before there is one.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._step = 0
        self._phase = "train"
        self._switch = 0
        self.layout: Callable[[], str] = str

    def begin(self) -> None:
        """All is there that a step needs: from here on the others can go on without this rank."""
        self._tell()

    def step(self, step: int) -> None:
        """A step has ended."""
        self._step = step
        self._tell()

    def event(self, event: str, _round: int, switch: int) -> None:
        """A phase of a switch, or an event within it, or its end."""
        if event in PHASES:
            self._phase, self._switch = event, switch
        elif event in ENDS:
            self._phase, self._switch = "train", 0
        elif event == "parked":
            self._phase = event
        self._tell()

    def _tell(self) -> None:
        self._seat.heart.at(step=self._step, phase=self._phase, switch=self._switch, layout=self.layout())


def job_of(checked: CheckedRun) -> Job:
    """The job that a checked configuration describes."""
    config = checked.config
    return Job(
        shape=checked.shape,
        seed=config.seed,
        precision=Precision(compute=config.precision.compute),
        optimizer=OptimizerSettings(
            name=config.optimizer.name,
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            momentum=config.optimizer.momentum,
            bf16_newton_schulz=config.optimizer.bf16_newton_schulz,
            weight_decay=config.optimizer.weight_decay,
            warmup_steps=config.optimizer.warmup_steps,
            total_steps=config.optimizer.decay_steps,
            min_lr_ratio=config.optimizer.min_lr_ratio,
            clip_norm=config.optimizer.clip_norm,
            exact_norm=config.optimizer.exact_norm,
        ),
        global_sequences=config.batch.global_sequences,
        micro_sequences=config.batch.micro_sequences,
        schedule=config.pipeline.schedule,
        recompute=config.blocks.recompute,
        compile_with="inductor" if config.blocks.compile else "",
    )


def samples_of(checked: CheckedRun, folder: Path) -> Samples:
    """The training samples that a checked configuration asks for, of a prepared folder."""
    data = checked.config.data
    return open_samples(folder, data.sequence, document_mask=data.document_mask)


def validation_of(checked: CheckedRun, folder: Path) -> Validation | None:
    """The validation that a checked configuration asks for, on the samples of a prepared folder."""
    asked = checked.config.validation
    if not asked.every:
        return None
    data = checked.config.data
    held_out = open_validation(folder, data.sequence, document_mask=data.document_mask)
    return Validation(data=held_out, every=asked.every, batches=asked.batches)
