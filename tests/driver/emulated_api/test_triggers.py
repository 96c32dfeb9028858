"""When the emulator lets the dependents of a kernel's dependents begin."""

from __future__ import annotations

import pytest

from urdir.driver.emulator.functions import triggers_before_waiting
from urdir.ptxgen import ptx

HEAD = """.version 8.6
.target sm_90
.address_size 64
.visible .entry k()
{
    .reg .pred %p;
    .reg .b32 %n;
    mov.u32 %n, %tid.x;
    setp.eq.u32 %p, %n, 0;
"""
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


@pytest.mark.parametrize(
    ("body", "early"),
    [
        (f"{WAIT} {TRIGGER} ret;", False),
        (f"{TRIGGER} {WAIT} ret;", True),
        (f"@%p {WAIT} {TRIGGER} ret;", True),  # threads that do not wait
        (f"@%p bra A; {WAIT} A: {TRIGGER} ret;", True),
        (f"@%p bra A; {WAIT} {TRIGGER} ret; A: {WAIT} {TRIGGER} ret;", False),
        (f"@%p ret; {WAIT} {TRIGGER} ret;", True),  # an ended thread has triggered
        (f"A: @%p bra A; {WAIT} {TRIGGER} ret;", False),
        (f"{WAIT} ret;", False),  # its dependents begin when it is complete
        ("ret;", False),
    ],
)
def test_a_kernel_triggers_before_it_waits(body: str, early: bool) -> None:
    entry = ptx.parse(HEAD + body.replace("; ", ";\n").replace(": ", ":\n") + "\n}\n").entries["k"]
    assert triggers_before_waiting(entry) == early
