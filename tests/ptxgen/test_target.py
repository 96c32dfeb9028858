"""The tables of targets and instructions, held against the assembler."""

import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.ptx.architecture import FIRST_VERSION, number_of, runs_on
from urdir.ptxgen.target import FEATURES, TARGETS, TESTED, Target, since
from urdir.ptxgen.tools.assemble import AssembleError, assemble, is_available

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")

VERSIONS = [
    (6, 3),
    (6, 4),
    (6, 5),
    *((7, i) for i in range(9)),
    *((8, i) for i in range(9)),
    (9, 0),
]

# One instruction or more for every row of FEATURES, and some that every target has.
# %a-%e, %s are b32, %d, %g, %i-%q b64, %f, %k-%m f32, %h b16, %p a predicate, %x b128; QUAD and
# INTS stand for four f32 and four b32.
SNIPPETS = """
cp.async.cg.shared.global [%s], [%g], 16;
cp.async.commit_group;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%g], 16, [%s];
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%s], [%g], 16, [%s];
BULK.multicast::cluster [%s], [%g], 16, [%s], %h;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%s], [%s], 16, [%s];
cp.async.bulk.global.shared::cta.bulk_group [%g], [%s], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%s], %a, [%s];
st.bulk.weak.shared::cta [%s], 64, 0;
mbarrier.init.shared.b64 [%s], 1;
mbarrier.init.shared::cta.b64 [%s], 1;
mbarrier.arrive.shared.b64 %d, [%s];
mbarrier.arrive.shared.b64 _, [%s];
mbarrier.test_wait.parity.shared.b64 %p, [%s], 0;
mbarrier.try_wait.parity.shared.b64 %p, [%s], 0;
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p, [%s], 0;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 16;
mbarrier.arrive.shared::cluster.b64 _, [%s];
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%s];
mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%s];
mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p, [%s], 0;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 16;
fence.proxy.async.shared::cta;
fence.mbarrier_init.release.cluster;
fence.release.sync_restrict::shared::cta.cluster;
fence.acquire.sync_restrict::shared::cluster.cluster;
fence.proxy.async;
fence.proxy.async.global;
barrier.cta.sync.aligned 0;
barrier.cta.arrive.aligned 1, 64;
barrier.cluster.arrive;
barrier.cluster.arrive.relaxed;
mapa.shared::cluster.u32 %a, %s, 0;
mov.u32 %a, %cluster_ctarank;
mov.u32 %a, %nclusterid.x;
ld.shared::cta.b32 %a, [%s];
ld.shared::cluster.b32 %a, [%s];
griddepcontrol.wait;
griddepcontrol.launch_dependents;
elect.sync %a|%p, 0xffffffff;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %x;
setmaxnreg.inc.sync.aligned.u32 240;
setmaxnreg.dec.sync.aligned.u32 24;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 INTS, [%s];
movmatrix.sync.aligned.m8n8.trans.b16 %a, %b;
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%s], INTS;
stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%s], {%a, %b};
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 QUAD, {%a, %b}, {%c}, QUAD;
mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%a, %b}, {%c}, {%e}, {%a, %b};
mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 INTS, {%a, %b}, {%c}, INTS;
mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 QUAD, {%a, %b}, {%c}, QUAD;
mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 QUAD, INTS, {%a, %b}, QUAD;
wgmma.fence.sync.aligned;
WGMMA.f32.f16.f16 QUAD, INTS, %d, %p, 1, 1, 0; WAIT
WGMMA.f32.bf16.bf16 QUAD, %d, %q, %p, -1, 1, 0, 1; WAIT
WGMMA.f16.f16.f16 {%a, %b}, %d, %q, !%p, 1, -1, 1, 1; WAIT
fma.rn.bf16x2 %a, %b, %c, %a;
max.bf16x2 %a, %b, %c;
add.bf16x2 %a, %b, %c;
ex2.approx.ftz.bf16x2 %a, %b;
fma.rn.f16x2 %a, %b, %c, %e;
max.f16x2 %a, %b, %c;
max.f32 %f, %k, %l;
max.NaN.f32 %f, %k, %l;
max.xorsign.abs.f32 %f, %k, %l;
max.f32 %f, %k, %l, %m;
fma.rn.f32x2 %d, %d, %d, %d;
fma.rn.relu.f16x2 %a, %b, %c, %e;
cvt.rn.f16.f32 %h, %f;
cvt.rn.relu.f16.f32 %h, %f;
cvt.rn.f16x2.f32 %a, %f, %k;
cvt.rn.bf16.f32 %h, %f;
cvt.f32.bf16 %f, %h;
cvt.rna.tf32.f32 %a, %f;
cvt.rn.tf32.f32 %a, %f;
cvt.rn.satfinite.e4m3x2.f32 %h, %f, %k;
cvt.pack.sat.s8.s32.b32 %a, %b, %c, %e;
tanh.approx.f32 %f, %k;
ex2.approx.ftz.f32 %f, %k;
ex2.approx.f16x2 %a, %b;
redux.sync.add.u32 %a, %b, 0xffffffff;
bmsk.clamp.b32 %a, %b, %c;
ld.global.nc.L1::no_allocate.v4.b32 INTS, [%g];
ld.global.L2::128B.b32 %a, [%g];
ld.global.L2::256B.b32 %a, [%g];
ld.global.nc.L1::no_allocate.L2::256B.v4.b32 INTS, [%g];
ld.global.L2::cache_hint.v4.b32 INTS, [%g], %d;
createpolicy.fractional.L2::evict_first.b64 %d, 1.0;
discard.global.L2 [%g], 128;
ld.global.v4.b64 {%d, %q, %i, %j}, [%g];
red.global.add.v4.f32 [%g], QUAD;
multimem.red.relaxed.sys.global.add.u32 [%g], %a;
ld.global.b128 %x, [%g];
dp4a.s32.s32 %a, %b, %c, %e;
nanosleep.u32 20;
ld.acquire.gpu.global.b32 %a, [%g];
atom.global.add.u32 %a, [%g], %b;
prefetch.global.L2 [%g];
mov.u64 %d, %globaltimer;
vote.sync.ballot.b32 %a, %p, 0xffffffff;
shfl.sync.bfly.b32 %a, %b, 16, 31, 0xffffffff;
""".strip().splitlines()

# Where the table, having one version for all targets, asks for a newer one than is needed.
GENEROUS = {(t, "cvt.rn.satfinite.e4m3x2.f32") for t in ("sm_90", "sm_90a")}


SHORT = {
    "BULK": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "QUAD": "{%f, %k, %l, %m}",
    "INTS": "{%a, %b, %c, %e}",
    "WGMMA": "wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16",
    "WAIT": "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
}


def assembles(snippet: str, target: str, version: tuple[int, int]) -> bool:
    for short, text in SHORT.items():
        snippet = snippet.replace(short, text)
    wide = ".reg .b128 %x;" if "%x" in snippet else ""
    text = f"""
.version {version[0]}.{version[1]}
.target {target}
.address_size 64
.visible .entry k(.param .u64 p) {{
    .reg .pred %p; .reg .b16 %h; .reg .b32 %a, %b, %c, %e, %s; .reg .b64 %g, %d, %q, %i, %j;
    .reg .f32 %f, %k, %l, %m; {wide}
    .shared .align 16 .b8 buffer[128];
    mov.u32 %s, buffer;
    ld.param.u64 %g, [p];
    cvta.to.global.u64 %g, %g;
    {snippet}
    ret;
}}
"""
    try:
        assemble(text, target, options=("-O0",))
    except AssembleError:
        return False
    return True


def version_or_none(snippet: str, target: str) -> tuple[int, int] | None:
    for short, text in SHORT.items():
        snippet = snippet.replace(short, text)
    try:
        return Target.parse(target).version_for(snippet)
    except PtxgenError:
        return None


def test_every_feature_has_a_snippet():
    without = [f.pattern.pattern for f in FEATURES if not any(map(f.pattern.search, SNIPPETS))]
    assert without == []


@needs_assembler
@pytest.mark.parametrize("target", TARGETS)
def test_the_first_version_of_a_target(target):
    first = VERSIONS.index(FIRST_VERSION[target])
    accepted = [assembles("", target, v) for v in VERSIONS[max(0, first - 1) : first + 1]]
    assert accepted == [False, True][-len(accepted) :]


@pytest.mark.turns(4)
@needs_assembler
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.split(" ")[0].rstrip(";"))
def test_version_and_targets_of_an_instruction(snippet):
    for target in (*TESTED, "sm_90a"):
        version = version_or_none(snippet, target)
        if version is None:
            assert not assembles(snippet, target, VERSIONS[-1]), target
            continue
        assert assembles(snippet, target, version), (target, version)
        if version > FIRST_VERSION[target] and (target, snippet.split()[0]) not in GENEROUS:
            assert not assembles(snippet, target, VERSIONS[VERSIONS.index(version) - 1]), target


def test_a_missing_instruction_names_what_it_needs():
    with pytest.raises(PtxgenError, match=r"griddepcontrol needs sm_90, the target is sm_80"):
        Target.parse("sm_80").version_for("griddepcontrol.wait;")
    with pytest.raises(PtxgenError, match=r"wgmma\. needs sm_90a, the target is sm_100"):
        Target.parse("sm_100").version_for("wgmma.fence.sync.aligned;")


def test_comments_need_nothing():
    body = "// griddepcontrol.wait would do\n/* mapa\n */ add.u32 %a, %a, 1;"
    assert Target.parse("sm_75").version_for(body) == (6, 3)


def test_names_and_numbers_of_registers_need_nothing():
    body = "mov.u32 %mapa, %redux.sync;\nld.global.b32 %elect.sync, [%wgmma.x+128];"
    assert Target.parse("sm_75").version_for(body) == (6, 3)
    assert Target.parse("sm_90").version_for("mov.u32 %a, %cluster_ctarank;") == (7, 8)
    for special in ("%cluster_ctarank", "%nclusterid.x", "%is_explicit_cluster"):
        with pytest.raises(PtxgenError, match="needs sm_90"):
            Target.parse("sm_80").version_for(f"mov.u32 %a12, {special};")


def test_an_instruction_may_have_several_lines():
    body = "{max.f32 %a,\n    %b,\n    %c; add.f32 %a, %b, %c;}\nmax.ftz.f32 %a,\n    %b,\n    %c"
    assert Target.parse("sm_100").version_for(body) == (8, 6)
    assert Target.parse("sm_100").version_for(body + ", %d;") == (8, 8)
    with pytest.raises(PtxgenError, match=r"max\.ftz\.f32 .*needs sm_100, the target is sm_90"):
        Target.parse("sm_90").version_for(body + ", %d;")


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(PtxgenError, match=r"unknown target 'sm_12': one of sm_75, sm_80"):
        Target.parse("sm_12")


def test_the_number_of_an_accelerated_target():
    assert Target.parse("sm_90a").sm == 90
    assert Target.parse("sm_90a").portable == "sm_90"
    assert Target.parse("sm_120").sm == 120


def test_targets_since_an_architecture_are_portable():
    assert since(90) == ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
    assert set(TESTED) < set(since(75)) < set(TARGETS)


@pytest.mark.parametrize(
    ("target", "device", "runs"),
    [
        ("sm_75", "sm_90", True),
        ("sm_52", "sm_90a", True),
        ("sm_90", "sm_90", True),
        ("sm_90", "sm_90a", True),
        ("sm_90a", "sm_90a", True),
        ("sm_90a", "sm_90", False),
        ("sm_90a", "sm_100a", False),
        ("sm_100", "sm_90a", False),
    ],
)
def test_whose_code_runs_where(target, device, runs):
    assert runs_on(target, device) is runs


@pytest.mark.turns(3)
@needs_assembler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("device", ["sm_75", "sm_90", "sm_90a", "sm_100a"])
def test_the_assembler_agrees_whose_code_runs_where(target, device):
    text = f".version 9.0\n.target {target}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
    if runs_on(target, device):
        assert assemble(text, device).target == device
    else:
        with pytest.raises(AssembleError):
            assemble(text, device)


@pytest.mark.parametrize("name", ["sm_80a", "sm_90f", "90", "sm_", "compute_90", ""])
def test_what_is_no_target(name):
    with pytest.raises(ValueError, match=f"unknown target '{name}'"):
        number_of(name)
