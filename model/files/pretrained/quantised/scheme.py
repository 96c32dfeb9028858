"""``quantization_config`` of config.json: how matrices are quantised.

Sources: the writers of these folders (AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, NVIDIA's
modelopt, bitsandbytes, DeepSeek's and gpt-oss's own), as vLLM's ``quantization`` package reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.tokens import read_json

#: Fields that say how activations or caches are quantised, or how the weights were made: neither
#: changes how they are read. Activations stay floats.
_UNREAD = frozenset(
    {
        "_load_in_4bit", "_load_in_8bit", "activation_scale_ub", "activation_scheme", "backend",
        "batch_size", "bits", "block_name_to_quantize", "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
        "cache_block_outputs", "checkpoint_format",
        "config_groups", "damp_auto_increment", "damp_percent", "dataset", "dequantize",
        "desc_act", "disable_exllama", "do_fuse", "dynamic", "exclude_modules",
        "exllama_config", "fmt", "format", "fuse_max_seq_len", "global_compression_ratio",
        "group_size", "hyb_act", "ignore", "ignored_layers", "is_marlin_format",
        "kv_cache_quant_algo", "kv_cache_scheme", "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold",
        "linear_class", "lm_head", "load_in_4bit", "load_in_8bit", "max_input_length", "meta",
        "meta_info", "model_file_base_name", "model_name_or_path", "model_seqlen",
        "module_name_preceding_first_block", "modules_in_block_to_quantize",
        "modules_to_not_convert", "pack_dtype", "pad_token_id", "producer", "q_group_size",
        "quant_algo", "quant_algo_kv", "quant_method", "quantization_mode",
        "quantization_status", "quantize_moe", "quantized_layers", "quantizer", "rms_norm_eps",
        "scale_fmt", "sparsity_config",
        "static_groups", "sym", "targets", "tokenizer", "transform_config",
        "true_sequential", "use_cuda_fp16", "use_exllama", "use_rms_norm", "version", "w_bit",
        "weight_block_size", "zero_point",
    }
)  # fmt: skip
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "modelopt", "mxfp4",
            "bitsandbytes", "bitnet")  # fmt: skip
_FORMATS = (
    "float-quantized", "pack-quantized", "int-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a folder's matrices are quantised; tensors themselves say which are.

    ``bits`` of packed integers, ``zero_added`` to their stored zero points (1 in GPTQ's first
    format), ``interleaved`` as AWQ packs them; ``block``: (rows, columns) of an FP8 scale, None
    where scales belong to rows or matrices. BitNet's matrix is divided by its scale if that
    ``divides``; or its matrices are floats that the model rounds, other than the
    modules ``unrounded`` (None: they are stored rounded).
    """

    method: str
    bits: int | None = None
    zero_added: int = 0
    interleaved: bool = False
    block: tuple[int, int] | None = None
    divides: bool = False
    unrounded: tuple[str, ...] | None = None


def read_scheme(config: Mapping[str, Any], path: Path) -> Scheme | None:
    """The scheme of a model's configuration, the file ``path``; None for a model of floats.

    Raises UnsupportedError for a method, format or field that is not known, ConfigError for an
    impossible value.
    """
    outer = config.get("text_config")
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None and isinstance(outer, dict):
        found = outer.get("quantization_config")
    beside = path.with_name("hf_quant_config.json")
    if found is None and beside.exists():  # older folders of modelopt
        path, found = beside, read_json(beside).get("quantization")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: quantization_config is not an object")
    method = found.get("quant_method", "modelopt" if "quant_algo" in found else None)
    if method not in _METHODS:
        raise _refused(path, "quant_method", method, *_METHODS)
    for name, value in found.items():
        if value is not None and name not in _UNREAD:
            raise UnsupportedError(f"{path}: quantization_config: unknown field '{shown(name)}'")
    read = _READERS.get(method)
    return Scheme(method) if read is None else read(found, path)


def _fp8(found: Mapping[str, Any], path: Path) -> Scheme:
    if found.get("fmt", "e4m3") != "e4m3":
        raise _refused(path, "fmt", found["fmt"], "e4m3")
    size = found.get("weight_block_size")
    return Scheme("fp8", block=None if size is None else _block(size, path))


def _block(size: object, path: Path) -> tuple[int, int]:
    sizes = size if isinstance(size, list) else []
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= 1 << 16 for n in sizes):
        raise ConfigError(f"{path}: quantization_config: a block of {shown(size)}, not two sizes")
    if sizes[1] % 32:
        raise UnsupportedError(
            f"{path}: quantization_config: blocks of {sizes[1]} columns, expected a multiple of 32"
        )
    return sizes[0], sizes[1]


def _compressed(found: Mapping[str, Any], path: Path) -> Scheme:
    form = found.get("format", "float-quantized")
    if form not in _FORMATS:
        raise _refused(path, "format", form, *_FORMATS)
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{path}: quantization_config: no config_groups")
    kinds: dict[str, list[Any]] = {"num_bits": [], "block_structure": []}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ConfigError(f"{path}: quantization_config: a group without weights")
        if weights.get("type") == "int":
            kinds["num_bits"].append(weights.get("num_bits"))
        if weights.get("block_structure") is not None:
            kinds["block_structure"].append(weights["block_structure"])
    for name, values in kinds.items():
        if any(value != values[0] for value in values):
            raise UnsupportedError(f"{path}: quantization_config: several values of {name}")
    bits, blocks = kinds["num_bits"], kinds["block_structure"]
    return Scheme(
        "compressed-tensors",
        bits=_bits(bits[0], path) if bits else None,
        block=_block(blocks[0], path) if blocks else None,
    )


def _bits(bits: object, path: Path) -> int:
    if type(bits) is not int or bits not in _BITS:
        raise _refused(path, "bits", bits, *map(str, _BITS))
    return bits


def _gptq(found: Mapping[str, Any], path: Path) -> Scheme:
    form = found.get("checkpoint_format", found.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise _refused(path, "checkpoint_format", form, "gptq", "gptq_v2")
    if found.get("dynamic"):
        raise UnsupportedError(f"{path}: quantization_config: 'dynamic' bits are not supported")
    return Scheme("gptq", bits=_bits(found.get("bits"), path), zero_added=int(form == "gptq"))


def _awq(found: Mapping[str, Any], path: Path) -> Scheme:
    version, bits = found.get("version", "gemm"), found.get("bits", found.get("w_bit"))
    if str(version).lower() != "gemm":
        raise _refused(path, "AWQ version", version, "gemm")
    if bits != 4:
        raise _refused(path, "AWQ bits", bits, "4")
    return Scheme("awq", bits=4, interleaved=True)


def _bitnet(found: Mapping[str, Any], path: Path) -> Scheme:
    kind, mode = found.get("linear_class", "bitlinear"), found.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear"):
        raise _refused(path, "linear_class", kind, "bitlinear", "autobitlinear")
    if mode not in ("online", "offline"):
        raise _refused(path, "quantization_mode", mode, "online", "offline")
    if found.get("use_rms_norm"):
        raise _refused(path, "use_rms_norm", found["use_rms_norm"], "false")
    skipped = found.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(of, str) for of in skipped):
        raise ConfigError(f"{path}: quantization_config: modules_to_not_convert are not names")
    rounds = kind == "autobitlinear" and mode == "online"
    return Scheme(
        "bitnet", divides=kind == "bitlinear", unrounded=tuple(skipped) if rounds else None
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any], Path], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitnet": _bitnet,
}


def _refused(path: Path, field: str, value: object, *supported: str) -> UnsupportedError:
    """For a value of a field that is not one of the ``supported`` ones."""
    what = f"{field} '{shown(value)}' is not supported (supported: {', '.join(supported)})"
    return UnsupportedError(f"{path}: quantization_config: {what}")
