"""`python -m trust_tta` is the command `trust-tta`."""

from __future__ import annotations

import sys

from trust_tta.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
