"""One training step's forward and backward under one layout.

Micro-batch i of the global batch runs on data rank i mod n. Where the shares are uneven, the shorter ones are filled
with micro-batches whose targets are all ignored: their loss and gradients are exact zeros, and every rank takes part
in the same collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dynatrain.data.order import micro_shares
from dynatrain.layout.layout import Coordinates, Layout
from dynatrain.layout.legality import ONE_ONE, least_share
from dynatrain.models.share import TokenShare
from dynatrain.train.live import reshard
from dynatrain.train.pipeline import Pipeline
from dynatrain.train.reduction import MicroBatchCounter

IGNORED = -100
"""Target that carries no loss, as in ``torch.nn.functional.cross_entropy``."""


FILLER = -1
"""Number of a sample that only fills a batch up: routers count no sample below 0."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        index: its number in the global batch; -1 for a filler.
        inputs: int64 [B, T].
        targets: int64 [B, T].
        samples: int64 [B], global sample ids, or :data:`FILLER`.
        documents: int64 [B, T], as of ``DecoderPart``; None where a sample is one document.
    """

    index: int
    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    documents: torch.Tensor | None


def told(batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """What every part of a pipeline is told of micro-batches, one behind the other: arguments of ``DecoderPart``."""
    found = {"samples": torch.cat([batch.samples for batch in batches])}
    documents = [batch.documents for batch in batches if batch.documents is not None]
    return found | ({"documents": torch.cat(documents)} if documents else {})


def together(batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Inputs, targets and what is told of micro-batches, one behind the other: arguments of ``Pipeline.run``."""
    return (
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.targets for batch in batches]),
        told(batches),
    )


class Data(Protocol):
    """Numbered samples: ``dynatrain.data.samples.Samples``."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(inputs, targets)``, int64 [len(ids), T]."""

    def documents(self, ids: np.ndarray) -> np.ndarray | None:
        """As of ``DecoderPart``, int64 [len(ids), T]; None where a sample is one document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How a global batch is cut into micro-batches.

    Attributes:
        global_sequences: samples of the global batch.
        micro_sequences: samples of one micro-batch; divides ``global_sequences``.
        schedule: of pipelines whose layout names none.
    """

    global_sequences: int
    micro_sequences: int
    schedule: str = ONE_ONE

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one global batch, over all data ranks."""
        return self.global_sequences // self.micro_sequences

    def micro_batches(
        self, data: Data, ids: np.ndarray, layout: Layout, at: Coordinates, device: str, part: range | None = None
    ) -> tuple[list[MicroBatch], int]:
        """The micro-batches of the data rank at ``at``, and the number of targets in the whole batch.

        Where ``ids`` are fewer than the global batch, the places that stay free have ignored targets.

        Args:
            data: has the samples.
            ids: of the global batch, in order; at least one.
            layout: says how many data ranks there are.
            at: where this rank sits.
            device: of the tensors.
            part: numbers of the micro-batches that are dealt out; None for all.
        """
        part = part or range(self.num_micro_batches)
        # That a pipeline takes the whole batch is legality; a part of it may need fillers.
        longest = -(-len(part) // layout.data_ranks)
        least = least_share(layout, longest, self.schedule) if len(part) < self.num_micro_batches else 0
        dealt = my_indices(part, layout.data_ranks, at.dp * layout.size("fsdp") + at.fsdp, least)
        size, width, share = self.micro_sequences, 0, shared_tokens(layout, at.cp)
        made = []
        for index in dealt:
            places = np.arange(max(index, 0) * size, (max(index, 0) + 1) * size)
            samples = ids[places % len(ids)]
            inputs, targets = (torch.from_numpy(array).to(device) for array in data.batch(samples))
            starts = data.documents(samples)
            documents = None if starts is None else torch.from_numpy(starts).to(device)
            free = (places >= len(ids)) | (index < 0)
            if free.any():
                targets = targets.masked_fill(torch.from_numpy(free).to(device)[:, None], IGNORED)
                samples = np.where(free, FILLER, samples)
            width = targets.shape[1]
            inputs, targets = share.of(inputs), share.of(targets)
            made.append(MicroBatch(index, inputs, targets, torch.from_numpy(samples).to(device), documents))
        return made, len(ids) * width


def shared_tokens(layout: Layout, part: int) -> TokenShare:
    """The tokens that a rank of cp attends from, by its number along that axis."""
    return TokenShare(parts=layout.size("cp"), part=part)


def my_indices(part: range, data_ranks: int, data_rank: int, least: int) -> list[int]:
    """Micro-batches of one data rank, in order; -1 fills the shares up to the longest one, or to ``least``."""
    shares = micro_shares(len(part), data_ranks)
    mine = [part[place] for place in shares[data_rank]]
    return [*mine, *[-1] * (max(len(shares[0]), least) - len(mine))]


class StepRunner:
    """Forward and backward of one rank's micro-batches.

    Args:
        parts: this rank's parts of the model, as ``build_parts`` made them.
        layout: its layout.
        mesh: its mesh.
        num_micro_batches: of the global batch.
        schedule: ``1f1b`` or ``gpipe``; used where the layout has stages.
        reduce_tied: called where a pipeline has run, before its gradients are added to those of an earlier part of the
            step: adds up in ``.grad`` what two stages hold of one tensor.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        layout: Layout,
        mesh: DeviceMesh,
        *,
        num_micro_batches: int,
        schedule: str,
        reduce_tied: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.layout = layout
        self.num_micro_batches = num_micro_batches
        self._global_tokens = 1
        self._params = [param for part in parts for param in part.parameters() if param.requires_grad]
        self._mesh = mesh
        self._schedule = schedule
        self._reduce_tied = reduce_tied
        self._pipelines: dict[int, Pipeline] = {}

    def run(self, batches: Sequence[MicroBatch], global_tokens: int, done: int = 0) -> torch.Tensor:
        """Leave the gradient of a step, or of its parts so far, in every parameter's ``.grad``, reduced.

        Args:
            batches: this rank's micro-batches; fillers have index -1.
            global_tokens: targets with a loss in the whole global batch.
            done: micro-batches of the global batch whose gradient is in ``.grad`` already.

        Returns:
            fp64 [num_micro_batches]: this rank's micro-batches' losses (their sum over tokens / ``global_tokens``),
            zeros elsewhere and on stages without a loss.
        """
        self._global_tokens = global_tokens
        counter = MicroBatchCounter(self._params)
        if done:
            counter.push(done)
        staged = self.layout.size("pp") > 1
        losses = self._pipelined(batches, counter) if staged else self._accumulated(batches, counter)
        counter.finish()
        found = torch.zeros(self.num_micro_batches, dtype=torch.float64)
        for batch, loss in zip(batches, losses, strict=False):
            if batch.index >= 0:
                found[batch.index] = loss.detach()
        if self.layout.zero == 1:
            for part in self.parts:
                reshard(part)
        return found

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
        return total / self._global_tokens

    def _accumulated(self, batches: Sequence[MicroBatch], counter: MicroBatchCounter) -> list[torch.Tensor]:
        (part,) = self.parts
        losses = []
        reduce_each = self.layout.zero > 1
        for place, batch in enumerate(batches):
            part.set_requires_gradient_sync(reduce_each or place == len(batches) - 1)
            loss = self._loss(part(batch.inputs, **told([batch])), batch.targets)
            loss.backward()
            losses.append(loss)
            if reduce_each:
                counter.push(self.layout.data_ranks)
        if not reduce_each:
            counter.push(len(batches) * self.layout.data_ranks)
        return losses

    def _pipelined(self, batches: Sequence[MicroBatch], counter: MicroBatchCounter) -> list[torch.Tensor]:
        losses = self._pipeline(len(batches)).run(*together(batches))
        self._reduce_tied()
        counter.push(len(batches) * self.layout.data_ranks)
        return losses

    def _pipeline(self, share: int) -> Pipeline:
        """The pipeline of that many micro-batches, which torch fixes with its stages."""
        if share not in self._pipelines:
            self._pipelines[share] = Pipeline(
                self.parts, self.layout, self._mesh, micro_batches=share, loss=self._loss, schedule=self._schedule
            )
        return self._pipelines[share]
