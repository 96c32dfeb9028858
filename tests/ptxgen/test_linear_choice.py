"""Which linear kernel is chosen, how it is cut for a device, and what that does not depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ptxgen.recut import recut
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.choice import (
    Limits,
    LinearRequest,
    choose_linear,
    cluster_for,
    takes_gemm,
)
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.linear.prologue.norm import Normed, begun
from urdir.ptxgen.kernels.linear.prologue.sum import NormedAdd
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, CLUSTERS_SINCE, PORTABLE_CLUSTER, number_of
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.tools.gpus import GPUS, Gpu
from urdir.ptxgen.weights.formats import FORMATS, Format

RMS = Norm("rms", 1e-5)

QUANTISED = [f for f in FORMATS.values() if f.arithmetic == "integers"]
Q8_0, Q4_K, Q6_K, F16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))


def limits_of(gpu: Gpu) -> Limits:
    """What a GPU has."""
    sm = number_of(gpu.target)
    cluster = PORTABLE_CLUSTER if sm >= CLUSTERS_SINCE else 1
    held = ARCHITECTURES[sm]
    return Limits(gpu.sm_count, held.shared, held.shared_per_cta, cluster)


H200, RTX5090, T4 = (limits_of(GPUS[name]) for name in ("h200", "rtx5090", "t4"))

#: Launches of an 8B and a 1B model.
SHAPES = {
    "8B qkv": LinearRequest(
        H200, ((Q4_K, 4096), (Q4_K, 1024), (Q6_K, 1024)), 4096, steps=(Normed(RMS),)
    ),
    "8B gate_up": LinearRequest(
        H200,
        ((Q4_K, 14336),),
        4096,
        steps=(
            Normed(RMS),
            Gated(),
        ),
    ),
    "8B down": LinearRequest(H200, ((Q4_K, 4096),), 14336, steps=(Residual(),)),
    "8B out": LinearRequest(H200, ((Q4_K, 128256),), 4096, steps=(Normed(RMS),)),
    "1B down": LinearRequest(H200, ((Q4_K, 2048),), 8192, steps=(Residual(),)),
}
FLOATS = LinearRequest(
    replace(H200, target="sm_90a"), ((FORMATS["BF16"], 1024),), 2048, batch=4, steps=(Normed(RMS),)
)
SMALL = LinearRequest(H200, ((Q4_K, 64),), 512)


def gemm_small(request: LinearRequest) -> GemmSmall:
    """The kernel chosen for several rows."""
    spec = choose_linear(request)
    assert isinstance(spec, GemmSmall)
    return spec


@pytest.mark.parametrize(
    ("rows", "exact", "wanted"),
    [
        *((1, False, False), (8, False, False), (9, False, True), (512, False, True)),
        *((1, True, False), (512, True, False)),
    ],
)
def test_the_choice_between_few_rows_and_many(rows: int, exact: bool, wanted: bool) -> None:
    assert takes_gemm(rows, exact) is wanted


def test_the_choice_between_the_kernels_of_few_rows() -> None:
    assert isinstance(choose_linear(SMALL), Gemv)
    assert isinstance(choose_linear(replace(SMALL, limits=T4, batch=2)), GemmSmall)
    for exact, fmt in ((True, Q4_K), (False, F16)):
        request = replace(SMALL, exact=exact, matrices=((fmt, 64),))
        assert isinstance(choose_linear(request), Gemv)
        assert isinstance(choose_linear(replace(request, batch=2)), GemvF32)
    mixed = replace(SMALL, matrices=((Q4_K, 64), (F16, 3)), batch=2)
    assert isinstance(choose_linear(mixed), GemvF32)


def test_the_type_of_the_weights_decides_how_activations_are_multiplied() -> None:
    """In one launch: of one vector, and unless they stay exact."""
    kinds = {"Q4_K": "i16", "IQ1_S": "i16", "E4M3R256": "f16", "E4M3G128": "f16", "BF16": "f32"}
    for name, kind in kinds.items():
        request = replace(SMALL, matrices=((FORMATS[name], 64),))
        for exact, wanted in ((False, kind), (True, "f32")):
            kernel = choose_linear(replace(request, exact=exact))
            assert isinstance(kernel, Gemv)
            assert kernel.activations == wanted


def test_a_launch_that_runs_alone_is_one_of_one_vector() -> None:
    """It changes nothing else of the launch; several vectors have no such kernel."""
    alone, usual = (choose_linear(replace(SMALL, alone=a)) for a in (True, False))
    assert isinstance(alone, Gemv)
    assert alone.alone
    assert replace(alone, alone=False) == usual
    assert alone.launch_shape == usual.launch_shape
    batch = replace(SMALL, batch=2)
    assert choose_linear(replace(batch, alone=True)) == choose_linear(batch)


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K], ids=lambda f: f.name)
def test_two_ctas_share_columns_that_are_too_many_for_one(fmt: Format) -> None:
    """Of Mistral Small 3 (24B). Without clusters, and where nothing is rounded: `GemvF32`."""
    request = LinearRequest(H200, ((fmt, 5120),), 32768, steps=(Residual(),))
    spec = choose_linear(request)
    assert isinstance(spec, Gemv)
    assert (spec.cluster, spec.cut.warps, spec.cut.rows.tiles) == (2, 8, 5)
    assert spec.launch_shape.grid == (128, 1, 1)
    least, most = H200.shared(larger=True)
    assert least <= spec.launch_shape.shared_bytes <= most
    alone = replace(H200, cluster=1)
    for other in (replace(request, limits=alone), replace(request, exact=True)):
        assert isinstance(choose_linear(other), GemvF32)
    if is_available():
        cost = assemble(spec.ptx("sm_90"), "sm_90").entries["gemv"]
        assert not cost.spills
        assert cost.registers <= 128, "with a CTA of the next launch"


def test_a_cta_takes_all_of_the_memory_rather_than_f32() -> None:
    """Where the usual share is too little and there are no clusters."""
    alone = replace(H200, cluster=1)
    request = LinearRequest(alone, ((Q6_K, 5376),), 21504)
    spec = choose_linear(request)
    assert isinstance(spec, Gemv)
    assert (spec.options.shared, spec.options.least_shared, spec.cluster) == (
        H200.shared_per_cta,
        0,
        1,
    )
    layer = Norm("layer", 1e-5, bias=True)  # is for one CTA
    assert choose_linear(replace(request, limits=H200)).launch_shape.cluster == (2, 1, 1)
    assert isinstance(choose_linear(replace(request, limits=H200).plus(Normed(layer))), GemvF32)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_norm_after_a_block_leaves_the_shares_as_they_are(batch: int) -> None:
    """Launches that end a block and others alternate, with a residual or without one."""
    down = replace(SHAPES["8B down"], batch=batch)
    bare = replace(down, steps=(), ends_block=True)
    assert bare.options == down.options
    assert bare.options != replace(bare, ends_block=False).options


def test_a_norm_after_a_block_is_for_one_vector_that_fits() -> None:
    rms = Norm("rms", 1e-6)
    request = SMALL.plus(NormedAdd(rms), Normed(rms))
    assert request.fits_gemv
    kernel = choose_linear(request)
    assert isinstance(kernel, Gemv)
    assert kernel.prologue == (NormedAdd(rms), Normed(rms))
    assert replace(kernel, prologue=(Normed(rms),)) == choose_linear(SMALL.plus(Normed(rms)))
    for refused in (replace(request, batch=2), replace(request, cols=65536)):
        assert not refused.fits_gemv
    with pytest.raises(PtxgenError, match="takes no normed_add"):
        choose_linear(replace(request, cols=65536))
    with pytest.raises(PtxgenError, match="cluster of 1"):
        recut(kernel, cluster=2)


@pytest.mark.parametrize("cols", [2304, 3584, 3840, 4096, 5376, 6144])
def test_norms_around_a_block_leave_registers(cols: int) -> None:
    """Streams of Gemma 2 and 3, GLM 4 and OLMo 2."""
    rms = Norm("rms", 1e-6)
    gated = replace(SMALL, matrices=((Q4_K, 2 * cols),), cols=cols)
    gated = gated.plus(NormedAdd(rms), Normed(rms), Gated())
    assert gated.fits_gemv
    kernel = choose_linear(gated)
    if is_available():
        cost = assemble(kernel.ptx("sm_90"), "sm_90").entries["gemv"]
        assert not cost.spills
        assert 2 * cost.registers * kernel.launch_shape.threads <= 65536


@pytest.mark.parametrize(
    ("several", "wanted", "rest"), [(False, 129_181, 102_242), (True, 131_487, 99_936)]
)
def test_what_a_cta_takes_of_an_sm(several: bool, wanted: int, rest: int) -> None:
    """Two of the larger ones never fit together; one and another do. All, where that is little."""
    least, most = H200.shared(larger=True, several=several)
    assert (least, most) == (117_760, wanted)
    assert H200.shared(larger=False, several=several) == (0, rest)
    assert 2 * (least + 1024) > H200.shared_per_sm
    assert most + rest + 2 * 1024 <= H200.shared_per_sm
    for gpu in (GPUS["t4"], GPUS["l4"], GPUS["a100"]):
        limits = limits_of(gpu)
        assert limits.shared(larger=True) == limits.shared(larger=False)
        assert limits.shared(larger=True) == (0, limits.shared_per_cta)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_real_shapes_fit_a_multiprocessor(shape: str, fmt: Format) -> None:
    (_, rows), *others = SHAPES[shape].matrices
    for batch in (2, MAX_BATCH):
        request = replace(SHAPES[shape], matrices=((fmt, rows), *others), batch=batch)
        for limits in (H200, T4):
            spec = gemm_small(replace(request, limits=limits))
            least, most = limits.shared(larger=not request.has(Residual), several=True)
            if recut(spec, shared=most).cut.rows.passes > 1:
                least, most = 0, limits.shared_per_cta
            assert spec.options.shared == most
            assert least <= spec.launch_shape.shared_bytes <= most
        if is_available() and fmt in (Q4_K, Q6_K):
            ptx = choose_linear(request).ptx("sm_90")
            cost = assemble(ptx, "sm_90").entries["gemm_small"]
            assert not cost.spills
            assert cost.registers <= 128


# ---- several vectors: parts of the columns, clusters, tiles ----


def test_the_order_of_the_sums_does_not_depend_on_the_batch() -> None:
    for request in SHAPES.values():
        for limits in (H200, T4):
            cuts = set()
            for batch in range(2, MAX_BATCH + 1):
                cut = gemm_small(replace(request, limits=limits, batch=batch)).cut
                cuts.add((cut.columns, cut.rows.warps, cut.sharers))
            assert len(cuts) == 1


@pytest.mark.parametrize("limits", [H200, RTX5090], ids=["H200", "RTX 5090"])
@pytest.mark.parametrize("cols", [256, 512, 1024, 2048, 4096, 14336])
@pytest.mark.parametrize("gated", [False, True])
def test_the_cut_of_the_columns_does_not_depend_on_the_batch(
    limits: Limits, cols: int, gated: bool
) -> None:
    """Whatever the rows, about where clusters end as well."""
    steps = (Gated(),) if gated else ()
    for fmt in (Q8_0, Q4_K, Q6_K):
        for tiles in (1, 2, 3, 4, 5, 6, 7, 12, 14):
            matrix = (fmt, 16 * limits.sms * tiles)
            requests = (
                LinearRequest(limits, (matrix,), cols, batch, steps=steps)
                for batch in range(2, MAX_BATCH + 1)
            )
            assert len({gemm_small(r).cut.columns for r in requests}) == 1, (fmt.name, tiles)


def test_real_shapes_have_pairs_of_ctas_where_tiles_are_few() -> None:
    """Gate and up of an 8B model are 14 tiles of an SM, its vocabulary more still."""
    found = {}
    for shape, request in SHAPES.items():
        for batch in (2, 5, MAX_BATCH):
            spec = gemm_small(replace(request, batch=batch))
            cluster = found.setdefault(shape, spec.cluster)
            assert spec.launch_shape.cluster == (cluster, 1, 1)
            clusters = 0
            for part in spec.parts:
                assert part.first_cta == clusters
                tiles = spec.cut.rows.passes * part.pass_tiles
                assert part.layout.bands <= part.ctas * tiles < part.layout.bands + tiles
                clusters += part.ctas
            assert spec.launch_shape.grid == (cluster * clusters, 1, 1)
            assert spec.launch_shape.grid[0] <= 132
    wanted = {"8B qkv": 2, "8B gate_up": 1, "8B down": 2, "8B out": 1, "1B down": 2}
    assert found == wanted


def test_what_gets_no_cluster() -> None:
    """A single vector, a row of one block, and what runs on a device that has no clusters."""
    assert cluster_for(H200, tiles=6, blocks=2) == 2
    assert cluster_for(H200, tiles=7, blocks=2) == 1
    assert cluster_for(H200, tiles=1, blocks=1) == 1
    assert cluster_for(H200, tiles=3, blocks=8, packed=True) == 1
    assert cluster_for(H200, tiles=1, blocks=8, packed=True) == 2
    assert cluster_for(H200, tiles=3, blocks=9, packed=True) == 2
    default = replace(H200, cluster=1)
    for limits in (default, T4):
        assert cluster_for(limits, tiles=1, blocks=16) == 1
    for request in SHAPES.values():
        single = choose_linear(request)
        assert isinstance(single, Gemv)
        assert single.launch_shape.cluster == (1, 1, 1)
        for limits in (default, T4):
            spec = choose_linear(replace(request, limits=limits, batch=4))
            assert spec.launch_shape.cluster == (1, 1, 1)
            assert "sm_75" in spec.targets
    one_block = choose_linear(LinearRequest(H200, ((Q4_K, 4096),), 256, batch=4))
    assert one_block.launch_shape.cluster == (1, 1, 1)


def test_ctas_of_larger_tiles_take_fewer() -> None:
    """Of an 8B model's queries, keys and values, on 66 pairs of SMs; alike, all take six."""
    for types, wanted in (((Q4_K, Q6_K), (7, 5, 4)), ((Q4_K, Q4_K), (6, 6, 6))):
        matrices = ((Q4_K, 4096), *((fmt, 1024) for fmt in types))
        spec = gemm_small(replace(SHAPES["8B qkv"], matrices=matrices, batch=8))
        assert tuple(part.pass_tiles for part in spec.parts) == wanted
        assert tuple(part.warp_tiles for part in spec.parts) == wanted
    several = recut(spec, others=((Q6_K, 1024),) * 2, per_pass=2)
    assert {part.pass_tiles for part in several.parts} == {several.cut.rows.pass_tiles}


def test_an_8b_model_s_launches_for_eight_vectors_have_slots_for_what_is_read_meanwhile() -> None:
    """Gate and up four, though sums take 56 KB; the last products four, of Q6_K three."""
    shapes = (("8B gate_up", Q4_K, 4), ("8B down", Q4_K, 4), ("8B down", Q6_K, 3))
    for shape, fmt, slots in shapes:
        (_, rows), *others = SHAPES[shape].matrices
        request = replace(SHAPES[shape], matrices=((fmt, rows), *others), batch=MAX_BATCH)
        steps = (begun(RMS) if isinstance(step, Normed) else step for step in request.steps)
        request = replace(request, steps=tuple(steps))
        assert gemm_small(request).cut.ring.slots == slots, (shape, fmt)


def test_warps_share_the_blocks_that_are_left_over() -> None:
    """28 of a CTA's 8 warps, of an 8B model's longest rows; not where each adds up squares."""
    for batch in range(2, MAX_BATCH + 1):
        request = replace(SHAPES["8B down"], matrices=((Q6_K, 4096),), batch=batch)
        cut = gemm_small(request).cut
        assert (cut.columns.cta_blocks, cut.columns.warps) == (28, 8)
        assert (cut.rows.warp_tiles, cut.sharers) == (4, 2)
        assert cut.ring.slots - cut.ring.filled <= cut.rows.warp_tiles // cut.sharers
    shared = GemmSmall.of(Q4_K, 64, 1536, split=4, groups=1, tiles_each=4)
    assert shared.cut.sharers == 2
    for changes in (
        {"prologue": (Normed(RMS),)},
        {"tiles_each": 3},
        {"per_pass": 2},
        {"cols": 2048},
        {"cols": 1792},
        {"cols": 512, "split": 2},
        {"cluster": 4, "split": 1},
    ):
        assert recut(shared, **changes).cut.sharers == 1, changes


# ---- norms and nonlinearities of other families ----


def test_a_norm_that_must_come_first_is_fused_but_for_several_rounded_vectors() -> None:
    layer, biased = Norm("layer", 1e-5), Norm("rms", 1e-5, bias=True)
    plain = Norm("rms", 1e-5, weight=False)
    for batch in (1, 2, MAX_BATCH):
        for norm in (layer, biased, plain, RMS):
            request = replace(SHAPES["8B qkv"], batch=batch, steps=(Normed(norm),))
            assert request.fuses_norm is (batch == 1 or norm in (plain, RMS))
            assert replace(request, exact=True).fuses_norm
            assert replace(request, matrices=((F16, 64),)).fuses_norm
            if request.fuses_norm:
                assert choose_linear(request).steps.norm == norm
            else:
                with pytest.raises(PtxgenError, match="must be a launch of its own"):
                    choose_linear(request)


def test_rows_too_long_for_a_norm_in_registers_are_left_to_f32() -> None:
    """Registers hold x, and weights and bias of a norm that is applied to it at once."""
    layer = Norm("layer", 1e-5, bias=True)
    for cols, kernel in ((8192, Gemv), (14848, GemvF32)):
        request = LinearRequest(H200, ((Q4_K, 4096),), cols, steps=(Normed(layer),))
        assert isinstance(choose_linear(request), kernel)
        assert isinstance(choose_linear(replace(request, steps=(Normed(RMS),))), Gemv)


@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize("batch", [1, 4])
def test_what_follows_a_product_does_not_spill(batch: int) -> None:
    """At the sizes of published models."""
    up = replace(SHAPES["8B gate_up"], batch=batch, steps=(Normed(RMS),))
    for request in (
        up.plus(Bias(), Gated(Activation("swiglu_oai", limit=7.0))),
        up.plus(Gated(Activation("gelu"))),
        replace(SHAPES["8B down"], batch=batch, steps=(Bias(), Residual(0.22))),
        up.plus(Activated(Activation("relu2"))),
        LinearRequest(
            H200,
            ((Q6_K, 256000),),
            3584,
            batch,
            steps=(
                Normed(RMS),
                Bounded(softcap=30.0),
            ),
        ),
    ):
        spec = choose_linear(request)
        assert not assemble(spec.ptx("sm_90"), "sm_90", name=spec.name).entries[spec.name].spills


def test_large_matrices_of_floats_are_multiplied_on_tensor_cores() -> None:
    """Those of whole units, of several vectors that may be rounded; from sm_80 on."""
    for name in ("BF16", "F16"):
        kernel = choose_linear(replace(FLOATS, matrices=((FORMATS[name], 1024),)))
        assert isinstance(kernel, GemmSmall)
        assert kernel.cut.rows.passes == 1
    others: list[dict[str, object]] = [
        {"exact": True},
        {"cols": 2044},
        {"matrices": ((FORMATS["BF16"], 256),)},
        {"matrices": ((FORMATS["F32"], 1024),)},
        {"limits": H200},
    ]
    for changes in others:
        assert isinstance(choose_linear(replace(FLOATS, **changes)), GemvF32)  # type: ignore[arg-type]
    assert isinstance(choose_linear(replace(FLOATS, batch=1)), Gemv)
    assert not replace(FLOATS, steps=()).takes_packed
