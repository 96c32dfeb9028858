"""Scores that no histogram of even bins divides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.select_keys import SelectKeys, select_keys

LAYOUT = KvLayout(1, 1, 5000, 64, "f16")


def odd_rows(keys: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Rows of scores: equal ones, both zeros, NaN, infinities, denormals, numbers whose difference
    overflows, steep, shifted, and in order."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((10, keys)).astype(np.float32)
    x[0] = 3.25
    x[1] = np.where(x[1] > 0, np.float32(0.0), np.float32(-0.0))
    x[2, rng.random(keys) < 0.01] = np.nan
    x[3, rng.random(keys) < 0.02] = np.inf
    x[4, rng.random(keys) < 0.3] = -np.inf
    x[5] *= np.float32(1e-41)
    x[6] = np.clip(x[6], -3, 3) * np.float32(1e38)
    x[7] = np.exp(8 * x[7])
    x[8] = x[8] * np.float32(1e-4) + 1000
    x[9].sort()
    return x


@pytest.mark.parametrize(("keys", "cluster"), [(901, 1), (4500, 2)])
def test_odd_scores_are_selected(keys: int, cluster: int, device: Device) -> None:
    kernel = SelectKeys(LAYOUT, 10, keys, 300, cluster)
    if not kernel.target_on(device.native_target):
        pytest.skip("no clusters")
    inputs = kernel.make_inputs(np.random.default_rng(1))
    inputs |= {"scores": odd_rows(keys), "position": np.full(10, keys - 1, np.uint32)}
    compare(kernel, run_kernel(device, kernel, inputs), kernel.reference(**inputs))


@pytest.mark.parametrize(
    ("rows", "keys", "cluster"),
    [(1, 8192, 1), (1, 8193, 2), (1, 65536, 8), (32, 65536, 4), (300, 65536, 1), (1, 262144, 8)],
)
def test_clusters_are_as_small_as_hold_a_row_and_resident(
    rows: int, keys: int, cluster: int
) -> None:
    layout = replace(LAYOUT, max_len=keys)
    chosen = select_keys(layout, rows, keys, 2048, 1, 132, "sm_90a")
    assert chosen.cluster == cluster
    assert select_keys(layout, rows, keys, 2048, 1, 132, "sm_80").cluster == 1
