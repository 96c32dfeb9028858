"""The PTX parser: every form of declaration and operand, scopes, errors, and speed."""

from __future__ import annotations

import math
import time

import pytest

from urdir.ptxgen import ptx
from urdir.ptxgen.ptx import (
    Address,
    Discard,
    Immediate,
    Instruction,
    Label,
    Pair,
    Register,
    Symbol,
    Vector,
)

HEAD = ".version 7.8\n.target sm_90, debug\n.address_size 64\n"


def entry(body: str, params: str = ".param .u64 p", directives: str = "") -> ptx.Entry:
    text = f"{HEAD}.visible .entry k({params})\n{directives}\n{{\n{body}\n}}\n"
    return ptx.parse(text).entries["k"]


def one(statement: str) -> Instruction:
    registers = (
        ".reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %d<4>; .reg .pred %p<3>;"
        ".shared .align 16 .b8 buf[64];"
    )
    (found,) = entry(registers + statement).instructions
    return found


def test_module() -> None:
    text = HEAD + (
        "/* a\n comment */ .global .align 8 .f32 table[3] = {0f3F800000, 1.5, -2};\n"
        ".const .u32 limit = 0x10;\n.extern .shared .align 16 .b8 dynamic[];\n"
        ".visible .entry first() { ret; }\n.weak .entry second(.param .u32 n) { ret; }\n"
    )
    module = ptx.parse(text)
    assert module.version == (7, 8)
    assert module.target == "sm_90"
    assert module.target_options == ("debug",)
    assert list(module.entries) == ["first", "second"]
    table, limit, dynamic = module.variables
    assert (table.space, table.type, table.align, table.count, table.nbytes) == (
        "global", "f32", 8, 3, 12,
    )  # fmt: skip
    assert [v.value for v in table.values] == [1.0, 1.5, -2]
    assert limit.values == (Immediate(16),)
    assert (dynamic.extern, dynamic.count, dynamic.nbytes) == (True, 0, 0)


def test_parameters_and_directives() -> None:
    found = entry(
        "ret;",
        ".param .u64 .ptr .global .align 16 x, .param .align 8 .b8 blob[24], .param .f32 scale,"
        "\n .param .u64 .ptr y",
        '.maxntid 128, 2, 1\n.minnctapersm 2 .pragma "nounroll";\n.reqnctapercluster 2',
    )
    x, blob, scale, y = found.parameters
    assert (x.type, x.size, x.pointer_space, x.pointer_align) == ("u64", 8, "global", 16)
    assert (blob.size, blob.align, blob.count, blob.pointer_space) == (24, 8, 24, None)
    assert (scale.name, scale.size) == ("scale", 4)
    assert y.pointer_space == "generic"
    assert found.directives == {
        "maxntid": (128, 2, 1), "minnctapersm": (2,), "reqnctapercluster": (2,),
    }  # fmt: skip


def test_registers() -> None:
    found = entry(".reg .b32 %r<3>, %x;\n.reg .pred %p;\nret;")
    assert found.registers == {
        "%r0": "b32", "%r1": "b32", "%r2": "b32", "%x": "b32", "%p": "pred",
    }  # fmt: skip


def test_operands() -> None:
    add = one("@!%p1 add.u32 %r0, %r1, -7;")
    assert add.opcode == "add.u32"
    assert add.parts == ("add", "u32")
    assert add.predicate == Register("%p1", negated=True)
    assert add.operands == (Register("%r0"), Register("%r1"), Immediate(-7))
    load = one("ld.global.nc.v4.f32 {%f0, %f1, _, %f3}, [%d0+-16];")
    assert load.operands == (
        Vector((Register("%f0"), Register("%f1"), Discard(), Register("%f3"))),
        Address(Register("%d0"), -16),
    )
    assert one("st.shared.u32 [buf + 0x10], %r0;").operands[0] == Address(Symbol("buf"), 16)
    assert one("ld.param.u64 %d0, [p];").operands[1] == Address(Symbol("p"), 0)
    assert one("ld.global.u32 %r0, [64];").operands[1] == Address(None, 64)
    assert one("ld.global.u32 %r0, [%d0-4];").operands[1] == Address(Register("%d0"), -4)
    setp = one("setp.lt.and.f32 %p0|%p1, %f0, 0f7F800000, !%p2;")
    assert setp.operands[0] == Pair(Register("%p0"), Register("%p1"))
    assert setp.operands[2] == Immediate(math.inf, "f32")
    assert setp.operands[3] == Register("%p2", negated=True)
    assert one("shfl.sync.up.b32 _|%p0, %r1, 1, 0, -1;").operands[0] == Pair(
        Discard(), Register("%p0")
    )
    assert one("mov.u32 %r0, %ctaid.x;").operands[1] == Register("%ctaid.x")
    assert one("mov.u32 %r0, buf;").operands[1] == Symbol("buf")


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("10", 10, "int"), ("-0x1F", -31, "int"), ("017", 15, "int"), ("0b101", 5, "int"),
        ("42U", 42, "int"), ("0", 0, "int"), ("0f3FC00000", 1.5, "f32"),
        ("0d3FF8000000000000", 1.5, "f64"), ("2.5", 2.5, "f64"), ("1e3", 1000.0, "f64"),
        ("0F80000000", -0.0, "f32"),
    ],
)  # fmt: skip
def test_constants(text: str, value: float, kind: str) -> None:
    found = one(f"mov.b32 %r0, {text};").operands[1]
    assert isinstance(found, Immediate)
    assert (found.value, found.kind) == (value, kind)
    assert math.copysign(1, found.value) == math.copysign(1, value)


def test_scopes_rename_what_they_redeclare() -> None:
    body = """
    .reg .b32 %r;
    LOOP: mov.u32 %r, 1;
    {
        .reg .b32 %r, %only;
        LOOP: mov.u32 %r, %only;
        bra LOOP;
        { .reg .b32 %r; mov.u32 %r, 2; bra OUT; }
    }
    { .reg .b32 %only; mov.u32 %only, %r; bra LOOP; }
    OUT: ret;
    """
    found = entry(body)
    assert list(found.registers) == ["%r", "%r$2", "%only", "%r$3", "%only$2"]
    labels = [item.name for item in found.body if isinstance(item, Label)]
    assert labels == ["LOOP", "LOOP$2", "OUT"]
    operands = [i.operands for i in found.instructions]
    assert operands[0] == (Register("%r"), Immediate(1))
    assert operands[1] == (Register("%r$2"), Register("%only"))
    assert operands[2] == (Symbol("LOOP$2"),)
    assert operands[3] == (Register("%r$3"), Immediate(2))
    assert operands[4] == (Symbol("OUT"),)
    assert operands[5] == (Register("%only$2"), Register("%r"))
    assert operands[6] == (Symbol("LOOP"),)


def test_lines_and_statements_over_several_lines() -> None:
    found = entry(
        ".reg .f32 %f<8>; .reg .b32 %a<4>;\n.loc 1 2 3\n// a comment; with a semicolon\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32\n  {%f0, %f1, %f2, %f3},\n"
        '  {%a0, %a1}, {%a2}, /* inline */ {%f4, %f5, %f6, %f7};\n.pragma "nounroll";\nret;'
    )
    mma, ret = found.instructions
    assert mma.line == 10
    assert "\n" not in mma.text
    assert len(mma.operands) == 4
    assert (ret.line, ret.text, ret.operands) == (14, "ret", ())


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("add.u32 %x, 1, 2;", 7, "%x is not declared"),
        (".reg .b32 %x;\n.reg .f32 %x;", 8, "%x is declared twice"),
        (".reg .b33 %x;", 7, "unknown type .b33"),
        (".reg .b32 %tid;", 7, "%tid is a special register"),
        ("ret", 7, "a statement without its ';' or '}'"),
        (".reg .b32 %x;\n@%x bra A; A: ret;", 8, "%x is not a predicate"),
        ("\n\nbra NOWHERE;", 9, "NOWHERE is not declared"),
        (".reg .b32 %x;\nmov.u32 %x, 5x;", 8, "cannot read operand '5x'"),
        (".reg .b32 %x;\nadd.u32 %x, , %x;", 8, "an operand is missing"),
        (".reg .b32 %x;\nmov.b64 {%x, }, %x;", 8, "an operand is missing"),
        (".reg .b32 %r<262145>;", 7, "at most 262,144 registers"),
        (".reg .b32 %r<" + "9" * 5000 + ">;", 7, "at most 262,144 registers"),
        (".shared .b8 s[];", 7, "an array without a size must be extern"),
        ("{ .reg .b32 %x; } .reg .b32 %y; mov.u32 %y, %x;", 7, "%x is not declared"),
    ],
)
def test_errors_have_line_and_text(body: str, line: int, message: str) -> None:
    with pytest.raises(ptx.PtxSyntaxError) as caught:
        entry(body)
    assert caught.value.line == line
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"PTX line {line}: ")


@pytest.mark.parametrize("text", ["\0", "\x1b[31m;", HEAD + ".visible .entry k() { @\x1b\r p; }"])
def test_errors_can_be_printed(text: str) -> None:
    with pytest.raises(ptx.PtxSyntaxError) as caught:
        ptx.parse(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text",
    ["", "int main() {}", ".version 7.8\n", HEAD + ".visible .entry k() { ret;",
     HEAD + ".visible .entry k() { ret; }\n.visible .entry k() { ret; }",
     ".version 7.8\n.target sm_90\n.address_size 32\n",
     HEAD + ".visible .entry k(.param u64 x) {}"],
)  # fmt: skip
def test_malformed_modules(text: str) -> None:
    with pytest.raises(ptx.PtxSyntaxError):
        ptx.parse(text)


def test_a_long_kernel_parses_quickly() -> None:
    lines = [
        f"@%p fma.rn.f32 %r{i % 97}, %r{i * 7 % 97}, 0f3F800000, %r{i % 13};" for i in range(2000)
    ]
    body = ".reg .pred %p; .reg .f32 %r<97>;\n" + "\n".join(lines)
    best = math.inf
    for _ in range(5):
        start = time.thread_time()
        found = entry(body)
        best = min(best, time.thread_time() - start)
    assert len(list(found.instructions)) == 2000
    assert best < 0.25  # about 0.02 on an idle core
