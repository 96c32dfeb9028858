"""Check any PTX text: lint, then the assembler, with the lines around findings."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.tools.assemble import (
    AssembleError,
    AssemblerMissingError,
    Resources,
    annotate,
    assemble,
    declared_target,
)
from urdir.ptxgen.tools.lint import Finding, lint


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a PTX text.

    ``findings`` are the lint's, ``refusal`` is the assembler's message ("" if none), ``resources``
    the cost by entry; ``skipped`` says why the assembler did not run ("" if it did).
    """

    text: str
    target: str
    findings: tuple[Finding, ...]
    refusal: str
    resources: dict[str, Resources]
    skipped: str = ""

    @property
    def is_good(self) -> bool:
        """Whether neither lint nor the assembler found anything."""
        return not self.findings and not self.refusal

    def __str__(self) -> str:
        """The findings, and the PTX around each line that they name."""
        parts = []
        if self.findings:
            parts.append(annotate(self.text, "\n".join(map(str, self.findings))))
        if self.refusal:
            parts.append(self.refusal)
        return "\n".join(parts)


def check(text: str, target: str | None = None, name: str = "kernel") -> Verdict:
    """Lint ``text`` and assemble it for ``target`` (None: that of its ``.target``).

    ``name`` is for messages. Nothing is raised for bad PTX; a missing assembler is noted.
    """
    chosen = target or declared_target(text)
    findings = lint(text)
    if chosen is None:
        return Verdict(text, "", findings, "", {}, "the text has no .target")
    try:
        made = assemble(text, chosen, name=name)
    except AssemblerMissingError as exc:
        return Verdict(text, chosen, findings, "", {}, str(exc))
    except AssembleError as exc:
        return Verdict(text, chosen, findings, str(exc), {})
    return Verdict(text, chosen, findings, "", dict(made.entries))
