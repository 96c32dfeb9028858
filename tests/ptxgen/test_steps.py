"""Steps before and after products, each by itself: parameters, reference, room, what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.linear.cut import CutOptions
from urdir.ptxgen.kernels.linear.epilogue.activation import (
    Activated,
    Bounded,
    Gated,
    Scaled,
    SigmoidScaled,
)
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed, begun
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.prologue.sum import NormedAdd, RankAdd
from urdir.ptxgen.kernels.linear.reference import multiplied
from urdir.ptxgen.kernels.linear.spec import LinearSpec
from urdir.ptxgen.kernels.linear.steps import Epilogue, Prologue, Reference
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import Array
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.packed_few import pack_few, unpack_few

Q4_K, Q6_K, Q8_0, F32 = (FORMATS[name] for name in ("Q4_K", "Q6_K", "Q8_0", "F32"))
RMS, LAYER = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
SILU, GELU = Activation("silu"), Activation("gelu")
ROWS, COLS = 37, 96
CONV = CausalConv(1, 3, 64, 0, channels=ROWS, taps=4)
SCAN = SelectiveScan(1, 3, 64, 0, channels=ROWS, size=16)
PRODUCTS = (Gemv, GemmSmall, GemvF32)


def sigmoid(x: Array | float) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def rms(x: Array, eps: float = 1e-5) -> Array:
    normed: Array = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + eps)
    return normed


# ---- what x goes through, against the formulas ----


def gated_x(x: Array, i: dict[str, Array]) -> Array:
    return x * sigmoid(i["x_gate"])


def gated_heads(x: Array, i: dict[str, Array]) -> Array:
    heads = rms(x.reshape(-1, 32), 1e-6) * i["head_norm"]
    return heads.reshape(x.shape) * i["x_gate"] * sigmoid(i["x_gate"])


def layer_normed(x: Array, i: dict[str, Array]) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return rms(centred) * i["norm"] + i["norm_bias"]


def normed_add(x: Array, i: dict[str, Array]) -> Array:
    return (i["before"] + rms(x) * i["post_norm"]) * i["stream_scale"]


def rank_add(x: Array, i: dict[str, Array]) -> Array:
    at = np.arange(x.size)
    words = i["inbox1"][i["sent"][at // 256] % 2, :, at, 0]
    return i["before"] + words[:, 0] + x + words[:, 2]


PROLOGUES = {
    "norm": (Normed(RMS), {"norm"}, lambda x, i: rms(x) * i["norm"]),
    "layer norm": (Normed(LAYER), {"norm", "norm_bias"}, layer_normed),
    "gate": (Gate(Activation("sigmoid")), {"x_gate"}, gated_x),
    "gated heads": (Gate(SILU, 32, 1e-6), {"x_gate", "head_norm"}, gated_heads),
    "normed add": (
        NormedAdd(RMS, scaled=True),
        {"before", "post_norm", "stream_scale", "stream"},
        normed_add,
    ),
    "rank add": (
        RankAdd(SumOfRanks(3, 1, 256)),
        {"before", "stream", "inbox1", "sent", "epochs", "fault"},
        rank_add,
    ),
}


@pytest.mark.parametrize("name", PROLOGUES)
def test_a_prologue_makes_of_x_what_its_formula_says(name: str) -> None:
    step, names, formula = PROLOGUES[name]
    plain, spec = Gemv(F32, ROWS, COLS), Gemv(F32, ROWS, COLS, prologue=(step,))
    assert {p.name for p in spec.params} - {p.name for p in plain.params} == names
    inputs = spec.make_inputs(np.random.default_rng(1))
    outputs: dict[str, Array] = {}
    made = step.apply(inputs["x"], Reference(spec, spec.parts[0], inputs, outputs))
    np.testing.assert_allclose(made, formula(inputs["x"], inputs), rtol=1e-6, atol=1e-6)
    if "stream" in names:
        np.testing.assert_array_equal(outputs["stream"], made.astype(np.float32))
    y = plain.reference(**{**inputs, "x": made})["y"]
    np.testing.assert_allclose(spec.reference(**inputs)["y"], y, rtol=1e-6)


def test_packed_vectors_whose_norm_has_begun_are_multiplied_as_they_were() -> None:
    rng = np.random.default_rng(2)
    v, norm = rng.standard_normal((3, 512)), rng.standard_normal(512)
    squares = (v**2).reshape(3, -1, 16).sum(axis=2)
    spec = GemmSmall(Q4_K, 32, 512, prologue=(PackedInput(), begun(RMS)), batch=3)
    inputs = spec.make_inputs(rng)
    inputs |= {"x": pack_few(v * norm, spec.order), "x_summary": squares[None].astype(np.float32)}
    made = multiplied(inputs["x"], Reference(spec, spec.parts[0], inputs, {}))
    np.testing.assert_allclose(made, rms(v) * norm, rtol=2**-10, atol=1e-5)
    assert spec.param("x").dtype == "f16"
    assert spec.shape_of(spec.param("x_summary")) == (1, 3, 32)
    unpacked = GemmSmall(Q4_K, 32, 512, prologue=(begun(RMS),), batch=3)
    assert unpacked.shape_of(unpacked.param("x_summary")) == (2, 3, 32)


# ---- what a product goes through ----


def plus_bias(y: Array, i: dict[str, Array]) -> Array:
    return y + i["bias"]


EPILOGUES = {
    "bias": (Bias(), {"bias"}, plus_bias),
    "activation": (Activated(Activation("relu")), set(), lambda y, i: np.maximum(y, 0)),
    "sigmoid scale": (SigmoidScaled(), {"gain"}, lambda y, i: y * sigmoid(i["gain"][0])),
    "scale": (Scaled(0.25), set(), lambda y, i: 0.25 * y),
    "residual": (Residual(0.5), {"residual"}, lambda y, i: i["residual"] + 0.5 * y),
    "soft cap": (Bounded(softcap=5.0), set(), lambda y, i: 5 * np.tanh(y / 5)),
    "clamp": (Bounded(clamp=1.5), set(), lambda y, i: np.clip(y, -1.5, 1.5)),
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("kind", PRODUCTS, ids=lambda kind: kind.name)
def test_an_epilogue_makes_of_a_product_what_its_formula_says(
    kind: type[LinearSpec], name: str
) -> None:
    step, names, formula = EPILOGUES[name]
    plain = kind(Q8_0, ROWS, COLS)
    if type(step) not in kind.epilogues:
        with pytest.raises(PtxgenError, match=f"{kind.name}: takes no {step.stem}"):
            kind(Q8_0, ROWS, COLS, epilogue=(step,))
        return
    spec = kind(Q8_0, ROWS, COLS, epilogue=(step,))
    assert {p.name for p in spec.params} - {p.name for p in plain.params} == names
    inputs = spec.make_inputs(np.random.default_rng(3))
    y = inputs["x"].astype(np.float64) @ spec.layout.unpack(inputs["weights"]).T.astype(np.float64)
    made = spec.reference(**inputs)["y"]
    np.testing.assert_allclose(made, formula(y, inputs), rtol=1e-5, atol=1e-5)


def test_a_gate_takes_two_products_with_biases_of_their_own() -> None:
    spec = Gemv(Q8_0, ROWS, COLS, epilogue=(Bias(), Gated(GELU)))
    inputs = spec.make_inputs(np.random.default_rng(4))
    x = inputs["x"].astype(np.float64)
    gate, up = (x @ spec.layout.unpack(inputs[n]).T.astype(np.float64) for n in ("weights", "up"))
    wanted = GELU(gate + inputs["bias"]) * (up + inputs["up_bias"])
    np.testing.assert_allclose(spec.reference(**inputs)["y"], wanted, rtol=1e-5, atol=1e-5)


def test_some_of_several_matrices_have_a_bias() -> None:
    spec = Gemv(Q8_0, 5, COLS, epilogue=(Bias((False, True)),), others=((Q8_0, 3),))
    assert [p.name for p in spec.params] == ["weights", "x", "y", "weights1", "bias1", "y1"]
    first, second = spec.parts
    assert (spec.epilogue_of(first), spec.epilogue_of(second)) == ((), spec.epilogue)


def test_a_norm_begins_with_what_is_stored() -> None:
    steps: tuple[Epilogue, ...] = (Residual(), BeginNorm())
    spec = GemmSmall(Q8_0, 48, COLS, epilogue=steps, batch=3)
    inputs = spec.make_inputs(np.random.default_rng(5))
    made = spec.reference(**inputs)
    scaled = made["y"] * inputs["next_norm"]
    np.testing.assert_array_equal(made["scaled"], scaled)
    groups = scaled.reshape(3, 3, 16)
    np.testing.assert_array_equal(made["y_summary"][0], np.abs(groups).max(axis=2))
    squares = (made["y"].astype(np.float64) ** 2).reshape(3, 3, 16).sum(axis=2)
    np.testing.assert_allclose(made["y_summary"][1], squares, rtol=1e-6)


@pytest.mark.parametrize("begins", [False, True])
def test_what_is_packed_leaves_other_vectors_as_they_were(begins: bool) -> None:
    steps: tuple[Epilogue, ...] = (Residual(), BeginNorm()) if begins else ()
    whole = GemmSmall(Q8_0, 256, COLS, epilogue=steps, batch=3)
    spec = GemmSmall(Q8_0, 256, COLS, epilogue=(*steps, PackedOutput("lanes")), batch=3)
    name = "scaled" if begins else "y"
    assert spec.param(name).dtype == "f16"
    inputs = spec.make_inputs(np.random.default_rng(6))
    made = unpack_few(spec.reference(**inputs)[name], 8, 256, "lanes")
    unpacked = {key: value for key, value in inputs.items() if key != name}
    np.testing.assert_allclose(made[:3], whole.reference(**unpacked)[name], rtol=2**-10, atol=1e-4)
    np.testing.assert_array_equal(made[3:], unpack_few(inputs[name], 8, 256, "lanes")[3:])
    assert len(spec.reference(**inputs).get("y_summary", [0])) == 1  # squares alone


def test_a_product_that_is_sent_goes_to_every_other_inbox() -> None:
    gives = Gives(ranks=3, rank=1, capacity=256)
    spec = Gemv(Q8_0, ROWS, COLS, epilogue=(Send(gives),))
    inputs = spec.make_inputs(np.random.default_rng(7))
    made = spec.reference(**inputs)
    epoch = inputs["epochs"][0] + 1
    for rank in (0, 2):
        words = made[f"inbox{rank}"][epoch % 2, 1, :ROWS, 0]
        np.testing.assert_array_equal(words, made["y"][0])
    assert "inbox1" not in made
    assert spec.epilogue[0].bytes_moved(spec) == 8 * ROWS * 2


@pytest.mark.parametrize("kernel", [CONV, SCAN], ids=lambda kernel: kernel.name)
def test_a_continuation_takes_the_product(kernel: CausalConv | SelectiveScan) -> None:
    plain = Gemv(Q8_0, ROWS, COLS)
    spec = Gemv(Q8_0, ROWS, COLS, epilogue=(Continued(kernel),))
    inputs = spec.make_inputs(np.random.default_rng(8))
    product = plain.reference(weights=inputs["weights"], x=inputs["x"])["y"]
    own = {n.removeprefix("then_"): v for n, v in inputs.items() if n.startswith("then_")}
    taken = "x" if kernel is CONV else "step"
    wanted = kernel.reference(**own, **{taken: product})
    made = spec.reference(**inputs)
    np.testing.assert_array_equal(made.pop("y"), wanted.pop("y"))
    assert {name.removeprefix("then_") for name in made} == set(wanted)


# ---- room: shared memory and registers ----


def test_steps_say_what_they_need_of_a_cta() -> None:
    sums = {step: step.warp_sums for step in (Normed(RMS), Normed(LAYER), NormedAdd(RMS))}
    assert list(sums.values()) == [0, 1, 2]
    assert (Normed(RMS).vectors, Normed(RMS).held_vectors) == (1, 0)
    assert (Normed(LAYER).vectors, Normed(LAYER).held_vectors) == (2, 2)
    assert (Gate(SILU).vectors, Gate(SILU).held_vectors) == (1, 1)
    assert (NormedAdd(LAYER).vectors, RankAdd(SumOfRanks(2, 0, 256)).vectors) == (2, 0)
    assert RankAdd.registers > NormedAdd.registers
    assert [Continued(kernel).shared_nbytes for kernel in (CONV, SCAN)] == [0, 128]
    assert Bias().shared_nbytes == 0


@pytest.mark.parametrize(
    "steps",
    [
        {"prologue": (Normed(LAYER),)},
        {"prologue": (NormedAdd(RMS),)},
        {"prologue": (NormedAdd(RMS), Normed(LAYER))},
        {"epilogue": (Continued(SCAN),)},
    ],
    ids=str,
)
def test_a_launch_has_the_shared_memory_that_its_steps_need(steps: dict[str, Any]) -> None:
    plain, spec = Gemv(Q8_0, ROWS, 1024), Gemv(Q8_0, ROWS, 1024, **steps)
    warps, sums = spec.cut.warps, 1 + sum(step.warp_sums for step in spec.prologue)
    shared = sum(step.shared_nbytes for step in spec.epilogue)
    of_sums = spec.cut.memory.partials - spec.cut.memory.squares
    assert of_sums == -(-4 * sums * warps // 16) * 16 + shared
    assert of_sums > plain.cut.memory.partials - plain.cut.memory.squares or warps <= 4


# ---- what is refused, by name ----


@pytest.mark.parametrize("kind", PRODUCTS, ids=lambda kind: kind.name)
def test_a_product_takes_its_steps_once_and_in_order(kind: type[LinearSpec]) -> None:
    with pytest.raises(PtxgenError, match=f"{kind.name}: bias, bias: each at most once"):
        kind(Q8_0, ROWS, COLS, epilogue=(Bias(), Bias()))
    with pytest.raises(PtxgenError, match=f"{kind.name}: scale, bias: .* in the order .*bias"):
        kind(Q8_0, ROWS, COLS, epilogue=(Scaled(2.0), Bias()))
    strange: list[Prologue] = [Gate(SILU), PackedInput(), BegunNorm(1e-5), NormedAdd(RMS)]
    for step in strange:
        if type(step) not in kind.prologues:
            with pytest.raises(PtxgenError, match=f"{kind.name}: takes no {step.stem}"):
                kind(Q8_0, ROWS, COLS, prologue=(step,))


@pytest.mark.parametrize(
    ("kind", "steps", "message"),
    [
        (Gemv, {"epilogue": (Gated(), Residual())}, "residual is for one matrix"),
        (Gemv, {"epilogue": (Residual(),), "others": ((Q8_0, 3),)}, "residual is for one matrix"),
        (Gemv, {"epilogue": (Gated(),), "others": ((Q8_0, 3),)}, "gated is for one pair"),
        (Gemv, {"epilogue": (Bias((True,)),), "others": ((Q8_0, 3),)}, "bias is .* of 2 matrices"),
        (Gemv, {"epilogue": (SigmoidScaled(), Bias())}, "sigmoid_scaled goes without bias"),
        (Gemv, {"epilogue": (Bounded(softcap=-1.0),)}, "softcap -1.0"),
        (Gemv, {"epilogue": (Bounded(clamp=float("nan")),)}, "clamp nan"),
        (Gemv, {"epilogue": (Activated(Activation("silu", limit=2.0)),)}, "is for gated"),
        (Gemv, {"epilogue": (Residual(), Continued(CONV))}, "gate or residual"),
        (Gemv, {"epilogue": (Send(Gives(2, 0, 256)),), "others": ((Q8_0, 3),)}, "send is for"),
        (
            Gemv,
            {"prologue": (RankAdd(SumOfRanks(2, 1, 256)),), "epilogue": (Send(Gives(2, 1, 256)),)},
            "takes from other ranks, or sends",
        ),
        (Gemv, {"prologue": (Gate(SILU, 64),)}, "96 columns in heads of 64"),
        (Gemv, {"prologue": (NormedAdd(RMS), Gate(SILU))}, "a gate, or one deferred add"),
        (GemmSmall, {"epilogue": (BeginNorm(),)}, "begin_norm is for what has a residual"),
        (GemmSmall, {"epilogue": (Residual(), BeginNorm())}, "begin_norm of 37 rows"),
        (GemmSmall, {"epilogue": (PackedOutput("units"),)}, "packed_output is of multiples of 256"),
        (GemmSmall, {"prologue": (PackedInput(), Normed(RMS))}, "go without a norm"),
        (GemmSmall, {"prologue": (Normed(LAYER),)}, "must be a launch of its own"),
    ],
)  # fmt: skip
def test_steps_that_do_not_go_together_are_refused(
    kind: type[LinearSpec], steps: dict[str, Any], message: str
) -> None:
    with pytest.raises(PtxgenError, match=message):
        kind(Q8_0, ROWS, COLS, **steps)


def test_a_cluster_has_no_step_that_needs_all_columns() -> None:
    for steps in ((NormedAdd(RMS),), (Normed(LAYER),)):
        with pytest.raises(PtxgenError, match="cluster"):
            Gemv(Q8_0, ROWS, 1024, prologue=steps, options=CutOptions(cluster=2))


@pytest.mark.parametrize("norm", [LAYER, Norm("rms", 1e-5, weight=False)], ids=str)
def test_only_a_scaled_rms_norm_is_begun(norm: Norm) -> None:
    with pytest.raises(PtxgenError, match="must be a launch of its own"):
        begun(norm)


# ---- macros ----


def test_every_step_has_its_macros_where_its_stem_says() -> None:
    folder = Path(__file__).parents[2] / "templates" / "linear"
    taken = [(kind.prologues, kind.epilogues) for kind in PRODUCTS]
    for before, after in taken:
        for room, kinds in (("prologue", before), ("epilogue", after)):
            for kind in kinds:
                if kind is not PackedInput:  # part of the main loop: products/_small_packed.j2
                    assert (folder / room / f"_{kind.stem}.j2").is_file(), kind
    stems = [kind.stem for kind in {*itertools.chain(*itertools.chain(*taken))}]
    assert len(set(stems)) == len(stems)
