"""Quantised checkpoints: weights are what their writers mean, what does not fit is refused."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.quantised_folders import (
    KINDS,
    ONLINE,
    ORDERED_EXPERTS,
    gptq,
    quantised,
    wide_floats,
    write_safetensors,
)
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.files.model_file import SHARED_ORDERS
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.quantised.modules import merge_parts
from urdir.model.files.pretrained.quantised.parts import Whole
from urdir.model.files.pretrained.quantised.scheme import Scheme
from urdir.model.files.safetensors import ITEM_NBYTES, StoredTensor, read_folder
from urdir.model.files.tensor_types import type_number
from urdir.ptxgen.weights.formats import format_of
from urdir.ptxgen.weights.layout import Layout

#: Bytes of a weight on the device, against those in the folder: quants, scales, zero points.
MOST = 1.17
_ORDER = ", columns in order of activations"
#: What `urdir show` says of each kind.
WORDS = {
    "fp8-blocks": "FP8, scales of blocks of 128 x 128",
    "fp8-rows": "FP8, scales of rows",
    "fp8-matrix": "FP8, scales of the matrix",
    "int8-rows": "integers of 8 bits, scales of rows",
    "gptq-4": "integers of 4 bits, groups of 64",
    "gptq-3": "integers of 3 bits, groups of 32",
    "gptq-2": "integers of 2 bits, scales of rows",
    "gptq-8": "integers of 8 bits, groups of 32",
    "gptq-order": f"integers of 4 bits, groups of 32{_ORDER}",
    "awq": "integers of 4 bits, groups of 64",
    "w4a16": "integers of 4 bits, groups of 32",
    "w4a16-zeros": "integers of 4 bits, groups of 64",
    "w4a16-order": f"integers of 4 bits, groups of 32{_ORDER}",
    "w8a16": "integers of 8 bits, scales of rows",
    "nvfp4": "NVFP4, groups of 16",
    "nvfp4-modelopt": "NVFP4, groups of 16",
    "nf4": "NF4, groups of 64 with quantised scales",
    "fp4": "FP4, groups of 128",
    "llm-int8": "integers of 8 bits, scales of rows",
    "bitnet": "-1, 0 and 1, a scale of the matrix",
    "bitnet-auto": "-1, 0 and 1, a scale of the matrix",
    "mxfp4": "MXFP4, groups of 32",
}


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_that_the_folder_means(data: Path, tmp_path: Path, name: str) -> None:
    """To f32's rounding of one product, and no wider than they are stored. NF4's values are rounded
    to integers of 16 bits."""
    off = 8e-6 if name == "nf4" else 0.0
    path, floats = quantised(data / "safetensors" / "llama-bf16", KINDS[name], tmp_path)
    matrices = 0
    with SafetensorsModel(path) as model, SafetensorsModel(floats) as plain:
        orders = set(model.tensors) - set(plain.tensors)
        assert set(plain.tensors) <= set(model.tensors)
        assert orders == (ORDERS if name.endswith("-order") else set())
        for of, wanted in plain.tensors.items():
            tensor = model.tensors[of]
            assert tensor.shape == wanted.shape
            if len(wanted.shape) < 2 or wanted.type_name != "F32":
                continue
            rows, cols = tensor.shape
            layout = Layout(format_of(tensor.type_id), rows, cols)
            found = layout.unpack(layout.pack(tensor.data[: len(tensor.data)]))
            values = wanted.data[: len(wanted.data)].view(np.float32).reshape(rows, cols)
            values = values[:, _order(model, of, cols)]
            atol = max(off * abs(values).max(), 1e-9)
            np.testing.assert_allclose(found, values, rtol=3e-7, atol=atol)
            assert np.sqrt(((found - values) ** 2).mean() / (values**2).mean()) <= 2 * off + 1e-7
            part = tensor.data[3 * len(tensor.data) // rows : 9 * len(tensor.data) // rows]
            assert bytes(part) == bytes(tensor.data[:])[3 * len(tensor.data) // rows :][: len(part)]
            matrices += 1
    assert matrices == 14
    method = KINDS[name].config["quant_method"]
    kinds = [{"kind": WORDS[name], "matrices": 14}]
    assert model.quantisation == {"method": method, "kinds": kinds}
    assert plain.quantisation == {}
    stored = sum(len(t.data) for t in read_folder(path).values() if t.name.find("proj") > 0)
    with SafetensorsModel(path) as model:
        kept = sum(len(t.data) for t in model.tensors.values() if t.type_name[:2] in TYPES)
    # two bits alone are stored: the integers' type for narrow rows has scales of groups
    assert stored / 2 < kept <= (1.19 if name.startswith("bitnet") else MOST) * stored


#: Of matrices of the same x, which are ordered alike, one.
ORDERS = {
    f"blk.{layer}.{name}.order"
    for layer in range(2)
    for name in ("attn_qkv", "attn_output", "ffn_gate_up", "ffn_down")
}


def _order(model: SafetensorsModel, name: str, cols: int) -> Any:
    """Which column of x each column of a matrix is."""
    base = name.removesuffix(".weight")
    layer, _, own = base.rpartition(".")
    for of in (base, f"{layer}.{SHARED_ORDERS.get(own)}"):
        if (tensor := model.tensors.get(f"{of}.order")) is not None:
            return tensor.data[: len(tensor.data)].view(np.float32).astype(np.intp)
    return np.arange(cols)


def test_orders_that_differ_are_those_of_their_matrices(data: Path, tmp_path: Path) -> None:
    """The value projection of a layer has another one, or none."""
    path = _folder(data, tmp_path, "gptq-order")
    arrays = _arrays(path)
    arrays["model.layers.0.self_attn.v_proj.g_idx"] = np.arange(128, dtype=np.int32) // 32
    other = arrays["model.layers.1.self_attn.v_proj.g_idx"][::-1]
    arrays["model.layers.1.self_attn.v_proj.g_idx"] = np.ascontiguousarray(other)
    write_safetensors(path / "model.safetensors", arrays)
    with SafetensorsModel(path) as model:
        found = {name for name in model.tensors if "attn_" in name and name.endswith(".order")}
    own = {f"blk.{n}.attn_{of}.order" for n in range(2) for of in ("q", "k", "output")}
    assert found == own | {"blk.1.attn_v.order"}


def test_routers_have_their_columns_in_order(data: Path, tmp_path: Path) -> None:
    """They become F32, and no launch brings their x into another order."""
    path = _folder(data, tmp_path, "gptq-8", "qwen3moe-bf16")
    arrays, name = _arrays(path), "model.layers.1.mlp.gate"
    rng = np.random.default_rng(3)
    values = rng.normal(size=(4, 128)).astype(np.float32)
    parts, wanted = gptq(8, 32, shuffled=True).quantize(values, rng)
    del arrays[f"{name}.weight"]
    write_safetensors(
        path / "model.safetensors", arrays | {f"{name}.{of}": array for of, array in parts.items()}
    )
    with SafetensorsModel(path) as model:
        found = model.tensors["blk.1.ffn_gate_inp.weight"]
        assert "blk.1.ffn_gate_inp.order" not in model.tensors
    np.testing.assert_allclose(found.data[:].view(np.float32).reshape(4, 128), wanted, rtol=3e-7)


def test_quantised_matrices_of_other_parts_are_left_alone(data: Path, tmp_path: Path) -> None:
    """Vision towers have rows of any width, 4304 for one, which no type has."""
    path = _folder(data, tmp_path, "llm-int8")
    layer = "vision_tower.encoder.layers.0.mlp.fc2"
    parts = {f"{layer}.weight": np.ones((2, 43), np.int8), f"{layer}.SCB": np.ones(2, np.float32)}
    write_safetensors(path / "model.safetensors", _arrays(path) | parts)
    with SafetensorsModel(path) as model:
        assert {*model.unused_tensors} == {*parts}


@pytest.mark.parametrize("name", ORDERED_EXPERTS)
def test_experts_with_orders_of_their_own(data: Path, tmp_path: Path, name: str) -> None:
    """No wider than stored; rows of gate and up are in the order of down's columns."""
    source = wide_floats(data / "safetensors" / "qwen3moe-bf16", tmp_path / "wide")
    path, floats = quantised(source, ORDERED_EXPERTS[name], tmp_path)
    found, wanted, kept = {}, {}, 0
    with SafetensorsModel(path) as model, SafetensorsModel(floats) as plain:
        configs = Config.of(model), Config.of(plain)
        assert {(of.router.experts, of.width) for c in configs for of in c.layers[0].mixtures} == {
            (4, 256)
        }
        named = {of for of in model.tensors if "exps" in of and of.endswith(".order")}
        own = ("gate", "up") if name == "apart" else ("gate_up",)
        assert named == {f"blk.0.ffn_{kind}_exps.order" for kind in own}
        for kind in ("gate", "up", "down"):
            tensor = model.tensors[f"blk.0.ffn_{kind}_exps.weight"]
            experts, rows, cols = tensor.shape
            layout = Layout(format_of(tensor.type_id), experts * rows, cols)
            weights = layout.unpack(layout.pack(tensor.data[:])).reshape(tensor.shape)
            if kind != "down":
                orders = _order(model, f"blk.0.ffn_{kind}_exps.weight", cols)
                stored, weights = weights, np.empty_like(weights)
                columns = np.broadcast_to(orders.reshape(experts, 1, cols), weights.shape)
                np.put_along_axis(weights, columns, stored, axis=2)
            found[kind], kept = weights, kept + len(tensor.data)
            values = plain.tensors[f"blk.0.ffn_{kind}_exps.weight"].data[:]
            wanted[kind] = values.view(np.float32).reshape(tensor.shape)
            some = tensor.data[37 : 5 * 2 * cols + 1]
            assert bytes(some) == bytes(tensor.data[:])[37 : 5 * 2 * cols + 1]
        kept += sum(len(model.tensors[of].data) for of in named)
    stored_tensors = read_folder(path)
    parts = [of for of in stored_tensors if of.startswith(_EXPERTS)]
    assert kept <= MOST * sum(len(stored_tensors[of].data) for of in parts)
    index = next(of.rpartition(".")[2] for of in parts if of.endswith("g_idx"))
    for expert in range(experts):
        raw = stored_tensors[f"{_EXPERTS}.{expert}.down_proj.{index}"].data[:]
        order = np.argsort(raw.view("<i4"), kind="stable")
        near = {"rtol": 3e-7, "atol": 1e-8}
        down = wanted["down"][expert][:, order]
        np.testing.assert_allclose(found["down"][expert], down, **near)
        for kind in ("gate", "up"):
            np.testing.assert_allclose(found[kind][expert], wanted[kind][expert][order], **near)


def test_experts_of_which_some_have_an_order(data: Path, tmp_path: Path) -> None:
    """Others have their columns as they are."""
    source = wide_floats(data / "safetensors" / "qwen3moe-bf16", tmp_path / "wide")
    path, _ = quantised(source, gptq(4, 32), tmp_path)
    arrays, name = _arrays(path), f"{_EXPERTS}.2.up_proj.g_idx"
    order = np.arange(256).reshape(8, 32).T.reshape(-1)  # column i, of group i % 8
    arrays[name] = np.argsort(order, kind="stable").astype(np.int32) // 32
    write_safetensors(path / "model.safetensors", arrays)
    with SafetensorsModel(path) as model:
        assert "blk.0.ffn_gate_exps.order" not in model.tensors
        found = _order(model, "blk.0.ffn_up_exps.weight", 256).reshape(4, 256)
    plain = np.arange(256)
    np.testing.assert_array_equal(
        found, [plain, plain, np.argsort(arrays[name], kind="stable"), plain]
    )


_EXPERTS = "model.layers.0.mlp.experts"
_MLP = "model.layers.1.mlp.experts"


def test_experts_with_orders_among_floats_are_refused(data: Path, tmp_path: Path) -> None:
    path = _folder(data, tmp_path, "gptq-order", "qwen3moe-bf16")
    arrays = _arrays(path)
    name = f"{_MLP}.1.up_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del arrays[f"{name}.{part}"]
    arrays[f"{name}.weight"] = np.zeros((64, 128), np.float16)
    write_safetensors(path / "model.safetensors", arrays)
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.experts\.1\.up_proj\.weight'"):
        SafetensorsModel(path)


TYPES = ("E4", "E2", "W2", "W3", "W4", "W8", "MX", "NF", "FP")


def _folder(data: Path, tmp_path: Path, name: str, source: str = "llama-bf16") -> Path:
    return quantised(data / "safetensors" / source, KINDS[name], tmp_path)[0]


@pytest.mark.parametrize("name", KINDS)
def test_each_tensor_that_is_missing_or_of_another_shape_or_type_is_refused(
    data: Path, tmp_path: Path, name: str
) -> None:
    """By its name, or by that of the matrix."""
    path = _folder(data, tmp_path, name)
    arrays = _arrays(path)
    changes: dict[str, Callable[[Any], Any]] = {
        "missing": lambda array: None,
        "longer": lambda array: (
            np.concatenate([array, array]) if array.ndim else np.stack([array] * 3)
        ),
        "deeper": lambda array: array[None, None],
        "F64": lambda array: np.zeros(array.shape, np.float64),
        "I64": lambda array: np.zeros(array.shape, np.int64),
    }
    module = "model.layers.1.mlp.down_proj."
    parts = [of for of in arrays if of.startswith(module) and not _UNREAD.search(of)]
    assert parts
    refused = []
    for part in parts:
        for change in changes.values():
            changed = dict(arrays)
            if (array := change(arrays[part])) is None:
                del changed[part]
            else:
                changed[part] = array
            write_safetensors(path / "model.safetensors", changed)
            try:
                with SafetensorsModel(path) as model:
                    for tensor in model.tensors.values():
                        len(tensor.data)
            except ModelError as error:
                refused.append(str(error))
    assert len(refused) >= len(parts) * (len(changes) - 1)
    assert all("down_proj" in message for message in refused)


def _same_values(path: Path, floats: Path, rtol: float) -> set[str]:
    """Compare the quantised matrices of two folders; their types."""
    types = set()
    with SafetensorsModel(path) as model, SafetensorsModel(floats) as plain:
        for name, tensor in model.tensors.items():
            if tensor.type_name in ("F32", "F16", "BF16"):
                continue
            rows, cols = tensor.shape
            layout = Layout(format_of(tensor.type_id), rows, cols)
            found = layout.unpack(layout.pack(tensor.data[: len(tensor.data)]))
            wanted = plain.tensors[name].data[:].view(np.float32).reshape(rows, cols)
            np.testing.assert_allclose(found, wanted, rtol=rtol)
            assert tensor.type_name != "TQ2_0" or len(tensor.data) * 4 < rows * cols * 1.04
            types.add(tensor.type_name)
    return types


def test_ternary_weights_stay_two_bits(data: Path, tmp_path: Path) -> None:
    source = wide_floats(data / "safetensors" / "llama-bf16", tmp_path / "wide")
    folders = quantised(source, KINDS["bitnet-auto"], tmp_path)
    assert _same_values(*folders, rtol=3e-7) == {"TQ2_0", "W2G128"}


@pytest.mark.filterwarnings("ignore:.* are rounded to f16:UserWarning")
def test_floats_that_a_model_rounds_become_ternary(data: Path, tmp_path: Path) -> None:
    """But for those that it says it does not round; others are refused."""
    source = wide_floats(data / "safetensors" / "llama-bf16", tmp_path / "wide")
    path, floats = quantised(source, ONLINE, tmp_path)
    assert _same_values(path, floats, rtol=2**-11) == {"TQ2_0", "W2G128"}
    config = json.loads((path / "config.json").read_text())
    skipped = ["o_proj", "model.layers.0.mlp"]
    config["quantization_config"]["modules_to_not_convert"] = skipped
    (path / "config.json").write_text(json.dumps(config))
    with SafetensorsModel(path) as model:
        kept = {n for n, of in model.tensors.items() if len(of.shape) == 2 and of.type_id == 0}
    assert kept == {f"blk.0.{n}.weight" for n in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    arrays = _arrays(path)
    name = "model.layers.0.self_attn.other.weight"
    write_safetensors(path / "model.safetensors", arrays | {name: np.ones((4, 32), np.float32)})
    with pytest.raises(ModelError, match=r"other\.weight' is not known to be rounded"):
        SafetensorsModel(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"linear_class": "other"}, "linear_class 'other' is not supported"),
        ({"quantization_mode": 1}, "quantization_mode '1' is not supported"),
        ({"use_rms_norm": True}, "use_rms_norm 'True' is not supported"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert are not names"),
    ],
)
def test_other_kinds_of_bitnet_are_refused(
    data: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = _folder(data, tmp_path, "bitnet")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changed
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        SafetensorsModel(path)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e6])
def test_scales_of_ternary_weights_that_no_f16_has_are_refused(
    data: Path, tmp_path: Path, scale: float
) -> None:
    path = _folder(data, tmp_path, "bitnet-auto")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    write_safetensors(path / "model.safetensors", _arrays(path) | {name: np.float32([scale])})
    with SafetensorsModel(path) as model, pytest.raises(ModelError, match="beyond f16"):
        len(model.tensors["blk.1.ffn_down.weight"].data[:])


def _stored(name: str, dtype: str, *shape: int) -> StoredTensor:
    array = np.arange(math.prod(shape) * ITEM_NBYTES[dtype], dtype=np.uint32).astype(np.uint8)
    return StoredTensor(name, dtype, shape, array, "a.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight_packed": ("U8",)}, "is MXFP4 and has 0 dimensions"),
        ({"a.weight_blocks": ("U8", 16)}, "is MXFP4 and has 1 dimensions"),
        (
            {"a.weight_packed": ("I32", 12, 4), "a.weight_scale": ("F16", 12, 1),
             "a.weight_zero_point": ("I32", 1, 1)},
            "zero points of 12 rows of 4 bits, expected whole words",
        ),
        (
            {"a.weight_packed": ("I32", 8, 4), "a.weight_scale": ("F16", 8, 1),
             "a.weight": ("F16", 8, 32)},
            "'a.weight' is stored twice, also as 'a.weight_packed'",
        ),
        (
            {"a.weight_blocks": ("U8", 8, 1, 16), "a.weight_scales": ("U8", 8, 1),
             "a.weight_packed": ("I32", 8, 4), "a.weight_scale": ("F16", 8, 1)},
            "'a.weight' is stored twice",
        ),
    ],
)  # fmt: skip
def test_sets_of_tensors_that_are_refused(
    tensors: dict[str, tuple[Any, ...]], message: str
) -> None:
    stored = {name: _stored(name, *of) for name, of in tensors.items()}
    with pytest.raises(ModelError, match=message):
        merge_parts(stored, Scheme("compressed-tensors", bits=4), Path("folder"))


def _four_bits(text: str) -> dict[str, StoredTensor]:
    """A matrix of bitsandbytes (2, 32) with that state."""
    state = np.frombuffer(text.encode(), np.uint8)
    return {
        "a.weight": _stored("a.weight", "U8", 32, 1),
        "a.weight.absmax": _stored("a.weight.absmax", "F32", 1),
        "a.weight.quant_map": _stored("a.weight.quant_map", "F32", 16),
        _STATE: replace(_stored(_STATE, "U8", len(state)), data=state),
    }


_STATE = "a.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("{}", "has shape None, blocks of"),
        ('{"shape": [64], "blocksize": 64}', r"shape \[64\]"),
        ('{"shape": [2, 0], "blocksize": 64}', r"shape \[2, 0\]"),
        ('{"shape": [2, 4294967296], "blocksize": 64}', "shape"),
        ('{"shape": [2, true], "blocksize": 64}', "shape"),
        ('{"shape": [2, 32], "blocksize": 0}', "blocks of"),
        ('{"shape": [2, 32], "blocksize": 3}', "blocks of"),
        ('{"shape": [2, 32], "blocksize": 131072}', "blocks of"),
        ('{"shape": [2, 32]}', "blocks of"),
        ('{"shape": [2, 32], "blocksize": 64, "nested_offset": NaN}', "nested_offset nan"),
        ('{"shape": [2, 32], "blocksize": 64, "nested_offset": 1e39}', "nested_offset 1e"),
        ('{"shape": [2, 32], "blocksize": 64, "nested_offset": "1"}', "nested_offset 1"),
        ('{"shape": [1, 1, 1, 1, 1, 1, 1, 2, 32], "blocksize": 64}', r"shape \[1, 1"),
        ('{"shape": [2, 64], "blocksize": 64}', "32 bytes for 128 codes"),
        ('{"shape": [2, 32], "blocksize": 32}', r"absmax' is F32 \(1,\), expected"),
    ],
)
def test_states_of_four_bits_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=rf"a\.weight.*{message}"):
        merge_parts(_four_bits(text), Scheme("bitsandbytes"), Path("folder"))


def _bytes(name: str, scales: tuple[float, float]) -> dict[str, StoredTensor]:
    """A matrix of bitsandbytes (2, 128) of all bytes."""
    stored = (
        ("weight", "I8", (2, 128), np.arange(256).astype(np.uint8)),
        ("SCB", "F32", (2,), np.array(scales, np.float32).view(np.uint8)),
    )
    return {
        f"{name}.{part}": replace(_stored(f"{name}.{part}", dtype, *shape), data=data)
        for part, dtype, shape, data in stored
    }


def test_bytes_in_the_order_of_some_gpus_are_refused() -> None:
    form = replace(_stored("a.weight_format", "U8"), data=np.array([1], np.uint8))
    with pytest.raises(ModelError, match=r"a\.weight.* is not stored row by row"):
        merge_parts(
            _bytes("a", (127, 254)) | {"a.weight_format": form},
            Scheme("bitsandbytes"),
            Path("folder"),
        )


def test_scales_of_bytes_that_are_rounded_are_said_once_for_all() -> None:
    stored = _bytes("a", (0.1, 3.0)) | _bytes("b", (0.1, 3.0))
    with pytest.warns(UserWarning, match=r"^folder: scales of rows \(SCB\) are rounded") as found:
        made = merge_parts(stored, Scheme("bitsandbytes"), Path("folder"))
    layout = Layout(format_of(type_number(made["b.weight"].dtype)), 2, 128)
    values = layout.unpack(layout.pack(made["b.weight"].data[:]))
    assert len({str(of.message) for of in found}) == 1
    wanted = stored["b.weight"].data[:].view(np.int8).reshape(2, 128) / 127 * [[0.1], [3.0]]
    np.testing.assert_allclose(values, wanted, rtol=2**-11)


@pytest.mark.parametrize("scale", [1e9, np.inf, np.nan])
def test_scales_of_bytes_that_no_f16_holds_are_refused(scale: float) -> None:
    scales = np.array([1, scale], np.float32).view(np.uint8)
    stored = {
        "a.weight": _stored("a.weight", "I8", 2, 32),
        "a.SCB": replace(_stored("a.SCB", "F32", 2), data=scales),
    }
    with pytest.raises(ModelError, match=r"'a\.weight' has scales of rows \(SCB\) that no f16"):
        merge_parts(stored, Scheme("bitsandbytes"), Path("folder"))


@pytest.mark.parametrize("scale", [4e4, np.inf, np.nan])
def test_scales_of_packed_integers_that_no_f16_holds_are_refused(scale: float) -> None:
    scales = np.array([1] * 7 + [scale], np.float32).view(np.uint8)
    words = {"a.qweight": (4, 8), "a.qzeros": (1, 1)}
    stored = {
        name: replace(_stored(name, "I32", *shape), data=np.zeros(4 * np.prod(shape), np.uint8))
        for name, shape in words.items()
    }
    stored["a.scales"] = replace(_stored("a.scales", "F32", 1, 8), data=scales)
    made = merge_parts(stored, Scheme("gptq", bits=4), Path("folder"))["a.weight"]
    with pytest.raises(ModelError, match=r"'a\.\w+' has scales beyond f16"):
        made.data[:]


@pytest.mark.filterwarnings("ignore:.* become F32, exactly:UserWarning")
@pytest.mark.parametrize(("shape", "block"), [((3, 21), 64), ((7, 9), 6)])
def test_rows_of_four_bits_of_any_width(shape: tuple[int, int], block: int) -> None:
    """Rows that begin within a byte and within a block, stored as other numbers."""
    rng, count = np.random.default_rng(6), math.prod(shape)
    codes = rng.integers(0, 16, count + count % 2).astype(np.uint8)
    table, scales = (rng.normal(size=n).astype(np.float32) for n in (16, -(-count // block)))
    text = json.dumps({"shape": shape, "blocksize": block})
    packed = codes[::2] << 4 | codes[1::2]
    stored = _four_bits(text) | {
        "a.weight": StoredTensor("a.weight", "BF16", (len(packed) // 2, 1), packed, "a"),
        "a.weight.absmax": StoredTensor(
            "a.weight.absmax", "F32", scales.shape, scales.view(np.uint8), "a"
        ),
        "a.weight.quant_map": StoredTensor(
            "a.weight.quant_map", "F32", (16,), table.view(np.uint8), "a"
        ),
    }
    made = merge_parts(stored, Scheme("bitsandbytes"), Path("folder"))["a.weight"]
    wanted = (table[codes[:count]] * scales[np.arange(count) // block]).reshape(shape)
    for first in range(shape[0]):
        row = 4 * shape[1]
        found = made.data[first * row : (first + 1) * row].view(np.float32)
        np.testing.assert_array_equal(found, wanted[first])
    np.testing.assert_array_equal(made.data[:].view(np.float32).reshape(shape), wanted)


@pytest.mark.parametrize("parts", [[(0, 4), (4, 7)], [(4, 7), (0, 1), (1, 4)], [(0, 7), (0, 7)]])
def test_a_tensor_that_is_read_whole_is_forgotten_with_all_its_rows(
    parts: list[tuple[int, int]],
) -> None:
    """Whichever device reads its rows last."""
    data = np.arange(42, dtype=np.uint8)
    read: list[weakref.ref[Any]] = []

    class File:
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, part: slice) -> Any:
            found = data[part].copy()
            read.append(weakref.ref(found))
            return found

    whole = Whole(replace(_stored("a", "U8", 7, 6), data=File()), 7)
    for first, last in parts:
        np.testing.assert_array_equal(whole.take(first, last), data)
    assert read
    assert not any(of() is not None for of in read)


@pytest.mark.parametrize("width", [32, 64, 128, 65536])
def test_scales_take_no_more_than_the_matrix(width: int) -> None:
    rows, cols = 512, 192
    blocks = -(-cols // width)
    stored = {
        "a.weight": _stored("a.weight", "F8_E4M3", rows, cols),
        "a.weight_scale": replace(
            _stored("a.weight_scale", "F32", rows, blocks),
            data=np.arange(1, 1 + rows * blocks, dtype=np.float32).view(np.uint8),
        ),
    }
    tracemalloc.start()
    merged = merge_parts(stored, Scheme("fp8", block=(1, width)), Path("folder"))["a.weight"]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    fmt = format_of(type_number(merged.dtype))
    found = merged.data[:].reshape(rows, cols // fmt.block, fmt.nbytes)[..., :4].copy()
    scales = np.arange(1, 1 + rows * blocks, dtype=np.float32).reshape(rows, blocks)
    each = scales[:, np.arange(0, cols, fmt.block) // width]
    assert np.array_equal(found.view(np.float32)[..., 0], each)


#: Tensors that are not needed, and not looked at.
_UNREAD = re.compile(r"weight_shape$|input_scale$")


def _arrays(path: Path) -> dict[str, Any]:
    import ml_dtypes

    dtypes = {
        "BF16": ml_dtypes.bfloat16, "F16": "<f2", "F32": "<f4", "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8",
    }  # fmt: skip
    return {
        name: tensor.data[: len(tensor.data)].view(dtypes[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in read_folder(path).items()
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({"quant_method": None}, "quant_method"),
    "unknown method": ({"quant_method": "quip"}, "'quip'"),
    "unknown field": ({"rotation": "hadamard"}, "'rotation'"),
    "odd bits": ({"bits": 5}, "bits '5'"),
    "bits as text": ({"bits": "4"}, "bits"),
    "no bits": ({"bits": None}, "bits"),
    "marlin": ({"checkpoint_format": "marlin"}, "'marlin'"),
    "bits by module": ({"dynamic": {"a": 8}}, "'dynamic'"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
    "a block of one size": ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
    "a block of odd width": ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "100"),
    "a huge block": ({"quant_method": "fp8", "weight_block_size": [1, 1 << 40]}, "block"),
    "no groups": ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
    "a group of nothing": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
        "without weights",
    ),
    "unknown format": (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        "'marlin-24'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_are_refused_by_field(data: Path, tmp_path: Path, case: str) -> None:
    path = _folder(data, tmp_path, "gptq-4")
    config = json.loads((path / "config.json").read_text())
    change, message = REFUSED[case]
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        SafetensorsModel(path)


def test_null_is_the_same_as_absent(data: Path, tmp_path: Path) -> None:
    path = _folder(data, tmp_path, "awq")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["rotation"] = None
    (path / "config.json").write_text(json.dumps(config))
    SafetensorsModel(path).close()


def test_a_configuration_that_is_no_object_is_refused(data: Path, tmp_path: Path) -> None:
    path = _folder(data, tmp_path, "awq")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": ["awq"]}))
    with pytest.raises(ModelError, match="quantization_config is not an object"):
        SafetensorsModel(path)


def test_a_configuration_in_a_file_of_its_own(data: Path, tmp_path: Path) -> None:
    """Where older versions of modelopt wrote it."""
    path = _folder(data, tmp_path, "nvfp4-modelopt")
    config = json.loads((path / "config.json").read_text())
    found = config.pop("quantization_config")
    del found["quant_method"]
    (path / "config.json").write_text(json.dumps(config))
    beside = path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": found}))
    with SafetensorsModel(path) as model:
        assert model.tensors["blk.0.attn_q.weight"].type_name == "E2M1G64"
    beside.write_text(json.dumps({"quantization": {**found, "rotation": 1}}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: .*'rotation'"):
        SafetensorsModel(path)
