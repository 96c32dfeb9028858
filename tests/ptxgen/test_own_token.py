"""What is done to a row's own query, key and value: norms, temperature; tokens that stay out.

That decode attention does it as PrepareTokens does, bit for bit: see test_decode_token.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import Rotation


@pytest.mark.parametrize("position", [6, 7, 8, 13, 14, 15])
@pytest.mark.parametrize("offset", [0, 1])
def test_temperature_steps_up(device: Device, position: int, offset: int) -> None:
    """And keys are left alone."""
    temperature = Temperature(0.3, 7, offset)
    layout = KvLayout(1, 1, 16, 32, "f32")
    spec = PrepareTokens(2, layout, token=OwnToken(temperature=temperature))
    inputs = spec.make_inputs(np.random.default_rng(1))
    inputs["position"][:] = position
    out = run_kernel(device, spec, inputs)
    factor = 1 + 0.3 * math.log(math.floor((position + offset) / 7) + 1)
    np.testing.assert_allclose(out["q"], inputs["q"] * factor, rtol=1e-6)
    np.testing.assert_array_equal(out["k_cache"][0, :, position], inputs["k"][0])


@pytest.mark.parametrize("kind", [IncrementalAttention, FlashDecode])
def test_a_layer_reads_the_cache_of_another(device: Device, kind: Any) -> None:
    """What one layer has appended, its own token among it; nothing is written."""
    layout = KvLayout(2, 1, 50, 64, "f16")
    token = OwnToken(Rotation(64, "half"), QK_NORM, appends=False)
    spec = kind(4, layout, 3, token=token)
    inputs = attention_inputs(spec, np.random.default_rng(4), [20, 41, 999], [1, 0, 0])
    assert not {"k", "v", "k_norm"} & {p.name for p in spec.params}
    prepares = PrepareTokens(4, layout, 3, token)
    prepared = run_kernel(device, prepares, {p.name: inputs[p.name] for p in prepares.params})
    plain = dataclasses.replace(spec, token=None)
    wanted = run_kernel(
        device,
        plain,
        {p.name: (inputs | prepared)[p.name] for p in plain.params if p.name in inputs},
    )
    for name, value in run_kernel(device, spec, inputs).items():
        assert value.tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize("norm", [QK_NORM, Norm("rms", 0.5), Norm("rms", 1e-5, weight=False)])
def test_norms_come_before_the_rotation(device: Device, norm: Norm) -> None:
    """Written out, with an eps that matters; heads of zeros stay zeros."""
    layout = KvLayout(1, 2, 9, 48, "f32")
    spec = PrepareTokens(3, layout, 2, OwnToken(Rotation(20, "half", 1.2), norm))
    inputs = spec.make_inputs(np.random.default_rng(5))
    inputs["position"][:] = (0, 5)
    inputs["sequence"][:] = 0
    inputs["q"][0, 1] = 0
    out = run_kernel(device, spec, inputs)
    out["k"] = out["k_cache"][0, :, (0, 5)]
    assert not out["q"][0, 1].any()
    for name in "qk":
        x = inputs[name].astype(float)
        x /= np.sqrt((x * x).sum(axis=2, keepdims=True) / 48 + norm.eps)
        x = x * inputs[f"{name}_norm"] if norm.weight else x
        turns = inputs["frequencies"].astype(float).sum(axis=1) * inputs["position"][:, None]
        angle = 2 * np.pi * turns[:, None]
        a, b = x[..., :10].copy(), x[..., 10:20].copy()
        x[..., :10] = 1.2 * (a * np.cos(angle) - b * np.sin(angle))
        x[..., 10:20] = 1.2 * (a * np.sin(angle) + b * np.cos(angle))
        np.testing.assert_allclose(out[name], x, rtol=0, atol=3e-6 * np.abs(x).max())


def test_values_are_normed_as_they_are_stored(device: Device) -> None:
    """Written out; K is stored as it is."""
    layout = KvLayout(1, 2, 8, 24, "f32", value_dim=40)
    spec = PrepareTokens(2, layout, 2, OwnToken(v_norm=Norm("rms", 0.1, False)))
    inputs = spec.make_inputs(np.random.default_rng(6))
    inputs["v"] = np.random.default_rng(7).standard_normal((2, 2, 40)).astype(np.float32)
    inputs["position"][:] = (3, 4)
    out = run_kernel(device, spec, inputs)
    v = inputs["v"].astype(float)
    wanted = v / np.sqrt((v * v).mean(axis=2, keepdims=True) + 0.1)
    np.testing.assert_allclose(out["v_cache"][0, :, 3:5], wanted.swapaxes(0, 1), rtol=1e-6)
    np.testing.assert_array_equal(out["k_cache"][0, :, 3:5], inputs["k"].swapaxes(0, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": Norm("layer", 1e-5)}, "qk_norm is an RMS norm without bias"),
        ({"qk_norm": Norm("rms", 1e-5, bias=True)}, "qk_norm is an RMS norm without bias"),
        ({"v_norm": QK_NORM}, "v_norm without weight"),
        ({"v_norm": V_NORM, "appends": False}, "it has no value"),
        ({"qk_norm_over": "row"}, "over rows is a qk_norm before the rotation"),
        (
            {"rope": Rotation(8, "half"), "qk_norm": QK_NORM, "qk_norm_over": "row"}
            | {"rope_first": True},
            "over rows is a qk_norm before the rotation",
        ),
    ],
)
def test_tokens_that_no_kernel_prepares(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        OwnToken(**fields)


def test_a_kernel_has_something_to_do() -> None:
    layout = KvLayout(1, 1, 4, 64, "f16")
    with pytest.raises(PtxgenError, match="nothing to do"):
        PrepareTokens(1, layout, token=OwnToken(appends=False))
    with pytest.raises(PtxgenError, match="launches of their own"):
        PrepareTokens(1, layout, token=OwnToken(qk_norm=QK_NORM, qk_norm_over="row"))
    with pytest.raises(PtxgenError, match="floor 0"):
        Temperature(0.1, 0)
