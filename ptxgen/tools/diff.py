"""Compare two PTX files, or two folders of them: text and resources."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.tools.assemble import (
    AssembleError,
    AssemblerMissingError,
    assemble,
    declared_target,
)
from urdir.ptxgen.tools.dump import body_of
from urdir.ptxgen.tools.stats import code_bytes, instruction_mix

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
#: The line in which the generator writes a kernel's fields: ``// Normalise(rows=3, ...)``.
_FIELDS = re.compile(r"^// ([A-Z]\w*\(.*\))$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PtxFile:
    """A PTX file: its path, and its text without the line that a dump adds."""

    path: Path
    text: str

    @property
    def entry(self) -> str:
        """The name of the (first) kernel."""
        found = _ENTRY.search(self.text)
        return found[1] if found else self.path.stem

    @property
    def fields(self) -> str:
        """The line with its fields, "" in other PTX."""
        found = _FIELDS.search(self.text)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """The ``.target``. Raises PtxgenError if there is none."""
        if (target := declared_target(self.text)) is None:
            raise PtxgenError(f"{self.path} has no .target: is it PTX?")
        return target


@dataclass(frozen=True, slots=True)
class Difference:
    """Two files of one kernel: their unified diff (empty when equal), and their costs.

    ``costs`` has (name, left, right); a number is None if it is unavailable, and ``notes`` give the
    reason.
    """

    left: PtxFile
    right: PtxFile
    lines: tuple[str, ...]
    costs: tuple[tuple[str, int | None, int | None], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differing pairs, the number of equal ones, and unpaired files."""

    differences: tuple[Difference, ...]
    equal: int
    only_left: tuple[PtxFile, ...]
    only_right: tuple[PtxFile, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.differences or self.only_left or self.only_right)


def compare(left: Path, right: Path) -> Comparison:
    """Compare two PTX files, or the PTX files of two folders.

    In folders, files with the same fields are paired; then the only kernels of a name. Raises
    PtxgenError for a path that cannot be read, a file with a folder, and folders without PTX.
    """
    if left.is_dir() != right.is_dir() and left.exists() and right.exists():
        raise PtxgenError(f"{left} and {right}: give two files or two folders")
    lefts, rights = _read(left), _read(right)
    pairs = _pair(lefts, rights) if left.is_dir() else [(lefts[0], rights[0])]
    paired = {id(file) for pair in pairs for file in pair}
    changed = [(a, b) for a, b in pairs if a.text != b.text]
    return Comparison(
        tuple(_difference(a, b) for a, b in changed),
        len(pairs) - len(changed),
        tuple(file for file in lefts if id(file) not in paired),
        tuple(file for file in rights if id(file) not in paired),
    )


def read_ptx(path: Path) -> PtxFile:
    """Read a PTX file; raises PtxgenError on failure."""
    try:
        return PtxFile(path, body_of(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError as exc:
        raise PtxgenError(f"{path} is not text: is it a cubin?") from exc
    except OSError as exc:
        raise PtxgenError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _read(path: Path) -> list[PtxFile]:
    if not path.is_dir():
        return [read_ptx(path)]
    found = [read_ptx(file) for file in sorted(path.glob("*.ptx"))]
    if not found:
        raise PtxgenError(f"there are no .ptx files in {path}")
    return found


def _pair(lefts: Sequence[PtxFile], rights: Sequence[PtxFile]) -> list[tuple[PtxFile, PtxFile]]:
    pairs: list[tuple[PtxFile, PtxFile]] = []
    for name in ("name", "fields", "entry"):
        free_left = [f for f in lefts if not any(f is a for a, _ in pairs)]
        free_right = [f for f in rights if not any(f is b for _, b in pairs)]
        by_left, by_right = _unique(free_left, name), _unique(free_right, name)
        pairs += [(by_left[key], by_right[key]) for key in by_left if key and key in by_right]
    return pairs


def _unique(files: Sequence[PtxFile], name: str) -> dict[str, PtxFile]:
    """Files by file name, fields or entry, if no two share it."""
    keys = [file.path.name if name == "name" else str(getattr(file, name)) for file in files]
    return {key: f for key, f in zip(keys, files, strict=True) if keys.count(key) == 1}


def _difference(left: PtxFile, right: PtxFile) -> Difference:
    lines = difflib.unified_diff(
        left.text.splitlines(),
        right.text.splitlines(),
        str(left.path),
        str(right.path),
        lineterm="",
    )
    notes: list[str] = []
    costs = [_costs(file, notes) for file in (left, right)]
    names = dict.fromkeys(name for cost in costs for name in cost)
    table = tuple((name, costs[0].get(name), costs[1].get(name)) for name in names)
    return Difference(left, right, tuple(lines), table, tuple(dict.fromkeys(notes)))


def _costs(file: PtxFile, notes: list[str]) -> dict[str, int]:
    """Resources and instructions of a file; unavailable ones are omitted, with a note."""
    found: dict[str, int] = {}
    try:
        made = assemble(file.text, file.target, name=str(file.path))
        used = made.entries.get(file.entry)
        if used is not None:
            found |= {
                "registers": used.registers,
                "spill bytes": used.spill_stores + used.spill_loads,
                "local bytes": used.stack,
                "static shared bytes": used.shared,
                "barriers": used.barriers,
            }
        found["code bytes"] = code_bytes(made.cubin).get(file.entry, 0)
    except (AssemblerMissingError, AssembleError) as exc:
        notes.append(str(exc))
    try:
        mix = instruction_mix(file.text)
        found |= {f"{pipe} instructions": count for pipe, count in mix.items()}
    except PtxgenError as exc:
        notes.append(f"{file.path}: {exc}")
    return found


def summary(difference: Difference) -> str:
    """A line: the file, and the costs that differ."""
    changed = [
        f"{name} {'-' if left is None else left} -> {'-' if right is None else right}"
        for name, left, right in difference.costs
        if left != right
    ]
    return f"{difference.left.path.name}: {', '.join(changed) or 'only the text'}"


def side_by_side(difference: Difference) -> Iterator[str]:
    """The costs as lines of a table, those that differ marked."""
    for name, left, right in difference.costs:
        shown = ["-" if value is None else f"{value:,}" for value in (left, right)]
        change = ""
        if left is not None and right is not None and left != right:
            change = f"  {right - left:+,}"
        yield f"{name:<22} {shown[0]:>10} {shown[1]:>10}{change}"
