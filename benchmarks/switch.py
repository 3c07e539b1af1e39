"""Measure switches and keep the rows: ``python benchmarks/switch.py [any argument of "dynatrain bench switch"]``.

Writes ``switch.json`` beside this file.
"""

import contextlib
import io
import sys
from pathlib import Path

from dynatrain.app.commands.bench import run

if __name__ == "__main__":
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run(["switch", "--json", *sys.argv[1:]])
    Path(__file__).with_suffix(".json").write_text(printed.getvalue(), encoding="utf-8")
    sys.exit(code)
