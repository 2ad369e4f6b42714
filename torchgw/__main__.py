"""Run the command line as ``python -m torchgw``."""

import sys

from torchgw.cli import main

__all__ = []

if __name__ == "__main__":
    sys.exit(main())
