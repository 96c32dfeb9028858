"""What work in a graph touches: found to the byte, in memory of the size of what it touches."""

from __future__ import annotations

import tracemalloc
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest

from urdir.driver.emulator.machine.memory import Memory
from urdir.driver.emulator.tracing import Footprint, TouchedBytes

SIZES = [1, 17, 4095, 4096, 4097, 50_001]


@pytest.mark.parametrize("nbytes", SIZES)
def test_overlaps_are_those_of_flags_of_all_bytes(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    for _ in range(60):
        found, expected = [], []
        for _ in range(2):
            touched, flags = TouchedBytes(nbytes), np.zeros(nbytes, np.bool_)
            for _ in range(int(rng.integers(4))):
                shift = int(rng.integers(5))
                if (elements := nbytes >> shift) == 0:
                    continue
                index = rng.integers(elements, size=rng.integers(1, 5))
                touched.add(index, shift)
                flags[(index[:, None] << shift) + np.arange(1 << shift)] = True
            if rng.integers(4) == 0:
                low = int(rng.integers(nbytes))
                high = int(rng.integers(low, nbytes)) + 1
                touched.add_range(low, high)
                flags[low:high] = True
            found.append(touched)
            expected.append(flags)
        both = expected[0] & expected[1]
        first = int(both.argmax()) if both.any() else None
        assert found[0].overlap(found[1]) == first
        assert found[1].overlap(found[0]) == first


def test_an_empty_range_touches_nothing() -> None:
    memory = Memory()
    allocation = memory.find(memory.allocate(5000))
    assert allocation is not None
    empty, whole = Footprint(), Footprint()
    empty.add_interval(allocation, (allocation.address, allocation.address))
    whole.add_interval(allocation, (allocation.address, allocation.end))
    assert empty.overlap(whole) is None
    assert whole.overlap(whole) == allocation.address


def test_a_graph_takes_memory_for_what_it_touches(bench: Any) -> None:
    """Two chains of fills side by side, in an allocation of 64 MiB of which they touch little."""
    api, chains, length = bench.api, 2, 20
    x = int(bench.ok(api.cuMemAlloc(64 << 20)))
    graph = bench.ok(api.cuGraphCreate(0))
    for chain in range(chains):
        before: list[Any] = []
        for i in range(length):
            fill = cuda.CUDA_MEMSET_NODE_PARAMS()
            fill.dst = cuda.CUdeviceptr(x + (chain << 25) + 1000 * i)
            fill.elementSize, fill.value, fill.width, fill.height = 4, i, 250, 1
            arguments = graph, before, len(before), fill, bench.context
            before = [bench.ok(api.cuGraphAddMemsetNode(*arguments))]
    executable = bench.ok(api.cuGraphInstantiate(graph, 0))
    bench.ok(api.cuGraphLaunch(executable, 0))
    tracemalloc.start()
    bench.ok(api.cuCtxSynchronize())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
