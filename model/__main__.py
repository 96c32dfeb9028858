"""`python -m urdir` (and `python -m urdir.model`) is the `urdir` command."""

import sys

from urdir.model.cli import main

sys.exit(main())
