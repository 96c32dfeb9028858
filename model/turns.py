"""How long a thread of a process that answers runs while others wait for the interpreter."""

from __future__ import annotations

import sys

#: The switch interval in seconds (usually 0.005). Threads plan, render and record beside the one
#: that turns steps, which gives the interpreter up in every call of the driver, some ten a step.
#: First tokens of a server that records graphs come no sooner with 0.0001, and launches take longer
#: (H200).
TURN_SECONDS = 0.0005


def take_short_turns() -> None:
    """Set it for this process. Libraries leave it to their caller."""
    sys.setswitchinterval(TURN_SECONDS)
