"""Tokeniser of a tokenizer.json, run by the `tokenizers` library that defines the format.

`Tokenizer` cuts out special tokens as for every other kind, so they are plain text here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from urdir.model.errors import TokenizerError, UnsupportedError
from urdir.model.files.json_text import check_values
from urdir.model.files.limits import TOKEN_NBYTES, TOKENS
from urdir.model.files.metadata import Metadata
from urdir.model.foreign import one_line
from urdir.model.text.end_tokens import find_end_ids, find_markup, find_shown_ids
from urdir.model.text.growth import check_text, text_growth
from urdir.model.text.spelling import BYTE_ALPHABET
from urdir.model.text.vocabulary import TokenType, Vocabulary

_PREFIX = "tokenizer.huggingface."
_ESCAPED_SPACE = "▁"  # U+2581


class HuggingFaceTokens:
    """The tokeniser of tokenizer.json (model "huggingface"); see `files.pretrained.tokens`."""

    def __init__(self, metadata: Metadata) -> None:
        text = metadata.require(_PREFIX + "json", str)
        try:
            check_values(text.encode("utf-8", "replace"), "it", TokenizerError)
            description = json.loads(text)
            rows = metadata.optional(_PREFIX + "rows", int, None)
            if rows is not None and _drops_tokens_beyond(description, rows):
                text = json.dumps(description)
            self._growth = text_growth(description)
            self._engine = self._inner = _engine(text)
            if _drops_first_prefixes(description):
                self._inner = _engine(json.dumps(description))
        except Exception as error:  # the library raises no more specific class
            raise TokenizerError(f"tokenizer.json cannot be used: {one_line(str(error))}") from None
        self._is_pieces = [step["type"] for step in _parts(description, "decoder")] == ["WordPiece"]
        self._is_byte_level = not self._is_pieces and _is_byte_level(description)
        self.adds_space = self._is_pieces or _strips_a_space(description)
        self._added = self._engine.get_added_tokens_decoder()
        self.vocabulary = self._read_vocabulary(metadata)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens, at the start of a text."""
        check_text(text, self._growth)
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of texts, side by side."""
        for text in texts:
            check_text(text, self._growth)
        return [
            made.ids for made in self._engine.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def encode_inside(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens, after other tokens."""
        check_text(text, self._growth)
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; added tokens are spelled literally."""
        token = self.vocabulary.tokens[token_id]
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            return b"".join(BYTE_ALPHABET.get(char) or char.encode() for char in token)
        if self._is_pieces:
            return (token[2:] if token.startswith("##") else f" {token}").encode()
        if self.vocabulary.types[token_id] == TokenType.BYTE:
            return bytes([int(token[3:-1], 16)])
        return token.replace(_ESCAPED_SPACE, " ").encode()

    def _around(self) -> tuple[list[int], list[int], list[int]]:
        """What the post-processor puts before a text, between two and after one."""
        pair = self._engine.encode("a", "a")
        masks = self._engine.encode("a").special_tokens_mask, pair.special_tokens_mask
        one, two = ([i for i, special in enumerate(mask) if not special] for mask in masks)
        if not one or len(two) != 2 * len(one):
            return [], [], []
        ids, half = self._engine.encode("a").ids, len(one)
        between = pair.ids[two[half - 1] + 1 : two[half]]
        return ids[: one[0]], between, ids[one[-1] + 1 :]

    def _read_vocabulary(self, metadata: Metadata) -> Vocabulary:
        ids = self._engine.get_vocab(with_added_tokens=True)
        if not ids:
            raise TokenizerError("tokenizer.json has no tokens")
        TOKENS.check(max(ids.values()) + 1, "tokenizer.json", TokenizerError)
        longest = max(len(token.encode("utf-8", "replace")) for token in ids)
        TOKEN_NBYTES.check(longest, "tokenizer.json", TokenizerError)
        tokens = [""] * (max(ids.values()) + 1)
        types = bytearray([TokenType.UNUSED]) * len(tokens)
        for token, token_id in ids.items():
            tokens[token_id] = token
            types[token_id] = self._type(token_id, token)
        ends = metadata.optional(_PREFIX + "end_token_ids", np.ndarray, None)
        end_ids = [] if ends is None else [end for end in ends.tolist() if end < len(tokens)]

        def role(name: str) -> int | None:
            named = ids.get(metadata.optional(f"{_PREFIX}{name}_token", str, ""))
            found = metadata.optional(f"tokenizer.ggml.{name}_token_id", int, None)
            found = named if named is not None else found
            return found if found is not None and 0 <= found < len(tokens) else None

        bos, eos = role("bos"), role("eos")
        eos = end_ids[0] if eos is None and end_ids else eos
        before, between, after = self._around()
        if bos is None and len(before) == 1:  # what encoders name after classification
            bos = before[0]
        first = bos is not None and before[:1] == [bos]
        adds_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool, first)
        pairs = len(between) > 1 and between[:1] == after
        return Vocabulary(
            tokens=tokens,
            types=bytes(types),
            id_of=ids,
            bos_id=bos,
            eos_id=eos,
            eot_id=None,
            eom_id=None,
            unknown_id=None,
            end_ids=find_end_ids(ids, end_ids if eos is None else [eos, *end_ids], {}),
            shown_ids=find_shown_ids(ids),
            adds_bos=adds_bos and bos is not None,
            adds_eos=len(after) == 1,
            sep_id=between[-1] if pairs else None,
            adds_sep=pairs,
            closing_id=after[0] if len(after) == 1 else None,
            strips_after=self._flagged("rstrip"),
            strips_before=self._flagged("lstrip"),
        )

    def _type(self, token_id: int, token: str) -> TokenType:
        """Token types. Added tokens that are not special are text: the library finds them
        itself."""
        added = self._added.get(token_id)
        if added is not None:
            return TokenType.CONTROL if added.special else TokenType.NORMAL
        is_byte = not self._is_byte_level and len(token) == 6 and token.startswith("<0x")
        return TokenType.BYTE if is_byte and _is_hex(token[3:-1]) else TokenType.NORMAL

    def _flagged(self, flag: str) -> frozenset[int]:
        return frozenset(
            token_id
            for token_id, token in self._added.items()
            if token.special and getattr(token, flag)
        )


def _engine(description: str) -> Engine:
    engine = Engine.from_str(description)
    engine.no_padding()
    engine.no_truncation()
    # markup that a file lists as text must not be forged by typing it
    added = {token.content: token for token in engine.get_added_tokens_decoder().values()}
    markup = find_markup(engine.get_vocab(with_added_tokens=True), ())
    engine.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in markup
            if name in added and not added[name].special
        ]
    )
    engine.encode_special_tokens = True
    return engine


def _parts(description: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The steps of a decoder, normalizer or pre_tokenizer, in order."""
    step = description.get(kind)
    if step is None:
        return []
    inner = {"decoder": "decoders", "normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
    return list(step[inner[kind]]) if step["type"] == "Sequence" else [step]


def _drops_first_prefixes(description: dict[str, Any]) -> bool:
    """Adapt the description to text that is not at the start, the meaning of "first"; whether that
    changed anything."""
    changed = False
    for step in _parts(description, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"], changed = "never", True
    return changed


def _drops_tokens_beyond(description: dict[str, Any], rows: int) -> bool:
    """Remove added tokens without a row of the embedding, which a model was not trained with and
    transformers takes; whether there were any."""
    added = description.get("added_tokens") or []
    kept = [token for token in added if token["id"] < rows]
    if len(kept) < len(added):
        description["added_tokens"] = kept
    return len(kept) < len(added)


def _is_byte_level(description: dict[str, Any]) -> bool:
    """Whether tokens use byte-level BPE's alphabet; UnsupportedError for a decoder that is neither
    that nor SentencePiece's.
    """
    kinds = [step["type"] for step in _parts(description, "decoder")]
    if kinds == ["ByteLevel"]:
        return True
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise UnsupportedError(f"tokenizer.json has the decoder {' + '.join(kinds) or 'none'}")


def _strips_a_space(description: dict[str, Any]) -> bool:
    return any(
        (step["type"] == "Strip" and step.get("start"))
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in _parts(description, "decoder")
    )


def _is_hex(text: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in text)
