"""Mixtures of experts: what a selection means, and what specs refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.experts.choice import most_warps
from urdir.ptxgen.kernels.experts.combine import CombineExperts
from urdir.ptxgen.kernels.experts.down import ExpertsDown
from urdir.ptxgen.kernels.experts.gemm import TILES, ExpertsGemm, tile_height
from urdir.ptxgen.kernels.experts.gemm_small import ExpertsGemmSmall
from urdir.ptxgen.kernels.experts.group import GroupExperts
from urdir.ptxgen.kernels.experts.held import Held
from urdir.ptxgen.kernels.experts.logits import RouterLogits
from urdir.ptxgen.kernels.experts.route import RouteExperts
from urdir.ptxgen.kernels.experts.select import SelectExperts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.experts.settle import SettleExperts
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.experts.up import ExpertsUp
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.pairs import most_places, most_tiles
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, number_of
from urdir.ptxgen.target import TESTED
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.formats import FORMATS, Format

Q8, F16 = FORMATS["Q8_0"], FORMATS["F16"]
SILU, LIMITED = Activation("silu"), Activation("silu", limit=1.0)
RMS, LAYER = Normed(Norm("rms", 1e-5)), Normed(Norm("layer", 1e-5))
OAI = Activation("swiglu_oai", limit=7.0)
FEW: dict[str, Any] = {"batch": 3}
SUM: dict[str, Any] = {"rows": 2, "used": 2, "cols": 256}
TILES_OF_16: dict[str, Any] = {"batch": 9, "height": 16}
GATED: dict[str, Any] = TILES_OF_16 | {"epilogue": (Gated(),)}


def test_the_weights_of_equal_logits() -> None:
    """Lower numbers first; by hand."""
    logits = np.array([[1.0, 3.0, 3.0, 1.0]])
    expert, weight = Selection(4, 3)(logits)
    assert expert.tolist() == [[1, 2, 0]]
    e = np.exp(-2.0)
    np.testing.assert_allclose(weight, np.array([[1, 1, e]]) / (2 + 2 * e))
    _, weight = Selection(4, 2, normalised=True, scale=3.0)(logits)
    np.testing.assert_allclose(weight, [[1.5, 1.5]])
    _, weight = Selection(4, 3, "softmax_selected")(logits)
    np.testing.assert_allclose(weight, np.array([[1, 1, e]]) / (2 + e))


def test_a_bias_changes_the_choice_alone() -> None:
    logits, bias = np.array([[0.0, 2.0, -2.0]]), np.array([0.0, -1.0, 1.0])
    expert, weight = Selection(3, 2, "sigmoid", bias=True)(logits, bias)
    assert expert.tolist() == [[2, 0]]
    np.testing.assert_allclose(weight, 1 / (1 + np.exp([[2.0, 0.0]])))


def test_groups_are_chosen_by_their_two_best() -> None:
    """The best expert is alone in its group: 5 + 0 is less than 3 + 3."""
    logits = np.array([[5.0, 0.0, 3.0, 3.0]])
    selection = Selection(4, 1, "softmax_selected", groups=2, groups_used=1)
    assert selection(logits)[0].tolist() == [[2]]


def test_a_small_sum_counts_as_the_least() -> None:
    _, weight = Selection(2, 1, "sigmoid", normalised=True)(np.array([[-20.0, -30.0]]))
    np.testing.assert_allclose(weight, [[np.exp(-20.0) / 6.103515625e-5]], rtol=1e-6)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(33, 5),
        Selection(40, 6, "sigmoid", groups=4, groups_used=2),
        Selection(509, 10),
        Selection(160, 20),
    ],
)
def test_experts_are_different_ones_whatever_the_logits(
    emulator: Device, selection: Selection
) -> None:
    """Also of rows that nothing has computed."""
    logits = np.full((4, selection.experts), np.nan, np.float32)
    logits[1, 3], logits[2], logits[3] = 1.0, -np.inf, np.inf
    spec = SelectExperts(4, selection)
    position = np.zeros(4, np.uint32)
    expert = run_kernel(emulator, spec, {"logits": logits, "position": position})["expert"]
    assert all(len(set(row)) == selection.used for row in expert.tolist())
    assert expert.max() < selection.experts
    if selection.groups == 1:
        assert expert[1, 0] == 3


def test_candidates_are_all_that_may_be_chosen(emulator: Device) -> None:
    """The best ones beside each other in a group, among equals, and more equals than are chosen."""
    selection, rng = Selection(509, 10, "softmax_selected"), np.random.default_rng(5)
    logits = rng.standard_normal((6, 509)).astype(np.float32)
    logits[1, 96:106] += 9.0
    logits[2, ::256] = logits[2, 1::256] = 5.0
    logits[3] = np.round(logits[3])
    logits[4, :] = 0.25
    logits[5, 40:] = -np.inf
    inputs = {"logits": logits, "position": np.zeros(6, np.uint32)}
    made = run_kernel(emulator, SelectExperts(6, selection), inputs)
    expert, weight = selection(logits)
    np.testing.assert_array_equal(made["expert"], expert)
    np.testing.assert_allclose(made["weight"], weight, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 7, 100, 512])
@pytest.mark.parametrize(("experts", "used"), [(8, 2), (128, 8), (512, 10)])
def test_the_list_has_room_for_the_worst_choice(rows: int, experts: int, used: int) -> None:
    """As many experts as possible with one pair more than whole tiles."""
    height = tile_height(rows, experts, used)
    left = rows * used - (chosen := min(experts, rows * used))
    counts = np.ones(chosen, int)
    for i in range(chosen):
        more = min(left // height * height, (rows - 1) // height * height)
        counts[i] += more
        left -= more
    tiles = int(np.sum(-(-counts // height)))
    assert tiles <= most_tiles(rows, experts, used, height)


@pytest.mark.parametrize(("kind", "height"), [("Q4_0", 128), ("F32", 64)])
def test_matrices_have_tiles_of_the_height(kind: str, height: int) -> None:
    """Of many rows, for which the highest tile would do."""
    fmt = FORMATS[kind]
    assert tile_height(512, 4, 2, (FORMATS["Q8_0"], fmt)) == height
    assert ExpertsGemm(fmt, 4, 2, 96, 64, 512, height=height, down=True).cut.batch == height


@pytest.mark.parametrize(("rows", "experts", "used"), [(1, 8, 2), (9, 8, 2), (20, 128, 8)])
def test_the_aligned_list_has_room_for_the_worst_choice(rows: int, experts: int, used: int) -> None:
    """Each expert but one has one pair, or one more than a multiple of eight."""
    chosen = min(experts, pairs := rows * used)
    counts = np.ones(chosen, int)
    counts[: (pairs - chosen) // 8] += 8
    counts[-1] += pairs - counts.sum()
    places = int(np.sum(-(-counts // 8) * 8))
    assert places <= most_places(rows, experts, used, 8) <= pairs + 7 * chosen


SHARING = {
    "no expert": [[0, 5], [4, 1], [2, 3]],
    "all of them": [[5, 0]] * 3,
    "every one of eight rows": [[3, 1]] * 8,
    "one of two": [[2, row] for row in (0, 1, 3, 4, 5)],
    "in two quartets": [[4, 0]] * 5 + [[0, 1], [1, 3]],
}


@pytest.mark.parametrize("padding", [[1], [0, 3, 4], [0, 1, 2, 3, 4]], ids=["one", "some", "all"])
@pytest.mark.parametrize("chooses", [False, True], ids=["chosen", "chooses"])
@pytest.mark.parametrize("kind", ["gemm_small up", "gemm_small down", "up", "down", "down early"])
def test_padding_rows_multiply_nothing(
    device: Device, kind: str, chooses: bool, padding: list[int]
) -> None:
    """Their results are left as they are, or are the residual alone. Those of others have the same
    bits as without padding."""
    selection = Selection(6, 2, "softmax_selected") if chooses else None
    down, together = "down" in kind, "gemm_small" in kind
    more: dict[str, Any] = {"batch": 5, "selection": selection, "sms": 3}
    steps: list[Epilogue] = [Bias(), *([Weighted()] if down else [])]
    if together:
        spec: ExpertsProduct = ExpertsGemmSmall.of(Q8, 6, 2, 48, 288, *steps, down=down, **more)
    elif down:
        more["early"] = "early" in kind
        spec = ExpertsDown.of(Q8, 6, 2, 48, 288, *steps, Residual(), **more)
    else:
        spec = ExpertsUp.of(Q8, 6, 2, 48, 288, *steps, **more)
    inputs = spec.make_inputs(np.random.default_rng(2))
    expected = run_kernel(device, spec, inputs)["y"]
    assert np.isfinite(expected).all()
    inputs["position"][padding] = IDLE
    real = np.delete(np.arange(5), padding)
    y = run_kernel(device, spec, inputs)["y"]
    np.testing.assert_array_equal(y[real], expected[real])
    alone = kind.startswith("down")
    np.testing.assert_array_equal(y[padding], inputs["residual"][padding] if alone else np.nan)


@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
@pytest.mark.parametrize("shared", SHARING)
def test_rows_that_share_experts(emulator: Device, shared: str, down: bool) -> None:
    """All, some or none of them."""
    chosen = np.array(SHARING[shared], np.uint32)
    spec = ExpertsGemmSmall.of(Q8, 6, 2, 32, 288, len(chosen), Bias(), down=down, sms=3)
    inputs = spec.make_inputs(np.random.default_rng(1)) | {"expert": chosen}
    compare(spec, run_kernel(emulator, spec, inputs), spec.reference(**inputs))


#: Those that took most beyond the registers of 16 warps, and of 12; --full has all.
SCARCE = {("sm_75", "Q3_K"), ("sm_80", "Q6_K"), ("sm_90", "E2M1G64"), ("sm_120", "NVFP4")}


@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize(
    ("target", "fmt"),
    [
        pytest.param(target, fmt, marks=[] if (target, fmt.name) in SCARCE else pytest.mark.full)
        for target in TESTED
        for fmt in FORMATS.values()
        if fmt.arithmetic == "integers"
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_quartets_of_real_shapes_spill_nothing(target: str, fmt: Format) -> None:
    """Eight rows of qwen3-30b-a3b, and of one like gpt-oss-20b, which has biases."""
    shared = ARCHITECTURES[number_of(target)].shared_per_cta
    most: dict[str, Any] = {"warps": most_warps(target, fmt), "shared": shared}
    for experts, used, width, hidden, f in ((128, 8, 768, 2048, SILU), (32, 4, 1024, 1536, OAI)):
        bias = [Bias()] if f == OAI else []
        up = (width, hidden, RMS, *bias, Gated(f))
        down = (hidden, width, *bias, Weighted())
        for (rows, cols, *steps), last in ((up, False), (down, True)):
            shape = (fmt, experts, used, rows, cols, 8)
            spec = ExpertsGemmSmall.of(*shape, *steps, down=last, early=last, **most)
            cost = assemble(spec.ptx(target), target, name=spec.name).entries[spec.name]
            assert not cost.spills, spec


@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
def test_a_cache_of_a_real_shape_spills_nothing() -> None:
    """Qwen3-30b-a3b's, where a CTA of the next launch shares an SM; the example has it alone."""
    held, steps = Held(128, 8, 64, tells=True), (RMS, Gated(SILU))
    row: dict[str, Any] = {"activations": "i16", "selection": Selection(128, 8), "held": held}
    spec = ExpertsUp.of(FORMATS["Q4_K"], 128, 8, 768, 2048, *steps, **row, resident=2)
    assert not assemble(spec.ptx("sm_90"), "sm_90", name=spec.name).entries[spec.name].spills


@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_a_row_has_the_same_bits_whatever_its_neighbours(emulator: Device, down: bool) -> None:
    """In another place, beside others that choose other experts, and alone."""
    steps = [Weighted()] if down else [RMS, Gated()]
    spec = ExpertsGemmSmall.of(FORMATS["Q4_K"], 6, 2, 32, 768, 6, *steps, down=down, sms=5)
    rng = np.random.default_rng(2)
    inputs = spec.make_inputs(rng) | {"expert": np.array([[1, 4]] * 6, np.uint32)}
    together = run_kernel(emulator, spec, inputs)["y"]

    order = np.array([3, 5, 0, 1, 2, 4])
    rows = {name: inputs[name][order] for name in ("expert", "x", "weight") if name in inputs}
    rows["expert"][:5] = [[4, 0], [2, 3], [0, 5], [1, 2], [3, 0]]
    rows["x"][:5] = 3 * rng.standard_normal(rows["x"][:5].shape)
    moved = run_kernel(emulator, spec, inputs | rows)["y"]
    np.testing.assert_array_equal(moved[5], together[4])

    alone = dataclasses.replace(spec, batch=1)
    rows = {name: values[5:] for name, values in rows.items()}
    np.testing.assert_array_equal(run_kernel(emulator, alone, inputs | rows)["y"][0], together[4])


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Selection, {"experts": 4, "used": 5}, "5 of 4 experts"),
        (Selection, {"experts": 513, "used": 1}, "1 of 513"),
        (Selection, {"experts": 64, "used": 33}, "33 of 64"),
        (Selection, {"experts": 8, "used": 2, "scoring": "max"}, "scoring is 'max'"),
        (Selection, {"experts": 8, "used": 2, "groups": 3}, "groups of the same size"),
        (Selection, {"experts": 8, "used": 2, "groups": 8}, "two experts at least"),
        (Selection, {"experts": 8, "used": 3, "groups": 4}, "fewer than the 3"),
        (SelectExperts, {"rows": 0, "selection": Selection(2, 1)}, "0 rows"),
        (RouteExperts, {"rows": 1, "cols": 6, "selection": Selection(2, 1)}, "6 columns"),
        (
            RouteExperts,
            {"rows": 1, "cols": 8, "selection": Selection(2, 1), "norm": Norm("layer", 1e-5)},
            "no norm but",
        ),
        (GroupExperts, {"rows": 600, "experts": 4, "used": 1, "tile": 2}, "600 rows in tiles"),
        (GroupExperts, {"rows": 6, "experts": 4, "used": 5, "tile": 16}, "5 of 4 experts"),
        (GroupExperts, {"rows": 6, "experts": 4, "used": 2, "tile": 16, "align": 3}, "power of"),
        (GroupExperts, {"rows": 6, "experts": 4, "used": 2, "tile": 16, "align": 32}, "power of"),
        (CombineExperts, SUM | {"order": "units"}, "the order of 8 rows at most"),
        (CombineExperts, SUM | {"rows": 9, "order": "units", "begins": True}, "8 rows at most"),
        (Pack, {"rows": 6, "cols": 4, "used": 2}, "those of pairs"),
        (Pack, {"rows": 6, "cols": 4, "weighted": True}, "those of pairs"),
        (ExpertsUp, {"rows": 17}, "a multiple of 16 rows"),
        (ExpertsUp, {"used": 3}, "3 of 2 experts"),
        (ExpertsUp, {"format": F16, "activations": "i16"}, "quantised weights only"),
        (ExpertsUp, {"cluster": 2}, "cluster and fill"),
        (ExpertsUp, {"epilogue": (Activated(OAI),)}, "is for gated products"),
        (ExpertsUp, {"epilogue": (Bias(), Weighted())}, "in the order weighted, bias"),
        (ExpertsDown, {"epilogue": (Weighted(), Bias())}, "in the order bias, weighted"),
        (ExpertsDown, {"epilogue": (Gated(),)}, "takes no gated"),
        (ExpertsUp, {"cols": 65536, "shared": 20000}, "more than 20000 bytes"),
        (ExpertsDown, {"split": 2}, "split is 2 of 1 blocks"),
        (ExpertsUp, {"held": Held(2, 1, 1), "batch": 2}, "2 x 1 of 2 experts look up as one row"),
        (ExpertsDown, {"held": Held(3, 1, 1)}, "look up as one row with 1 of 3"),
        (ExpertsUp, {"held": Held(2, 1, 1), "in_turn": True}, "without weights or slots"),
        (Held, {"experts": 8, "used": 3, "slots": 2}, "2 slots for 1 x 3"),
        (SettleExperts, {"caches": 129, "used": 1, "experts": 2, "slots": 1}, "129 caches"),
        (SettleExperts, {"caches": 1, "used": 3, "experts": 8, "slots": 2}, "2 slots for 1 x 3"),
        (ExpertsGemm, {"batch": 9, "height": 17}, "tiles of 17 pairs"),
        (ExpertsGemm, {"batch": 9, "height": 16, "rows": 8}, "a multiple of 16 rows"),
        (ExpertsGemm, GATED | {"down": True}, "takes no gated"),
        (ExpertsGemm, TILES_OF_16 | {"epilogue": (Activated(LIMITED),)}, "for gated products"),
        (ExpertsGemm, GATED | {"tile": TILES[-1]}, "too narrow for a gate"),
        (ExpertsGemmSmall, {"batch": 9}, "9 rows: 1 to 8"),
        (ExpertsGemmSmall, FEW | {"format": F16}, "must be quantised"),
        (ExpertsGemmSmall, FEW | {"rows": 17}, "a multiple of 16 rows"),
        (ExpertsGemmSmall, FEW | {"epilogue": (Activated(LIMITED),)}, "for gated products"),
        (ExpertsGemmSmall, FEW | {"epilogue": (Gated(),), "down": True}, "takes no gated"),
        (ExpertsGemmSmall, FEW | {"prologue": (LAYER,)}, "a launch of its own"),
        (ExpertsGemmSmall, FEW | {"prologue": (RMS,), "down": True}, "a launch of its own"),
        (ExpertsGemmSmall, FEW | {"splits": 2}, "1 blocks of columns in 2 splits"),
        (ExpertsGemmSmall, FEW | {"cols": 512, "splits": 2}, "splits are for what goes down"),
        (ExpertsGemmSmall, FEW | {"cols": 8192, "shared": 90_000}, "more than 90000 bytes"),
        (ExpertsGemmSmall, FEW | {"used": 3}, "3 of 2 experts"),
        (RouterLogits, {"rows": 0, "experts": 4, "cols": 8}, "0 rows"),
        (RouterLogits, {"rows": 9, "experts": 513, "cols": 8}, "513 experts"),
        (RouterLogits, {"rows": 9, "experts": 4, "cols": 6}, "6 columns"),
        (RouterLogits, {"rows": 1 << 20, "experts": 4, "cols": 1024}, "exceed 4 GiB"),
    ],
)
def test_what_is_refused(kind: type[Any], fields: dict[str, Any], message: str) -> None:
    if kind in (ExpertsUp, ExpertsDown, ExpertsGemm, ExpertsGemmSmall):
        shape = {"format": Q8, "experts": 2, "used": 1, "rows": 16, "cols": 32}
        fields = shape | fields
    with pytest.raises(PtxgenError, match=message):
        getattr(kind, "of", kind)(**fields)
