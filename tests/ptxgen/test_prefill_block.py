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
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores

#: Of a sequence, of keys of a tile, of a block, and those that there is room for.
TOKENS, TILE, LENGTH, ROOM = 420, 112, 224, 336


pytestmark = pytest.mark.usefixtures("on_hopper")


def by_blocks(device: Device, spec: PrefillBlock, parts: list[tuple[dict[str, Any], int]]) -> Any:
    """The output, a block after another; each launch is checked. Each of the ``parts`` has the
    inputs of a sequence's rows, and the key of the walk that its first one is."""
    shape = (spec.rows, spec.heads, spec.value_dim)
    rows = {
        name: np.concatenate([part[name] for part, _ in parts])[: spec.rows]
        for name in ("q", "sequence", "position")
    }
    begins = [np.full(len(part["position"]), begin, np.uint32) for part, begin in parts]
    rows["begin"] = np.concatenate(begins)[: spec.rows]
    end = max(begin for _, begin in parts) + TOKENS
    walk = {
        name: np.full((1, spec.layout.kv_heads, end + LENGTH, width), np.nan, np.float16)
        for name, width in (("k_cache", spec.head_dim), ("v_cache", spec.value_dim))
    }
    for part, begin in parts:
        for name, keys in walk.items():
            keys[:, :, begin : begin + TOKENS] = part[name]
    carried = {  # what nobody has begun counts for nothing
        "partial": np.full(shape, 3e38, np.float32),
        "softmax": np.full((*shape[:2], 4, 2), 3e38, np.float32),
        "out": np.zeros(spec.shape_of(spec.param("out")), spec.param("out").numpy_dtype),
    }
    for first in range(0, end, LENGTH):
        block = {name: in_room(keys[:, :, first : first + LENGTH]) for name, keys in walk.items()}
        scalars = {"first": first, "length": LENGTH, "count": spec.rows}
        inputs = rows | block | carried | {n: np.uint32(of) for n, of in scalars.items()}
        outputs = run_kernel(device, spec, inputs)
        compare(spec, outputs, spec.reference(**inputs))
        carried = {name: outputs[name] for name in carried}
    return carried["out"]


def in_room(keys: Any) -> Any:
    """The keys of a block, followed by what is left of another one there."""
    found = np.full((*keys.shape[:2], ROOM, keys.shape[3]), np.nan, np.float16)
    found[:, :, :LENGTH] = keys
    return found


def part_of(
    layout: KvLayout, heads: int, position: np.ndarray[Any, Any], seed: int
) -> dict[str, Any]:
    """Inputs of rows of a sequence of its own."""
    one = PrefillWgmma(heads, layout, len(position))
    return attention_inputs(
        one, np.random.default_rng(seed), position.tolist(), [0] * len(position)
    )


@pytest.mark.parametrize(
    ("starts", "packs", "begin"),
    [
        ((200,), False, 0),
        ((60,), True, 112),  # the first rows end a block before the last ones
        ((0, 223, 350), False, 336),  # within a tile rows end in several blocks
    ],
)
def test_blocks_give_what_one_launch_gives(
    device: Device, starts: tuple[int, ...], packs: bool, begin: int
) -> None:
    """Bit for bit, wherever in the walk the sequence begins."""
    rows = 69
    runs = [np.arange(start, start + rows // len(starts)) for start in starts]
    position = np.concatenate(runs)
    position[-3:] = IDLE
    layout = KvLayout(1, 4, TOKENS, 64, "f16")
    one = PrefillWgmma(8, layout, rows, packs=packs)
    whole = part_of(layout, 8, position, rows)
    spec = PrefillBlock(8, KvLayout(1, 4, ROOM, 64, "f16"), rows, packs=packs, tokens=TOKENS)
    expected = run_kernel(device, one, whole)["out"]
    np.testing.assert_array_equal(by_blocks(device, spec, [(whole, begin)]), expected)


def test_sequences_follow_one_another(device: Device) -> None:
    """Each has the keys of its own rows, some of which are idle."""
    layout, group = KvLayout(1, 1, TOKENS, 64, "f16"), 4
    spec = PrefillBlock(group, KvLayout(1, 1, ROOM, 64, "f16"), rows=90, tokens=TOKENS)
    assert spec.segment_rows == 32
    parts, expected, begin = [], [], 0
    for number, (start, count) in enumerate(((300, 30), (0, 5), (130, 26))):
        position = np.full(32, IDLE, np.int64)
        position[:count] = np.arange(start, start + count)
        part = part_of(layout, group, position, number)
        expected.append(run_kernel(device, PrefillWgmma(group, layout, 32), part)["out"])
        parts.append((part, begin))
        begin += -(-(start + count) // TILE) * TILE
    found = by_blocks(device, spec, parts)
    np.testing.assert_array_equal(found, np.concatenate(expected)[: spec.rows])


@pytest.mark.parametrize(
    ("length", "tokens", "dims", "scores", "message"),
    [
        (100, 400, (64, 0), Scores(), "whole tiles of 112"),
        (224, 0, (64, 0), Scores(), "sequences of 0 tokens"),
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
