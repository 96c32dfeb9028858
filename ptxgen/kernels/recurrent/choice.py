"""Choice of recurrence kernels by rows, heads and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.chunked_recurrence import ChunkedRecurrence
from urdir.ptxgen.kernels.recurrent.drafted_recurrence import DraftedRecurrence
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan
from urdir.ptxgen.kernels.recurrent.gated_recurrence import GatedRecurrence
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.prefill_conv import PrefillConv
from urdir.ptxgen.kernels.recurrent.prefill_scan import MAX_WARPS, PrefillScan
from urdir.ptxgen.kernels.recurrent.prepare_chunks import PrepareChunks
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import ceil_div

#: Prompt rows from which on chunks pay. Token by token and in chunks, on an H200, the delta rule of
#: Qwen3-Next takes 13.2 and 8.4 us at 32 rows, 655 and 86 at 2,048; Mamba-2 of Nemotron-H 17.3 and
#: 10.2, 871 and 80; Kimi Delta Attention 16.6 and 11.4, 919 and 144.
CHUNKED_ROWS = 32


def recurrences(
    target: str,
    rule: HeadsRule,
    *,
    exact: bool,
    most: int = 0,
    drafted: bool = False,
    starts_next: bool = False,
    **rows: Any,
) -> tuple[RecurrentRows, ...]:
    """The kernels for a device of native target ``target``, in order; ``rows`` are the fields of
    `RecurrentRows`. ``most`` and ``drafted`` are those of `DraftedStates`, where steps have drafts,
    ``starts_next`` that of `GatedRecurrence`.

    ``exact`` requires f32 throughout: token by token. Raises PtxgenError for unsupported shapes.
    """
    if most and not rows["segments"]:
        return (DraftedRecurrence(**rows, rule=rule, most=most, drafted=drafted),)
    whole = GatedRecurrence(**rows, rule=rule, starts_next=starts_next)
    pays = rows["segments"] and rows["rows"] >= CHUNKED_ROWS and ChunkedRecurrence.serves(rule)
    if exact or not pays:
        return (whole,)
    chunked = PrepareChunks(**rows, rule=rule), ChunkedRecurrence(**rows, rule=rule)
    return chunked if all(kernel.target_on(target) for kernel in chunked) else (whole,)


def causal_conv(*, packs: bool = False, **fields: Any) -> CausalConv:
    """The kernel of a convolution; ``fields`` are `CausalConv`'s. With ``packs`` (`can_pack`) the
    results are also written packed."""
    return (PrefillConv if fields["segments"] else CausalConv)(**fields, packs=packs)


def selective_scan(
    sms: int, *, packs: bool = False, most: int = 0, drafted: bool = False, **fields: Any
) -> SelectiveScan:
    """The kernel of Mamba's scan on a device with ``sms`` SMs; ``fields`` are `SelectiveScan`'s,
    ``most`` and ``drafted`` those of `DraftedStates`, where steps have drafts.

    For prompts each SM has a CTA, if CTAs are large enough for all channels. With ``packs``
    (`can_pack`) the results are packed. Raises PtxgenError for unsupported shapes.
    """
    if not fields["segments"]:
        if most:
            return DraftedScan(**fields, packs=packs, most=most, drafted=drafted)
        return SelectiveScan(**fields, packs=packs)
    scan = PrefillScan(**fields, packs=packs)
    warps = ceil_div(scan.channels * scan.parts, 32 * sms)
    return replace(scan, warps=min(MAX_WARPS, warps))
