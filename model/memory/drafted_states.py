"""Sizes of recurrent states in sessions whose steps verify drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from urdir.model.errors import UnsupportedError
from urdir.model.families.ngrams import NgramMemory
from urdir.model.families.recurrent import Recurrent, Selective
from urdir.model.families.rules import rule_of
from urdir.model.families.rwkv import ChannelMix, TimeMix
from urdir.ptxgen.kernels.recurrent.causal_conv import tail_slots
from urdir.ptxgen.kernels.recurrent.drafted_recurrence import DraftedRecurrence
from urdir.ptxgen.kernels.recurrent.drafted_rows import KEPT, DraftedStates
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan


def drafted_state(mixer: Recurrent, most: int) -> dict[str, int]:
    """Number of values of a sequence's state, by name, for steps of up to ``most`` drafts: tails of
    convolutions are rings. Raises UnsupportedError for a mixer that cannot verify drafts."""
    if isinstance(mixer, TimeMix | ChannelMix):
        raise UnsupportedError(f"drafts of a model with {mixer.kind} are not supported")
    if isinstance(mixer, NgramMemory):
        return {**mixer.state_with(most)}
    tails = {
        name: conv.channels * tail_slots(conv.taps, most)
        for name, conv in mixer.convolutions.items()
    }
    return {**mixer.state, **tails}


def kept_inputs(mixer: Recurrent, most: int) -> Mapping[str, int]:
    """Number of values of a sequence's arrays that keep inputs of up to ``most`` drafts, by the
    kernels' parameter names; see `DraftedStates`."""
    shape: dict[str, Any] = {"rows": 1, "sequences": 1, "max_len": 1, "segments": 0, "most": most}
    kernel: DraftedStates
    if (rule := rule_of(mixer)) is not None:
        kernel = DraftedRecurrence(**shape, **rule)
    elif isinstance(mixer, Selective):
        kernel = DraftedScan(**shape, channels=mixer.conv.channels, size=mixer.size)
    else:
        return {}
    return {p.name: kernel.nbytes(p) // 4 for p in kernel.kept_params if p.name.startswith(KEPT)}
