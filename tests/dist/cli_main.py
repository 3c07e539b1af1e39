"""The command line with ranks of the tests: ``python cli_main.py MODULE:ENTRY COMMAND [...]``."""

import sys

import dynatrain.app.start as start_module
from dynatrain.app.main import main

if __name__ == "__main__":
    start_module.start.__kwdefaults__["entry"] = f"tests.dist.{sys.argv.pop(1)}"
    assert "torch" not in sys.modules, "nothing before the agent may import torch"
    sys.exit(main())
