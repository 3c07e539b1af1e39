"""Is a tree slower than one before it? ``python benchmarks/before_after.py BEFORE [AFTER]``, each a checkout.

Both trees train a dense model and run ``bench switch`` by their own command line, in turn, again and again: before,
after, after, before. Prints the median of each and the ratio, after / before, and writes ``before_after.json``.

To compare with the last commit that knew neither contexts nor experts:

    git worktree add --detach ../before 0203d3b
    python benchmarks/before_after.py ../before .
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

DENSE = ("fsdp4", "fsdp2.tp2", "pp2.fsdp2")
WARM = 5
"""Steps of each run that do not count."""
CONFIG = """
layout = "{layout}"
steps = {steps}
[model]
config = "{model}"
[data]
paths = ["{text}"]
tokenizer = "bytes"
sequence = {sequence}
validation = 0.0
[batch]
global_sequences = 4
micro_sequences = 1
"""


class Tree:
    """The command line of one checkout."""

    def __init__(self, root):
        if not (root / "src" / "dynatrain").is_dir():
            raise SystemExit(f"{root} is no checkout: it has no src/dynatrain")
        self.environment = {**os.environ, "PYTHONPATH": str(root.resolve() / "src"), "GLOO_SOCKET_IFNAME": "lo"}

    def run(self, folder, *words):
        command = [sys.executable, "-m", "dynatrain", *words]
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} in {self.environment['PYTHONPATH']}:\n{done.stderr}")
        return done.stdout

    def steps(self, arguments, layout):
        """``{what: seconds}`` of each step of a run in ``layout``, without the first ones."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            (place / "text.txt").write_text("There is enough of it here. " * 5000, encoding="utf-8")
            given = vars(arguments) | {"layout": layout, "text": place / "text.txt", "steps": WARM + arguments.steps}
            (place / "run.toml").write_text(CONFIG.format(**given), encoding="utf-8")
            self.run(place, "train", "run.toml")
            (metrics,) = place.glob("runs/*/metrics.jsonl")
            lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
            return {f"step in {layout}": [line["seconds"] for line in lines[WARM:]]}

    def switches(self, arguments):
        """``{what: seconds}`` of every case of ``bench switch``, ours alone, by the transport that a run takes."""
        words = ("bench", "switch", f"--model={arguments.model}", "--repeats=1", "--slow-repeats=0", "--json")
        rows = json.loads(self.run(Path.cwd(), *words))["rows"]
        taken = [row for row in rows if row.get("transport") != "gloo"]
        return {f"{row['case']}, {row['mode']}": [row["seconds"]] for row in taken}


def measure(arguments):
    """``{what: {tree: seconds}}``."""
    trees = {"before": Tree(arguments.before), "after": Tree(arguments.after)}
    found = defaultdict(lambda: {name: [] for name in trees})
    for number in range(arguments.repeats):
        for name in list(trees) if number % 2 == 0 else list(trees)[::-1]:
            parts = [trees[name].steps(arguments, layout) for layout in DENSE] + [trees[name].switches(arguments)]
            for what, seconds in (item for part in parts for item in part.items()):
                found[what][name] += seconds
            print(f"repeat {number + 1}, {name}: done", flush=True)
    return found


def rows(found):
    made = []
    for what, by_tree in found.items():
        medians = {name: statistics.median(seconds) for name, seconds in by_tree.items()}
        made.append({"what": what, **medians, "ratio": medians["after"] / medians["before"]})
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--model", default="25m")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30, help="of each run that count")
    parser.add_argument("--repeats", type=int, default=4, help="of everything, by each tree; even")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    made = rows(measure(arguments))
    arguments.out.write_text(json.dumps({"model": arguments.model, "rows": made}, indent=1) + "\n", encoding="utf-8")
    for row in made:
        print(f"{row['what']:32} before {row['before']:7.3f} s  after {row['after']:7.3f} s  x{row['ratio']:.3f}")


if __name__ == "__main__":
    main()
