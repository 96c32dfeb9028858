"""Norms around mixtures of many rows, which take no launches: those of router and experts, and the
one after the sum, against numpy."""

from __future__ import annotations

import pytest

from tests.model.lower import test_router_parts
from tests.model.lower.test_router_parts import INNER, LAYER, RMS, Case, PartsBench
from urdir.driver.device import Device
from urdir.model.graph.ops import Norm as Normed
from urdir.model.graph.ops import Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower import router
from urdir.ptxgen.kernels.experts.selection import Selection

HIDDEN, WIDTH, LAST = 512, 256, 272
#: What a step of many rows launches between its products.
CHOICE = [
    "router_logits",
    "select_experts",
    "group_experts",
    "pack",
    "gemm_wgmma",
    "gemm_wgmma",
]

CASES = {
    "scaled": Case(Selection(32, 6), scale=0.5),
    "normalised": Case(Selection(40, 8, normalised=True)),
    "sigmoid, choice": Case(Selection(33, 3, "sigmoid", by_logits=True)),
}
#: Norms whose factors come too late.
OTHERS = {
    "bias": Case(Selection(32, 4), bias=True),
    "layer norm": Case(Selection(32, 4), norm=LAYER),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of few rows are many, and products are as wide as packed vectors need."""
    monkeypatch.setattr(router, "MANY_LOGITS", 8)
    monkeypatch.setattr(test_router_parts, "HIDDEN", HIDDEN)
    monkeypatch.setattr(test_router_parts, "WIDTH", WIDTH)


@pytest.mark.turns(8, which=(0, 3))
@pytest.mark.parametrize("rows", [19, 40])
@pytest.mark.parametrize("case", CASES | OTHERS)
def test_norms_take_no_launches(emulator: Device, case: str, rows: int) -> None:
    of = (CASES | OTHERS)[case]
    made = PartsBench(emulator, rows, False, of.selection.experts)
    y, last = made.out(HIDDEN, "mixed"), made.out(LAST, "last")
    expected = made.layer("ffn", of, made.input(INNER), made.input(HIDDEN, "x"), y)
    norm, weights = made.norm(RMS, HIDDEN)
    normed = made.add(Normed, "next", Tensor("normed next", rows, HIDDEN), y, norm)
    matrix, values, _ = made.linear(LAST, HIDDEN)
    made.add(Product, "last", last, normed, matrix)
    norms = ["normalise"] if case in OTHERS else []
    launches = ["pack", "gemm_wgmma", *norms, *CHOICE, "combine_experts", "gemm_wgmma"]
    assert made.run() == launches
    made.compare(y, expected, 1e-3)
    made.compare(last, RMS(expected, **weights) @ values.T, 1e-3)
    made.close()


def test_layers_in_a_graph_read_nothing_too_early(urdir_sanitizer: Device) -> None:
    """Of two layers. A graph gives what launches one after the other give, and the emulator finds
    no race of kernels that overlap."""
    case = Case(Selection(7, 3, normalised=True))
    made = PartsBench(urdir_sanitizer, 9, False, case.selection.experts)
    x, first, last = made.input(HIDDEN, "x"), made.out(HIDDEN, "first"), made.out(HIDDEN, "last")
    between = made.layer("0", case, made.input(INNER), x, first)
    expected = made.layer("1", case, made.input(INNER, "read"), (first, between), last)
    launches = made.run()
    assert launches.count("group_experts") == 2
    made.compare(last, expected, 2e-3)
    made.check_replays(last, 1)
    made.close()
