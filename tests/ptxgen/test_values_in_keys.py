"""Values that are the end of keys (latent attention) against values with a cache of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_formats import GROUP
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import Rotation

TOKEN = OwnToken(Rotation(64, "interleaved", 1.2))
#: Where tensor cores multiply, and as wide as DeepSeek's.
NARROW, WIDE = (192, 128), (576, 512)
CASES = [
    *((kind, NARROW) for kind in ("f16", "bf16", "q8_0", "f32")),
    ("f16", WIDE),
    ("q8_0", WIDE),
]


def layout_of(dtype: Any, widths: tuple[int, int]) -> KvLayout:
    return KvLayout(2, 1, 48, widths[0], dtype, 16, 7, widths[1], values_in_keys=True)


def values_apart(layout: KvLayout, cache: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """V of a cache of keys, in one of its own."""
    own = replace(layout, values_in_keys=False).values
    made = own.empty()
    start = layout.value_start * layout.format.bits // 8
    own.elements(made)[:] = layout.elements(cache)[:, start:]
    if layout.dtype == "q8_0":
        own.scales(made)[:] = layout.scales(cache)[:, layout.value_start // GROUP :]
    return made


def check(device: Device, spec: Any, is_alike: bool = True) -> None:
    """The same output, bit for bit where sums are in the same order, and the same keys."""
    layout = spec.layout
    inputs = spec.make_inputs(np.random.default_rng(5))
    assert "v_cache" not in inputs
    apart = replace(spec, layout=replace(layout, values_in_keys=False))
    given = inputs | {"v_cache": values_apart(layout, inputs["k_cache"])}
    if "k" in inputs:
        given["v"] = np.ascontiguousarray(inputs["k"][..., layout.value_start :])
    made, wanted = run_kernel(device, spec, inputs), run_kernel(device, apart, given)
    error = 0 if is_alike else spec.tolerance.rtol * np.abs(wanted["out"]).max()
    np.testing.assert_allclose(made["out"], wanted["out"], rtol=0, atol=error)
    if "k" in inputs:
        assert made["k_cache"].tobytes() == wanted["k_cache"].tobytes()
        ends = values_apart(layout, made["k_cache"])
        assert ends.tobytes() == wanted["v_cache"].tobytes()


@pytest.mark.turns(2)
@pytest.mark.parametrize(("dtype", "widths"), CASES)
def test_decoding(device: Device, dtype: Any, widths: tuple[int, int]) -> None:
    """Lanes that read values where keys are have room for twice as many wide keys a step."""
    layout = layout_of(dtype, widths)
    for spec in (
        IncrementalAttention(6, layout, 2, token=TOKEN),
        FlashDecode(3, layout, 2, token=TOKEN, ctas=3, least=16, most=16),
    ):
        check(device, spec, is_alike=spec.head_tiles.tensor_cores or widths == NARROW)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("dtype", "widths"), CASES)
def test_prompts(device: Device, dtype: Any, widths: tuple[int, int]) -> None:
    layout = layout_of(dtype, widths)
    check(device, PrefillAttention(3, layout, 12))
    if PrefillWgmma.serves(layout) and PrefillWgmma(3, layout, 12).target_on(device.native_target):
        check(device, PrefillWgmma(3, layout, 12))


def test_a_token_is_as_long_as_its_key() -> None:
    """DeepSeek's 576 values, and 18 scales of q8_0."""
    sizes = {kind: layout_of(kind, WIDE).pair_nbytes for kind in ("f32", "f16", "q8_0")}
    assert sizes == {"f32": 4 * 576, "f16": 2 * 576, "q8_0": 576 + 2 * 18}


@pytest.mark.parametrize(("dtype", "dims"), [("f16", (64, 72)), ("q8_0", (96, 64))])
def test_values_that_are_no_end_of_keys_are_refused(dtype: Any, dims: tuple[int, int]) -> None:
    with pytest.raises(PtxgenError, match="values within the keys"):
        KvLayout(1, 1, 8, dims[0], dtype, value_dim=dims[1], values_in_keys=True)


@pytest.mark.parametrize(
    "token", [OwnToken(Rotation(72, "half")), OwnToken(qk_norm=Norm("rms", 1e-6))]
)
def test_what_happens_to_keys_leaves_values_as_they_are(token: OwnToken) -> None:
    with pytest.raises(PtxgenError, match="neither normed nor rotated"):
        IncrementalAttention(2, layout_of("f16", NARROW), token=token)
