"""Sizes of recurrent states in sessions whose steps verify drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from urdir.model.families.recurrent import Recurrent, Selective
from urdir.model.families.rules import rule_of
from urdir.ptxgen.kernels.recurrent.drafted_recurrence import DraftedRecurrence
from urdir.ptxgen.kernels.recurrent.drafted_rows import KEPT, DraftedStates
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan


def kept_inputs(mixer: Recurrent, most: int) -> Mapping[str, int]:
    """Number of values of a sequence's arrays that keep inputs of up to ``most`` drafts, by the
    kernels' parameter names; see `DraftedStates`."""
    shape: dict[str, Any] = {"rows": 1, "sequences": 1, "max_len": 1, "segments": 0, "most": most}
    kernel: DraftedStates
    if (rule := rule_of(mixer)) is not None:
        kernel = DraftedRecurrence(**shape, rule=rule)
    elif isinstance(mixer, Selective):
        kernel = DraftedScan(**shape, channels=mixer.conv.channels, size=mixer.size)
    else:
        return {}
    return {p.name: kernel.nbytes(p) // 4 for p in kernel.kept_params if p.name.startswith(KEPT)}
