"""Decoding of latent attention on wgmma: borders of tiles and chunks, equal bits, own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import Device
from urdir.driver.compare import compare
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, OwnToken
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation

Inputs = dict[str, Any]

TURNED = OwnToken(Rotation(64, "interleaved", 1.2), latent_norm=QK_NORM)
HALVES = OwnToken(Rotation(64, "half"), latent_norm=QK_NORM)
LATENT = KvLayout(1, 1, 320, 576, "f16", value_dim=512, values_in_keys=True)

# With clusters of two CTAs a row's part is at least 16 keys, and tiles are of 64.
BORDERS = (0, 1, 15, 16, 31, 32, 33, 63, 64, 127, 128, 129, 191, 255, 256, 319)
CUTS: dict[str, dict[str, int]] = {
    "whole": {"ctas": len(BORDERS), "cluster": 4},
    "chunks": {"ctas": 4 * len(BORDERS)},
    "dealt": {"ctas": 3, "most": 32},
}


def of_rows(rows: int, heads: int = 16, layout: KvLayout = LATENT, **fields: Any) -> LatentDecode:
    """Rows of as many sequences."""
    given = {"token": TURNED, "cluster": 2, "least": 16} | fields
    return LatentDecode(heads, replace(layout, sequences=rows), rows, **given)


def inputs_of(spec: LatentDecode, positions: list[int], seed: int = 0) -> Inputs:
    return attention_inputs(spec, np.random.default_rng(seed), positions, list(range(spec.rows)))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("cut", "heads", "most"),
    [
        ("dealt", 8, 8),
        *(
            pytest.param(cut, *heads, marks=pytest.mark.full)
            for cut in CUTS
            for heads in ((16, 16), (24, 8))
        ),
    ],
)
def test_rows_end_at_every_border(device: Device, cut: str, heads: int, most: int) -> None:
    """Of a tile, a CTA's part and a chunk."""
    spec = of_rows(len(BORDERS), heads, most_heads=most, **CUTS[cut])
    inputs = inputs_of(spec, list(BORDERS), heads)
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.turns(3)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("token", [TURNED, HALVES, OwnToken(latent_norm=QK_NORM)])
def test_the_row_s_own_key_is_that_of_flash_decode(
    device: Device, token: OwnToken, dtype: Any
) -> None:
    """Bit for bit, and nothing else in the cache changes."""
    spec = of_rows(2, 8, replace(LATENT, dtype=dtype), token=token, ctas=4)
    fields = ("heads", "layout", "rows", "scores", "token")
    wanted = FlashDecode(**{name: getattr(spec, name) for name in fields}, ctas=4, least=16)
    inputs = inputs_of(spec, [200, 77], 1)
    made = run_kernel(device, spec, inputs)
    given = {p.name: inputs[p.name] for p in wanted.params if p.name in inputs}
    for param in wanted.params:
        if param.name in ("partial", "softmax", "arrived"):
            given[param.name] = np.zeros(wanted.shape_of(param), param.numpy_dtype)
    other = run_kernel(device, wanted, given)
    assert made["k_cache"].tobytes() == other["k_cache"].tobytes()
    error = 2 * spec.tolerance.rtol * np.abs(other["out"]).max()
    np.testing.assert_allclose(made["out"], other["out"], rtol=0, atol=error)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.turns(2)
@pytest.mark.parametrize("fields", [{"ctas": 6}, {"ctas": 2, "most": 32}])
def test_other_rows_do_not_change_a_bit(device: Device, fields: dict[str, int]) -> None:
    """Long ones, short ones and idle ones; nor does a second launch."""
    spec = of_rows(3, **fields)
    inputs = inputs_of(spec, [319, 200, 319])
    outs = []
    for others in (319, 3, 320, 320):
        inputs["position"][[0, 2]] = others
        outs.append(run_kernel(device, spec, inputs)["out"])
    assert all(out[1].tobytes() == outs[0][1].tobytes() for out in outs)
    assert not outs[-1][[0, 2]].any()


@pytest.mark.full
@pytest.mark.usefixtures("on_hopper")
def test_a_launch_leaves_room_for_the_next(device: Device) -> None:
    """The same buffers again, with rows of other lengths each time."""
    spec, kept = of_rows(2, ctas=8), {}
    for positions in ([319, 20], [30, 319], [319, 319]):
        inputs = inputs_of(spec, positions)
        made = run_kernel(device, spec, inputs | kept)
        compare(spec, made, spec.reference(**inputs | kept))
        kept = {name: made[name] for name in ("partial", "softmax", "arrived")}


@pytest.mark.full
@pytest.mark.usefixtures("on_hopper")
def test_pages_change_no_bit(device: Device) -> None:
    paged = of_rows(3, layout=replace(LATENT, page_len=16, pages=70), ctas=6)
    inputs = inputs_of(paged, [319, 130, 15])
    layout = replace(paged.layout, page_len=0, pages=0)
    cache, tokens = layout.empty(), range(layout.max_len)
    for s in range(layout.sequences):
        origin = paged.layout.slots_of(s, tokens, inputs["block_table"])
        layout.elements(cache)[layout.slots_of(s, tokens)] = paged.layout.elements(
            inputs["k_cache"]
        )[origin]
    given = {name: value for name, value in inputs.items() if name != "block_table"}
    whole = run_kernel(device, replace(paged, layout=layout), given | {"k_cache": cache})
    assert whole["out"].tobytes() == run_kernel(device, paged, inputs)["out"].tobytes()


@pytest.mark.full
@pytest.mark.usefixtures("on_hopper")
def test_one_key_far_above_the_others(device: Device) -> None:
    """Wherever it stands."""
    spec = of_rows(1, ctas=2)
    for key in (0, 70, 200, 318):
        inputs = inputs_of(spec, [319])
        rows = spec.layout.elements(inputs["k_cache"]).view(spec.layout.numpy_dtype)
        rows[:320] = 0
        rows[key, :64] = 30.0
        rows[key, 64:] = np.arange(512)
        inputs["q_rotated"][:] = 0
        inputs["q_absorbed"][:] = 0
        inputs["q_absorbed"][:, :, 500] = 10.0
        out = run_kernel(device, spec, inputs)["out"][0]
        wanted = np.tile(np.arange(512.0), (16, 1))
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"token": None},
        {"token": OwnToken(Rotation(48, "half"), latent_norm=QK_NORM)},
        {"scores": Scores(window=20)},
        {"layout": replace(LATENT, dtype="q8_0")},
        {"layout": replace(LATENT, head_dim=192, value_dim=128)},
        {"cluster": 1},
        {"ring": 64 << 10},
        {"most_heads": 4},
        {"heads": 9},
    ],
)
def test_what_it_does_not_serve_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PtxgenError):
        of_rows(1, **fields)
