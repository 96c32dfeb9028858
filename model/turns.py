"""How long a thread of a process that answers runs while others wait for the interpreter."""

from __future__ import annotations

import sys

#: The switch interval in seconds (usually 0.005). Threads plan, render and record beside the one
#: that turns steps, which gives the interpreter up in every call of the driver, some ten a step.
TURN_SECONDS = 0.0005
#: The same while graphs are recorded ahead: a kernel is loaded in some twenty calls, after each of
#: which the thread waits for one that plans. On an H200 the last graph of a first start came after
#: 8.3 s in place of 9.0 (2026-11-29).
SHORT_TURN_SECONDS = 0.0001


def take_short_turns() -> None:
    """Set it for this process. Libraries leave it to their caller."""
    sys.setswitchinterval(TURN_SECONDS)


def take_shorter_turns() -> None:
    """Set it for this process while graphs are recorded ahead."""
    sys.setswitchinterval(SHORT_TURN_SECONDS)
