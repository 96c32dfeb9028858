"""Fill in the middle: the tokens that mark the text before and after a gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

#: Roles of `FillTokens`: keys of the metadata, and texts of tokens in files without them.
_ROLES = {
    "before": (
        ("fim_pre", "prefix"),
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    ),
    "after": (
        ("fim_suf", "suffix"),
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    ),
    "gap": (
        ("fim_mid", "middle"),
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    ),
    "file": (("fim_sep",), ("<|file_sep|>",)),
}


@dataclass(frozen=True, slots=True)
class FillTokens:
    """Token ids: ``before`` begins the text before the gap, ``after`` the one after it, ``gap`` the
    answer; ``file`` begins the name of a file."""

    before: int
    after: int
    gap: int
    file: int | None = None

    @classmethod
    def find(
        cls, metadata: Mapping[str, Any], id_of: Callable[[str], int | None], size: int
    ) -> Self | None:
        """The tokens of a vocabulary of ``size`` tokens, by a file's ``metadata`` or their texts;
        None if one is missing."""
        found: dict[str, int | None] = {}
        for role, (keys, texts) in _ROLES.items():
            given = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
            ids = [*given, *map(id_of, texts)]
            good = (token for token in ids if isinstance(token, int) and 0 <= token < size)
            found[role] = next(good, None)
        before, after, gap = (found[role] for role in ("before", "after", "gap"))
        if before is None or after is None or gap is None:
            return None
        return cls(before, after, gap, found["file"])
