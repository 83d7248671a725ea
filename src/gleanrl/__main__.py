"""Runs the command line for `python -m gleanrl`, and so also for `torchrun -m gleanrl`."""

import sys

from gleanrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
