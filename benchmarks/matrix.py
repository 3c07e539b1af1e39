"""The matrix of switches: models x ranks x layouts, by every method of ``dynatrain bench switch``; tables and plots.

    python benchmarks/matrix.py                                           # all of it: hours; `make bench` does this
    python benchmarks/matrix.py --models 25m --ranks 2,4 --repeats 3      # minutes
    python benchmarks/matrix.py --plot FOLDER                             # tables and plots of saved runs, anew

Every case is one run of the command, whose JSON is saved with the command's words and the machine's load; a case for
which the machine has no memory left is named, and not run. Plots need matplotlib (the extra ``bench``).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from dynatrain.app.output import seconds, size

MODELS, RANKS = ("25m", "200m", "600m"), (2, 4, 8)
FREE_GB = {"25m": 2, "200m": 8, "600m": 19}
"""Of memory for one case: the state in both layouts, a checkpoint where it lies in memory, and the ranks."""
ON_DISK = ("600m",)
"""Models whose checkpoints find no room in memory beside the state."""
TITLES = ("case", "method", "seconds", "range", "digest", "stall", "floor", "ratio", "peak per rank", "runs")
KINDS = {"png": {}, "svg": {"Date": None}}


def cases(ranks):
    """The three pairs of layouts of ``ranks`` ranks: rows to columns, to stages, and copies to rows."""
    half = ranks // 2
    fsdp = f".fsdp{half}" if half > 1 else ""
    return (
        (f"fsdp{ranks}", f"{fsdp[1:]}.tp2".strip(".")),
        (f"fsdp{ranks}", f"pp2{fsdp}"),
        (f"dp2{fsdp}", f"fsdp{ranks}"),
    )


def words_of(model, ranks, case, repeats, slow_repeats, folder):
    """What follows ``dynatrain``."""
    words = ["bench", "switch", "--json", "--model", model, "--ranks", str(ranks), "--from", case[0], "--to", case[1]]
    words += ["--repeats", str(repeats), "--slow-repeats", str(slow_repeats)]
    return [*words, "--checkpoints", str(folder)] if model in ON_DISK else words


def free_gb():
    """Of memory, for whoever asks now."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1e6


def run(args):
    """Run every case and save what it says. How many could not be run."""
    missing = 0
    args.out.mkdir(parents=True, exist_ok=True)
    for model, ranks in ((model, ranks) for model in args.models for ranks in args.ranks):
        for case in cases(ranks):
            words = words_of(model, ranks, case, args.repeats, args.slow_repeats, args.out)
            name = f"{model}-{ranks}-{case[0]}-{case[1]}"
            needed, free = FREE_GB.get(model, 0), free_gb()
            if free < needed:
                missing += 1
                print(f"{name}: not run: {needed} GB of memory are needed, {free:.0f} are free", flush=True)
                continue
            before = os.getloadavg()[0]
            said = subprocess.run(
                [sys.executable, "-m", "dynatrain", *words], stdout=subprocess.PIPE, text=True, check=False
            )
            if said.returncode:
                missing += 1
                print(f"{name}: exit code {said.returncode}\n{said.stdout}", flush=True)
                continue
            record = {
                "command": shlex.join(["dynatrain", *words]),
                "cores": os.cpu_count(),
                "load": [before, os.getloadavg()[0]],
                **json.loads(said.stdout),
            }
            (args.out / f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return missing


def saved(folder):
    """Saved runs by (model, ranks), in the order of names."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault((record["model"], record["ranks"]), []).append(record)
    return dict(sorted(found.items(), key=lambda item: (len(item[0][0]), item[0])))


def method(row):
    """What a row is called."""
    return " ".join(filter(None, (row["method"], row["mode"], row["transport"])))


def speeds(record):
    """The probed rates of a run as one line; each is the median over its rows, of which each is a median itself."""
    rates = {
        name: sorted(row["probed"][name] for row in record["rows"])[len(record["rows"]) // 2]
        for name in record["rows"][0]["probed"]
    }
    told = {
        "one link": "link",
        "all links": "wire",
        "one link by gloo": "group_link",
        "all links by gloo": "group_wire",
        "copies": "copy",
        "checksums": "digest",
    }
    return "probed, GB/s: " + ", ".join(f"{name} {rates[key]:.2f}" for name, key in told.items())


def where(record):
    """The machine, and how busy it was."""
    before, after = record["load"]
    return f"{record['cores']} cores, load {before:.1f} before and {after:.1f} after"


def tables(found):
    """The lines of a page in Markdown: a table for each model and number of ranks."""
    yield "# Switches"
    for (model, ranks), records in found.items():
        yield from ("", f"## {model}, {ranks} ranks", "")
        yield f"![seconds by method]({model}-{ranks}.svg)"
        yield from ("", f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES))
        notes = []
        for record in records:
            for row in record["rows"]:
                if row["seconds"] is None:
                    notes.append(f"- {row['case']}, {method(row)}: {row['note']}")
                    continue
                least, most = row["seconds_range"]
                digest = "-" if row["digest_seconds"] is None else seconds(row["digest_seconds"])
                times = [seconds(row["seconds"]), f"{least:.2f}-{most:.2f}", digest, seconds(row["stall_seconds"])]
                floor = [seconds(row["floor_seconds"]), f"{row['ratio']:.2f}"]
                cells = [f"`{row['case']}`", method(row), *times, *floor, size(row["peak_bytes"]), str(row["runs"])]
                yield f"| {' | '.join(cells)} |"
        yield ""
        for record in records:
            yield from (f"    {record['command']}", f"    # {where(record)}; {speeds(record)}")
        yield from ("", *notes) if notes else ()


def draw(found, folder):
    """One figure for each model and number of ranks, as PNG and as SVG: seconds of each method, and the floor."""
    import matplotlib as mpl  # noqa: PLC0415 - tables need it not
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "dynatrain"  # the same runs, the same file
    for (model, ranks), records in found.items():
        figure = Figure(figsize=(9, 3.4 * len(records)), layout="constrained")
        figure.suptitle(f"{model}, {ranks} ranks: seconds in which all state changes its layout")
        for axes, record in zip(figure.subplots(len(records), squeeze=False)[:, 0], records, strict=True):
            rows = [row for row in record["rows"] if row["seconds"] is not None]
            for row in rows:
                middle, (least, most) = row["seconds"], row["seconds_range"]
                reach = [[middle - least], [most - middle]]
                colour = "tab:blue" if row["method"] == "dynatrain" else "tab:grey"
                axes.errorbar([middle], [method(row)], xerr=reach, fmt="o", color=colour, capsize=3)
            floor = sorted(row["floor_seconds"] for row in rows)[len(rows) // 2]
            axes.axvline(floor, color="tab:red", linestyle="--", label=f"floor, {seconds(floor)}")
            axes.set(xscale="log", title=rows[0]["case"])
            axes.invert_yaxis()
            axes.grid(axis="x", which="both", alpha=0.3)
            axes.legend(loc="upper right")
            axes.set_xlabel(f"seconds\n{record['command']}\n{where(record)}; {speeds(record)}", fontsize=6)
        for kind, more in KINDS.items():
            figure.savefig(folder / f"{model}-{ranks}.{kind}", dpi=120, metadata=more)


def show(folder):
    """Write the page and the plots of what is saved in ``folder``. Whether the plots could be drawn."""
    found = saved(folder)
    (folder / "README.md").write_text("\n".join(tables(found)) + "\n", encoding="utf-8")
    try:
        draw(found, folder)
    except ModuleNotFoundError as lacking:
        print(f"no plots: {lacking}; pip install -c constraints.txt -e '.[bench]', then --plot {folder}")
        return False
    return True


def arguments(words):
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).with_suffix("")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="presets or folders")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=list(RANKS))
    parser.add_argument("--repeats", type=int, default=10, help="runs of each mode and transport of dynatrain")
    parser.add_argument("--slow-repeats", type=int, default=1, help="runs of every other method")
    parser.add_argument("--out", type=Path, default=here, help="where everything is written")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="run nothing; draw what is saved there")
    found = parser.parse_args(words)
    if odd := [one for one in found.ranks if one < 2 or one % 2]:
        parser.error(f"--ranks {','.join(map(str, odd))}: the cases are of an even number of ranks, 2 at least")
    if found.plot is not None and not any(found.plot.glob("*.json")):
        parser.error(f"--plot {found.plot}: no runs are saved there")
    return found


def main(words):
    """Run, write and draw. 0 where nothing is missing."""
    given = arguments(words)
    lacking = 0 if given.plot else run(given)
    return 0 if show(given.plot or given.out) and not lacking else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
