"""Targets: which PTX a compute capability takes, and which ISA version an instruction needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from urdir.ptxgen.errors import PtxgenError

Version = tuple[int, int]

# First PTX ISA version with `.target sm_NN` (PTX ISA, "Release Notes", table of targets).
FIRST_VERSION: Mapping[str, Version] = {
    "sm_75": (6, 3),
    "sm_80": (7, 0),
    "sm_86": (7, 1),
    "sm_87": (7, 4),
    "sm_89": (7, 8),
    "sm_90": (7, 8),
    "sm_90a": (8, 0),
    "sm_100": (8, 6),
    "sm_100a": (8, 6),
    "sm_103": (8, 8),
    "sm_120": (8, 7),
    "sm_120a": (8, 7),
}

#: The targets every kernel is assembled for in the tests.
TESTED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Instruction -> (first ISA version, first architecture) (PTX ISA, each instruction's "PTX ISA
# Notes" and "Target ISA Notes"). Only instructions that some target or version lacks.
FEATURES: tuple[tuple[re.Pattern[str], Version, int], ...] = tuple(
    (re.compile(pattern), version, sm)
    for pattern, version, sm in (
        (r"\bcp\.async\.(ca|cg)\b", (7, 0), 80),
        (r"\bcp\.async\.bulk\b", (8, 0), 90),
        (r"\bgriddepcontrol\b", (7, 8), 90),
        (r"\bmbarrier\.", (7, 0), 80),
        (r"\bmbarrier\.try_wait\b", (7, 8), 90),
        (r"\bfence\.proxy\.async\b", (8, 0), 90),
        (r"\bmma\.sync\.aligned\.m16n8k(16|32)\b", (7, 0), 80),
        (r"\bcvt\.[a-z.]*bf16\b", (7, 0), 80),
        (r"\bredux\.sync\b", (7, 0), 80),
        (r"\bL2::evict_(first|last)\b", (7, 4), 80),
        (r"\bL2::cache_hint\b", (7, 4), 80),
        (r"\bnanosleep\b", (6, 3), 70),
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One compute capability as PTX names it: ``Target.parse("sm_90")``."""

    name: str
    sm: int

    @staticmethod
    def parse(name: str) -> Target:
        """The target called ``name``; raises PtxgenError for an unknown one."""
        if name not in FIRST_VERSION:
            raise PtxgenError(f"unknown target {name!r}: one of {', '.join(FIRST_VERSION)}")
        return Target(name, int(re.sub(r"\D", "", name)))

    def version_for(self, body: str) -> Version:
        """The lowest PTX ISA version that knows this target and every instruction of ``body``.

        Raises PtxgenError when an instruction needs a newer architecture.
        """
        version = FIRST_VERSION[self.name]
        for pattern, first_version, first_sm in FEATURES:
            found = pattern.search(body)
            if not found:
                continue
            if self.sm < first_sm:
                raise PtxgenError(f"{found[0]} needs sm_{first_sm}, the target is {self.name}")
            version = max(version, first_version)
        return version
