"""Types to which a folder's matrices can be quantised while loading."""

from __future__ import annotations

from urdir.model.errors import SettingsError
from urdir.model.files.tensor_types import type_number

#: Types that the gguf package produces without calibration data and that our kernels read.
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32")


def quantised_type(name: str) -> int:
    """ggml's number of a type; SettingsError if it is not in ``QUANTISED``."""
    if name not in QUANTISED:
        raise SettingsError(f"cannot quantise to '{name}' (possible: {', '.join(QUANTISED)})")
    return type_number(name.upper())
