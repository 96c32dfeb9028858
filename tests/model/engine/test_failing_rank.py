"""One of two ranks fails, in every phase: all that is told is one error, soon, and all is closed.

Each case is a process of its own (failing_rank.py), so that it can be two real GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("failing_rank.py")
MODEL = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q8_0.gguf"
#: Seconds until a rank that waits has given up, at most: `spec.POLLS` looks.
SOON = 30.0
#: Within a step the others wait for the rank. Its step is refused, or does not come though it was
#: taken, or an earlier kernel of its stream faults.
CASES = [
    *(("loading", fault) for fault in ("refused", "address")),
    *(
        (phase, fault)
        for phase in ("prompt", "long prompt", "decoding")
        for fault in ("refused", "absent", "address")
    ),
    ("idle", "address"),
]

pytestmark = [pytest.mark.full, pytest.mark.slow]


@pytest.mark.parametrize(("phase", "fault"), CASES)
def test_a_rank_that_fails_ends_all_with_one_error(
    phase: str, fault: str, device_name: str, needs_gpus: Callable[[int], None]
) -> None:
    needs_gpus(2)
    result = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, device_name, MODEL, phase, fault],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == ""
    print(result.stdout)
    told = re.split(r"^(?=[\d.]+ s: |opened|closed)", result.stdout, flags=re.MULTILINE)[1:]
    seconds, error = told[0].split(" s: ", 1)
    assert float(seconds) < SOON
    assert told[-1] == "closed\n"
    if phase == "loading" and fault == "refused":  # nothing ran: the engine is not there
        assert error.startswith("CudaError: cuLaunchKernelEx")
        assert len(told) == 2
        return
    if device_name == "cuda":  # the driver tells it of all that reach each other's memory
        expected = {"address": ["CUDA_ERROR_ILLEGAL_ADDRESS"] * 2}.get(
            fault, ["CUDA_ERROR_LAUNCH_FAILED"] * 2
        )
    else:
        of_first = "no fault of its own" if phase == "loading" else "CUDA_ERROR_LAUNCH_TIMEOUT"
        of_last = "CUDA_ERROR_ILLEGAL_ADDRESS" if fault == "address" else "no fault of its own"
        expected = [of_first, of_last]
    assert re.findall(r"^rank \d, .*: (.*)$", error, re.M) == expected
    waited = re.search(r"^rank 0 timed out waiting for rank 1, in epoch \d+$", error, re.M)
    # the emulator sees that nobody comes, and does not look so often
    assert (waited is not None) == (device_name == "cuda" and fault != "address")
    if phase == "loading":
        return
    *_, a, b, opened, _ = told
    assert opened == "opened\n"
    for other in (a, b):
        assert re.match(r"\d+\.\d s: GroupError: .* close the group", other)
