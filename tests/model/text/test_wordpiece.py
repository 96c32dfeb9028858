"""WordPiece against its definition: words by blanks and marks, the longest tokens from the left."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pytest

from tests.model.tiny_encoder import BEGIN, END, UNKNOWN, WORDS, vocabulary, write_encoder
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata, StringArray
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.vocabulary import TokenType
from urdir.model.text.wordpiece import WordPiece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with Gguf(write_encoder(tmp_path_factory.mktemp("words") / "tiny.gguf")) as file:
        return Tokenizer.of(file)


def reference(text: str) -> list[int]:
    """The ids of a text in ASCII, or with accents, by the definition."""
    ids = {word: number for number, word in enumerate(WORDS, 4)}
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if unicodedata.category(c)[0] == "P" else c for c in plain)
    found: list[int] = []
    for word in spaced.split():
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in ids), None)
            if end is None:
                pieces = [UNKNOWN]
                break
            pieces.append(ids[prefix + word[start:end]])
            start = end
        found += pieces
    return found


def test_random_texts(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    parts = [*(word.removeprefix("##") for word in WORDS), " ", " ", "x", "Á", "WARP", "\t", "!"]
    for _ in range(300):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 12)))
        assert tokenizer.encode(text) == reference(text), text
        assert tokenizer.encode_each([text, "a", text]) == [
            [BEGIN, *reference(of), END] for of in (text, "a", text)
        ]


def test_user_defined_tokens_are_cut_out_of_texts_together() -> None:
    tokens = [*vocabulary(), "<mark>"]
    types = [TokenType.CONTROL] * 4 + [TokenType.NORMAL] * len(WORDS) + [TokenType.USER_DEFINED]
    values = {"bos_token_id": BEGIN, "unknown_token_id": UNKNOWN, "seperator_token_id": END}
    lists = {"tokens": StringArray.of(tokens), "token_type": np.array(types, np.int32)}
    keys = {f"tokenizer.ggml.{name}": value for name, value in (values | lists).items()}
    tokenizer = Tokenizer(WordPiece(Metadata(keys)))
    texts = ["the warp", "the<mark> warp", "a weft", ""]
    mark = len(tokens) - 1
    assert tokenizer.encode_each(texts)[1] == [
        BEGIN,
        *reference("the"),
        mark,
        *reference("warp"),
        END,
    ]
    assert tokenizer.encode_each(texts) == [tokenizer.encode_whole(text) for text in texts]


def test_whole_texts_have_their_ends(tokenizer: Tokenizer) -> None:
    words = reference("the warp")
    assert tokenizer.encode_whole("the warp") == [BEGIN, *words, END]
    assert [*tokenizer.encode_pair("the warp", "a")] == [BEGIN, *words, END, *reference("a"), END]


def test_texts_are_read_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("the Cottons crosses")) == "the cottons crosses"
    assert len(vocabulary()) == tokenizer.vocab_size
