"""What each optimizer keeps beside a tensor: one schema per optimizer, as functions of the tensor's shape.

The same functions say what a live optimizer must hold (``dynatrain.train.optimizers``), and what a catalogue that is
made without torch declares. A state has one of these forms (:class:`dynatrain.space.tensor.State`): the tensor's own,
reduced over named dims, one element per block, or one scalar. Nothing is kept per rank: a state that belongs to no
place in the tensor could not be given to other ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from dynatrain.space.tensor import Catalogue, State, Tensor

BLOCK = 256
"""Elements along the last dim that share one scale in AdamW8bit."""

STEP = State("step", "float32", scalar=True)
"""Steps that the tensor has taken; torch keeps it in fp32."""


@cache  # asked for every parameter inside the stall
def adam(dtype: str, *, amsgrad: bool = False) -> tuple[State, ...]:
    """``torch.optim.Adam`` and ``AdamW``: two moments, with ``amsgrad`` the largest second one, and the step."""
    largest = (State("max_exp_avg_sq", dtype),) if amsgrad else ()
    return State("exp_avg", dtype), State("exp_avg_sq", dtype), *largest, STEP


@cache
def momentum(dtype: str) -> tuple[State, ...]:
    """``torch.optim.SGD`` with momentum, and Muon: one buffer."""
    return (State("momentum_buffer", dtype),)


def adafactor(shape: tuple[int, ...], dtype: str) -> tuple[State, ...]:
    """Adafactor: of matrices (the last two dims of what has more) the means of each row and of each column; the step.

    ``exp_avg_sq_row`` has no last dim: one mean per row. ``exp_avg_sq_col`` has no last but one.
    """
    last = len(shape) - 1
    if last < 1:
        return State("exp_avg_sq", dtype), STEP
    return (
        State("exp_avg_sq_col", dtype, reduced=(last - 1,)),
        State("exp_avg_sq_row", dtype, reduced=(last,)),
        STEP,
    )


def adamw8bit(shape: tuple[int, ...], dtype: str) -> tuple[State, ...]:
    """AdamW8bit: of matrices a byte per element and moment, and a scale per block of :data:`BLOCK`; else as Adam."""
    if len(shape) < 2:
        return adam(dtype)
    return (
        State("exp_avg_codes", "uint8"),
        State("exp_avg_scale", "float32", block=BLOCK),
        State("exp_avg_sq_codes", "uint8"),
        State("exp_avg_sq_scale", "float32", block=BLOCK),
        STEP,
    )


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a decoder's tensor: matrices that map hidden to hidden, neither embeddings nor the head."""
    return len(shape) > 1 and not name.startswith(("embed_tokens.", "embed_positions.", "lm_head."))


Beside = Callable[[str, tuple[int, ...], str], tuple[State, ...]]
"""``(tensor name, shape, dtype) -> states`` beside the value, by name."""

OPTIMIZERS: dict[str, Beside] = {
    "adamw": lambda _name, _shape, dtype: adam(dtype),
    "sgd": lambda _name, _shape, dtype: momentum(dtype),
    "adafactor": lambda _name, shape, dtype: adafactor(shape, dtype),
    "muon": lambda name, shape, dtype: momentum(dtype) if is_hidden_matrix(name, shape) else adam(dtype),
    "adamw8bit": lambda _name, shape, dtype: adamw8bit(shape, dtype),
}
"""The optimizers that a run can be configured with, and what each keeps of a decoder's tensors."""


def beside(catalogue: Catalogue, kept: Beside) -> Catalogue:
    """The same tensors with their values and what ``kept`` says beside them; nothing is kept beside a buffer."""
    shared: dict[tuple[State, ...], tuple[State, ...]] = {}  # one value for all layers, as plans count on

    def states(one: Tensor) -> tuple[State, ...]:
        found = (one.states[0], *kept(one.name, one.shape, one.states[0].dtype))
        return shared.setdefault(found, found)

    return tuple(replace(one, states=states(one)) if one.states[0].name == "param" else one for one in catalogue)
