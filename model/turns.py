"""How long a thread of a process that answers runs while others wait for the interpreter."""

from __future__ import annotations

import sys

#: The switch interval (usually 5 ms). Threads plan, render and record beside the one that turns
#: steps, which gives the interpreter up in every call of the driver: five such waits are 25 ms.
TURN_SECONDS = 0.0005


def take_short_turns() -> None:
    """Set it for this process. Libraries leave it to their caller."""
    sys.setswitchinterval(TURN_SECONDS)
