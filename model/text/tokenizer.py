"""Tokeniser: text to tokens and back, by a GGUF file's own vocabulary.

The kinds are in `tokenizer_models`: byte-level BPE, SentencePiece's BPE and others.

Special tokens ("<|im_end|>") are cut out of the text first, except in what a user wrote (`opaque`
spans), so that no message can forge a turn.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from urdir.model.errors import TokenizerError, UnsupportedError
from urdir.model.files.model_file import ModelFile
from urdir.model.foreign import foreign
from urdir.model.text.pair import Pair
from urdir.model.text.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from urdir.model.files.metadata import Metadata
    from urdir.model.text.tokenizer_models import Checked, TokenModel

Span = tuple[int, int]
"""[start, end) in characters."""


class Tokenizer:
    """Encodes and decodes; immutable once built (`Tokenizer.of`)."""

    def __init__(self, model: TokenModel, name: str = "") -> None:
        """`name` is general.name, which identifies Phi-3: its markup absorbs following spaces."""
        vocabulary = model.vocabulary
        self._model = model
        # only tokenizer.json distinguishes the start of a text from text after a special token
        self._encode_inside = getattr(model, "encode_inside", model.encode)
        self._encode_each = getattr(model, "encode_each", None)
        self._types = vocabulary.types
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eot_id = vocabulary.eot_id
        self.eom_id = vocabulary.eom_id
        self.end_ids = vocabulary.end_ids
        self.adds_bos = vocabulary.adds_bos
        self.adds_eos = vocabulary.adds_eos
        self._closing = vocabulary.closing_id if vocabulary.closing_id is not None else self.eos_id
        self._separator = [vocabulary.sep_id] if vocabulary.adds_sep else []
        self._shown = vocabulary.shown_ids
        self._specials = _longest_first(vocabulary)
        self._words = [s for s in self._specials if self._types[s[1]] == TokenType.USER_DEFINED]
        self._controls = {
            text: i for text, i in self._specials if self._types[i] != TokenType.USER_DEFINED
        }
        self._strips = re.search("phi-?3", name.lower()) is not None

    @classmethod
    def of(cls, gguf: ModelFile) -> Tokenizer:
        """Build the tokeniser that `gguf` describes.

        Raises TokenizerError (no vocabulary, or a malformed one), ConfigError (a missing or
        mistyped key) or UnsupportedError (an unknown tokeniser or pre-tokeniser).
        """
        return cls.checked(gguf)()

    @classmethod
    def checked(cls, gguf: ModelFile) -> Callable[[], Tokenizer]:
        """Check the vocabulary of a file at once; returns a function that builds the tokeniser.
        Raises as `of`."""
        check = _checked_kind(gguf)
        name = gguf.metadata.optional("general.name", str, "")
        with _about(gguf), foreign(_UNUSABLE, TokenizerError):
            checked = check(gguf.metadata)
            embedding = gguf.tensors.get(_EMBEDDING)
            if embedding is not None and embedding.shape[0] < checked.n_tokens:
                raise TokenizerError(
                    f"the vocabulary has {checked.n_tokens} tokens, "
                    f"more than the {embedding.shape[0]} rows of {_EMBEDDING}"
                )

        def build() -> Tokenizer:
            with _about(gguf), foreign(_UNUSABLE, TokenizerError):
                return cls(checked.build(), name)

        return build

    @staticmethod
    def is_there(gguf: ModelFile) -> bool:
        """Whether the file has a vocabulary of a known kind."""
        try:
            _checked_kind(gguf)
        except (TokenizerError, UnsupportedError):
            return False
        return True

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool = False,
        add_eos: bool = False,
        opaque: Sequence[Span] = (),
    ) -> list[int]:
        """Token ids of `text`.

        `parse_special` maps the texts of control tokens to these tokens, except within the `opaque`
        spans (sorted, not overlapping). `add_bos` prepends BOS if the model wants one and `text`
        does not begin with it; `add_eos` appends EOS likewise. Raises TokenizerError for text that
        is not valid Unicode, or that a library fails on.
        """
        _check_unicode(text)
        fragments: list[Span | int] = [(0, len(text))] if text else []
        for special, token_id in self._specials if parse_special else self._words:
            if special in text:
                hidden = () if self._types[token_id] == TokenType.USER_DEFINED else opaque
                strip = self._strips and special not in _NEVER_STRIP
                fragments = _cut(text, fragments, special, token_id, hidden, strip)
        ids: list[int] = []
        after_special = True  # SentencePiece: also true at the start
        for index, fragment in enumerate(fragments):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                piece = self._strip(text[slice(*fragment)], fragments, index)
                encode = self._encode_inside if index else self._model.encode
                with foreign(_UNCUT, TokenizerError):
                    ids += encode(piece, after_special)
            after_special = isinstance(fragment, int)
        return self._enclosed(ids, add_bos, add_eos)

    @property
    def ends_texts_with(self) -> int | None:
        """The token that the model wants after a whole text; None for none."""
        return self._closing if self.adds_eos else None

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a whole text with what the model wants before and after it."""
        return self.encode(text, add_bos=True, add_eos=True)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_whole` of each text. The `tokenizers` library, where it cuts the texts of this
        vocabulary, takes them side by side on all cores. Raises as `encode`."""
        alone = [
            self._encode_each is None or not text or any(word in text for word, _ in self._words)
            for text in texts
        ]
        plain = [text for text, is_alone in zip(texts, alone, strict=True) if not is_alone]
        if len(plain) < 2:
            return [self.encode_whole(text) for text in texts]
        for text in plain:
            _check_unicode(text)
        assert self._encode_each is not None
        with foreign(_UNCUT, TokenizerError):
            made: Iterator[list[int]] = iter(self._encode_each(plain))
        return [
            self.encode_whole(text) if is_alone else self._enclosed(next(made), True, True)
            for text, is_alone in zip(texts, alone, strict=True)
        ]

    def encode_pair(self, first: str, second: str) -> Pair:
        """Token ids of two texts that a model compares, with what it wants around them."""
        between = [of for of in self._separator if of is not None]
        start = self.encode(first, add_bos=True, add_eos=True)
        head = [*start, *between]
        return Pair([*head, *self.encode(second, add_eos=True)], len(head))

    def _enclosed(self, ids: list[int], add_bos: bool, add_eos: bool) -> list[int]:
        """``ids`` with what is wanted at both ends and is not there."""
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        closing = self._closing
        if add_eos and self.adds_eos and closing is not None and ids[-1:] != [closing]:
            ids.append(closing)
        return ids

    def _strip(self, piece: str, fragments: Sequence[Span | int], index: int) -> str:
        """``piece``, fragment ``index``, without white space that its neighbours absorb."""
        vocabulary = self._model.vocabulary
        if index and fragments[index - 1] in vocabulary.strips_after:
            piece = piece.lstrip()
        if index + 1 < len(fragments) and fragments[index + 1] in vocabulary.strips_before:
            piece = piece.rstrip()
        return piece

    def decode(self, ids: Iterable[int], *, keep_control: bool = False) -> str:
        """The text of `ids`, the inverse of `encode`; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self._pieces(ids, keep_control)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, often only part of a character.

        Raises TokenizerError for an id outside the vocabulary.
        """
        self._check_id(token_id)
        return self._model.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as the file spells it ("Ġthe", "▁the", "<0x0A>")."""
        self._check_id(token_id)
        return self._model.vocabulary.tokens[token_id]

    def control_tokens(self) -> Mapping[str, int]:
        """Control tokens by the texts that `parse_special` maps to them."""
        return self._controls

    def special_texts(self) -> frozenset[str]:
        """Texts of tokens that are cut out before words are split: control tokens, and user-defined
        ones."""
        return frozenset(text for text, _ in self._specials)

    def control_id(self, text: str) -> int | None:
        """The control token that `text` spells, or None for ordinary text."""
        return self._controls.get(text)

    def is_markup(self, token_id: int) -> bool:
        """Whether no text encodes to this token: control and unknown tokens, printed or not."""
        return self._types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def is_control(self, token_id: int) -> bool:
        """Whether a token is never printed: control tokens, the unknown token, padding rows.

        Padding rows are rows of the embedding beyond the vocabulary. Control tokens that separate
        the messages of one answer (gpt-oss) are printed.
        """
        if token_id >= self.vocab_size:
            return True
        return self.is_markup(token_id) and token_id not in self._shown

    def _pieces(self, ids: Iterable[int], keep_control: bool) -> Iterator[bytes]:
        after_special = True
        for token_id in ids:
            piece = self.token_bytes(token_id)
            if after_special and self._model.adds_space:
                piece = piece.removeprefix(b" ")
            if keep_control or not self.is_control(token_id):
                yield piece
            # an unknown character is part of the text
            after_special = self._types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )


_UNUSABLE = "the vocabulary cannot be used"
_UNCUT = "the text cannot be cut into tokens"
_EMBEDDING = "token_embd.weight"
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_ASCII_SPACES = " \t\n\v\f\r"
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")


def _longest_first(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    """(text, id) of the special tokens, in search order."""
    pairs = [(vocabulary.tokens[i], i) for i in vocabulary.ids(*_SPECIAL_TYPES)]
    return sorted((p for p in pairs if p[0]), key=lambda pair: -len(pair[0].encode()))


def _cut(
    text: str,
    fragments: list[Span | int],
    special: str,
    token_id: int,
    opaque: Sequence[Span],
    strip: bool,
) -> list[Span | int]:
    """Replace `special` within the spans by its id; `strip` also removes the spaces after it."""
    result: list[Span | int] = []
    for fragment in fragments:
        if isinstance(fragment, int):
            result.append(fragment)
            continue
        start, end = fragment
        for found in _occurrences(text, special, start, end, opaque):
            if start < found:
                result.append((start, found))
            result.append(token_id)
            start = found + len(special)
            while strip and start < end and text[start] in _ASCII_SPACES:
                start += 1
        if start < end:
            result.append((start, end))
    return result


def _occurrences(
    text: str, special: str, start: int, end: int, opaque: Sequence[Span]
) -> Iterator[int]:
    """Positions of `special` in text[start:end] outside the opaque spans, from the left."""
    while (found := text.find(special, start, end)) >= 0:
        after = found + len(special)
        last = bisect_left(opaque, (after, 0)) - 1  # the last span that begins before `after`
        if last >= 0 and opaque[last][1] > found:
            start = found + 1
        else:
            yield found
            start = after


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}"
        ) from None


def _checked_kind(gguf: ModelFile) -> Callable[[Metadata], Checked]:
    """The check for a file's vocabulary, which must exist and be of a known kind."""
    from urdir.model.text.pretokenizers import pre_tokenizer
    from urdir.model.text.tokenizer_models import TOKEN_MODELS

    metadata = gguf.metadata
    with _about(gguf):
        kind = metadata.optional("tokenizer.ggml.model", str, "no_vocab")
        if kind in ("no_vocab", "none"):
            missing = "the file has no vocabulary (tokenizer.ggml.model)"
            if gguf.path.is_dir():
                missing = "the folder has no tokeniser (tokenizer.json, or tokenizer.model)"
            raise TokenizerError(
                f"{missing}, so text cannot be tokenised; 'show', 'logits' and 'bench' need none"
            )
        if kind not in TOKEN_MODELS:
            raise UnsupportedError(
                f"tokeniser {kind!r} (tokenizer.ggml.model) is not supported "
                f"(supported: {', '.join(TOKEN_MODELS)})"
            )
        if kind == "gpt2":
            pre_tokenizer(metadata.optional("tokenizer.ggml.pre", str, "default"))
    return TOKEN_MODELS[kind]


@contextmanager
def _about(gguf: ModelFile) -> Iterator[None]:
    """Prefix errors about the vocabulary with the file's name."""
    try:
        yield
    except (TokenizerError, UnsupportedError) as error:
        raise type(error)(f"{gguf.path}: {error}") from None
