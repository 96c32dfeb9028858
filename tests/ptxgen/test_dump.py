"""Dumps: PTX that can be checked, cubin, SASS, JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from urdir.ptxgen import ptx
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.products.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import smallest_example
from urdir.ptxgen.tools import sass
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.tools.dump import EMITTERS, Dump, body_of, is_edited, parse_emit, write

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
SPEC = Normalise(rows=3, cols=257, norm=Norm("rms", 1e-5))
DUMP = Dump(SPEC, "sm_80", "as the test has them")


def _text(form: str, dump: Dump = DUMP) -> str:
    found = EMITTERS[form](dump)
    assert isinstance(found, str)
    return found


def test_dumped_ptx_explains_itself() -> None:
    text = _text("ptx")
    head = text[: text.index(".version")]
    body = SPEC.ptx("sm_80")
    for part in (
        SPEC.key("sm_80"),
        "as the test has them",
        hashlib.sha256(body.encode()).hexdigest(),
        "Normalise(rows=3, cols=257, norm=Norm(kind='rms', eps=1e-05, ",
        f"grid {SPEC.launch_shape.grid}",
        f"block {SPEC.launch_shape.block}",
        "// normalise:",
    ):
        assert part in head
    assert body_of(text) == body
    assert len(text.splitlines()) == len(body.splitlines())  # errors name lines of either
    assert ptx.parse(text).target == "sm_80"


def test_a_dump_knows_whether_it_was_edited() -> None:
    text = _text("ptx")
    assert is_edited(text) is False
    assert is_edited(text.replace("ret;", "exit;")) is True
    assert is_edited(text.replace("// normalise", "// my normalise")) is True
    assert is_edited(SPEC.ptx("sm_80")) is None
    assert body_of(SPEC.ptx("sm_80")) == SPEC.ptx("sm_80")


def test_json_has_every_field_and_number() -> None:
    spec = smallest_example(GemvF32)
    found = json.loads(_text("json", Dump(spec, "sm_90", "x")))
    assert found["fields"]["format"] == "Q8_0"
    assert found["fields"]["rows"] == spec.rows
    assert found["key"] == spec.key("sm_90")
    assert found["bytes_moved"] == spec.bytes_moved()
    assert tuple(found["block"]) == spec.launch_shape.block
    assert (found["machine_code_of"] or "nvJitLink").startswith("nvJitLink")
    assert [p["name"] for p in found["params"]] == [p.name for p in spec.params]
    assert found["ptx_sha256"] == hashlib.sha256(spec.ptx("sm_90").encode()).hexdigest()


@needs_assembler
def test_a_cubin_is_what_the_assembler_makes_of_the_text() -> None:
    found = EMITTERS["cubin"](DUMP)
    assert found == assemble(body_of(_text("ptx")), "sm_80", name=SPEC.name).cubin


@needs_assembler
def test_sass_names_assembler_and_disassembler() -> None:
    try:
        sass.find_disassembler()
    except sass.DisassemblerError:
        pytest.skip("nvdisasm is not installed")
    text = _text("sass")
    assert "nvJitLink" in text
    assert "nvdisasm" in text
    assert "EXIT" in text
    assert "GPR" not in text
    assert "GPR" in _text("sass", Dump(SPEC, "sm_80", "x", life_ranges=True))


@needs_assembler
def test_sass_is_that_of_the_cubin_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stands in for nvdisasm with a program that prints its input, to see what reaches it."""
    fake = tmp_path / "nvdisasm"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo V1.2.3 && exit\nshift\ncat "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sass, "find_disassembler", lambda: fake)
    text = _text("sass", Dump(SPEC, "sm_80", "x", cubin=b"machine code", cubin_maker="driver 5"))
    assert text.endswith("machine code")
    assert "driver 5" in text
    assert "nvdisasm 1.2.3" in text
    fake.write_text("#!/bin/sh\necho cannot read it >&2\nexit 3\n")
    with pytest.raises(sass.DisassemblerError, match=r"\(3\): cannot read it"):
        sass.disassemble(b"")


def test_a_missing_disassembler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "PACKAGE", "no-such-package")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(sass.DisassemblerError, match=r"pip install 'urdir\[sass\]'"):
        sass.disassembler_version()


def test_files_are_named_by_key(tmp_path: Path) -> None:
    other = Dump(Normalise(1, 5, Norm("rms", 1e-5)), "sm_80", "x")
    files = write([DUMP, other], tmp_path / "new" / "folder", ("ptx", "json"))
    assert {f.name for f in files} == {
        f"{dump.key}.{form}" for dump in (DUMP, other) for form in ("ptx", "json")
    }
    assert files[0].read_text() == _text("ptx")


def test_bad_forms_and_folders(tmp_path: Path) -> None:
    assert parse_emit("ptx, json,ptx") == ("ptx", "json")
    for text in ("", "exe", "ptx,exe"):
        with pytest.raises(PtxgenError, match="cannot emit"):
            parse_emit(text)
    (tmp_path / "file").write_text("")
    with pytest.raises(PtxgenError, match="cannot write"):
        write([DUMP], tmp_path / "file" / "below", ("ptx",))
