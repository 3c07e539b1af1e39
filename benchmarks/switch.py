"""Measure switches and keep the rows: ``python benchmarks/switch.py [any argument of "dynatrain bench switch"]``.

Writes ``switch.json`` beside this file.
"""

import contextlib
import io
import sys
from pathlib import Path

from dynatrain.app.main import main


def measured(words: list[str]) -> tuple[int, str]:
    """Exit code of the command, and what it printed."""
    sys.argv = ["dynatrain", "bench", "switch", "--json", *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            code = main()
        except SystemExit as leaving:  # of --help
            code = int(leaving.code or 0)
    return code, printed.getvalue()


if __name__ == "__main__":
    code, text = measured(sys.argv[1:])
    if code == 0 and text.startswith("{"):
        Path(__file__).with_suffix(".json").write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    sys.exit(code)
