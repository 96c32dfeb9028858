"""How drafts of the next tokens are made, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import SettingsError
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM

#: Where drafts come from: "ngram", what followed the last tokens where they were before; "model", a
#: draft model, or heads of the model itself.
DRAFT_KINDS = ("ngram", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Speculation: up to ``most`` drafts of a sequence in each step, at least ``least``.

    Drafts of ``kind`` "ngram" follow the latest earlier occurrence of the last ``longest`` tokens,
    or of fewer, down to ``shortest``. Those of a model end before a token whose probability, by the
    draft itself, is below ``p_min``: of the softmax of its ten highest logits, as in llama.cpp; a
    request may have another one (`Request.draft_p_min`), unless that is 0 here. With a ``chance``
    drafts are not compared with what the model
    chooses, but accepted with that probability: answers are wrong, their speed is that of drafts
    of that quality. Heads of the model itself (MTP) draft the first ``tokens`` of its vocabulary
    alone, where that is above 0. SettingsError names the field and the value that is out of range.
    """

    kind: str = "ngram"
    most: int = 7
    least: int = 0
    longest: int = 4
    shortest: int = 2
    p_min: float = 0.0
    chance: float | None = None
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DRAFT_KINDS:
            raise SettingsError(f"drafts of {self.kind!r}: expected {', '.join(DRAFT_KINDS)}")
        if not 1 <= self.most <= MOST_DRAFTS:
            raise SettingsError(f"at most {self.most} drafts: expected 1 to {MOST_DRAFTS}")
        if not 0 <= self.least <= self.most:
            raise SettingsError(f"at least {self.least} drafts: expected 0 to {self.most}")
        if not 1 <= self.shortest <= self.longest <= MOST_NGRAM:
            raise SettingsError(
                f"n-grams of {self.shortest} to {self.longest} tokens: expected 1 to {MOST_NGRAM}"
            )
        if self.tokens < 0:
            raise SettingsError(f"drafts of the first {self.tokens} tokens: expected 0 or more")
        if not 0 <= self.p_min <= 1:
            raise SettingsError(f"drafts as likely as {self.p_min}: expected 0 to 1")
        if self.chance is not None and not 0 <= self.chance <= 1:
            raise SettingsError(f"drafts accepted with probability {self.chance}: expected 0 to 1")
