"""Bound on the expansion by the steps of a tokenizer.json: bytes per byte, a product over steps.

Forty doubling steps make a terabyte from one character, and the library aborts the process when it
cannot allocate. So such a file is refused before the library loads it, and a long text before it
could expand too far. Pieces between added tokens are normalised one by one, and a piece may be one
byte: a step's prefix counts in full for each. Figures for Unicode are the maximum over all
characters in tokenizers 0.23 (normal forms: Unicode Standard Annex 15, table "Maximum Expansion
Factors").
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from urdir.model.errors import TokenizerError, UnsupportedError
from urdir.model.text.charsmap import CharsMap

Step = Mapping[str, Any]

#: Largest accepted expansion. The maximum of published models is 176, for SentencePiece as
#: converted by transformers: NFKC as a table (11), a regular expression that replaces spaces by a
#: mark (4), and a mark before words (4).
MOST = 256
#: Largest expanded text in bytes; the library takes some hundred times as much memory for it.
MOST_BYTES = 64 << 20
#: Bytes that a model's options may add to the spelling of a token.
MOST_AFFIX = 256

_SAME = 1.0


def text_growth(description: Step) -> float:
    """The expansion of all steps. Raises TokenizerError beyond `MOST`, UnsupportedError for an
    unknown step; the caller translates other errors of malformed files."""
    found = 1.0
    for part, kinds in _PARTS.items():
        found *= _of(description.get(part), part, kinds)
        if not found <= MOST:
            raise TokenizerError(f"its steps may expand text more than {MOST} times")
    _check_model(description["model"])
    return found


def check_text(text: str, growth: float) -> None:
    """Raise TokenizerError for a text that could expand too far."""
    if len(text) * 4 * growth > MOST_BYTES and len(text.encode("utf-8", "replace")) * growth > (
        MOST_BYTES
    ):
        raise TokenizerError(
            f"the text has {len(text):,} characters, which tokenizer.json could expand to "
            f"more than {MOST_BYTES >> 20} MiB"
        )


def _of(step: Step | None, part: str, kinds: Mapping[str, Callable[[Step], float]]) -> float:
    if step is None:
        return _SAME
    kind = step["type"]
    if kind == "Sequence":
        found = 1.0
        for inner in step[_INNER[part]]:
            found = min(found * _of(inner, part, kinds), 2.0 * MOST)
        return found
    if kind not in kinds:
        raise UnsupportedError(f"it has the {part} {str(kind)[:60]!r}, which is not known")
    return kinds[kind](step)


def _bert(step: Step) -> float:
    spaces = 5 / 3 if step.get("handle_chinese_chars", True) else 1.0  # around each of 3 bytes
    lower = step.get("lowercase", True)
    accents = step.get("strip_accents")
    decomposed = 3.0 if (lower if accents is None else accents) else 1.0
    return spaces * decomposed * (1.5 if lower else 1.0)


def _replace(step: Step) -> float:
    """If the pattern may match nothing, the content is also inserted between all bytes."""
    pattern, nbytes = step["pattern"], len(step["content"].encode())
    literal = pattern.get("String")
    return max(1.0, nbytes / len(literal.encode())) if literal else 1.0 + nbytes


def _prepend(step: Step) -> float:
    return 1.0 + len(step["prepend"].encode())


def _precompiled(step: Step) -> float:
    return CharsMap.parse(base64.b64decode(step["precompiled_charsmap"])).growth


def _byte_level(step: Step) -> float:
    """Each byte becomes a character of one or two bytes; a piece may get a leading space."""
    return 4.0 if step.get("add_prefix_space", True) else 2.0


def _metaspace(step: Step) -> float:
    mark = len(step["replacement"].encode())
    return float(mark) if step.get("prepend_scheme", "always") == "never" else 1.0 + mark


def _template(step: Step) -> float:
    """The text's tokens occur wherever the template names it."""
    return float(max(1, sum("Sequence" in piece for piece in step["single"])))


def _same(_: Step) -> float:
    return _SAME


_NORMALIZERS: Mapping[str, Callable[[Step], float]] = {
    "BertNormalizer": _bert,
    "ByteLevel": lambda _: 2.0,
    "Lowercase": lambda _: 1.5,
    "NFC": lambda _: 3.0,
    "NFD": lambda _: 3.0,
    "NFKC": lambda _: 11.0,
    "NFKD": lambda _: 11.0,
    "Nmt": _same,
    "Precompiled": _precompiled,
    "Prepend": _prepend,
    "Replace": _replace,
    "Strip": _same,
    "StripAccents": _same,
}
_PRE_TOKENIZERS: Mapping[str, Callable[[Step], float]] = {
    **dict.fromkeys(
        (
            *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"),
            *("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
        ),
        _same,
    ),
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
}
_POST_PROCESSORS: Mapping[str, Callable[[Step], float]] = {
    "BertProcessing": _same,
    "ByteLevel": _same,
    "RobertaProcessing": _same,
    "TemplateProcessing": _template,
}
_PARTS = {
    "normalizer": _NORMALIZERS,
    "pre_tokenizer": _PRE_TOKENIZERS,
    "post_processor": _POST_PROCESSORS,
}
_INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
}


def _check_model(model: Step) -> None:
    """Options that are copied for every character or every token of it."""
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(name) or "")) > MOST_AFFIX:
            raise TokenizerError(f"its {name} has more than {MOST_AFFIX} characters")
