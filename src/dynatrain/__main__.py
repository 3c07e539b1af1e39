"""``python -m dynatrain`` is the command ``dynatrain``."""

import sys

from dynatrain.app.main import main

if __name__ == "__main__":
    sys.exit(main())
