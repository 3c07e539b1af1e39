"""The command ``dynatrain``: finds the named command, calls it, and turns what goes wrong into a message and a code.

Exit codes: 0 done, or already so; 2 the user's mistake; 3 the run failed, or what was asked of it did not happen; 75
stopped and saved; 130 Ctrl-C; 143 SIGTERM with nothing saved; 1 only for a bug of ours. Only the module of the command
that was named is imported.
"""

import difflib
import importlib
import io
import json
import keyword
import os
import sys
import tempfile
import traceback
from pathlib import Path

import dynatrain
from dynatrain.app.mistake import MistakeError, is_mistake
from dynatrain.observe.versions import PYTHON

COMMANDS = {
    "demo": "train a small model on four CPU ranks while its layout changes eight times",
    "train": "train as a TOML file says; --section.key=value changes single settings",
    "status": "what a run is doing",
    "events": "what has happened to a run",
    "history": "the switches of a run: bytes, seconds, digests",
    "logs": "what the ranks of a run printed",
    "switch": "change the layout of a running run",
    "prepare": "build and warm a layout ahead, so that a switch to it begins at once",
    "scale": "give a running run more ranks, or fewer",
    "drain": "take ranks out of a running run, and wait until they are gone",
    "lend": "give ranks' places to another program for a while; the run goes on with the others",
    "reclaim": "take the lent places back",
    "park": "bring a run's state to host memory; its devices are free until it is unparked",
    "unpark": "bring a parked run's state back, and train on",
    "join": "bring this machine to a running run, as a place for ranks",
    "save": "save a running run beside training",
    "stop": "end a running run at its next step edge, saved",
    "layout": "explain a layout, or the difference of two",
    "plan": "what a change of layout moves: bytes, peak memory, floor",
    "simulate": "what a change of layout would take on a cluster: seconds, floor, busiest link",
    "bench": "measure a switch on this machine, beside what PyTorch offers for it",
    "check": "check a run, a checkpoint, a switch, a certificate or a plan offline",
    "export": "write the weights of a checkpoint as a Hugging Face folder",
    "import": "make a run out of a Hugging Face folder",
    "generate": "have a run's model continue a text",
}
"""Every command, with what it does in a line."""

DONE, BUG, MISTAKE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


def main() -> int:
    """Run the command of this process; returns its exit code."""
    words = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a damaged file may say what no encoding knows
    try:
        return _run(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has closed it, as `| head` does. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except ValueError as error:
        return _refused(error, words) if is_mistake(error) else _bug(error)
    except Exception as error:  # noqa: BLE001 - the last place that can turn a bug into a message
        return _bug(error)


def _run(words: list[str]) -> int:
    if sys.version_info[:2] != PYTHON:
        tested = ".".join(map(str, PYTHON))
        raise MistakeError(f"dynatrain is tested with Python {tested} only; this is {sys.version.split()[0]}.")
    name = words[0] if words else "--help"
    if name in {"-h", "--help", "help"}:
        sys.stdout.write(_help())
        return DONE
    if name == "--version":
        sys.stdout.write(f"dynatrain {dynatrain.__version__}\n")
        return DONE
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2) or list(COMMANDS)
        raise MistakeError(f"There is no command {name!r}. Nearest: {', '.join(near)}. See dynatrain --help.")
    module = importlib.import_module(f"dynatrain.app.commands.{name}{'_' * keyword.iskeyword(name)}")
    return int(module.run(words[1:]))


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        (
            "usage: dynatrain COMMAND [...]",
            "",
            "Train language models whose parallel layout changes while training runs.",
            "",
            *lines,
            "",
            "dynatrain COMMAND --help explains one. RUN is a run's name or folder; the newest where none is given.",
            "--json, with any command, prints one JSON object.",
            "",
        )
    )


def _refused(error: ValueError, words: list[str]) -> int:
    if "--json" in words:
        problems = list(getattr(error, "problems", ()))
        sys.stdout.write(json.dumps({"error": str(error), "problems": problems}) + "\n")
    sys.stderr.write(f"{error}\n")
    return MISTAKE


def _bug(error: Exception) -> int:
    """Keep the traceback for whoever mends it; people get one line."""
    with tempfile.NamedTemporaryFile("w", prefix="dynatrain-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(f"dynatrain {dynatrain.__version__}, Python {sys.version}\n{sys.argv}\n\n")
        traceback.print_exception(error, file=file)
    where = Path(file.name)
    sys.stderr.write(f"This is a bug of dynatrain: {type(error).__name__}: {error}\nPlease report it with {where}.\n")
    return BUG
