"""Quantised checkpoints made of float ones: what their writers store, written from the formats'
definitions, and the weights that it stands for.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from urdir.model.files.safetensors import read_folder

Array = npt.NDArray[Any]
Stored = dict[str, Array]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_DTYPES = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "|u1": "U8", "|i1": "I8", "<i4": "I32", "<i8": "I64",
}  # fmt: skip
_NAMES = {np.dtype(ml_dtypes.bfloat16): "BF16", E4M3: "F8_E4M3"}
_READ = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """A *.safetensors file."""
    header, at = {}, 0
    for name, array in tensors.items():
        dtype = _NAMES.get(array.dtype) or _DTYPES[array.dtype.str]
        header[name] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes],
        }  # fmt: skip
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@dataclass(frozen=True)
class Kind:
    """``quantize`` (weights, rng) gives the tensors in place of ``weight`` by their own names, and
    the weights that they stand for. The rng of a matrix is one for all, or by what ``seed`` makes
    of its name."""

    config: Mapping[str, Any]
    quantize: Callable[[Array, np.random.Generator], tuple[Stored, Array]]
    seed: Callable[[str], int] | None = None


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def _fp8(weights: Array, scales: Array) -> tuple[Array, Array]:
    """Quants, and what they stand for, with scales as large as the weights."""
    quants = np.clip(weights / scales, -448, 448).astype(E4M3)
    return quants, quants.astype(np.float32) * scales


def fp8_blocks(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    shape = [-(-size // 128) for size in weights.shape]
    stored = rng.uniform(1e-4, 1e-3, shape).astype(np.float32)
    each = np.repeat(np.repeat(stored, 128, 0), 128, 1)[: len(weights), : weights.shape[1]]
    quants, values = _fp8(weights, each)
    return {"weight": quants, "weight_scale_inv": stored}, values


def fp8_rows(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    scales = rng.uniform(1e-4, 1e-3, (len(weights), 1)).astype(ml_dtypes.bfloat16)
    quants, values = _fp8(weights, scales.astype(np.float32))
    return {"weight": quants, "weight_scale": scales}, values


def fp8_matrix(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    scale = np.array(rng.uniform(1e-4, 1e-3), np.float32)
    quants, values = _fp8(weights, scale)
    return {"weight": quants, "weight_scale": scale, "input_scale": np.ones(1, "f4")}, values


def int8_rows(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    scales = (abs(weights).max(1, keepdims=True) / 127).astype(np.float16)
    quants = np.clip(np.round(weights / scales.astype(np.float32)), -128, 127).astype(np.int8)
    return {"weight": quants, "weight_scale": scales}, quants * scales.astype(np.float32)


def _bits_of(values: Array, bits: int) -> Array:
    """Numbers (rows, n), lowest bits first, as words (rows, n * bits / 32) i32."""
    digits = values.astype(np.int64)[..., None] >> np.arange(bits) & 1
    packed = np.packbits(digits.reshape(len(values), -1).astype(np.uint8), 1, bitorder="little")
    return packed.view(np.int32)


def _integers(
    weights: Array, bits: int, group: int, rng: np.random.Generator, zero: int | None
) -> tuple[Array, Array, Array, Array]:
    """Quants (rows, cols), scales and zero points (rows, groups), and what they stand for."""
    rows, cols = weights.shape
    group = group or cols
    groups = cols // group
    zeros = rng.integers(0, 2**bits, (rows, groups)) if zero is None else zero
    zeros = np.broadcast_to(zeros, (rows, groups))
    scales = rng.uniform(0.003, 0.02, (rows, groups)).astype(np.float16)
    each, offset = (np.repeat(x, group, 1) for x in (scales.astype(np.float32), zeros))
    quants = np.clip(np.round(weights / each) + offset, 0, 2**bits - 1).astype(np.int64)
    return quants, scales, zeros, (each * (quants - offset)).astype(np.float32)


def gptq(
    bits: int,
    group: int,
    *,
    added: int = 1,
    shuffled: bool = False,
    each: bool = False,
    symmetric: bool = False,
    seed: Callable[[str], int] | None = None,
) -> Kind:
    """``shuffled``: with columns in an order of activations, of ``each`` matrix (of those with a
    ``seed`` alike) or of those of as many columns, as the order of the same input is."""

    def quantize(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        zero, cols = 2 ** (bits - 1) if symmetric else None, weights.shape[1]
        of_group = np.arange(cols) // (group or cols)
        if shuffled:
            source = rng if each else np.random.default_rng(cols)
            of_group = source.permutation(of_group)
        quants, scales, zeros, values = _integers(weights, bits, group, rng, zero)
        zeros = zeros + (zeros == 0) * added  # what is stored is not negative
        factors, offset = scales.astype(np.float32)[:, of_group], zeros[:, of_group]
        values = (factors * (quants - offset)).astype(np.float32)
        return {
            "qweight": np.ascontiguousarray(_bits_of(quants, bits).T),
            "qzeros": _bits_of(zeros.T - added, bits),
            "scales": scales.T,
            "g_idx": of_group.astype(np.int32),
        }, values

    form = {"checkpoint_format": "gptq" if added else "gptq_v2"}
    fields = {"bits": bits, "group_size": group or -1, "desc_act": shuffled, "sym": symmetric}
    return Kind({"quant_method": "gptq", **form, **fields}, quantize, seed)


def of_input(name: str) -> int:
    """A number for all matrices of a layer, or of an expert, that multiply the same x."""
    alike = re.sub(r"(gate|up)_proj", "gate_up_proj", re.sub("[qkv]_proj", "qkv_proj", name))
    return zlib.crc32(alike.encode())


def awq(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    quants, scales, zeros, values = _integers(weights, 4, 64, rng, None)

    def packed(numbers: Array) -> Array:  # (n, rows): word i of a row has numbers 8i + order
        order = numbers.reshape(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return _bits_of(order.reshape(len(numbers), -1), 4)

    return {"qweight": packed(quants.T), "qzeros": packed(zeros.T), "scales": scales.T}, values


def packed_integers(
    bits: int,
    group: int,
    symmetric: bool,
    shuffled: bool = False,
    seed: Callable[[str], int] | None = None,
) -> Kind:
    """``shuffled``: with columns in an order of activations, of those of as many columns or with a
    ``seed`` alike."""

    def quantize(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        zero, cols = 2 ** (bits - 1) if symmetric else None, weights.shape[1]
        source = np.random.default_rng(cols) if seed is None else rng
        of_group = source.permutation(np.arange(cols) // group) if shuffled else None
        quants, scales, zeros, values = _integers(weights, bits, group, rng, zero)
        stored = {
            "weight_packed": _bits_of(quants, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weights.shape, np.int64),
        }
        if not symmetric:
            stored["weight_zero_point"] = np.ascontiguousarray(_bits_of(zeros.T, bits).T)
        if of_group is not None:
            stored["weight_g_idx"] = of_group.astype(np.int32)
            each = scales.astype(np.float32)[:, of_group]
            values = (each * (quants - zeros[:, of_group])).astype(np.float32)
        return stored, values

    fields = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    fields |= {"actorder": "group"} if shuffled else {}
    return Kind(_compressed("pack-quantized", **fields), quantize, seed)


def nvfp4(names: tuple[str, str], divides: bool) -> Callable[..., tuple[Stored, Array]]:
    def quantize(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        rows, cols = weights.shape
        codes = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
        factors = rng.uniform(8, 400, (rows, cols // 16)).astype(E4M3)
        scale = np.float32(rng.uniform(1e-5, 1e-4))
        stored = {
            names[0]: codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": factors,
            names[1]: np.array([1 / scale if divides else scale], np.float32),
        }
        kept = 1 / stored[names[1]] if divides else stored[names[1]]
        return stored, E2M1[codes] * np.repeat(factors.astype(np.float32) * kept, 16, 1)

    return quantize


def mxfp4(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    rows, cols = weights.shape
    codes = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    exponents = rng.integers(118, 124, (rows, cols // 32)).astype(np.uint8)
    scales = np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, 1)
    stored = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": exponents}
    return stored, (E2M1[codes] * scales).astype(np.float32)


#: Values of QLoRA's codes of four bits (arXiv 2305.14314, appendix E), and those of bitsandbytes'
#: FP4, a sign and 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4.
_NF4 = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.09105004,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
_FP4 = tuple(sign * of / 12 for sign in (1, -1) for of in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def bitsandbytes(kind: str, block: int, nested: bool) -> Callable[..., tuple[Stored, Array]]:
    def quantize(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        table = np.array(_NF4 if kind == "nf4" else _FP4, np.float32)
        flat = weights.reshape(-1, block)
        largest = abs(flat).max(1).astype(np.float32)
        codes = abs(flat[..., None] / largest[:, None, None] - table).argmin(-1).astype(np.uint8)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state |= {"shape": list(weights.shape)}
        pairs = codes.reshape(-1, 2)
        stored = {"weight": pairs[:, :1] << 4 | pairs[:, 1:], "weight.quant_map": table}
        absmax = largest
        if nested:
            offset = float(largest.mean())
            values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            runs = np.arange(len(largest)) // 256
            spread = np.array([abs(largest[runs == n] - offset).max() for n in range(runs[-1] + 1)])
            factors = spread.astype(np.float32)
            scaled = (largest - np.float32(offset)) / factors[runs]
            absmax = abs(scaled[:, None] - values).argmin(1).astype(np.uint8)
            largest = values[absmax] * factors[runs] + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            stored |= {"weight.nested_absmax": factors, "weight.nested_quant_map": values}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        stored |= {"weight.absmax": absmax, f"weight.quant_state.bitsandbytes__{kind}": text}
        return stored, (table[codes] * largest[:, None]).reshape(weights.shape)

    return quantize


def llm_int8(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    # 127 times a number that f16 has
    scales = (abs(weights).max(1) / 127).astype(np.float16).astype(np.float32)
    quants = np.clip(np.round(weights / scales[:, None]), -127, 127).astype(np.int8)
    stored = {"weight": quants, "SCB": 127 * scales, "weight_format": np.zeros((), np.uint8)}
    return stored, quants * scales[:, None]


def bitnet(divides: bool) -> Kind:
    """Four rows in two bits each of a byte's row, as transformers packs them."""

    def quantize(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        signs = rng.integers(-1, 2, weights.shape)
        quarters = np.split((signs + 1).astype(np.uint8), 4)
        packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        scale = np.array([2.0 ** rng.integers(3, 7)], ml_dtypes.bfloat16)  # and 1 / scale, exact
        scale = scale if divides else (scale.astype(np.float32) * 0.00123).astype(scale.dtype)
        factor = 1 / scale.astype(np.float32) if divides else scale.astype(np.float32)
        return {"weight": packed, "weight_scale": scale}, (signs * factor).astype(np.float32)

    linear = "bitlinear" if divides else "autobitlinear"
    fields = {"linear_class": linear, "quantization_mode": "offline", "use_rms_norm": False}
    return Kind({"quant_method": "bitnet", "modules_to_not_convert": None, **fields}, quantize)


def bitnet_online(weights: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    """Floats that the model rounds."""
    mean = np.float32(abs(weights).mean(dtype=np.float64))
    rounded = np.clip(np.round(weights * (np.float32(1) / mean)), -1, 1)
    return {"weight": weights.astype(np.float32)}, (rounded * mean).astype(np.float32)


def _bits_and_bytes(bits: int, **fields: Any) -> dict[str, Any]:
    loads = {f"load_in_{of}bit": of == bits for of in (4, 8)}
    return {"quant_method": "bitsandbytes", **loads, "llm_int8_threshold": 6.0, **fields}


_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
_FOURS = _compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)
KINDS: Mapping[str, Kind] = {
    "fp8-blocks": Kind({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8-rows": Kind(_compressed("float-quantized", **_FLOATS), fp8_rows),
    "fp8-matrix": Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_matrix),
    "int8-rows": Kind(_compressed("int-quantized", num_bits=8, type="int"), int8_rows),
    "gptq-4": gptq(4, 64),
    "gptq-3": gptq(3, 32),
    "gptq-2": gptq(2, 0, added=0),
    "gptq-8": gptq(8, 32),
    "gptq-order": gptq(4, 32, shuffled=True),
    "awq": Kind({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "w4a16": packed_integers(4, 32, symmetric=True),
    "w4a16-zeros": packed_integers(4, 64, symmetric=False),
    "w4a16-order": packed_integers(4, 32, symmetric=False, shuffled=True),
    "w8a16": packed_integers(8, 0, symmetric=True),
    "nvfp4": Kind(_FOURS, nvfp4(("weight_packed", "weight_global_scale"), divides=True)),
    "nvfp4-modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4(("weight", "weight_scale_2"), divides=False),
    ),
    "nf4": Kind(_bits_and_bytes(4), bitsandbytes("nf4", 64, nested=True)),
    "fp4": Kind(_bits_and_bytes(4), bitsandbytes("fp4", 128, nested=False)),
    "llm-int8": Kind(_bits_and_bytes(8), llm_int8),
    "bitnet": bitnet(divides=True),
    "bitnet-auto": bitnet(divides=False),
    "mxfp4": Kind(_compressed("mxfp4-pack-quantized", num_bits=4, type="float"), mxfp4),
}
#: Which floats are quantised: no format.
ONLINE = Kind(
    {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
    bitnet_online,
)
#: Orders of experts differ, and those of an expert's gate and up.
OWN_ORDERS = gptq(4, 32, shuffled=True, each=True)
#: Orders of experts differ; gate and up of an expert have one, as writers give them.
ORDERED_EXPERTS: Mapping[str, Kind] = {
    "gptq": gptq(4, 32, shuffled=True, each=True, seed=of_input),
    "gptq, groups of 128": gptq(4, 128, shuffled=True, each=True, symmetric=True, seed=of_input),
    "gptq, 8 bits": gptq(8, 32, shuffled=True, each=True, seed=of_input),
    "gptq, 3 bits": gptq(3, 64, shuffled=True, each=True, symmetric=True, seed=of_input),
    "compressed-tensors": packed_integers(4, 128, False, True, of_input),
    "apart": OWN_ORDERS,
}


def wide_floats(source: Path, folder: Path, width: int = 256, layers: int = 1) -> Path:
    """A folder of floats like ``source``, some layers of that width, with random weights."""
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": width}
    sizes = {128: width, 192: width}  # heads are as wide as they were
    if (inner := config.get("moe_intermediate_size")) is not None:
        config["moe_intermediate_size"] = sizes[inner] = width
    rng, tensors = np.random.default_rng(1), {}
    for name, tensor in read_folder(source).items():
        if layers == 1 and ".layers.1." in name:
            continue
        shape = [sizes.get(size, size) for size in tensor.shape]
        if "self_attn" in name:
            kept = 1 if "o_proj" in name else 0
            shape[kept] = tensor.shape[kept]
        values = rng.standard_normal(shape) * (0.06 if len(shape) > 1 else 0.1) + (len(shape) < 2)
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def quantised(source: Path, kind: Kind, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """A folder quantised in that way, but for embedding and head, and one of the same weights as
    F32."""
    rng = np.random.default_rng(seed)
    stored: Stored = {}
    floats: Stored = {}
    for name, tensor in read_folder(source).items():
        values = tensor.data[: len(tensor.data)].view(_READ[tensor.dtype]).reshape(tensor.shape)
        if "proj" not in name or values.ndim != 2:
            stored[name] = floats[name] = values
            continue
        own = rng if kind.seed is None else np.random.default_rng(kind.seed(name))
        made, floats[name] = kind.quantize(values.astype(np.float32), own)
        stored |= {name.removesuffix("weight") + part: array for part, array in made.items()}
    made_folders = []
    config = json.loads((source / "config.json").read_text())
    for of, tensors, added in (
        ("quantised", stored, {"quantization_config": kind.config}),
        ("floats", floats, {}),
    ):
        path = folder / of
        path.mkdir()
        shutil.copy(source / "tokenizer.json", path)
        (path / "config.json").write_text(json.dumps(config | added))
        write_safetensors(path / "model.safetensors", tensors)
        made_folders.append(path)
    return made_folders[0], made_folders[1]
