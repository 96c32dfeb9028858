"""Quantisation recipes: the type that llama.cpp gives each tensor (`src/llama-quant.cpp`).

A fused QKV matrix is Q5_K in Q4_K_M, as in published files. The newest llama.cpp takes Q6_K for
half of the layers and Q4_K for the others, which is as large.
"""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.families.shapes import Shape
from urdir.model.families.stored import Stored, StoredMatrix
from urdir.ptxgen.weights.formats import FORMATS, OWN_TYPES, Format

#: Recipes with several types. A type's own name is a recipe too.
MIXED = ("q4_k_m", "mxfp4_moe")
#: The type of a tensor whose row length is not a multiple of the type's block.
_FALLBACK = {
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    **{"E4M3R256": "E4M3G128", "E4M3G128": "E4M3G32", "E2M1G256": "E2M1G64", "W4G128": "W8G32"},
    **{name: "IQ4_NL" for name in FORMATS if name.startswith("IQ") and name != "IQ4_NL"},
}
#: Matrices that are never quantised; the last one keeps its published type.
_KEPT = {
    **dict.fromkeys(("ffn_gate_inp.weight", "position_embd.weight"), "F32"),
    "ffn_gate_inp_shexp.weight": "F32",  # a vector in files
    "per_layer_model_proj.weight": "BF16",
    # of RWKV: the decays stay as they are, other products of low rank in the published type
    **{f"time_mix_{of}{n}.weight": "F32" for of in ("w", "decay_w") for n in (1, 2)},
    **{f"time_mix_{of}{n}.weight": "F16" for of in "avg" for n in (1, 2)},
}
#: Those that quantised folders keep as floats.
_FLOATS = ("token_embd.weight", "output.weight")
_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")


def formats(stored: Sequence[Stored], shape: Shape, kind: str) -> dict[str, Format]:
    """The type of every tensor by name; vectors are F32. ``kind`` is one of `MIXED`, or a type."""
    found = {}
    values = dict.fromkeys(s.name for s in stored if _role(s.name) == "attn_v.weight")
    places = {name: number for number, name in enumerate(values)}
    for item in stored:
        kept = _KEPT.get(_role(item.name))
        if not isinstance(item, StoredMatrix):
            wanted = "F32"
        elif kept is not None:
            wanted = kept
        elif kind == "q4_k_m":
            wanted = _q4_k_m(item, shape, places)
        elif kind == "mxfp4_moe":
            wanted = "MXFP4" if _role(item.name).endswith("_exps.weight") else "Q8_0"
        elif FORMATS[kind.upper()].ggml_type >= OWN_TYPES and _role(item.name) in _FLOATS:
            wanted = "BF16"
        else:
            wanted = kind.upper()
        fmt = FORMATS[wanted]
        while isinstance(item, StoredMatrix) and item.shape[-1] % fmt.block:
            fmt = FORMATS[_FALLBACK.get(fmt.name, "F16")]
        found[item.name] = fmt
    return found


def _q4_k_m(item: StoredMatrix, shape: Shape, places: dict[str, int]) -> str:
    role = _role(item.name)
    if role == "output.weight" or (shape.tied and role in _TABLES):
        return "Q8_0" if shape.arch == "falcon" else "Q6_K"
    if role == "attn_qkv.weight":
        return "Q5_K"
    if role == "attn_v.weight":
        return _values(shape, more_bits(places[item.name], len(places)))
    if role.startswith("ffn_down"):
        return _down(int(item.name.split(".")[1]), shape)
    if shape.experts == 8:
        return {"attn_k.weight": "Q8_0", "attn_output.weight": "Q5_K"}.get(role, "Q4_K")
    return "Q4_K"


def _values(shape: Shape, more: bool) -> str:
    if shape.experts == 8:
        return "Q8_0"
    if more:
        return "Q6_K"
    # in a 70B model every value head serves eight query heads
    is_70b = (
        shape.layers == 80 and shape.arch in ("llama", "qwen2") and shape.kv_heads < shape.heads
    )
    return "Q5_K" if is_70b else "Q4_K"


def _down(layer: int, shape: Shape) -> str:
    more = more_bits(layer, shape.layers)
    if shape.arch == "falcon":
        return "Q6_K" if layer < shape.layers // 16 else "Q5_K" if more else "Q4_K"
    return "Q6_K" if more else "Q4_K"


def more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or every third in between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _role(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name
