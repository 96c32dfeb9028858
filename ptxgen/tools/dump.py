"""Dump kernels to files: annotated PTX, cubin, SASS, and a description as JSON.

Files are named by the spec key; an edited PTX file with the same name replaces the generated text
(``URDIR_PTX_OVERRIDE``). A dumped PTX text is the generated one (contract, fields, launch shape,
code) with its first empty line filled in, so that line numbers stay the same::

    // normalise: y[r] = (residual[r] +) scale * norm(x[r]), norm(v) =
    // ...
    // Normalise(rows=3, cols=257, norm=Norm(...), ...)
    // grid (3, 1, 1)  block (64, 1, 1)  cluster (1, 1, 1)  dynamic shared 0 bytes
    // dump normalise-sm_90-...; fields ...; sha256 of the text with this line empty: 5f0c...
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from urdir.ptxgen.errors import PtxgenError, SettingError
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import KernelSpec, purpose_of
from urdir.ptxgen.tools.assemble import AssemblerMissingError, assemble, assembler_version
from urdir.ptxgen.tools.sass import disassemble, disassembler_version
from urdir.ptxgen.tools.settings import plain

_DUMP_LINE = re.compile(r"^// dump .*; sha256 [^:\n]*: ([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True)
class Dump:
    """A kernel for a target, ready to be written in any form of ``EMITTERS``.

    ``origin`` describes in one line the source of the fields' values; ``life_ranges`` adds those of
    registers to SASS. ``cubin`` and ``cubin_maker`` replace nvJitLink's if given: the driver's own
    machine code.
    """

    spec: KernelSpec
    target: str
    origin: str
    life_ranges: bool = False
    cubin: bytes | None = None
    cubin_maker: str = ""

    @property
    def key(self) -> str:
        """The spec key, and the stem of every file name."""
        return self.spec.key(self.target)


def ptx_text(dump: Dump) -> str:
    """The PTX text, its first empty line replaced by one with key, origin and hash."""
    text = dump.spec.ptx(dump.target)
    line = (
        f"// dump {dump.key}; fields {dump.origin}; "
        f"sha256 of the text with this line empty: {content_hash(text)}"
    )
    return text.replace("\n\n", f"\n{line}\n", 1)


def sass_text(dump: Dump) -> str:
    """SASS, with a head that names the assembler and the disassembler."""
    code = disassemble(machine_code(dump), life_ranges=dump.life_ranges)
    return (
        f"// urdir ptx dump: {dump.spec.name} for {dump.target}, as SASS\n"
        f"// key     {dump.key}\n"
        f"// fields  {dump.origin}\n"
        f"// machine code of {_maker(dump)}, printed by {disassembler_version()}\n"
        f"{code}"
    )


def description(dump: Dump) -> dict[str, Any]:
    """Everything known about the kernel except its code, as plain values."""
    return describe(dump.spec, dump.target) | {
        "origin": dump.origin,
        "ptx_sha256": content_hash(dump.spec.ptx(dump.target)),
        "machine_code_of": _maker(dump),
    }


def describe(spec: KernelSpec, target: str) -> dict[str, Any]:
    """Fields, parameters and launch shape of a spec, as plain values."""
    shape = spec.launch_shape
    return {
        "kernel": spec.name,
        "purpose": purpose_of(type(spec)),
        "key": spec.key(target),
        "target": target,
        "fields": {name: plain(value) for name, value in field_values(spec).items()},
        "grid": list(shape.grid),
        "block": list(shape.block),
        "cluster": list(shape.cluster),
        "dynamic_shared_bytes": shape.shared_bytes,
        "params": [
            {
                "name": p.name,
                "dtype": p.dtype,
                "access": p.access.value if p.access else "scalar",
                "shape": list(spec.shape_of(p)) if p.is_pointer else [],
            }
            for p in spec.params
        ],
        "bytes_moved": spec.bytes_moved(),
        "flops": spec.flops(),
    }


def machine_code(dump: Dump) -> bytes:
    """The given cubin, else nvJitLink's. Raises AssemblerMissingError, AssembleError."""
    if dump.cubin is not None:
        return dump.cubin
    return assemble(dump.spec.ptx(dump.target), dump.target, name=dump.spec.name).cubin


def _maker(dump: Dump) -> str | None:
    """The assembler of the cubin, None if there is none."""
    if dump.cubin is not None:
        return dump.cubin_maker
    try:
        return f"{assembler_version()} (a driver's own compiler may differ)"
    except AssemblerMissingError:
        return None


#: Forms of output: file name suffix -> contents.
EMITTERS: Mapping[str, Callable[[Dump], str | bytes]] = {
    "ptx": ptx_text,
    "cubin": machine_code,
    "sass": sass_text,
    "json": lambda dump: json.dumps(description(dump), indent=2) + "\n",
}


def parse_emit(text: str) -> tuple[str, ...]:
    """ "ptx,sass" as names of ``EMITTERS``; raises PtxgenError for others."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in EMITTERS]
    if unknown or not names:
        raise SettingError(f"cannot emit {', '.join(unknown) or text!r}: {', '.join(EMITTERS)}")
    return names


def write(dumps: Iterable[Dump], folder: Path, emit: Sequence[str]) -> list[Path]:
    """Write every dump in every form of ``emit``; returns the files.

    Everything is generated before the first file is written. Raises PtxgenError for a folder that
    cannot be created or written.
    """
    contents = {f"{dump.key}.{form}": EMITTERS[form](dump) for dump in dumps for form in emit}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)
    except OSError as exc:
        raise PtxgenError(f"cannot write to {folder}: {exc.strerror or exc}") from exc
    return [folder / name for name in contents]


def content_hash(text: str) -> str:
    """SHA-256 of a PTX text, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def body_of(text: str) -> str:
    """A PTX text without the line that a dump adds."""
    return _DUMP_LINE.sub("", text, count=1)


def is_edited(text: str) -> bool | None:
    """Whether a dumped text was edited; None if it is not a dump."""
    found = _DUMP_LINE.search(text)
    return content_hash(body_of(text)) != found[1] if found else None
