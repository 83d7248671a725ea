"""`python -m gleanrl`, and so `torchrun -m gleanrl`: the command line."""

import sys

from gleanrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
