"""Every lint rule: text that breaks it, and the nearest text that does not."""

import pytest

from urdir.ptxgen.tools.lint import Finding, lint

HEAD = """\
.version 7.0
.target sm_80
.address_size 64
.visible .entry k(
    .param .u64 .ptr .global .align 16 out
)
.maxntid {threads}
{{
"""


def ptx(body: str, threads: str = "128, 1, 1") -> str:
    """A module whose body starts at line 9."""
    return HEAD.format(threads=threads) + body.strip("\n") + "\n}\n"


def rules(body: str, threads: str = "128, 1, 1") -> list[tuple[int, str]]:
    return [(f.line, f.rule) for f in lint(ptx(body, threads))]


CLEAN = """
.reg .b64 %out;
.reg .b32 %thread;
.reg .pred %p;
.reg .f32 %a<2>;
.shared .align 4 .f32 kept[32];
ld.param.u64 %out, [out];
cvta.to.global.u64 %out, %out;
mov.u32 %thread, %tid.x;
mul.wide.u32 %out, %thread, 4;
mov.f32 %a0, 0f00000000;
LOOP:
fma.rn.f32 %a0, %a0, %a0, %a0;
ld.global.f32 %a1, [%out];
setp.gt.f32 %p, %a0, %a1;
@%p bra LOOP;
bar.sync 0;
st.shared.f32 [kept], %a0;
shfl.sync.bfly.b32 %a1, %a0, 16, 31, 0xFFFFFFFF;
st.global.f32 [%out], %a1;
ret;
"""


def test_clean_text_has_no_findings():
    assert lint(ptx(CLEAN)) == ()


def test_text_that_does_not_parse_is_one_finding():
    (finding,) = lint(ptx(CLEAN.replace("bra LOOP", "bra LOPP")))
    assert (finding.line, finding.rule) == (23, "syntax")
    assert finding.message == "LOPP is not declared: @%p bra LOPP"


def test_a_register_may_not_shadow_a_special_one():
    (finding,) = lint(ptx(".reg .b32 %tid;\nret;"))
    assert (finding.line, finding.rule) == (9, "syntax")
    assert "%tid" in finding.message


@pytest.mark.parametrize("threads", ["2048", "1025, 1, 1", "64, 8, 4"])
def test_too_many_threads(threads):
    assert rules("ret;", threads) == [(4, "threads")]


@pytest.mark.parametrize("threads", ["1024", "32, 32, 1"])
def test_as_many_threads_as_there_may_be(threads):
    assert rules("ret;", threads) == []


def test_static_shared_memory_counts_alignment():
    full = ".shared .align 1 .b8 a[1];\n.shared .align 16 .b8 b[{}];\nret;"
    assert rules(full.format(48 * 1024 - 16)) == []
    assert rules(full.format(48 * 1024 - 15)) == [(10, "static-shared")]


@pytest.mark.parametrize(
    "instruction",
    [
        "add.f32 %x, %b, %x;",
        "fma.rn.f32 %b, %x, %x, %x;",
        "setp.gt.f32 %p, %b, %x;",
        "selp.f32 %x, %x, %b, %p;",
        "cvt.rn.f32.s32 %b, %b;",
        "cvt.rzi.s32.f32 %b, %b;",
        "cvt.rn.f16x2.f32 %b, %b, %x;",
        "ex2.approx.ftz.f32 %x, %b;",
    ],
)
def test_float_arithmetic_on_bits(instruction):
    assert rules(floats(instruction)) == [(13, "float-on-bits")]


@pytest.mark.parametrize(
    "instruction",
    [
        "mov.b32 %b, %x;",
        "mov.f32 %b, %x;",
        "st.global.f32 [%g], %b;",
        "ld.global.f32 %b, [%g];",
        "shfl.sync.idx.b32 %b, %x, 0, 31, 0xFFFFFFFF;",
        "selp.b32 %b, %x, %b, %p;",
        "cvt.rn.f32.s32 %x, %b;",
        "cvt.rzi.s32.f32 %b, %x;",
        "cvt.rn.f16x2.f32 %b, %x, %x;",
        "add.u32 %b, %b, 1;",
    ],
)
def test_bits_may_be_moved_and_converted(instruction):
    assert rules(floats(instruction)) == []


def floats(instruction: str) -> str:
    return f"""
.reg .f32 %x;  .reg .b32 %b;  .reg .pred %p;  .reg .b64 %g;
mov.f32 %x, 0f3F800000;
mov.b32 %b, 7;
ld.param.u64 %g, [out]; setp.eq.u32 %p, %b, 7;
{instruction}
@%p st.global.b32 [%g], %b; st.global.f32 [%g], %x;
ret;
"""


READS = ".reg .pred %p, %q; .reg .b32 %t, %x, %y; .reg .b64 %g;\nld.param.u64 %g, [out];\n"
ASK = READS + "mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 5; setp.lt.u32 %q, %t, 9;\n"
END = "\nst.global.b32 [%g], %y; @%q st.global.b32 [%g], %t; @%p st.global.b32 [%g], %t;\nret;"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("mov.b32 %y, %x;", 12),
        ("@%p mov.b32 %x, 1;\nmov.b32 %y, %x;", 13),
        ("@%p mov.b32 %x, 1;\n@%q mov.b32 %x, 1;\nmov.b32 %y, %x;", 14),
        ("@%p mov.b32 %x, 1;\nmov.b32 %y, 2;\n@!%p mov.b32 %y, %x;", 14),
        # the predicate has changed in between
        (
            "@%p mov.b32 %x, 1;\nsetp.eq.u32 %p, %t, 0;\nmov.b32 %y, 0;\n@%p mov.b32 %y, %x;",
            15,
        ),
        # written on one side of a branch
        ("@%p bra SKIP;\nmov.b32 %x, 1;\nSKIP:\nmov.b32 %y, %x;", 15),
        # a first round of a loop
        ("LOOP:\nmov.b32 %y, %x;\nmov.b32 %x, 1;\n@%p bra LOOP;", 13),
    ],
)
def test_a_register_read_before_it_is_written(body, line):
    assert rules(ASK + body + END) == [(line, "read-before-write")]


@pytest.mark.parametrize(
    "body",
    [
        "@%p mov.b32 %x, 1;\nmov.b32 %y, 2;\n@%p mov.b32 %y, %x;",
        "@%p mov.b32 %x, 1;\n@!%p mov.b32 %x, 2;\nmov.b32 %y, %x;",
        "@%p bra ELSE;\nmov.b32 %x, 1;\nbra END;\nELSE:\nmov.b32 %x, 2;\nEND:\nmov.b32 %y, %x;",
        "mov.b32 %x, 0;\nLOOP:\nmov.b32 %y, %x;\nmov.b32 %x, 1;\n@%p bra LOOP;",
        "@%p bra LAST;\nbra SET;\nLAST:\nret;\nSET:\nmov.b32 %x, 1;\nmov.b32 %y, %x;",
    ],
)
def test_a_register_written_on_every_path(body):
    assert rules(ASK + body + END) == []


def test_addresses_and_predicates_are_reads():
    assert [f.message.split()[0] for f in lint(ptx(READS.split("\n", 1)[0] + """
        @%p st.global.b32 [%g], %y;
        setp.eq.and.u32 %p, %t, %x, %q;
        ret;
    """))] == ["%g", "%p", "%y", "%q", "%t", "%x"]  # fmt: skip


BARRIER = """
.reg .pred %p; .reg .b32 %t;
mov.u32 %t, {source};
setp.lt.u32 %p, %t, 5;
{body}
ret;
"""


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("@%p bra SKIP;\nbar.sync 0;\nSKIP:", 13),
        ("@%p bra SIDE;\nret;\nSIDE:\nbar.sync 0;", 15),
        ("LOOP:\nbar.sync 0;\n@%p bra LOOP;", 13),
        ("@%p bar.sync 0;", 12),
        ("@%p bra SKIP;\nbarrier.sync 0;\nSKIP:", 13),
        ("@%p ret;\nbar.sync 0;", 13),
        ("@%p bra SKIP;\nbarrier.cluster.arrive.aligned;\nSKIP:", 13),
        ("@%p bra SKIP;\nbarrier.cluster.wait.acquire.aligned;\nSKIP:", 13),
    ],
)
def test_a_barrier_that_not_all_threads_reach(body, line):
    assert rules(BARRIER.format(source="%tid.x", body=body)) == [(line, "divergent-barrier")]
    assert rules(BARRIER.format(source="%ctaid.x", body=body)) == []


@pytest.mark.parametrize(
    "body",
    [
        "@%p bra SKIP;\nadd.u32 %t, %t, 1;\nSKIP:\nbar.sync 0;",
        "bar.sync 0;\n@%p bra SKIP;\nadd.u32 %t, %t, 1;\nSKIP:",
        "@%p bra SKIP;\nbar.sync 1, 64;\nSKIP:",
        # together again before all of them may go round the barrier
        "@%p bra SKIP;\nadd.u32 %t, %t, 1;\nSKIP:\n"
        ".reg .pred %q; .reg .b32 %c;\nmov.u32 %c, %ctaid.x;\nsetp.eq.u32 %q, %c, 0;\n"
        "@%q bra END;\nbar.sync 0;\nEND:",
        "@%p bra SKIP;\nbar.warp.sync 0xFFFFFFFF;\nSKIP:",
        # each thread arrives once, here or there
        "@%p bra SIDE;\nbarrier.cluster.arrive;\nbra END;\nSIDE:\nbarrier.cluster.arrive;\n"
        "END:\nbarrier.cluster.wait.aligned;",
        # a trap ends the whole grid
        "@%p trap;\nbar.sync 0;",
        "@%p bra WAIT;\ntrap;\nWAIT:\nbar.sync 0;",
    ],
)
def test_a_barrier_that_may_stand_where_it_is(body):
    assert rules(BARRIER.format(source="%tid.x", body=body)) == []


def test_a_value_loaded_from_a_varying_address_varies():
    body = """
.reg .pred %p; .reg .b32 %t; .reg .b64 %g;
mov.u32 %t, {source};
mul.wide.u32 %g, %t, 4;
ld.global.u32 %t, [%g];
setp.eq.u32 %p, %t, 0;
@%p bra END;
bar.sync 0;
END:
ret;
"""
    assert rules(body.format(source="%laneid")) == [(15, "divergent-barrier")]
    assert rules(body.format(source="%ctaid.x")) == []


@pytest.mark.parametrize(
    "body",
    [
        "bar.sync 0;",
        "ret;\nEND:\nbar.sync 0;\n@%p bra END;",
        "@%p ret;",
        "@%p bra END;\nret;\nEND:",
    ],
)
def test_an_end_without_ret(body):
    setup = ".reg .pred %p; .reg .b32 %c;\nmov.u32 %c, %ctaid.x;\nsetp.eq.u32 %p, %c, 0;\n"
    if "END" in body:
        setup += "@%p bra END;\n"
    assert "missing-ret" in [rule for _, rule in rules(setup + body)]


def test_an_endless_loop_needs_no_ret():
    assert rules("LOOP:\nbar.sync 0;\nbra LOOP;") == []


def test_unreachable_instructions():
    assert rules("ret;\nbar.sync 0;\nret;") == [(10, "unreachable")]


def test_unused_registers_and_labels():
    body = ".reg .b32 %used, %unused, %r<4>;\nmov.u32 %used, %tid.x;\nmov.b32 %r2, %used;\n"
    assert rules(body + "NOWHERE:\nadd.u32 %r1, %r2, 1;\nret;") == [
        (9, "unused-register"),
        (12, "unused-label"),
    ]


def test_a_vector_load_may_bring_more_than_is_wanted():
    body = """
.reg .b64 %g; .reg .b32 %a, %b;
ld.param.u64 %g, [out];
ld.global.v2.b32 {%a, %b}, [%g];
st.global.b32 [%g], %b;
ret;
"""
    assert rules(body) == []


def test_registers_that_the_assembler_does_not_hand_over():
    body = "setmaxnreg.dec.sync.aligned.u32 40;\nret;"
    assert rules(body) == [(9, "ignored-setmaxnreg")]
    assert rules(body, "128\n.minnctapersm 1") == []
    assert rules(body, "128\n.maxnreg 168") == []


def test_the_registers_of_a_wgmma():
    """It writes the accumulators, and reads A, the descriptor and the predicate."""
    body = """
.reg .b64 %b; .reg .b32 %a<4>; .reg .f32 %d<4>; .reg .pred %p;
PUT
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3},
    %b, %p, 1, 1, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.f32 [%b], %d3;
ret;
"""
    put = "ld.param.u64 %b, [out]; setp.eq.u64 %p, %b, 0; mov.b32 %a0, 0; mov.b32 %a1, 0;"
    put += " mov.b32 %a2, 0; mov.b32 %a3, 0;"
    assert rules(body.replace("PUT", put)) == []
    for missing in ("mov.b32 %a1, 0;", "setp.eq.u64 %p, %b, 0;"):
        found = rules(body.replace("PUT", put.replace(missing, "")))
        assert found == [(12, "read-before-write")]


def test_indirect_branches_are_not_followed():
    body = ".reg .b32 %i;\nmov.b32 %i, 0;\nbrx.idx %i, table;\ntable:\nret;"
    assert rules(body) == [(11, "indirect-branch")]


def test_findings_print_as_a_line():
    assert str(Finding(7, "unused-label", "no branch goes to X")) == (
        "line 7: unused-label: no branch goes to X"
    )
