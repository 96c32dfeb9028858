"""How many CTAs one SM holds at once."""

from __future__ import annotations

from urdir.driver.emulator.machine.compile import target_number

# Threads and bytes of shared memory of one SM, by compute capability (CUDA C++ guide, table of
# technical specifications); the last line that is not above the target counts.
_SM_LIMITS = (
    (50, 2048, 65536), (75, 1024, 65536), (80, 2048, 167936), (86, 1536, 102400),
    (87, 2048, 167936), (89, 1536, 102400), (90, 2048, 233472), (120, 1536, 102400),
)  # fmt: skip
MAX_CTAS_PER_SM = 32
#: Shared memory that the system takes of every CTA.
RESERVED_SHARED = 1024


def ctas_per_sm(target: str, threads: int, shared_bytes: int) -> int:
    """CTAs of ``threads`` threads and ``shared_bytes`` (static and dynamic), 0: none fits."""
    number = target_number(target)
    _, limit, shared = [row for row in _SM_LIMITS if row[0] <= number][-1]
    by_threads = limit // (-(-threads // 32) * 32)
    return min(MAX_CTAS_PER_SM, by_threads, shared // (shared_bytes + RESERVED_SHARED))
