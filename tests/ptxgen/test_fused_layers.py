"""The persistent kernel of all layers: how it is cut, what it refuses, whom it waits for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from urdir.driver import Device, Plan, execute
from urdir.driver.errors import CudaError
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS
from urdir.ptxgen.fused_choice import CASES, Case, fuses
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.fused_layers import FusedLayers
from urdir.ptxgen.kv_layout import KvLayout
from urdir.ptxgen.rope import Rotation
from urdir.ptxgen.spec import Tolerance

Q4, Q6 = FORMATS["Q4_K"], FORMATS["Q6_K"]
SMALL = Attention(4, KvLayout(1, 2, 33, 64, "f16"), rope=Rotation(64, "half"))
SPEC = FusedLayers.of(256, 512, SMALL, [(Q4,) * 7] * 2, sms=4)


# ---- how it is cut ----


@pytest.mark.parametrize("sms", [16, 23, 108, 132, 148])
@pytest.mark.parametrize(("hidden", "ffn"), [(256, 512), (1536, 8960), (4096, 14336)])
def test_every_tile_of_a_stage_has_one_cta(sms, hidden, ffn):
    heads = Attention(hidden // 64, KvLayout(1, 2, 64, 64, "f16"), rope=Rotation(64, "half"))
    spec = FusedLayers.of(hidden, ffn, heads, [(Q4,) * 7], sms=sms, shared=10**6)
    for stage in spec.stages:
        taken = []
        for cta in range(sms):
            piece = [p for p in stage.pieces if p.first_cta <= cta][-1]
            first = (cta - piece.first_cta) * stage.each
            tiles = range(first, min(first + stage.each, piece.tiles))
            taken += [(piece.matrix, tile) for tile in tiles]
        rows = [(piece.matrix, spec.shapes[piece.matrix][0]) for piece in stage.pieces]
        wanted = [(matrix, tile) for matrix, count in rows for tile in range(count // 16)]
        assert sorted(taken) == wanted


def test_rows_that_are_added_to_stay_with_their_cta():
    _, output, _, down = SPEC.stages
    assert (output.each, output.pieces[0].tiles) == (down.each, down.pieces[0].tiles)


@pytest.mark.parametrize("spec", FusedLayers.examples().values(), ids=FusedLayers.examples())
def test_parts_of_shared_memory_lie_apart(spec):
    places = spec.offsets
    parts = ["token", "heads", "places", "planes", "stages", "squares", "residual", "records"]
    ends = sorted(places[name] for name in [*parts, "partials", "rings"])
    assert len(set(ends)) == len(ends)
    assert places["scratch"] + spec.scratch_nbytes <= places["rings"]
    assert all(b - a >= 256 for a, b in pairwise(ends))
    assert spec.launch_shape.shared_bytes <= spec.shared


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden": 320}, "hidden is 320: a multiple of 256"),
        ({"ffn": 0}, "ffn is 0"),
        ({"attention": replace(SMALL, rows=2)}, "attention of one row"),
        ({"attention": replace(SMALL, rope=None)}, "attention of one row"),
        ({"attention": replace(SMALL, layout=KvLayout(1, 2, 64, 64, "q8_0"))}, "floats"),
        ({"attention": replace(SMALL, layout=KvLayout(1, 2, 64, 64, "f16", 16, 9))}, "contiguous"),
        ({"sms": 1}, "attention takes 2 CTAs, of 1 there are"),
        ({"shared": 40_000}, "do not fit 40000 bytes of shared memory"),
        ({"cta_warps": 12}, "12 warps: 8 or 16"),
    ],
)
def test_what_it_does_not_serve_is_refused_by_name(fields, message):
    with pytest.raises(PtxgenError, match=message):
        replace(SPEC, **fields)


def test_unquantised_weights_are_refused():
    with pytest.raises(PtxgenError, match="must be quantised"):
        FusedLayers.of(256, 256, SMALL, [(FORMATS["F16"],) * 7])


def test_matrices_must_be_aligned():
    layer = replace(SPEC.layers[0], matrices=(16, *SPEC.layers[0].matrices[1:]))
    with pytest.raises(PtxgenError, match="multiples of 256 bytes"):
        replace(SPEC, layers=(layer,))


# ---- that stages wait for the right values ----


def memory_of(device, spec, inputs):
    """A buffer with its value for every parameter."""
    buffers = {}
    for param in spec.params:
        array = np.ascontiguousarray(inputs[param.name])
        buffers[param.name] = device.allocate(array.nbytes, param.name)
        buffers[param.name].upload(array)
    return buffers


def check(actual, reference, tolerance: Tolerance):
    allowed = tolerance.atol + tolerance.rtol * np.abs(reference).max()
    assert np.abs(actual - reference).max() <= allowed


@pytest.mark.parametrize("before", [0, 2, 2**32 - 4])
def test_steps_follow_each_other_on_the_same_channels(before):
    """Values of the step before are not taken for this one's, whatever the epoch."""
    inputs = SPEC.make_inputs(np.random.default_rng(3))
    inputs["epoch"] = np.array([before], np.uint32)
    # channels as the step before would have left them: with its tag
    inputs["sent"] = np.full(SPEC.channel_values, before % 4, np.uint32).view(np.float32)
    expected = SPEC.reference(**inputs)
    second = SPEC.reference(**(inputs | expected))
    with Device.open("emulator") as device, device.create_stream() as stream:
        plan = Plan("steps")
        buffers = memory_of(device, SPEC, inputs)
        plan.launch(SPEC, "layers", **buffers)
        for wanted in (expected, second):
            execute.run(plan, device, stream)
            stream.synchronize()
            check(buffers["x"].download(np.float32), wanted["x"], SPEC.tolerance)
            epoch = buffers["epoch"].download(np.uint32)
            assert epoch.tolist() == wanted["epoch"].tolist()
        for buffer in buffers.values():
            buffer.close()


class Silent(FusedLayers):
    """Nobody sends anything, and a few looks are enough."""

    most_polls = 20

    def ptx(self, target):
        lines = super().ptx(target).split("\n")
        kept = [line for line in lines if "st.relaxed.gpu.global.b32" not in line]
        assert len(kept) < len(lines)
        return "\n".join(kept)

    def key(self, target):
        return "silent" + super().key(target)


def test_who_waits_in_vain_says_where():
    spec = Silent(**SPEC.fields())
    inputs = spec.make_inputs(np.random.default_rng(3))
    with Device.open("emulator") as device, device.create_stream() as stream:
        plan = Plan("silence")
        buffers = memory_of(device, spec, inputs)
        stall = device.pinned(16, "stall")
        stall.array[:] = 0
        plan.launch(spec, "layers", **{**buffers, "stall": stall})
        execute.run(plan, device, stream)
        with pytest.raises(CudaError):
            stream.synchronize()
        stage, cta, value, waited = stall.view(np.uint32, 4).tolist()
        at, size = spec.channels["hidden"]
        assert (stage, waited) == (0, 1)
        assert cta < spec.sms
        assert at <= value < at + size


# ---- the choice ----


def test_the_quicker_one_is_chosen_where_it_was_measured():
    types = frozenset({"Q4_K"})
    for graph, fused in ((10.0, 20.0), (20.0, 10.0)):
        case = Case("H200", 256, 512, 2, types, graph, fused)
        assert case.fits("NVIDIA H200", SPEC)
        assert (case.fused > case.graph) == (fused > graph)


@pytest.mark.parametrize(
    "fields", [{"gpu": "L4"}, {"hidden": 512}, {"ffn": 256}, {"layers": 3}, {"types": frozenset()}]
)
def test_a_case_is_about_nothing_else(fields):
    case = replace(Case("H200", 256, 512, 2, frozenset({"Q4_K"}), 1.0, 2.0), **fields)
    assert not case.fits("NVIDIA H200", SPEC)


def test_the_graph_serves_what_was_not_measured():
    assert CASES
    assert not fuses("urdir emulator", SPEC)
    assert not fuses("NVIDIA H200", SPEC)
