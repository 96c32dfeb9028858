"""Comparing dumps, and checking PTX files."""

from __future__ import annotations

from pathlib import Path

import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.tools import assemble as assembler
from urdir.ptxgen.tools.assemble import AssemblerMissingError, is_available
from urdir.ptxgen.tools.check import check
from urdir.ptxgen.tools.diff import compare, side_by_side
from urdir.ptxgen.tools.dump import Dump, write

RMS = Norm("rms", 1e-5)

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")


def _dump(folder: Path, *specs: KernelSpec, target: str = "sm_90") -> list[Path]:
    return write([Dump(spec, target, "x") for spec in specs], folder, ("ptx",))


def _no_library() -> None:
    raise AssemblerMissingError("nvJitLink is not here")


@needs_assembler
def test_two_files_line_by_line_and_number_by_number(tmp_path: Path) -> None:
    (left,) = _dump(tmp_path / "a", Normalise(1, 256, RMS))
    right = tmp_path / "b.ptx"
    right.write_text(left.read_text().replace("    ret;", "    bar.sync 3;\n    ret;"))
    found = compare(left, right)
    (difference,) = found.differences
    assert not found.is_equal
    assert "+    bar.sync 3;" in difference.lines
    assert [line for line in difference.lines if line[0] == "-" and line[:3] != "---"] == []
    costs = {name: (a, b) for name, a, b in difference.costs}
    assert costs["barriers"][1] == 4  # barriers 0 to 3
    control = costs["control instructions"]
    assert control[1] == (control[0] or 0) + 1
    assert any("control instructions" in line and "+1" in line for line in side_by_side(difference))


def test_equal_files_are_equal_whatever_their_dumps_say(tmp_path: Path) -> None:
    (left,) = _dump(tmp_path / "a", Add(n=5))
    right = tmp_path / "b.ptx"
    right.write_text(Add(n=5).ptx("sm_90"))
    found = compare(left, right)
    assert found.is_equal
    assert found.equal == 1


@needs_assembler
def test_folders_are_paired_by_fields_over_targets_and_versions(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    _dump(
        a,
        Add(n=5),
        Add(n=700),
        Normalise(1, 256, RMS),
        Normalise(2, 9, RMS),
    )
    _dump(b, Add(n=700), Add(n=5), Normalise(1, 512, RMS), target="sm_80")
    found = compare(a, b)
    pairs = {(d.left.fields, d.right.fields) for d in found.differences}
    assert pairs == {(f"Add(n={n}, scale=1.0, scaled=False, width=0)",) * 2 for n in (5, 700)}
    (right,) = (file.fields for file in found.only_right)
    assert right.startswith("Normalise(rows=1, cols=512, norm=Norm(kind='rms', eps=1e-05, ")
    assert len(found.only_left) == 2  # two of that name: which of them belongs to it is not clear
    assert all("-.target sm_90" in d.lines for d in found.differences)


def test_the_only_kernel_of_a_name_belongs_to_the_other_only_one(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    _dump(a, Normalise(1, 256, RMS), Add(n=5))
    _dump(b, Normalise(1, 512, RMS), Add(n=5))
    found = compare(a, b)
    assert found.equal == 1
    assert [d.left.entry for d in found.differences] == ["normalise"]


def test_without_an_assembler_the_text_and_the_mix_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "_library", _no_library)
    (left,), (right,) = _dump(tmp_path / "a", Add(n=5)), _dump(tmp_path / "b", Add(n=7))
    (difference,) = compare(left, right).differences
    assert difference.lines
    assert difference.notes == ("nvJitLink is not here",)
    assert {name for name, _, _ in difference.costs} >= {"fma instructions"}
    assert "registers" not in {name for name, _, _ in difference.costs}


def test_paths_that_cannot_be_compared(tmp_path: Path) -> None:
    (file,) = _dump(tmp_path / "a", Add(n=5))
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.ptx").write_bytes(b"\x7fELF\xff\xfe")
    for left, right, message in (
        (file, tmp_path / "a", "two files or two folders"),
        (file, tmp_path / "absent", "cannot be read"),
        (tmp_path / "empty", tmp_path / "a", "no .ptx files"),
        (file, tmp_path / "binary.ptx", "is it a cubin"),
    ):
        with pytest.raises(PtxgenError, match=message):
            compare(left, right)


@needs_assembler
def test_good_ptx_passes_and_tells_its_cost() -> None:
    verdict = check(Add(n=5).ptx("sm_80"))
    assert verdict.is_good
    assert verdict.target == "sm_80"
    assert verdict.resources["add"].registers > 0


@needs_assembler
def test_findings_come_with_the_lines_around_them() -> None:
    text = Add(n=5).ptx("sm_80")
    linted = check(
        text.replace("    ret;", "    bar.sync 0;\n    @%missing bra NOWHERE;\n    ret;")
    )
    assert not linted.is_good
    assert "not a predicate" in str(linted)
    number = linted.findings[0].line
    assert f">{number:5d} |     @%missing bra NOWHERE;" in str(linted)
    assert f" {number - 1:5d} |     bar.sync 0;" in str(linted)
    refused = check(text.replace("add.f32", "add.f33"))
    assert "add.f33" in refused.refusal
    assert any(line.startswith(">") for line in str(refused).splitlines())


def test_what_the_assembler_lets_pass_is_found() -> None:
    text = Add(n=5).ptx("sm_80").replace("    ret;", "    .reg .b32 %idle;\n    ret;")
    verdict = check(text)
    assert [f.rule for f in verdict.findings] == ["unused-register"]
    assert not verdict.refusal
    assert not verdict.is_good


def test_a_missing_assembler_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "_library", _no_library)
    verdict = check(Add(n=5).ptx("sm_80"))
    assert verdict.is_good
    assert verdict.skipped == "nvJitLink is not here"


def test_text_that_is_no_ptx() -> None:
    verdict = check("hello")
    assert not verdict.is_good
    assert "no .target" in verdict.skipped
