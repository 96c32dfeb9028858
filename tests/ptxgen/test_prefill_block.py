"""Attention over blocks of keys: what one launch over all of them gives, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.choice import block_attention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_block import IDLE, PrefillBlock
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.scores import Scores

TOKENS, LENGTH = 420, 112  # four blocks, the last of which is not full


pytestmark = pytest.mark.usefixtures("on_hopper")


def by_blocks(device: Device, spec: PrefillBlock, whole: dict[str, Any]) -> Any:
    """The output, a block after another; each launch is checked."""
    shape = (spec.rows, spec.heads, spec.value_dim)
    carried = {
        "partial": np.full(shape, np.nan, np.float32),
        "softmax": np.full((*shape[:2], 2), np.nan, np.float32),
        "out": np.zeros(spec.shape_of(spec.param("out")), spec.param("out").numpy_dtype),
    }
    for first in range(0, spec.tokens, LENGTH):
        block = {name: spec.layout.cache_of(name[0]).empty(0) for name in ("k_cache", "v_cache")}
        for name, cache in block.items():
            part = whole[name][:, :, first : first + LENGTH]
            cache[:, :, : part.shape[2]] = part
        rows = {name: whole[name] for name in ("q", "sequence", "position")}
        inputs = rows | block | carried | {"first": np.uint32(first)}
        outputs = run_kernel(device, spec, inputs)
        if first:  # before, nothing is carried: NaN stays in what nobody has begun
            compare(spec, outputs, spec.reference(**inputs))
        carried = {
            name: np.nan_to_num(array) if name != "out" else array
            for name, array in outputs.items()
        }
    return carried["out"]


@pytest.mark.parametrize(
    ("starts", "packs"),
    [
        ((200,), False),
        ((60,), True),  # the first rows end a block before the last ones
        ((0, 223, 350), False),  # within a tile rows end in three blocks
    ],
)
def test_blocks_give_what_one_launch_gives(
    device: Device, starts: tuple[int, ...], packs: bool
) -> None:
    rows = 69
    runs = [np.arange(start, start + rows // len(starts)) for start in starts]
    position = np.concatenate(runs)
    position[-3:] = IDLE
    layout = KvLayout(1, 4, TOKENS, 64, "f16")
    one = PrefillWgmma(8, layout, rows, packs=packs)
    whole = one.inputs_at(np.random.default_rng(rows), position.tolist(), [0] * rows)
    spec = PrefillBlock(8, KvLayout(1, 4, LENGTH, 64, "f16"), rows, packs=packs, tokens=TOKENS)
    expected = run_kernel(device, one, whole)["out"].astype(np.float64)
    found = by_blocks(device, spec, whole).astype(np.float64)
    # sums of weights are added up in another order; a packed value is rounded
    np.testing.assert_allclose(found, expected, rtol=2**-10 if packs else 2e-6, atol=1e-7)


def test_a_row_has_the_same_bits_in_every_chunk(device: Device) -> None:
    spec = PrefillBlock(2, KvLayout(1, 2, LENGTH, 64, "f16"), rows=69, tokens=TOKENS)
    one = PrefillWgmma(2, KvLayout(1, 2, TOKENS, 64, "f16"), rows=90)
    whole = one.inputs_at(np.random.default_rng(2), [*range(190, 280)], [0] * 90)
    chunks = []
    for start in (0, 21):
        rows = slice(start, start + spec.rows)
        own = {name: whole[name][rows] for name in ("q", "sequence", "position")}
        chunks.append(by_blocks(device, spec, whole | own))
    np.testing.assert_array_equal(chunks[0][21:], chunks[1][:-21])


@pytest.mark.parametrize(
    ("length", "tokens", "dims", "scores", "message"),
    [
        (100, 400, (64, 0), Scores(), "whole tiles of 112"),
        (224, 112, (64, 0), Scores(), "no more than there are tokens"),
        (96, 400, (192, 144), Scores(), "up to 128 dims"),
        (112, 400, (64, 0), Scores(window=5), "plain scores"),
        (112, 400, (64, 0), Scores(sinks=True), "plain scores"),
    ],
)
def test_refused(
    length: int, tokens: int, dims: tuple[int, int], scores: Scores, message: str
) -> None:
    layout = KvLayout(1, 2, length, dims[0], "f16", value_dim=dims[1])
    with pytest.raises(PtxgenError, match=message):
        PrefillBlock(2, layout, 5, scores, tokens=tokens)


@pytest.mark.parametrize(
    ("dims", "room", "target", "scores", "expected"),
    [
        ((192, 128), 2048, "sm_90a", Scores(scale=0.1), 2016),
        ((96, 64), 2048, "sm_90a", Scores(), 2016),
        ((192, 128), 500, "sm_90a", Scores(), 480),
        ((192, 128), 90, "sm_90a", Scores(), None),  # no tile
        ((192, 128), 2048, "sm_80", Scores(), None),
        ((48, 32), 2048, "sm_90a", Scores(), None),
        ((192, 192), 2048, "sm_90a", Scores(), None),
        ((192, 128), 2048, "sm_90a", Scores(window=9), None),
    ],
)
def test_the_choice(
    dims: tuple[int, int], room: int, target: str, scores: Scores, expected: int | None
) -> None:
    kernel = block_attention(4, dims, 8192, room, 300, target, scores=scores)
    assert (kernel and kernel.layout.max_len) == expected
