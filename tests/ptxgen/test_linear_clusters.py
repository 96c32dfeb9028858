"""Launches cut for clusters: each CTA has a part of the columns, and their sums are added."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ptxgen.recut import recut
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Step
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, PORTABLE_CLUSTER
from urdir.ptxgen.target import since
from urdir.ptxgen.tools.gpus import GPUS
from urdir.ptxgen.weights.formats import FORMATS

RMS = Norm("rms", 1e-5)

Q8_0, Q4_K, Q6_K, Q3_K = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q3_K"))
SM = ARCHITECTURES[90]
H200 = Limits(GPUS["h200"].sm_count, SM.shared, SM.shared_per_cta, PORTABLE_CLUSTER)

#: What is multiplied on tensor cores.
i16 = functools.partial(Gemv.of, activations="i16")

every_kernel = pytest.mark.parametrize("kernel", [Gemv, GemmSmall], ids=lambda kernel: kernel.name)


def test_sms_that_a_launch_of_clusters_leaves_over_get_clusters_without_rows() -> None:
    """Whole ones: an SM that is left over from those stays so."""
    for bands, sms, idle in ((64, 132, 2), (33, 132, 0), (34, 132, 32), (66, 132, 0), (3, 9, 1)):
        spec = i16(Q8_0, 16 * bands, 512, tiles_each=1, groups=1, sms=sms, fill=True, cluster=2)
        assert spec.parts[0].ctas == bands
        assert spec.launch_shape.grid == (2 * (bands + idle), 1, 1)
        assert spec.cut.rows.has_tiles_beyond == (idle > 0)
        assert recut(spec, fill=False).launch_shape.grid == (2 * bands, 1, 1)


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "cols", "steps"),
    [
        (4096, 14336, (Residual(),)),
        (4096, 4096, (Residual(),)),
        (14336, 4096, (Normed(RMS), Gated())),
        (2048, 8192, (Residual(),)),
        (128256, 4096, (Normed(RMS),)),
    ],
)
def test_real_shapes_in_clusters_have_all_rows_and_a_cta_an_sm(
    rows: int, cols: int, steps: tuple[Step, ...], cluster: int
) -> None:
    """Whole clusters, no more of them than there is room for; with what they are told of."""
    least, most = H200.shared(larger=Residual() in steps)
    cut = {"shared": most, "least_shared": least, "sms": 132, "cluster": cluster}
    for fmt in (Q4_K, Q6_K):
        spec = i16(fmt, rows, cols, *steps, **cut)
        shape = spec.launch_shape
        assert shape.cluster == (cluster, 1, 1)
        assert shape.grid == (cluster * spec.parts[0].ctas, 1, 1)
        assert shape.grid[0] <= 132
        columns, taken = spec.cut.columns, 16 * spec.cut.rows.tiles
        assert rows <= taken * spec.parts[0].ctas < rows + taken
        assert columns.warp_blocks * columns.warps >= columns.cta_blocks == cols // 256 // cluster
        assert spec.cut.rows.pass_rows % cluster == 0  # each CTA adds up as many
        assert least <= shape.shared_bytes <= most


def test_several_matrices_in_clusters_follow_each_other() -> None:
    """An 8B model's queries, keys and values on pairs of an H200's SMs, which ``parts`` count."""
    least, most = H200.shared(larger=False)
    others = ((Q4_K, 1024), (Q6_K, 1024))
    cut = {"shared": most, "least_shared": least, "sms": 132, "cluster": 2}
    spec = i16(Q4_K, 4096, 4096, Normed(RMS), others=others, **cut)
    assert [(p.first_cta, p.ctas) for p in spec.parts] == [(0, 43), (43, 11), (54, 11)]
    assert (spec.cut.rows.tiles, spec.launch_shape.grid) == (6, (130, 1, 1))


@every_kernel
def test_impossible_clusters_are_refused(kernel: type[TiledSpec]) -> None:
    for cluster in (0, 3, 16):
        with pytest.raises(PtxgenError, match=f"cluster is {cluster}: 1, 2, 4 or 8"):
            kernel.of(Q4_K, 3, 8192, cluster=cluster)
    with pytest.raises(PtxgenError, match="split is 2 in each of 2 CTAs of 3 blocks"):
        kernel.of(Q4_K, 3, 768, split=2, cluster=2)
    for cluster, cols in ((2, 256), (4, 768), (8, 1792)):
        message = f"split is 1 in each of {cluster} CTAs of {cols // 256} blocks"
        with pytest.raises(PtxgenError, match=message):
            kernel.of(Q4_K, 3, cols, cluster=cluster)
        assert kernel.of(Q4_K, 3, cols + 256, cluster=cluster).cut.columns.warps == 1


@every_kernel
def test_a_target_without_clusters_is_refused(kernel: type[TiledSpec]) -> None:
    for cluster in (2, 4, 8):
        spec = kernel.of(Q4_K, 3, 2048, cluster=cluster)
        assert spec.targets == since(90)
        for target in ("sm_75", "sm_80", "sm_89"):
            message = f"kernel {kernel.name} is for sm_90, .*, not {target}"
            with pytest.raises(PtxgenError, match=message):
                spec.ptx(target)
        assert "mapa.shared::cluster" in spec.ptx("sm_90")
    alone = kernel.of(Q4_K, 3, 2048, cluster=1)
    assert alone.targets == since(75)
    assert "cluster" not in alone.ptx("sm_75").split("{", 1)[1]


CLUSTERED: list[TiledSpec] = [
    i16(Q4_K, 40, 4352, cluster=2),
    i16(Q4_K, 23, 4352, Normed(RMS), Bias(), cluster=4),
    i16(Q8_0, 33, 4192, Normed(RMS), Bias(), cluster=4),  # the last block has three units
    i16(Q8_0, 18, 2080, Normed(RMS), Residual(), cluster=8),
    i16(Q4_K, 90, 1280, split=2, groups=2, tiles_each=6, per_pass=2, stages=3, cluster=2),
    i16(Q6_K, 70, 2304, Normed(RMS), Gated(), split=2, tiles_each=4, per_pass=2, cluster=4),
    i16(Q3_K, 21, 2816, Bias(), Residual(), split=1, groups=3, cluster=8),
    i16(Q6_K, 9, 2304, Normed(RMS), others=((Q4_K, 17), (Q8_0, 5)), cluster=4),
    i16(Q8_0, 41, 544, Bias(), others=((Q8_0, 3),), tiles_each=1, sms=12, cluster=2),
    i16(Q8_0, 37, 544, Gated(), groups=1, tiles_each=1, sms=8, fill=True, cluster=2),
    Gemv.of(Q4_K, 19, 4352, Residual(), groups=2, cluster=4),
    Gemv.of(FORMATS["F32"], 18, 1061, Normed(RMS), Gated(), cluster=2),
    GemmSmall.of(Q4_K, 40, 4352, cluster=2, batch=4),
    GemmSmall.of(Q8_0, 33, 4192, Normed(RMS), Bias(), cluster=4, batch=7),  # three units remain
    GemmSmall.of(Q8_0, 18, 2080, Normed(RMS), Residual(), cluster=8, batch=2),
    GemmSmall.of(
        *(Q4_K, 90, 1280),
        **{"split": 2, "groups": 2, "tiles_each": 6, "per_pass": 2, "stages": 3},
        **{"batch": 8, "cluster": 2},
    ),
    GemmSmall.of(Q6_K, 70, 2304, Normed(RMS), Gated(), per_pass=2, sms=8, cluster=4, batch=5),
    GemmSmall.of(Q6_K, 9, 2304, Normed(RMS), cluster=4, others=((Q4_K, 17), (Q8_0, 5)), batch=3),
    GemmSmall.of(Q8_0, 41, 544, Bias(), sms=12, cluster=2, others=((Q8_0, 3),), batch=6),
    GemmSmall.of(
        Q8_0, 37, 544, Gated(), groups=1, tiles_each=1, sms=8, fill=True, cluster=2, batch=4
    ),
]


@pytest.mark.turns(4)
@pytest.mark.parametrize("spec", CLUSTERED, ids=str)
def test_a_cluster_gives_the_product(device: Device, spec: TiledSpec) -> None:
    """Rows and blocks that CTAs have no equal share of; and the same bits, run after run."""
    skip_where_missing(spec, device.native_target)
    assert spec.cut.columns.blocks % spec.cluster
    inputs = spec.make_inputs(np.random.default_rng(17))
    first, second = (run_kernel(device, spec, inputs) for _ in range(2))
    for deviation in compare(spec, first, spec.reference(**inputs)):
        assert deviation.ok, deviation
    for name, found in first.items():
        np.testing.assert_array_equal(found, second[name])
