"""The `urdir` command, also as `python -m urdir` and `python -m urdir.model`.

It imports nothing before it is ready for Ctrl-C, which ends it silently until the command line is
there to say more.
"""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from urdir.model.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
