"""Offline assembly: machine code, resource report, error messages."""

import sys

import pytest

from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.tools.assemble import (
    AssembleError,
    AssemblerMissingError,
    Resources,
    annotate,
    assemble,
    is_available,
    parse_resources,
)

PTX = Normalise(rows=3, cols=257, norm=Norm("rms", 1e-5)).ptx("sm_80")

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     48 bytes stack frame, 44 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compile time = 10.361 ms
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 380 bytes cmem[0]
info    : 0 bytes gmem
info    : Function properties for 'first':
info    : used 255 registers, used 1 barriers, 0 stack, 1032 bytes smem
"""


def test_the_log_gives_the_cost_of_every_entry():
    assert parse_resources(LOG) == {
        "first": Resources(255, 48, 44, 52, 4096, 1),
        "second": Resources(8, 0, 0, 0, 0, 0),
    }
    assert parse_resources(LOG)["first"].spills
    assert not parse_resources(LOG)["second"].spills


@needs_assembler
def test_assembling_gives_an_elf_image_and_its_cost():
    done = assemble(PTX, "sm_80")
    assert done.cubin.startswith(b"\x7fELF")
    cost = done.entries["normalise"]
    assert 8 < cost.registers < 64
    assert (cost.stack, cost.spill_stores, cost.spill_loads) == (0, 0, 0)
    assert cost.barriers == 1
    assert 8 <= cost.shared <= 32  # the partial sums of two warps, aligned


PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3},"
    " %desc, %p, 1, 1, 0;"
)
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
FENCE = "wgmma.fence.sync.aligned;"


def hopper(*lines):
    """Products of a warpgroup, with the accumulators and A's registers loaded and stored."""
    return "\n".join([
        ".version 8.0", ".target sm_90a", ".address_size 64",
        ".visible .entry k(.param .u64 x, .param .u64 desc)", ".maxntid 128", "{",
        ".reg .b32 %a<4>;", ".reg .f32 %d<4>;", ".reg .b64 %x, %desc;", ".reg .pred %p;",
        "ld.param.u64 %x, [x];", "ld.param.u64 %desc, [desc];", "setp.ne.u64 %p, %desc, 0;",
        "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%x];",
        "ld.global.v4.f32 {%d0, %d1, %d2, %d3}, [%x];",
        *lines,
        "st.global.v4.f32 [%x], {%d0, %d1, %d2, %d3};", "ret;", "}",
    ])  # fmt: skip


@needs_assembler
def test_products_of_a_warpgroup_assemble():
    made = assemble(hopper(FENCE, PRODUCT, COMMIT, WAIT), "sm_90a")
    assert "wgmma" not in made.log


@needs_assembler
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # A changes while a product reads it
        ([FENCE, PRODUCT, COMMIT, "add.u32 %a0, %a1, 1;", FENCE, PRODUCT, COMMIT, WAIT],
         r"\(C7513\) .*wgmma.mma_async instructions are serialized due to .* input registers"),
        # an accumulator is read too early
        ([FENCE, PRODUCT, COMMIT, "add.f32 %d0, %d1, %d1;", WAIT],
         r"\(C7517\) wgmma.wait_group is injected in around line 19 .*\n.*\n.*\n.*\n"
         r">   19 \| add.f32 %d0"),
    ],
    ids=["A", "sums"],
)  # fmt: skip
def test_serialised_products_are_an_error(lines, message):
    with pytest.raises(AssembleError, match=rf"k assembles for sm_90a, but (?s:.*){message}"):
        assemble(hopper(*lines), "sm_90a", name="k")


@needs_assembler
def test_assembling_twice_gives_the_same_bytes():
    assert assemble(PTX, "sm_80").cubin == assemble(PTX, "sm_80").cubin


@needs_assembler
def test_an_error_quotes_the_ptx_around_it():
    number = next(i for i, line in enumerate(PTX.split("\n"), 1) if "rsqrt.approx.f32" in line)
    with pytest.raises(AssembleError, match="broken does not assemble for sm_80") as caught:
        assemble(PTX.replace("rsqrt.approx.f32", "rsqrt.approx.f33"), "sm_80", name="broken")
    assert f">{number:5d} |     rsqrt.approx.f33 %scale, %scale;" in str(caught.value)
    assert f" {number - 1:5d} |     fma.rn.f32 %scale, %scale, " in str(caught.value)


@needs_assembler
def test_an_unknown_architecture_is_named():
    with pytest.raises(AssembleError, match="-arch=sm_11"):
        assemble(PTX, "sm_11")


def test_without_the_wheel_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvjitlink", None)
    monkeypatch.delattr("cuda.bindings.nvjitlink", raising=False)
    assert not is_available()
    with pytest.raises(AssemblerMissingError, match=r"pip install 'urdir\[assemble\]'"):
        assemble(PTX, "sm_80")


def test_a_library_that_is_missing_is_told_in_one_line(monkeypatch):
    def missing():
        raise RuntimeError("Failure finding libnvJitLink.so:\n\tNo such file\n")

    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
    monkeypatch.setattr(nvjitlink, "version", missing)
    with pytest.raises(AssemblerMissingError) as caught:
        assemble(PTX, "sm_80")
    assert str(caught.value).endswith("(Failure finding libnvJitLink.so: No such file)")


def test_annotation_keeps_the_log_and_joins_neighbouring_lines():
    text = "\n".join(f"line{i}" for i in range(1, 21))
    shown = annotate(text, "line 3: bad\nline 5: worse\nline 15; error\nline 99: nowhere", around=1)
    assert shown.split("\n") == [
        "line 3: bad",
        "line 5: worse",
        "line 15; error",
        "line 99: nowhere",
        "  ...",
        "     2 | line2",
        ">    3 | line3",
        "     4 | line4",
        ">    5 | line5",
        "     6 | line6",
        "  ...",
        "    14 | line14",
        ">   15 | line15",
        "    16 | line16",
    ]


def test_a_long_log_is_cut():
    text = "\n".join(f"line{i}" for i in range(1, 301))
    log = "\n".join(f"line {i}: bad" for i in range(1, 301))
    shown = annotate(text, log, around=0).split("\n")
    assert shown[:40] == log.split("\n")[:40]
    named = [f">{i:5d} | line{i}" for i in range(1, 41)]
    assert shown[40:] == ["... and 260 lines more", "  ...", *named]
