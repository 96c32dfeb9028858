"""Flash decoding of rows of drafts, which share a read of their sequence's keys, against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.tools.assemble import assemble

pytestmark = pytest.mark.sanitizer

IDLE = 2**32 - 1
RING = 96 << 10


def rows_of(runs: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Positions and sequences of rows: of each sequence its first position, live and idle rows."""
    positions: list[int] = []
    sequences: list[int] = []
    for sequence, (start, live, idle) in enumerate(runs):
        positions += [*range(start, start + live), *[IDLE] * idle]
        sequences += [sequence] * (live + idle)
    return positions, sequences


def check(device: Device, spec: FlashDecode, rows: tuple[list[int], list[int]], seed: int) -> None:
    """The output against the definition in float64, within the kernel's tolerance."""
    inputs = attention_inputs(spec, np.random.default_rng(seed), *rows)
    outputs = run_kernel(device, spec, inputs)
    compare(spec, outputs, spec.reference(**inputs))
    assert np.isfinite(outputs["out"].astype(np.float32)).all()


@pytest.mark.turns(4, which=(0, 3))  # each type with each dimension
@pytest.mark.parametrize("run", [2, 4])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_random_numbers_of_rows(device: Device, dtype: Any, head_dim: int, run: int) -> None:
    """1 to 8 rows of each sequence, some of them idle, up to the end of a paged cache."""
    rng = np.random.default_rng([run, head_dim, len(dtype)])
    for seed in range(2):
        live = rng.integers(1, 9, 4)
        starts = [int(rng.integers(0, 240 - n)) for n in live]
        starts[0] = 240 - int(live[0])
        rows = rows_of(
            [(s, int(n), int(rng.integers(0, 3))) for s, n in zip(starts, live, strict=True)]
        )
        layout = KvLayout(4, 2, 240, head_dim, dtype, 16, 66)
        ring = RING if run == 4 else 0
        spec = FlashDecode(8, layout, len(rows[0]), ctas=5, least=16, most=32, ring=ring, run=run)
        check(device, spec, rows, seed)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "scores",
    [
        Scores(window=20),
        Scores(chunk=48),
        Scores(window=33, softcap=30.0),
        Scores(sinks=True),
        Scores(max_bias=8.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [0, 13, 15, 16, 30, 44, 47, 63, 104])
def test_borders_of_chunks_windows_and_pages(device: Device, scores: Scores, start: int) -> None:
    """8 rows across borders: each sees its own keys alone."""
    layout = KvLayout(1, 1, 112, 64, "f16", 16, 7)
    spec = FlashDecode(4, layout, 8, scores, ctas=4, least=16, most=16, run=2)
    check(device, spec, rows_of([(start, 8, 0)]), start)


def test_a_ring_of_windowed_keys(device: Device) -> None:
    layout = KvLayout(2, 1, 160, 64, "f16", 16, 13, capacity=64)
    spec = FlashDecode(2, layout, 7, Scores(window=50), ctas=4, least=16, most=16, run=2)
    check(device, spec, rows_of([(90, 4, 0), (3, 2, 1)]), 5)


def test_runs_across_the_rows_of_a_warp(device: Device) -> None:
    """A lane looks at a row: tokens of one sequence in rows 30 to 37, and many after these."""
    layout = KvLayout(40, 1, 60, 64, "f16")
    runs = [(5 * n % 50, 1, 0) for n in range(30)] + [(20, 8, 0), (40, 1, 0), (2, 31, 0)]
    rows = rows_of(runs)
    spec = FlashDecode(2, layout, len(rows[0]), ctas=3, least=16, run=4)
    check(device, spec, rows, 6)


def test_rows_that_only_look_like_a_run(device: Device) -> None:
    """The next position of another sequence, the same position, one before, one of two later."""
    layout = KvLayout(2, 1, 80, 64, "f16")
    positions = [20, 21, 21, 20, 22, 23, 78, 79, 80, IDLE]
    sequences = [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    spec = FlashDecode(4, layout, 10, ctas=4, least=16, ring=RING, run=4)
    check(device, spec, (positions, sequences), 7)


@pytest.mark.turns(2)
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("most", [0, 16])
def test_clusters(device: Device, cluster: int, most: int) -> None:
    """Chunks that CTAs of a cluster share, some of them without keys, and packed results."""
    layout = KvLayout(3, 2, 150, 64, "f16")
    spec = FlashDecode(
        8, layout, 16, ctas=3, least=16, most=most, cluster=cluster, ring=RING, run=4, packs=True
    )
    check(device, spec, rows_of([(140, 7, 1), (15, 3, 1), (1, 4, 0)]), 8)


@pytest.mark.turns(7)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize(("cluster", "packs"), [(1, False), (1, True), (2, False), (2, True)])
def test_groups_of_any_size(device: Device, group: int, cluster: int, packs: bool) -> None:
    """Tiles of heads that a KV head's last one does not fill, of rows in chunks and whole."""
    layout = KvLayout(4, 2, 150, 64, "f16")
    scores = Scores(sinks=True)
    spec = FlashDecode(2 * group, layout, 16, scores, ctas=3, least=16, cluster=cluster)
    spec = replace(spec, ring=RING, run=4, packs=packs and spec.can_pack)
    check(device, spec, rows_of([(140, 7, 0), (15, 3, 1), (1, 4, 0), (5, 1, 0)]), group)


def test_it_equals_single_rows(device: Device) -> None:
    """Within tolerance; rows that are alone to the bit, if chunks are the same."""
    layout = KvLayout(3, 1, 200, 128, "f16")
    rows = rows_of([(150, 4, 0), (90, 1, 0), (199, 1, 0)])
    shared = FlashDecode(4, layout, 6, ctas=4, least=32, ring=RING, run=4)
    single = replace(shared, run=1, ctas=12)
    assert shared.split.cut == single.split.cut
    inputs = attention_inputs(shared, np.random.default_rng(9), *rows)
    out, wanted = (run_kernel(device, spec, inputs)["out"] for spec in (shared, single))
    np.testing.assert_allclose(
        out, wanted, rtol=0, atol=2 * shared.tolerance.rtol * np.abs(wanted).max()
    )
    assert out[4:].tobytes() == wanted[4:].tobytes()
    whole = IncrementalAttention(4, layout, 6)
    wanted = run_kernel(device, whole, {p.name: inputs[p.name] for p in whole.params[:-1]})["out"]
    np.testing.assert_allclose(
        out, wanted, rtol=0, atol=2 * shared.tolerance.rtol * np.abs(wanted).max()
    )


@pytest.mark.turns(5)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize(("head_dim", "run"), [(64, 4), (128, 4), (192, 2), (256, 2)])
def test_no_spills(dtype: Any, head_dim: int, run: int) -> None:
    """A CTA on each SM has 256 registers a thread."""
    layout = KvLayout(64, 8, 1 << 17, head_dim, dtype, 64, 99)
    scores = Scores(window=1 << 14, softcap=30.0)
    spec = FlashDecode(32, layout, 8, scores, ctas=16, most=2048, ring=RING, run=run)
    assert not assemble(spec.ptx("sm_90"), "sm_90").entries["flash_decode"].spills


@pytest.mark.parametrize(
    ("heads", "layout", "fields"),
    [
        (4, KvLayout(1, 1, 64, 64, "f16"), {"run": 3}),
        (4, KvLayout(1, 1, 64, 64, "f16"), {"rows": 1}),
        (4, KvLayout(1, 1, 64, 64, "f32"), {}),
        (4, KvLayout(1, 1, 64, 128, "f16"), {"run": 4}),
        (4, KvLayout(1, 1, 64, 64, "f16"), {"token": OwnToken(Rotation(64, "half"))}),
    ],
)
def test_what_cannot_share_is_refused(heads: int, layout: KvLayout, fields: dict[str, Any]) -> None:
    with pytest.raises(PtxgenError, match="rows of a sequence at once"):
        FlashDecode(heads, layout, **{"rows": 8, "run": 2, **fields})
