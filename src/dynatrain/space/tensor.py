"""Logical tensors: what a job owns, named once, without a layout.

A *tensor* is a parameter (or a buffer, or a registered object's value) under its canonical name, with its global
shape. Each tensor has one or more *states*: the value itself and what the optimizer keeps beside it. A state has the
tensor's shape, or lacks some of its dims, or has one element for each block along the last dim; in every form it is cut
by those of the tensor's cuts that fall on the dims that it shares with the tensor, and is a copy along the other axes.
"""

import math
from dataclasses import dataclass, replace

from dynatrain.space.box import Box, shape_of, whole

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
}
"""Bytes of one element, by dtype name as torch prints it without its prefix."""

FIRST, LAST = "first", "last"
"""Stage anchors of tensors that belong to no layer: the embedding sits first, final norm and head last."""


@dataclass(frozen=True, slots=True)
class State:
    """One state of a tensor.

    Attributes:
        name: ``param`` for the value itself; optimizer states by torch's own key (``exp_avg``, ``step``, ...);
            registered objects as ``object.key`` (``ema.shadow``).
        dtype: element type, one of :data:`ITEMSIZE`.
        scalar: one element for the whole tensor, held by every holder of the tensor (AdamW's ``step``).
        reduced: dims of the tensor that the state lacks, because it is a sum or a mean over them (Adafactor's factors).
        block: elements along the last dim that share one element of the state (the scales of block-quantised codes);
            0 where each has its own. Whoever holds a part of a row holds the scales of the whole row: a block may
            begin on one rank and end on another, and its scale is one number to both.
    """

    name: str
    dtype: str
    scalar: bool = False
    reduced: tuple[int, ...] = ()
    block: int = 0

    @property
    def form(self) -> tuple[bool, tuple[int, ...], int]:
        """What decides shape and cuts: states of one tensor with equal forms lie alike."""
        return self.scalar, self.reduced, self.block

    @property
    def like_tensor(self) -> bool:
        """Whether it has the tensor's shape and cuts."""
        return not (self.scalar or self.reduced or self.block)

    def box(self, box: Box, shape: tuple[int, ...]) -> Box:
        """The box of the state that belongs to ``box`` of a tensor of ``shape``."""
        if self.scalar:
            return ()
        if self.like_tensor:
            return box
        if self.block:
            box = (*box[:-1], (0, -(-shape[-1] // self.block)))
        return tuple(ends for dim, ends in enumerate(box) if dim not in self.reduced)

    def dim(self, dim: int) -> int:
        """The state's own dim that is ``dim`` of the tensor, over which it is not reduced."""
        return dim - sum(gone < dim for gone in self.reduced)

    def cuts(self, cuts: tuple[tuple[str, int], ...], dims: int) -> tuple[tuple[str, int], ...]:
        """Those of a tensor's ``cuts`` that cut the state, by the state's own dims; ``dims`` are the tensor's."""
        if self.scalar or not cuts:
            return ()
        if self.like_tensor:
            return cuts
        gone = {*self.reduced, *range(dims - bool(self.block), dims)}
        return tuple((axis, self.dim(dim)) for axis, dim in cuts if dim not in gone)


Cuts = tuple[tuple[str, int], ...]
"""``(axis, dim)`` in cutting order; see :class:`Tensor`."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor.

    Attributes:
        name: canonical name, with *global* layer numbers (``layers.7.attention.wq.weight``). A stack of experts is one
            tensor: the global number of an expert is its index in dim 0.
        shape: global shape.
        cuts: ``(axis, dim)`` in cutting order: the dims that tp and fsdp split, tp first; of a stack of experts
            [experts, out, in] those that ep, etp and efsdp split, in this order. An axis that is absent does not split
            the tensor: its ranks hold copies. ``tp8`` splits at most 8 ways: rows of 8 key/value heads, of which more
            ranks hold copies.
        anchors: the pipeline places that hold it: a global layer number, or :data:`FIRST` / :data:`LAST`. A tied
            embedding has both, and hence two holders once there are two stages.
        states: the value (``param``) first, then what the optimizer and registered objects keep for it.
        unit: the modules it is materialised and gathered with (``layers.7``, ``embedding``, ``head``).
        within: name of the fused tensor in whose storage it lies, beside other segments; empty where it is alone. What
            lies in one storage is handed over together.
    """

    name: str
    shape: tuple[int, ...]
    cuts: Cuts
    anchors: tuple[int | str, ...]
    states: tuple[State, ...]
    unit: str
    within: str = ""

    @property
    def numel(self) -> int:
        """Elements of the tensor (of one state that has its shape)."""
        return math.prod(self.shape)

    def state_shape(self, state: State) -> tuple[int, ...]:
        """Global shape of one of its states."""
        if state.like_tensor or state.scalar:
            return () if state.scalar else self.shape
        return shape_of(state.box(whole(self.shape), self.shape))

    def nbytes(self, state: State) -> int:
        """Bytes of one of its states, whole."""
        return math.prod(self.state_shape(state)) * ITEMSIZE[state.dtype]


Catalogue = tuple[Tensor, ...]
"""All tensors of a job, in one agreed order (the order of construction)."""


def values_of(catalogue: Catalogue) -> Catalogue:
    """The same tensors with their values alone; each keeps its numbers."""
    return tuple(replace(tensor, states=tensor.states[:1]) for tensor in catalogue)
