"""BPE tokenisers: byte-level BPE, BPE over spaced text, SentencePiece's BPE."""

from __future__ import annotations

import re

from tokenizers import pre_tokenizers

from urdir.model.errors import TokenizerError
from urdir.model.files.limits import MERGE_NBYTES
from urdir.model.files.metadata import Metadata, StringArray
from urdir.model.text.merging import Merger
from urdir.model.text.pretokenizers import PreTokenizer
from urdir.model.text.spelling import (
    BYTE_ALPHABET,
    ESCAPED_SPACE,
    Speller,
    read_scores,
    spaced_bytes,
)
from urdir.model.text.vocabulary import Defaults, TokenType, Vocabulary, read_vocabulary


class ByteLevelBpe:
    """GPT-2's byte-level BPE, each byte written as a printable character (model "gpt2").

    A piece that is not a token is spelled in characters; characters that are not tokens are
    dropped.
    """

    adds_space = False

    def __init__(self, metadata: Metadata, pre: PreTokenizer) -> None:
        merges = _Merges(stored_merges(metadata).decoded())
        defaults = Defaults(adds_bos=pre.adds_bos)
        self.vocabulary = read_vocabulary(metadata, defaults, merges.makes)
        self._words = self.vocabulary.words()
        self._whole_words = pre.whole_words
        self._merge = Merger(merges.ranks, between=" ")
        self._split = pre_tokenizers.Sequence(
            [pre.splitter(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        words, ids = self._words, []
        for word, _ in self._split.pre_tokenize_str(text):
            if self._whole_words and word in words:
                ids.append(words[word])
                continue
            for piece in self._merge(word):
                if piece in words:
                    ids.append(words[piece])
                else:
                    ids += [words[char] for char in piece if char in words]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; special tokens are spelled literally."""
        token = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            return token.encode()
        return b"".join(BYTE_ALPHABET.get(char) or char.encode() for char in token)


class SpacedBpe:
    """BPE over text whose spaces are written as U+2581 (model "gemma4", and some "gpt2").

    Characters without a token become bytes.
    """

    adds_space = False

    def __init__(self, metadata: Metadata, pre: PreTokenizer) -> None:
        merges = _Merges(stored_merges(metadata).decoded())
        defaults = Defaults(adds_bos=pre.adds_bos, always_adds_bos=pre.always_adds_bos)
        self.vocabulary = read_vocabulary(metadata, defaults, merges.makes)
        self._spell = Speller(self.vocabulary)
        self._whole_newlines = pre.whole_newlines
        self._merge = Merger(merges.ranks, between=" ")
        self._split = pre.splitter()
        self._cut = _cut_between_words(self.vocabulary)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        ids: list[int] = []
        for line, _ in self._split.pre_tokenize_str(text.replace(" ", ESCAPED_SPACE)):
            if self._whole_newlines and line[0] == "\n" and line in self._spell.words:
                ids.append(self._spell.words[line])
                continue
            for word in self._cut.split(line):
                ids += self._spell(self._merge(word))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; special tokens are spelled literally."""
        return spaced_bytes(self.vocabulary, token_id)


class SentencePieceBpe:
    """SentencePiece's BPE (model "llama"): repeatedly merge the pair with the best score.

    A pair merges if the result is a piece; ties go to the leftmost. Control and byte tokens are
    never the result of a merge. Characters without a piece become bytes.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(
            metadata, Defaults(bos=1, eos=2, unknown=0, adds_bos=True)
        )
        self.adds_space = adds_space_prefix(metadata)
        scores = read_scores(metadata, len(self.vocabulary.tokens)).tolist()
        self._spell = Speller(self.vocabulary)
        ranks = {piece: -scores[i] for piece, i in self._spell.words.items()}
        for token_id in self.vocabulary.ids(TokenType.BYTE):
            ranks.pop(self.vocabulary.tokens[token_id], None)
        self._merge = Merger(ranks, between="")
        self._cut = _cut_between_words(self.vocabulary)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        if self.adds_space and after_special:
            text = " " + text
        ids: list[int] = []
        for word in self._cut.split(text.replace(" ", ESCAPED_SPACE)):
            ids += self._spell(self._merge(word))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; special tokens are spelled literally."""
        return spaced_bytes(self.vocabulary, token_id)


def adds_space_prefix(metadata: Metadata) -> bool:
    """Whether the tokeniser prepends a space to a text; ConfigError if the value is not a
    boolean."""
    return metadata.optional("tokenizer.ggml.add_space_prefix", bool, True)


class _Merges:
    """Merge ranks from tokenizer.ggml.merges: "left right", the first has priority."""

    def __init__(self, lines: list[str]) -> None:
        self.ranks = dict(zip(reversed(lines), range(len(lines) - 1, -1, -1), strict=True))

    def makes(self, token: str) -> bool:
        """Whether a merge results in `token`."""
        return any(f"{token[:cut]} {token[cut:]}" in self.ranks for cut in range(1, len(token)))


def stored_merges(metadata: Metadata) -> StringArray:
    """tokenizer.ggml.merges as stored; ConfigError if missing, TokenizerError for an entry that is
    not a pair, or too long."""
    stored = metadata.require("tokenizer.ggml.merges", StringArray)
    MERGE_NBYTES.check(stored.longest, "tokenizer.ggml.merges", TokenizerError)
    if (place := stored.first_without(" ")) is not None:
        raise TokenizerError(f"tokenizer.ggml.merges: {stored[place]!r} is not a pair of tokens")
    return stored


def _cut_between_words(vocabulary: Vocabulary) -> re.Pattern[str]:
    """Where text can be cut before merging, because no token reaches across.

    That is before each U+2581, unless some token has the preceding character before a U+2581.
    Short words merge faster and are cached.
    """
    between = "\ud800"  # in no text
    joined = re.findall(f"[^{between}]{ESCAPED_SPACE}", between.join(vocabulary.tokens))
    inside = "".join(map(re.escape, sorted({ESCAPED_SPACE} | {pair[0] for pair in joined})))
    return re.compile(f"(?<=[^{inside}])(?={ESCAPED_SPACE})")
