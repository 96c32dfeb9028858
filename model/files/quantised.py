"""Types to which matrices can be quantised while they are read, and recipes of several types."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import SettingsError
from urdir.model.files.tensor_types import tensor_type, type_number
from urdir.model.files.wanted_types import QUANTISED
from urdir.ptxgen.weights.quantise import QUANTISERS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: What a type becomes where its block does not divide rows, as in llama.cpp; then FP8's.
_OTHERS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "E4M3R256": "E4M3G128",
           "E4M3G128": "E4M3G32"}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The types that matrices of a model of ``layers`` layers get: those of "q4_k_m" (llama.cpp's,
    `src/llama-quant.cpp`), or one type for all. ``tied``: the embedding is the output matrix."""

    name: str
    layers: int
    tied: bool = False

    def __post_init__(self) -> None:
        if self.name not in QUANTISED:
            raise SettingsError(
                f"cannot quantise to '{self.name}' (possible: {', '.join(QUANTISED)})"
            )

    def type_of(self, tensor: str, width: int) -> int | None:
        """The type's number for rows of ``width`` values; None where no type fits them."""
        wanted: str | None = "E4M3R256" if self.name == "fp8" else self.name.upper()
        if self.name == "q4_k_m":
            wanted = self._mixed(tensor)
        while wanted is not None and width % tensor_type(type_number(wanted)).block:
            wanted = _OTHERS.get(wanted)
        return None if wanted is None else type_number(wanted)

    def _mixed(self, tensor: str) -> str:
        role = tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor
        if role == "output.weight" or (self.tied and role == "token_embd.weight"):
            return "Q6_K"
        if role == "attn_qkv.weight":
            return "Q5_K"
        if role == "attn_v.weight" or role.startswith("ffn_down"):
            layer = _LAYER.match(tensor)
            return "Q6_K" if layer and self._takes_more(int(layer[1])) else "Q4_K"
        return "Q4_K"

    def _takes_more(self, layer: int) -> bool:
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2


def quantizer(type_id: int) -> Callable[[Floats], Bytes]:
    """What makes blocks of rows (rows, width) f32 -> (rows, bytes)."""
    name = tensor_type(type_id).name
    if name in QUANTISERS:
        return QUANTISERS[name]
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    kind = GGMLQuantizationType(type_id)

    def make(rows: Floats) -> Bytes:
        made: Any = quantize(rows, kind)
        return made.view(np.uint8)  # type: ignore[no-any-return]

    return make
