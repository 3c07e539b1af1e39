"""The columns and rows of the tables in docs/what-can-switch.md: axes, and states of a job."""

from dynatrain.space.optimizers import OPTIMIZERS

AXES = {
    "dp": "dp2",
    "fsdp": "fsdp2",
    "fsdp-z2": "fsdp2-z2",
    "fsdp-z1": "fsdp2-z1",
    "pp": "pp2",
    "pp-v": "pp2v2",
    "pp-zb": "pp2-zb",
    "pp-zbv": "pp2v2-zbv",
    "cp": "cp2",
    "cp-ring": "cp2-ring",
    "cp-ulysses": "cp2-ulysses",
    "tp": "tp2",
    "tp-sp": "tp2-sp",
    "ep": "fsdp2.ep2",
    "etp": "fsdp2.etp2",
}
"""Every axis and every option of one, and the layout of two ranks that stands for it."""

HOME = {"fsdp": "dp2", "fsdp-z2": "dp2", "fsdp-z1": "dp2", "ep": "tp2", "etp": "tp2.ep2"}
"""The layout that an axis is switched to from, and back to; where none is named, ``fsdp2``."""

BITS, BOUND = "bits", "1e-12"

STATES = {
    "parameters": BOUND,
    "frozen parameters": BITS,
    "adapters (LoRA)": BOUND,
    "parameters without a gradient yet": BITS,
    "several optimizers, with groups": BOUND,
    "gradients inside a step": BOUND,
    "persistent buffers": BITS,
    "other buffers": BITS,
    "extra state": BITS,
    "averages (EMA)": BOUND,
    "averages as plain shards": BOUND,
    "scaler, counts": BITS,
}
"""What a job keeps, and how near a run through the axis is to the run of one process."""

EXACT = {name: BOUND if name != "adamw8bit" else BITS for name in OPTIMIZERS}
"""Likewise by optimizer; of ``adamw8bit`` the state right before and after each switch is compared, see the page."""
