"""A rank's stages of a pipeline, and the schedule that takes micro-batches through them: torch's, for every layout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from dynatrain.layout.layout import Layout
from dynatrain.layout.stages import held_stages

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(logits [B, T, V], targets [B, T]) -> loss``."""

_ONE_STAGE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_SEVERAL = {
    "1f1b": ScheduleInterleaved1F1B,
    "gpipe": ScheduleLoopedBFS,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """One rank's stages and their schedule.

    Args:
        parts: this rank's parts of the model, first stage first, as ``build_parts`` made them.
        layout: its layout, of two pp ranks or more.
        mesh: its mesh.
        micro_batches: of one data rank.
        loss: of one micro-batch; the sum over micro-batches is what gradients are of.
        schedule: ``1f1b`` or ``gpipe``; a layout that names a schedule has that one.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        layout: Layout,
        mesh: DeviceMesh,
        *,
        micro_batches: int,
        loss: Loss,
        schedule: str,
    ) -> None:
        numbers = held_stages(layout, mesh.get_local_rank("pp"))
        device, group = torch.device(mesh.device_type), mesh.get_group("pp")
        stages = [
            _Stage(part, number, layout.num_stages, device, group=group)
            for part, number in zip(parts, numbers, strict=True)
        ]
        self._first, self._last = numbers[0] == 0, numbers[-1] == layout.num_stages - 1
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti
        # Gradients are summed, not averaged: the loss of each micro-batch is already over the global tokens.
        if layout.chunks == 1 and not layout.schedule:
            self._schedule = _ONE_STAGE[schedule](stages[0], micro_batches, loss_fn=loss, scale_grads=False)
        else:
            kind = _SEVERAL[layout.schedule or schedule]
            self._schedule = kind(list(stages), micro_batches, loss_fn=loss, scale_grads=False)

    def run(
        self, inputs: torch.Tensor, targets: torch.Tensor, beside: dict[str, torch.Tensor], *, backward: bool = True
    ) -> list[torch.Tensor]:
        """Take the micro-batches, one behind the other along dim 0, through the stages.

        Args:
            inputs: int64 tokens [n B, T].
            targets: int64 [n B, T].
            beside: what every part is told.
            backward: also leave the gradients in ``.grad``, reduced; else forward alone.

        Returns:
            The losses of the micro-batches where the last stage is on this rank, else none.
        """
        losses: list[torch.Tensor] = []
        run = self._schedule.step if backward else self._schedule.eval
        args = (inputs,) if self._first else ()
        run(*args, target=targets if self._last else None, losses=losses, return_outputs=False, **beside)
        return losses


class _Stage(PipelineStage):
    """A stage of a decoder.

    Its routers count real micro-batches alone: before the first of them torch runs the part forward and backward, on
    numbers of its own, to learn shapes. And where the stage before it is on the same rank (the bottom of a V), torch
    hands the gradient over by a call, which it makes also where nothing has a gradient.
    """

    def __init__(self, part: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(part, *args, **options)
        self._streams = part.streams
        self._streams.counting = False

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        self._streams.counting = True
        try:
            return super().forward_one_chunk(*args, **options)
        finally:
            self._streams.counting = False

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
