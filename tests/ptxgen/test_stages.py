"""Stages of shared memory are freed after what was loaded from them has been used."""

from __future__ import annotations

import re

import pytest

from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.spec import KernelSpec

#: Kernels whose warps load weights from stages that bulk copies fill again.
STAGED = ("gemm_bytes", "gemm_e4m3", "gemm_wgmma")

_STEP = re.compile(
    r"^\s*(?:@\S+ )?(ld\.shared|wgmma\.commit_group|mbarrier\.arrive\.release.*\[%barrier\+)", re.M
)


@pytest.mark.parametrize("name", STAGED)
def test_products_are_issued_between_the_last_loads_and_the_arrival(name: str) -> None:
    """An arrival waits for no load of its thread: only what needs the loaded registers does."""
    kernel: type[KernelSpec] = kernels()[name]
    for spec in kernel.examples().values():
        before, arrivals = "", 0
        for step in _STEP.finditer(spec.ptx("sm_90a")):
            if "arrive" in step[1]:
                assert before == "wgmma.commit_group", step[0]
                arrivals += 1
            before = step[1]
        assert arrivals
