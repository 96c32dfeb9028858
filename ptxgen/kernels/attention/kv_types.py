"""Element types and page lengths that a KV cache can have; no numpy."""

from __future__ import annotations

from typing import Literal

#: Element types a KV cache can hold (`kv_formats`).
KvDtype = Literal["f32", "f16", "bf16", "q8_0", "fp8", "q4_0"]
KV_DTYPES: tuple[KvDtype, ...] = ("f32", "f16", "bf16", "q8_0", "fp8", "q4_0")
#: The shortest page: a CTA's step then takes few pages.
MIN_PAGE_LEN = 16
