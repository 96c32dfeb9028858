"""Types that matrices are quantised to: blocks against the gguf package, recipes against ours."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from urdir.model.errors import SettingsError
from urdir.model.families.recipe import formats
from urdir.model.families.shapes import SHAPES
from urdir.model.families.stored import StoredMatrix
from urdir.model.files.quantised import Recipe, quantizer
from urdir.model.files.tensor_types import tensor_type, type_number
from urdir.ptxgen.weights import quantise
from urdir.ptxgen.weights.formats import format_of
from urdir.ptxgen.weights.layout import Layout

#: The most relative error of normal weights, root mean square.
ERRORS = {"Q4_K": 0.074, "Q5_K": 0.037, "Q6_K": 0.0185, "E4M3R256": 0.027}


def _rows(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Normal rows of unlike size, a block and a row of zeros, a group of equal values."""
    rows = rng.standard_normal((9, 512)) * np.exp(rng.standard_normal((9, 1)))
    rows[3, :256] = 0
    rows[4] = 0
    rows[5, 32:64] = -0.25
    return rows.astype(np.float32)


def _values(name: str, blocks: npt.NDArray[np.uint8]) -> Any:
    if name in gguf.GGMLQuantizationType.__members__:
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    layout = Layout(format_of(type_number(name)), 9, 512)
    return layout.unpack(layout.pack(blocks))


@pytest.mark.parametrize("name", ERRORS)
def test_blocks_are_near_the_rows(name: str) -> None:
    rows = _rows(np.random.default_rng(4))
    values = _values(name, quantizer(type_number(name))(rows))
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values[4], 0)
    np.testing.assert_array_equal(values[3, :256], 0)
    assert abs(values[5, 32:64] + 0.25).max() < 0.02
    kept = [row for row in range(9) if row not in (3, 4, 5)]
    error = np.sqrt(((values - rows)[kept] ** 2).mean(axis=1) / (rows[kept] ** 2).mean(axis=1))
    assert error.mean() < ERRORS[name]
    assert error.max() < 1.1 * ERRORS[name]


def _steps(first: float, last: float) -> tuple[float, ...]:
    """Tenths from the first to the last."""
    return tuple(float(of) for of in np.linspace(first, last, round(10 * (last - first)) + 1))


#: How many codes more than the range's llama.cpp tries (`make_qkx2_quants`, `make_qx_quants`).
LLAMA_CPP = {"Q4_K": _steps(-1, 1), "Q5_K": _steps(-0.5, 1), "Q6_K": _steps(-0.9, 0.9)}


@pytest.mark.parametrize("name", LLAMA_CPP)
@pytest.mark.parametrize("weights", ["normal", "laplace", "t", "unlike groups"])
def test_the_search_for_scales_is_no_worse_than_llama_cpp_s(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the squared errors that it weights and by plain ones, after scales are rounded."""
    rng, size = np.random.default_rng(8), (32, 2048)
    rows = {
        "normal": rng.standard_normal(size),
        "laplace": rng.laplace(size=size),
        "t": rng.standard_t(4, size=size),
        "unlike groups": rng.standard_normal(size) * np.exp(rng.standard_normal(size) / 2),
    }[weights].astype(np.float32)
    groups = rows.reshape(-1, 32)
    each = np.abs(groups) + np.sqrt(np.square(groups).mean(axis=1, keepdims=True))
    each = np.square(groups) if name == "Q6_K" else each

    def errors() -> tuple[float, float]:
        found = np.square(_values(name, quantizer(type_number(name))(rows)) - rows)
        return float(found.mean()), float((each * found.reshape(groups.shape)).mean())

    ours = errors()
    monkeypatch.setattr(quantise, "STEPS", LLAMA_CPP[name])
    assert all(own < theirs for own, theirs in zip(ours, errors(), strict=True))


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-8b", "llama-3.2-1b"])
def test_the_recipe_is_that_of_the_models_that_bench_makes(shape: str) -> None:
    of = SHAPES[shape]
    roles = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    names = [f"blk.{layer}.{role}.weight" for layer in range(of.layers) for role in roles]
    names += ["token_embd.weight", *["output.weight"] * (not of.tied)]
    recipe = Recipe("q4_k_m", of.layers, of.tied)
    stored = tuple(StoredMatrix.whole(name, 512, 256) for name in names)
    wanted = formats(stored, of, "q4_k_m")
    found = {name: tensor_type(recipe.type_of(name, 256) or 0).name for name in names}
    assert found == {name: fmt.name for name, fmt in wanted.items()}
    assert set(found.values()) == {"Q4_K", "Q6_K"}


def test_rows_that_a_type_does_not_fit_get_another_or_none() -> None:
    widths = {
        ("q4_k_m", 288): "Q5_0", ("q6_k", 96): "Q8_0", ("fp8", 384): "E4M3G128",
        ("fp8", 96): "E4M3G32", ("q8_0", 33): None, ("fp8", 33): None,
    }  # fmt: skip
    for (name, width), wanted in widths.items():
        number = Recipe(name, 4).type_of("blk.1.attn_q.weight", width)
        assert (None if number is None else tensor_type(number).name) == wanted


def test_other_names_are_refused() -> None:
    with pytest.raises(SettingsError, match="cannot quantise to 'q3_k'"):
        Recipe("q3_k", 4)


@pytest.mark.parametrize("tensor", ["a.b.attn_v.weight", "ffn_down", "blk.x.ffn_down.weight"])
@pytest.mark.parametrize(("name", "expected"), [("q4_k_m", "Q4_K"), ("fp8", "E4M3R256")])
def test_names_without_a_layer(tensor: str, name: str, expected: str) -> None:
    found = Recipe(name, 4).type_of(tensor, 256)
    assert found == type_number(expected)
