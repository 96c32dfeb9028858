"""`python -m urdir` (and `python -m urdir.model`) is the `urdir` command.

Ctrl-C is answered from here on, while the rest is imported.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from urdir.model.interrupts import spare_imports

        spare_imports()
        from urdir.model.cli import main as command

        return command()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
