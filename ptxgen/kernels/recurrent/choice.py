"""Which kernel serves a recurrence: a function of the rows, the heads and what is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.ptxgen.kernels.recurrent.chunked_recurrence import ChunkedRecurrence
from urdir.ptxgen.kernels.recurrent.gated_recurrence import GatedRecurrence
from urdir.ptxgen.kernels.recurrent.prefill_scan import MAX_WARPS, PrefillScan
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import ceil_div

#: Rows of prompts from which on chunks pay. Token by token and by chunks, on an H200, the delta
#: rule of Qwen3-Next takes 20 and 11 us at 32 rows, 161 and 54 at 512, 686 and 190 at 2,048;
#: Mamba-2 of Nemotron-H 36 and 34, 236 and 53, 889 and 141; Kimi Delta Attention 24 and 17, 244 and
#: 154, 938 and 491, but 15 and 21 at 16 rows.
CHUNKED_ROWS = 32


def recurrence(target: str, *, exact: bool, **fields: Any) -> GatedRecurrence:
    """The kernel for a device of native target ``target``; ``fields`` are `GatedRecurrence`'s.

    ``exact`` asks for f32 throughout: token by token. Raises PtxgenError for shapes that no kernel
    handles.
    """
    whole = GatedRecurrence(**fields)
    if exact or not whole.segments or whole.rows < CHUNKED_ROWS:
        return whole
    if not ChunkedRecurrence.serves(whole.key_dim, whole.delta):
        return whole
    chunked = ChunkedRecurrence(**fields)
    return chunked if chunked.target_on(target) else whole


def selective_scan(sms: int, **fields: Any) -> SelectiveScan:
    """The kernel of Mamba's scan on a device with so many SMs; ``fields`` are `SelectiveScan`'s.

    Over prompts each SM has a CTA, where these are large enough for all channels. Raises
    PtxgenError for shapes that no kernel handles.
    """
    if not fields["segments"]:
        return SelectiveScan(**fields)
    scan = PrefillScan(**fields)
    warps = ceil_div(scan.channels * scan.lanes, 32 * sms)
    return replace(scan, warps=min(MAX_WARPS, warps))
