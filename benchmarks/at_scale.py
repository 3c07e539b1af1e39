"""The tables of docs/at-scale.md: ten switches of large models, simulated by ``dynatrain simulate``."""

import contextlib
import io
import json

from dynatrain.app.commands import simulate
from dynatrain.app.output import seconds, size

SWITCHES = {
    "llama-3.1-70b": (
        64,
        2.0,
        [
            ("fsdp64", "fsdp8.tp8"),
            ("fsdp8.tp8", "dp2.fsdp4.tp8"),
            ("pp2.fsdp4.tp8", "pp4.fsdp4.tp4"),
            ("pp4.fsdp2.tp8", "pp8.tp8"),
            ("fsdp64", "fsdp32"),
        ],
    ),
    "qwen3-235b-a22b": (
        128,
        4.36,
        [
            ("fsdp128.ep8", "fsdp128.ep16"),
            ("dp2.fsdp64.ep8", "fsdp128.ep8"),
            ("fsdp16.tp8.ep16", "fsdp32.tp4.ep32"),
            ("pp4.fsdp32.ep8", "pp2.fsdp64.ep8"),
            ("fsdp128.ep8", "fsdp64.ep8"),
        ],
    ),
}
"""By model: GPUs, seconds that DynaTrain reports for its size, switches."""


def simulated(old, new, model, cluster, *more):
    """What the command says, with --json."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert simulate.run([old, new, "--model", model, "--cluster", cluster, "--json", *more]) == 0
    return json.loads(said.getvalue())


def cells(found):
    """Seconds, floor, ratio."""
    return [seconds(found["predicted_seconds"]), seconds(found["floor_seconds"]), f"{found['ratio']:.2f}"]


def times(reported, taken):
    """How many times the least and the most of ``taken`` go into ``reported``."""
    return f"{reported / max(taken):.1f} to {reported / min(taken):.1f}"


def tables():
    """Every line of the tables, and under each what its predictions are beside the reported seconds."""
    for model, (ranks, reported, switches) in SWITCHES.items():
        titles = "moved | even50 | floor | ratio | h100 | ratio | hashed | ordered: moved | takes"
        yield f"| {model}, {ranks} GPUs | {titles} |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        taken = {"even": [], "hashed": [], "best": []}
        for old, new in switches:
            even, nodes = (simulated(old, new, model, f"{name}x{ranks}") for name in ("even50", "h100"))
            hashed = simulated(old, new, model, f"h100x{ranks}", "--checksum-gb-s", "10")
            best = simulated(old, new, model, f"h100x{ranks}", "--choose-order")
            kinds = {"even": even, "hashed": hashed, "best": best}
            for kind, found in kinds.items():
                taken[kind].append(found["predicted_seconds"])
            row = [size(even["bytes"]["moved"]), *cells(even), *cells(nodes)[::2], cells(hashed)[0]]
            row += [size(best["bytes"]["moved"]), cells(best)[0]]
            yield f"| `{old}` -> `{new}` | {' | '.join(row)} |"
        yield ""
        even, hashed, best = (times(reported, taken[kind]) for kind in ("even", "hashed", "best"))
        yield f"{reported:g} s is {even} times the seconds of `even50`, {best} times those in the chosen order, and"
        yield f"{hashed} times those with checksums."
        yield ""


if __name__ == "__main__":
    print("\n".join(tables()))
