"""The stored tensors of each quantised matrix, put together to one under the float tensor's name.

A matrix ``N`` ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj") is
stored as one of these sets of tensors:

| tensors | what |
|---|---|
| N (F8_E4M3), N_scale_inv or N_scale | FP8: a scale for a block, a row or all |
| N (I8), N_scale | integers of eight bits |
| N_packed (I32), N_scale, N_zero_point, N_shape, N_g_idx | packed integers of compressed-tensors |
| qweight, qzeros, scales, g_idx in place of ``weight`` | GPTQ, AWQ: inputs are rows |
| N (U8), N_scale (F8_E4M3), N_scale_2 | NVFP4 of modelopt |
| N_packed (U8), N_scale (F8_E4M3), N_global_scale | NVFP4 of compressed-tensors |
| N_packed or N_blocks (U8), N_scale or N_scales (U8) | MXFP4 |
| N (U8), N.absmax, N.quant_map, N.nested_*, N.quant_state.* | NF4 and FP4 of bitsandbytes |
| N (I8), SCB, weight_format of the module | LLM.int8 of bitsandbytes |
| N (U8), N_scale | ternary weights of BitNet, four in a byte; or floats N that are rounded |
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.pretrained.quantised import bitsandbytes, e2m1, e4m3, integers, ternary
from urdir.model.files.pretrained.quantised.parts import Parts
from urdir.model.files.pretrained.quantised.scheme import Scheme
from urdir.model.files.safetensors import StoredTensor

#: Ends of names that say how activations and caches are quantised. They stay floats.
_OF_ACTIVATIONS = (
    *(".input_scale", ".output_scale", ".input_global_scale", ".input_zero_point"),
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".input_scale_ub"),
    *("_input_scale", ".activation_scale_ub", ".weight_scale_ub"),
)
#: Ends of the names of quants, and the matrix's instead.
_ENDS = (("_packed", ""), ("_blocks", ""), (".qweight", ".weight"), (".SCB", ".weight"))
_QUANTISED = ("F8_E4M3", "F8_E5M2", "I8", "U8")


def merge_parts(
    stored: Mapping[str, StoredTensor], scheme: Scheme, path: Path
) -> dict[str, StoredTensor]:
    """The tensors of a folder with one of a block type (``dtype`` is its name) for each quantised
    matrix; the others as they are. Raises UnsupportedError for a set of tensors that is none of the
    above, SafetensorsError for shapes and types that do not go together."""
    rest = {name: of for name, of in stored.items() if not name.endswith(_OF_ACTIVATIONS)}
    merged = {}
    for name in list(rest):
        if name not in rest:
            continue
        is_rounded = ternary.is_rounded(rest[name], scheme)
        base = name if is_rounded else _base(rest[name], rest)
        if base is None:
            continue
        parts = Parts(base, rest, path)
        if scheme.method == "bitnet":
            matrix = ternary.rounded(parts) if is_rounded else ternary.packed(parts, scheme)
        else:
            matrix = _matrix(parts, scheme)
        for taken in parts.taken:
            del rest[taken]
        if base in rest or base in merged:
            raise SafetensorsError(f"{path}: tensor '{base}' is stored twice, also as '{name}'")
        merged[base] = matrix
    _warn(merged, scheme, path)
    return rest | merged


def kinds_of(stored: Mapping[str, StoredTensor], scheme: Scheme | None) -> dict[str, Any]:
    """How matrices are quantised, for reading: the ``method`` of quantization_config, and of each
    of the ``kinds`` the words and the number of matrices, most of them first; empty for a folder of
    floats."""
    if scheme is None:
        return {}
    counts = Counter(tensor.quants for tensor in stored.values() if tensor.quants)
    kinds = [{"kind": kind, "matrices": count} for kind, count in counts.most_common()]
    return {"method": scheme.method, "kinds": kinds}


def _warn(merged: Mapping[str, StoredTensor], scheme: Scheme, path: Path) -> None:
    decoded = [of for of in merged.values() if of.is_decoded]
    if decoded:
        nbytes = sum(len(of.data) for of in decoded)
        warnings.warn(
            f"{path}: {len(decoded)} matrices of {scheme.method} have codes of four bits in rows "
            "of widths not divisible by 32 or with a table of their own, and become F32, exactly: "
            f"{nbytes / 1e9:.2f} GB on the device (quantize= makes them smaller: f16, q8_0, q4_k_m "
            "and others)",
            stacklevel=2,
        )


def _base(tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> str | None:
    """The float tensor's name if this one has the quants of a matrix."""
    name = tensor.name
    for end, to in (*_ENDS, *((state, "") for state in bitsandbytes.STATES)):
        if name.endswith(end):
            return name.removesuffix(end) + to
    has_scale = f"{name}_scale" in stored or f"{name}_scale_inv" in stored
    return name if has_scale and tensor.dtype in _QUANTISED else None


def _matrix(parts: Parts, scheme: Scheme) -> StoredTensor:
    if (found := bitsandbytes.matrix(parts)) is not None:
        return found
    if parts.has("blocks"):
        return e2m1.mxfp4(parts, "blocks", "scales")
    if parts.module_has("qweight"):
        return integers.by_inputs(parts, scheme)
    if parts.has("packed"):
        if parts.dtype("packed") == "I32":
            return integers.by_outputs(parts, scheme)
        if parts.has("global_scale"):
            return e2m1.nvfp4(parts, "packed", "global_scale")
        return e2m1.mxfp4(parts, "packed", "scale")
    if parts.dtype("") == "F8_E4M3":
        return e4m3.matrix(parts, scheme)
    if parts.dtype("") == "I8":
        return integers.whole(parts)
    if parts.has("scale_2"):
        return e2m1.nvfp4(parts, "", "scale_2")
    raise UnsupportedError(
        f"{parts.path}: tensor '{parts.base}' is {parts.dtype('')}, quantised in an unknown way"
    )
