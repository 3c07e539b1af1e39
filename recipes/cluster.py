"""A run whose ranks come and go, driven by a program: ``python recipes/cluster.py``; the same on many machines."""

import sys
import tempfile
from pathlib import Path

import dynatrain

CONFIG = """
layout = "fsdp2"
steps = 1000000
device = "cpu"
[model]
config = "tiny"
[data]
tokenizer = "bytes"
sequence = 32
[batch]
global_sequences = 4
micro_sequences = 1
[world]
max = 4
"""


def main(folder):
    config = Path(folder) / "run.toml"
    config.write_text(CONFIG)
    run = dynatrain.RunAgent(config, run=Path(folder) / "run")
    run.start()
    answers = [
        run.scale(4),
        run.switch("dp2.tp2"),
        run.lend(count=2),  # two ranks end; another program has their places
        run.reclaim(),
        run.save(),
    ]
    for answer in answers:
        sys.stdout.write(f"{answer.outcome} {answer.message}\n")
    return [answer.outcome for answer in answers], run.end()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
