"""Machine code of asynchronous copies to shared memory.

ptxas 13.0 takes a copy's descriptor from an odd uniform register where the address is partly in
the register before it: an illegal instruction. Kernels that tell it that a warp's lanes agree on
the warp's number must make the copies' addresses of something else.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from urdir.ptxgen.kernels.linear.choice import Limits, LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, PORTABLE_CLUSTER
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.tools.gpus import GPUS
from urdir.ptxgen.tools.sass import DisassemblerError, disassemble, find_disassembler
from urdir.ptxgen.weights.formats import FORMATS

RMS = Norm("rms", 1e-5)

Q4_K, Q6_K, Q8_0, F16 = (FORMATS[name] for name in ("Q4_K", "Q6_K", "Q8_0", "F16"))
SM = ARCHITECTURES[90]
H200 = Limits(GPUS["h200"].sm_count, SM.shared, SM.shared_per_cta)
IN_CLUSTERS = replace(H200, cluster=PORTABLE_CLUSTER)

#: Copies of an H200's decode steps: a loop, several matrices, two matrices row by row.
ATTENTION = LinearRequest(
    H200, ((Q4_K, 4096), (Q4_K, 1024), (Q6_K, 1024)), 4096, steps=(Normed(RMS),)
)
FEED_FORWARD = LinearRequest(
    H200,
    ((Q4_K, 14336),),
    4096,
    steps=(
        Normed(RMS),
        Gated(),
    ),
)
SPECS = {
    name: choose_linear(request)
    for name, request in {
        "one tile after another": LinearRequest(H200, ((Q4_K, 4096),), 4096, steps=(Residual(),)),
        "gated": replace(FEED_FORWARD, matrices=((Q6_K, 14336),)),
        "others": replace(ATTENTION, matrices=((Q4_K, 2048), (Q4_K, 512), (Q6_K, 512)), cols=2048),
        "several passes": LinearRequest(H200, ((Q8_0, 128256),), 4096, steps=(Normed(RMS),)),
        "exact": replace(FEED_FORWARD, matrices=((F16, 14336),), exact=True),
        "batch": replace(FEED_FORWARD, batch=8),
        "batch of several": replace(ATTENTION, batch=4),
        "batch in clusters": replace(
            ATTENTION, matrices=((Q4_K, 4096), (Q6_K, 1024)), limits=IN_CLUSTERS, batch=4
        ),
    }.items()
}


def odd_copies(sass: str) -> list[str]:
    """Copies with a descriptor in an odd uniform register, or an address in any."""
    copies = [line for line in sass.splitlines() if "LDGSTS" in line]
    assert copies
    return [
        line
        for line in copies
        if re.search(r"desc\[UR\d*[13579]\]", line) or re.search(r"(?<!desc\[)UR\d+", line)
    ]


def test_copies_are_told_apart() -> None:
    fine = "/*0950*/ @P3 LDGSTS.E.LTC128B.64 [R55+0x10], desc[UR36][R10.64+0x200] ;"
    assert not odd_copies(f"{fine}\n/*0960*/ LDG.E R1, desc[UR5][R10.64] ;")
    for bad in (
        "LDGSTS.E.LTC128B.64 [R55+UR4], desc[UR5][R10.64] ;",
        "LDGSTS.E.LTC128B.64 [R55], desc[UR37][R10.64] ;",
        "LDGSTS.E.LTC128B.64 [R55+UR4+0x10], desc[UR6][R10.64] ;",
        "LDGSTS.E.LTC128B.64 [R55], desc[UR6][R10.64+UR8] ;",
    ):
        assert odd_copies(f"{fine}\n{bad}") == [bad]


@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize(
    ("case", "target"),
    [
        (case, target)
        for case, spec in SPECS.items()
        for target in ("sm_80", "sm_90", "sm_120")
        if target in spec.targets
    ],
)
def test_no_copy_is_addressed_by_uniform_registers(case: str, target: str) -> None:
    try:
        find_disassembler()
    except DisassemblerError:
        pytest.skip("nvdisasm is not installed")
    spec = SPECS[case]
    assert isinstance(spec, GemmSmall if "batch" in case else Gemv)
    assert not odd_copies(disassemble(assemble(spec.ptx(target), target).cubin))
