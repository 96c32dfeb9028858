"""What is refused before anything runs, and what a compiled entry tells about itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.emulator_machine.ptx_forms import module, refused_by_emulator, right_lines
from urdir.driver.emulator.machine.compile import compile_entry
from urdir.driver.emulator.machine.faults import CompileError
from urdir.ptxgen import ptx

REGISTERS = (
    ".reg .b32 %a, %b; .reg .f32 %f; .reg .b64 %l; .reg .pred %p; .reg .b16 %h; .reg .u32 %u;"
    ".reg .s32 %s; .reg .f64 %d; .shared .align 16 .b8 sh[16];\n"
)


def refuse(machine: Any, code: str) -> CompileError:
    with pytest.raises(CompileError) as caught:
        machine.compile(REGISTERS + code)
    return caught.value


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("frobnicate.b32 %a, %b;", "PTX line 8: unknown instruction frobnicate.b32"),
        ("add.u33 %a, %a, %b;", "PTX line 8: add has no form add.u33"),
        ("add.rn.u32 %a, %a, %b;", "add has no form add.rn.u32"),
        ("ld.global.sometimes.u32 %a, [%l];", "ld has no form"),
        ("shfl.bfly.b32 %a, %b, 1, 31;", "shfl has no form"),
        ("mov.u32 %h, %a;", "%h is a .b16 register; allowed here: .b32, .u32, .s32, .f16x2"),
        ("add.u16 %h, %h, %a;", "%a is a .b32 register; allowed here: .b16, .u16, .s16 registers"),
        ("add.u16 %a, %h, %h;", "%a is a .b32 register; allowed here: .b16, .u16, .s16 registers"),
        ("add.f32 %f, %f, %p;", "%p is a predicate; allowed here: .b32, .f32 registers or a const"),
        ("setp.eq.u32 %a, %a, %b;", "%a is a .b32 register; allowed here: a predicate or a disc"),
        ("setp.lo.s32 %p, %a, %b;", "setp has no form setp.lo.s32"),
        ("add.u32 %a, %b;", "wrong number of operands"),
        ("fma.rn.f32 %f, %f;", "wrong number of operands"),
        ("mul.wide.u32 %l;", "wrong number of operands"),
        ("bra NOWHERE;", "NOWHERE is not declared"),
        ("mov.u32 %a, %envreg3;", "%envreg3 is a special register that is not supported"),
        ("cp.async.cg.shared.global [%a], [%l], 8;", "8 is out of range; allowed here: 16"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f}, {%a}, {%a}, {%f};",
         "4 elements are needed, not 1"),
        ("ld.param.u32 %a, [%l];", "ld.param takes"),
    ],
)  # fmt: skip
def test_malformed_instructions(machine: Any, code: str, message: str) -> None:
    try:
        error: Exception = refuse(machine, code)
    except ptx.PtxSyntaxError as exc:
        error = exc
    assert message in str(error)


#: Instructions that ptxas refuses, by what it and the emulator refuse of them.
REFUSED = {
    "type": (
        "add.s32 %f, %a, %b; add.s32 %a, %f, %b; add.f32 %f, %u, %f; add.f32 %f, %f, %s; "
        "mul.lo.u32 %f, %a, %b; fma.rn.f32 %u, %f, %f, %f; ld.global.u32 %f, [%l]; "
        "ld.global.f32 %u, [%l]; st.global.f32 [%l], %s; cvt.rn.f32.s32 %f, %f; "
        "cvt.rzi.s32.f32 %f, %f; mov.f32 %f, %u; selp.u32 %f, %a, %b, %p; shl.b32 %a, %b, %f; "
        "bfe.u32 %a, %b, %f, 4; neg.s32 %f, %a; atom.global.add.u32 %a, [%l], %f; "
        "redux.sync.add.u32 %f, %a, -1; dp4a.u32.u32 %f, %a, %b, %a"
    ),
    "width": (
        "mov.u32 %h, %a; add.u64 %l, %l, %a; cvt.rn.bf16.f32 %a, %f; mul.wide.u32 %a, %a, %b; "
        "shl.b64 %l, %l, %l; ld.global.u32 %h, [%l]; setp.eq.u64 %p, %l, %a; popc.b64 %l, %l"
    ),
    "constant": (
        "add.f32 %f, %f, 1; add.s32 %a, %b, 1.0; mov.f32 %f, 0; mov.u32 %a, 0f00000000; "
        "fma.rn.f32 %f, 1, %f, %f; lop3.b32 %a, %b, %a, %b, %a; bar.sync 16; bar.sync 0, 33; "
        "bfe.u32 %a, %b, 300, 1; mbarrier.init.shared.b64 [sh], 0; "
        "mbarrier.try_wait.parity.shared.b64 %p, [sh], 2; "
        "cp.async.ca.shared.global [sh], [%l], 12; cp.async.ca.shared.global [sh], [%l], 16, 17"
    ),
    "kind of operand": (
        "add.u32 %a, %tid.x, 1; cvt.rn.f32.u32 %f, %tid.x; mov.u32 %a, %clock64; "
        "add.u32 %a, %b, sh; add.u32 %a, {%b, %b}, 1; selp.b32 %a, %b, 1, %a; "
        "add.u32 %a, !%p, 1; and.pred !%p, %p, %p; shfl.sync.idx.b32 _, %a, 0, 31, -1; "
        "match.any.sync.b32 %a|%p, %b, -1; bra 4"
    ),
    "address": (
        "ld.global.u32 %a, [%b]; st.u32 [%b], %a; ld.global.u32 %a, [sh]; "
        "ld.shared.u32 %a, [64]; ld.shared.u32 %a, [%f]; ld.global.u32 %a, [%d]; "
        "mbarrier.init.b64 [%b], 1; ld.u32 %a, %l"
    ),
    "vector": (
        "ld.shared.v2.u32 {%a}, [sh]; ld.shared.v2.u32 %a, [sh]; "
        "ld.shared.v2.u32 {%a, %h}, [sh]; st.shared.v2.b32 [sh], {%f, %u}; "
        "ld.shared.v2.u32 {_, _}, [sh]; mov.b64 %l, {%a, %h}; "
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 %a, [sh]; mov.u64 %l, {%a, %b}; "
        "ld.global.v4.u64 {%l, %l, %l, %l}, [%l]"
    ),
    "number of operands": (
        "add.u32 %a, %b; add.u32 %a, %b, 1, 2; ret %a; bar.sync; bar.warp.sync; "
        "cp.async.wait_all 0; mbarrier.test_wait.shared.b64 %p, [sh], %l, 5; "
        "ld.global.u32 %a, [%l], %l; setp.eq.and.s32 %p, %a, %b; "
        "ld.global.L2::cache_hint.u32 %a, [%l]"
    ),
    "modifiers": (
        "shl.s32 %a, %b, 1; popc.u32 %a, %b; setp.lt.b32 %p, %a, %b; setp.eq.ftz.s32 %p, %a, %b; "
        "min.NaN.f64 %d, %d, %d; neg.ftz.f64 %d, %d; tanh.approx.ftz.f32 %f, %f; "
        "cvt.sat.s32.s16 %a, %h; cvt.rn.f32.f32 %f, %f; cvt.rzi.ftz.s32.f64 %a, %d; "
        "ld.volatile.gpu.global.u32 %a, [%l]; ld.acquire.global.u32 %a, [%l]; "
        "ld.shared.L1::no_allocate.u32 %a, [sh]; st.global.cv.u32 [%l], %a; "
        "red.acq_rel.gpu.global.add.u32 [%l], %a; red.global.cas.b32 [%l], %a, %b; "
        "mbarrier.arrive.release.shared.b64 %l, [sh]; ld.global.f16 %h, [%l]; mov.f16 %h, %h"
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_ptxas_refuses(machine: Any, what: str) -> None:
    """Each by itself: further ones are in test_ptxas_refuses_the_same.py."""
    for code in REFUSED[what].split(";"):
        assert "PTX line 8" in str(refuse(machine, f"{code.strip()};")), code


@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
def test_every_form_is_translated(target: str) -> None:
    """With the operands that its signature names."""
    lines = [line.text for line in right_lines(seed=3, most=2)]
    lacking = refused_by_emulator(lines, "8.6", target)
    assert all("needs .target" in message for message in lacking.values())
    lines = [line for line in lines if line not in lacking]
    compile_entry(ptx.parse(module(lines, "8.6", target)), "k", target)


@pytest.mark.parametrize(
    ("target", "code", "needs"),
    [
        ("sm_75", "cp.async.commit_group;", "needs .target sm_80 or higher, not sm_75"),
        ("sm_75", "redux.sync.add.u32 %a, %b, -1;", "sm_80"),
        ("sm_80", "elect.sync %a|%p, -1;", "sm_90"),
        ("sm_80", "griddepcontrol.wait;", "sm_90"),
        ("sm_75", "cvt.rn.bf16.f32 %h, %f;", "sm_80"),
        ("sm_89", "mbarrier.try_wait.shared.b64 %p, [%a], %l;", "sm_90"),
    ],
)
def test_instructions_the_target_lacks(machine: Any, target: str, code: str, needs: str) -> None:
    machine.target = target
    assert needs in refuse(machine, code).message
    machine.target = "sm_90"
    machine.compile(REGISTERS + code)


def test_version_and_target(machine: Any) -> None:
    machine.version = "6.3"
    machine.target = "sm_75"
    error = refuse(
        machine, "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%a, %a}, {%b}, {%b}, {%a, %b};"
    )
    assert error.code == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    assert "needs PTX ISA .version 6.5" in error.message
    machine.target = "sm_90"
    assert ".target sm_90 needs .version 7.8" in refuse(machine, "ret;").message
    machine.version = "99.0"
    assert "newer than this driver's" in refuse(machine, "ret;").message
    machine.version = "8.0"
    with pytest.raises(CompileError, match=r"for sm_90, which the device .sm_80. is not"):
        machine.compile("ret;", target="sm_80")


def test_program_tells_its_resources() -> None:
    text = """.version 7.0
.target sm_75
.address_size 64
.shared .align 4 .b8 first[6];
.extern .shared .align 16 .b8 rest[];
.visible .entry k(.param .u64 .ptr .global .align 16 x, .param .u32 n)
.maxntid 96, 2, 1
{
    .shared .align 8 .b64 second[2];
    .reg .b32 %r<12>;
    .reg .b32 %s;
    mov.u32 %s, rest;
    ret;
}
"""
    program = compile_entry(ptx.parse(text), "k", "sm_90")
    assert program.param_layout == ((0, 8), (8, 4))
    assert program.max_threads == 192
    assert program.static_shared_bytes == 32
    assert program.register_count >= 13
    assert not program.uses_dependencies
    with pytest.raises(CompileError, match=r"no entry 'other'.*it has: k"):
        compile_entry(ptx.parse(text), "other", "sm_90")


def test_blocks_that_differ_in_names_share_a_text(machine: Any) -> None:
    """And each has its own registers, constants and next blocks."""
    block = ".reg .b32 %{0}<4>; add.u32 %{0}1, %{0}2, {1}; mov.u32 %{0}3, %{0}1;"
    first, other = block.format("a", 5), block.format("b", 7)
    program = machine.compile(f"{first} bar.sync 0; {other} bar.sync 0; ret;")
    functions = [program.whole[pc] for pc in sorted(program.whole)][:2]
    assert functions[0].parts == functions[1].parts
    assert functions[0].names.keys() == functions[1].names.keys()
    names = [set(function.code.co_names) for function in functions]
    common = {"add", "copyto"}
    assert names[0] - common
    assert not (names[0] - common) & (names[1] - common)
    assert functions[0].code.co_filename != functions[1].code.co_filename
