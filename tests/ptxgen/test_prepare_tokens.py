"""Tokens that are appended as they are: which are written, and how they are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.tools.assemble import assemble

every_dtype = pytest.mark.parametrize("dtype", KV_DTYPES)


def inputs_at(spec: PrepareTokens, sequences: list[int], positions: list[int]) -> dict[str, Any]:
    inputs = spec.make_inputs(np.random.default_rng(1))
    rows = {"sequence": sequences, "position": positions}
    return inputs | {name: np.array(value, np.uint32) for name, value in rows.items()}


@every_dtype
@pytest.mark.parametrize("position", [0, 1, 8])
def test_one_token_of_every_head_is_written(device: Device, dtype: Any, position: int) -> None:
    layout = KvLayout(2, 3, 9, 96, dtype)
    spec = PrepareTokens(1, layout)
    inputs = inputs_at(spec, [1], [position])
    outputs = run_kernel(device, spec, inputs)
    slots = layout.slots_of(1, [position])[:, 0]
    others = np.delete(np.arange(layout.slots), slots)
    for name in ("k", "v"):
        before, after = inputs[f"{name}_cache"], outputs[f"{name}_cache"]
        alone = layout.empty()
        layout.write(alone, 0, [0], inputs[name][0][:, None])
        written = layout.slots_of(0, [0])[:, 0]
        parts = [layout.elements, layout.scales] if dtype == "q8_0" else [layout.elements]
        for part in parts:
            np.testing.assert_array_equal(part(after)[slots], part(alone)[written])
            np.testing.assert_array_equal(part(after)[others], part(before)[others])


@every_dtype
@pytest.mark.parametrize("position", [5, 6, 2**31, 2**32 - 1])
def test_an_idle_row_writes_nothing(device: Device, dtype: Any, position: int) -> None:
    spec = PrepareTokens(1, KvLayout(2, 2, 5, 64, dtype), rows=2)
    inputs = inputs_at(spec, [0, 2**31], [position, position])
    outputs = run_kernel(device, spec, inputs)
    for name in ("k_cache", "v_cache"):
        assert outputs[name].tobytes() == inputs[name].tobytes()


def test_f16_rounds_to_even_and_overflows_to_infinity(device: Device) -> None:
    spec = PrepareTokens(1, KvLayout(1, 1, 2, 8, "f16"))
    inputs = inputs_at(spec, [0], [1])
    # Ties between neighbours, the largest f16, the tie above it, subnormals and half of one.
    inputs["k"] = np.array(
        [[[2049, 2051, 65504, 65519.996, 65520, -1e9, 2**-24, 2**-25]]], np.float32
    )
    inputs["v"] = -inputs["k"]
    outputs = run_kernel(device, spec, inputs)
    wanted = [2048, 2052, 65504, 65504, np.inf, -np.inf, 2**-24, 0]
    np.testing.assert_array_equal(outputs["k_cache"][0, 0, 1], np.array(wanted, np.float16))
    np.testing.assert_array_equal(outputs["v_cache"][0, 0, 1], -np.array(wanted, np.float16))


def test_bf16_rounds_to_even_and_keeps_nan(device: Device) -> None:
    spec = PrepareTokens(1, KvLayout(1, 1, 2, 8, "bf16"))
    inputs = inputs_at(spec, [0], [1])
    inputs["k"] = np.array(
        [[[257, 259, 3.4e38, np.inf, -np.nan, 1 + 2**-8 + 2**-20, -1e-40, 0]]], np.float32
    )
    inputs["v"] = -inputs["k"]
    outputs = run_kernel(device, spec, inputs)
    bits = [0x4380, 0x4382, 0x7F80, 0x7F80, 0x7FFF, 0x3F81, 0x8001, 0]
    assert outputs["k_cache"][0, 0, 1].tolist() == bits
    assert outputs["v_cache"][0, 0, 1].tolist()[:4] == [b | 0x8000 for b in bits[:4]]


def test_q8_0_at_its_ends(device: Device) -> None:
    """Ties, groups of zeros, scales beyond f16 on both sides, NaN: each in a group of its own."""
    spec = PrepareTokens(1, KvLayout(1, 1, 2, 192, "q8_0"))
    inputs = inputs_at(spec, [0], [1])
    k = inputs["k"][0, 0].reshape(6, 32)
    k[0, :5] = [127, 0.5, 1.5, -126.5, -2.5]
    k[0, 5:] = 0
    k[1] = 0
    k[2, 0] = 1e9
    k[3] *= 1e-9
    k[4, 7] = np.nan
    k[5] *= 1e-4  # the scale is a subnormal f16
    inputs["v"] = -inputs["k"]
    outputs = run_kernel(device, spec, inputs)
    for name, sign in (("k_cache", 1), ("v_cache", -1)):
        wanted = spec.reference(**inputs)[name]
        values = spec.layout.read(outputs[name], 0, [1])
        np.testing.assert_array_equal(values, spec.layout.read(wanted, 0, [1]))
        groups = sign * values.reshape(6, 32)
        assert groups[0, :5].tolist() == [127, 0, 2, -126, -2]
        assert not groups[[1, 3]].any()
        assert np.isnan(groups[[2, 4]]).all()
        np.testing.assert_allclose(groups[5], k[5], rtol=0, atol=np.abs(k[5]).max() / 100)


SPECS = (
    PrepareTokens(1, KvLayout(3, 2, 32, 64, "f16", 16, 6), rows=4),
    PrepareTokens(1, KvLayout(3, 1, 32, 96, "q8_0", 16, 6), rows=4),
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_paged_holds_what_contiguous_holds(spec: PrepareTokens, data: st.DataObject) -> None:
    """Any permutation of the pages, any different tokens, idle rows among them."""
    paged = spec.layout
    plain = KvLayout(3, paged.kv_heads, 32, paged.head_dim, paged.dtype)
    tokens = st.tuples(st.integers(0, 2), st.integers(0, 40))
    rows = data.draw(st.lists(tokens, min_size=4, max_size=4, unique=True))
    inputs = inputs_at(spec, [s for s, _ in rows], [p for _, p in rows])
    table = np.array(data.draw(st.permutations(range(6))), np.uint32).reshape(3, 2)
    caches = {f"{n}_cache": paged.empty() for n in "kv"}
    twin = inputs | {f"{n}_cache": plain.empty() for n in "kv"}
    del twin["block_table"]
    with Device.open("emulator") as emulator:
        out = run_kernel(emulator, spec, inputs | caches | {"block_table": table})
        plain_out = run_kernel(emulator, PrepareTokens(1, plain, rows=4), twin)
    for name in ("k_cache", "v_cache"):
        for s in range(3):
            a = paged.read(out[name], s, range(32), table)
            b = plain.read(plain_out[name], s, range(32))
            np.testing.assert_array_equal(a, b)
            assert np.isnan(a).all(axis=(0, 2)).tolist() == [(s, p) not in rows for p in range(32)]


def test_no_spills_and_few_registers() -> None:
    for dtype in KV_DTYPES:
        spec = PrepareTokens(1, KvLayout(64, 8, 1 << 17, 128, dtype, 64, 1 << 14), rows=64)
        cost = assemble(spec.ptx("sm_75"), "sm_75").entries["prepare_tokens"]
        assert not cost.spills
        assert cost.registers <= 48
