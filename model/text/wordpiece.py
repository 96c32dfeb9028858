"""WordPiece (tokenizer.ggml.model "bert"; Wu et al. 2016, arXiv 1609.08144): words, and in each the
longest tokens from the left.

A GGUF file writes tokens at the start of a word with U+2581 before them, and others as they are.
The `tokenizers` library, which splits words as BERT does, has "##" before the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer as Engine
from tokenizers.models import WordPiece as Model
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata
from urdir.model.text.spelling import ESCAPED_SPACE
from urdir.model.text.vocabulary import Defaults, TokenType, read_vocabulary

#: Ids of BERT's own vocabulary.
_DEFAULTS = Defaults(bos=101, unknown=100, sep=102, adds_bos=True)
_NORMALIZER = "tokenizer.ggml.normalizer."


class WordPiece:
    """Tokens of words; a word that has none becomes the unknown token. A text ends with the
    separator, which counts as its EOS."""

    adds_space = True

    def __init__(self, metadata: Metadata) -> None:
        vocabulary = read_vocabulary(metadata, _DEFAULTS)
        unknown, sep = vocabulary.unknown_id, vocabulary.sep_id
        if unknown is None:
            raise TokenizerError("tokenizer.ggml.unknown_token_id is missing")
        self.vocabulary = replace(
            vocabulary, eos_id=sep, adds_eos=sep is not None, sep_id=None, adds_sep=False
        )
        words = {_spelled(token): i for token, i in vocabulary.words().items()}
        words[vocabulary.tokens[unknown]] = unknown
        model = Model(words, unk_token=vocabulary.tokens[unknown], max_input_chars_per_word=100)
        self._engine = Engine(model)
        lowercase = metadata.optional(_NORMALIZER + "lowercase", bool, True)
        strips = metadata.optional(_NORMALIZER + "strip_accents", bool, lowercase)
        self._engine.normalizer = BertNormalizer(lowercase=lowercase, strip_accents=strips)
        self._engine.pre_tokenizer = BertPreTokenizer()

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of texts, side by side."""
        return [
            made.ids for made in self._engine.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; special tokens are spelled literally."""
        token = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN):
            return token.encode()
        return token.replace(ESCAPED_SPACE, " ", 1).encode()


def _spelled(token: str) -> str:
    """A token as the library spells it."""
    return token[1:] if token.startswith(ESCAPED_SPACE) else f"##{token}"
