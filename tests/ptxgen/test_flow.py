"""Control flow: blocks, reads and writes, dominance."""

import pytest

from urdir.ptxgen import ptx
from urdir.ptxgen.ptx import flow

TEXT = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry k()
{{
    .reg .pred %p; .reg .b32 %a, %b, %c; .reg .b64 %g; .reg .f32 %f, %h;
    {}
}}
"""

DIAMOND = """
    mov.b32 %a, 0;
    @%p bra RIGHT;
    mov.b32 %a, 1;
    bra JOIN;
RIGHT:
    mov.b32 %a, 2;
JOIN:
    @%p bra JOIN;
    ret;
"""


def entry(body: str) -> ptx.Entry:
    return ptx.parse(TEXT.format(body)).entries["k"]


def one(text: str) -> ptx.Instruction:
    return next(entry(text + "\nL: ret;").instructions)


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("add.u32 %a, %b, %c;", {"%b", "%c"}, {"%a"}),
        ("@!%p mov.b32 %a, %b;", {"%p", "%b"}, {"%a"}),
        ("ld.global.v2.f32 {%f, %h}, [%g+8];", {"%g"}, {"%f", "%h"}),
        ("st.global.v2.f32 [%g], {%f, %h};", {"%g", "%f", "%h"}, set()),
        ("shfl.sync.bfly.b32 %a|%p, %b, 1, 31, -1;", {"%b"}, {"%a", "%p"}),
        ("atom.global.add.u32 %a, [%g], %b;", {"%g", "%b"}, {"%a"}),
        ("red.global.add.u32 [%g], %b;", {"%g", "%b"}, set()),
        ("bar.sync %a;", {"%a"}, set()),
        ("bar.red.popc.u32 %a, 0, %p;", {"%p"}, {"%a"}),
        ("nanosleep.u32 %a;", {"%a"}, set()),
        ("mov.u32 %a, %tid.x;", {"%tid.x"}, {"%a"}),
        ("cp.async.cg.shared.global [%a], [%g], 16;", {"%a", "%g"}, set()),
        ("@%p bra L;", {"%p"}, set()),
    ],
)
def test_reads_and_writes(text, reads, writes):
    instruction = one(text)
    assert set(flow.reads(instruction)) == reads
    assert set(flow.writes(instruction)) == writes


def test_blocks_and_their_successors():
    graph = flow.blocks(entry(DIAMOND))
    assert [block.successors for block in graph] == [(2, 1), (3,), (3,), (3, 4), ()]
    assert [len(block.instructions) for block in graph] == [2, 2, 1, 1, 1]
    assert not any(block.falls_off for block in graph)


def test_every_path_passes_the_join():
    graph = flow.blocks(entry(DIAMOND))
    assert flow.post_dominators(graph) == [{0, 3, 4}, {1, 3, 4}, {2, 3, 4}, {3, 4}, {4}]
    assert flow.reachable(graph, 2) == {2, 3, 4}
    assert flow.reachable(graph) == {0, 1, 2, 3, 4}


def test_the_end_without_ret_is_marked():
    graph = flow.blocks(entry("@%p ret;\nmov.b32 %a, 0;"))
    assert [block.falls_off for block in graph] == [False, True]


def test_a_label_at_the_end_is_a_block():
    graph = flow.blocks(entry("@%p bra END;\nret;\nEND:"))
    assert [block.successors for block in graph] == [(2, 1), (), ()]
    assert graph[2].falls_off
