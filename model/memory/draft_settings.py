"""How drafts of the next tokens are made, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import SettingsError
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM

#: Where drafts come from: "ngram", what followed the last tokens where they were before; "model", a
#: draft model, or heads of the model itself.
DRAFT_KINDS = ("ngram", "model")
#: Tokens that heads draft alone of a vocabulary of at least twice as many. English and Python texts
#: have 2 to 5 % of others (Qwen, o200k), Chinese ones 36 % (Qwen): see `DraftScope`.
FIRST_TOKENS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Speculation: up to ``most`` drafts of a sequence in each step, at least ``least``.

    Drafts of ``kind`` "ngram" follow the latest earlier occurrence of the last ``longest`` tokens,
    or of fewer, down to ``shortest``. Those of a model end before a token whose probability, by the
    draft itself, is below ``p_min``: of the softmax of its ten highest logits, as in llama.cpp; a
    request may have another one (`Request.draft_p_min`), unless that is 0 here. With a ``chance``
    drafts are not compared with what the model chooses, but accepted with that probability: answers
    are wrong, their speed is that of drafts of that quality. Heads of the model itself (MTP) draft
    the first ``tokens`` of its vocabulary alone (0: all); None: `first_tokens` of a large one,
    while texts have few others. SettingsError names the field and the value that is out of range.
    """

    kind: str = "ngram"
    most: int = 7
    least: int = 0
    longest: int = 4
    shortest: int = 2
    p_min: float = 0.0
    chance: float | None = None
    tokens: int | None = None

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
        if self.tokens is not None and self.tokens < 0:
            raise SettingsError(f"drafts of the first {self.tokens} tokens: expected 0 or more")
        if not 0 <= self.p_min <= 1:
            raise SettingsError(f"drafts as likely as {self.p_min}: expected 0 to 1")
        if self.chance is not None and not 0 <= self.chance <= 1:
            raise SettingsError(f"drafts accepted with probability {self.chance}: expected 0 to 1")

    def first_tokens(self, vocab: int, *, ranked: bool) -> int:
        """How many tokens of a vocabulary of ``vocab`` are drafted alone where texts have few
        others, 0: all of them are. Vocabularies are ``ranked`` whose earlier tokens are more
        frequent."""
        if self.tokens is not None:
            return self.tokens
        return FIRST_TOKENS if ranked and vocab >= 2 * FIRST_TOKENS else 0
