"""Tokenisers that do not merge bytes: unigram, longest match, PLaMo-2, BPE over spaced text."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models

from urdir.model.errors import TokenizerError
from urdir.model.files.gguf import Gguf
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.vocabulary import TokenType

Maker = Callable[..., Path]
_, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = map(int, TokenType)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def build(make_gguf: Maker, tokens: list[str], types: list[int], **keys: Any) -> Tokenizer:
    metadata = {"tokens": tokens, "token_type": np.array(types, np.int32), **keys}
    return Tokenizer.of(
        Gguf(make_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))
    )


def ways(text: str, words: dict[str, Any]) -> Iterator[list[str]]:
    """Every way of cutting `text` into `words`."""
    if not text:
        yield []
    for end in range(1, len(text) + 1):
        if text[:end] in words:
            for rest in ways(text[end:], words):
                yield [text[:end], *rest]


# ---- unigram -------------------------------------------------------------------------------------


@pytest.fixture
def unigram(data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((data / "vocab" / "unigram.json").read_text())
    return content


def build_unigram(make_gguf: Maker, content: dict[str, Any], **keys: Any) -> Tokenizer:
    table = np.frombuffer(base64.b64decode(content["charsmap"]), np.uint8)
    return build(
        make_gguf,
        content["pieces"],
        content["types"],
        **{
            "model": "t5",
            "scores": np.array(content["scores"], np.float32),
            "add_space_prefix": content["add_dummy_prefix"],
            "remove_extra_whitespaces": content["remove_extra_whitespaces"],
            "precompiled_charsmap": table,
        }
        | keys,
    )


def test_unigram_as_sentencepiece(make_gguf: Maker, unigram: dict[str, Any]) -> None:
    tokenizer = build_unigram(make_gguf, unigram)
    for text, ids, decoded in unigram["cases"]:
        assert tokenizer.encode(text) == ids, text
        if 2 not in ids:  # <unk>, which is not printed here
            assert tokenizer.decode(ids) == decoded
    assert (tokenizer.adds_bos, tokenizer.adds_eos, tokenizer.end_ids) == (False, True, {1})
    assert tokenizer.encode("", add_eos=True) == [1]


def test_unigram_takes_the_likeliest_way(make_gguf: Maker) -> None:
    """Of all ways of cutting, that with the greatest sum of scores."""
    rnd = random.Random(4)
    pieces = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab", repeat=n)]
    scores = {piece: -rnd.uniform(1, 4) * len(piece) ** 0.7 for piece in pieces}
    tokens = ["<pad>", "</s>", "<unk>", *pieces]
    values = np.array([0, 0, 0, *scores.values()], np.float32)
    tokenizer = build(
        make_gguf, tokens, [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * len(pieces),
        model="t5", scores=values,
    )  # fmt: skip
    for _ in range(40):
        text = "".join(rnd.choices("ab", k=rnd.randint(1, 9)))
        best = max(ways(text, scores), key=lambda way: math.fsum(scores[p] for p in way))
        assert [tokens[i] for i in tokenizer.encode(text)] == best
    library = Library(
        models.Unigram([(t, float(s)) for t, s in zip(tokens, values, strict=True)], 2)
    )
    assert tokenizer.encode("abzzab") == library.encode("abzzab").ids


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros(3, np.uint8), "is not an array of bytes"),
        (np.zeros(9, np.int32), "is not an array of bytes"),
        (np.zeros(9, np.uint8), "0 bytes of nodes in 9 bytes"),
        (np.frombuffer(struct.pack("<II", 8, 0), np.uint8), "8 bytes of nodes in 8 bytes"),
        (np.frombuffer(struct.pack("<IIx", 3, 0), np.uint8), "3 bytes of nodes in 9 bytes"),
    ],
)
def test_broken_tables_are_refused(
    make_gguf: Maker, unigram: dict[str, Any], table: np.ndarray[Any, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=f"precompiled_charsmap.* {message}"):
        build_unigram(make_gguf, unigram, precompiled_charsmap=table)


def test_tables_that_lead_astray_are_refused(make_gguf: Maker, unigram: dict[str, Any]) -> None:
    """Every node of the table in turn points far away: the text is read, or the table refused."""
    stored = base64.b64decode(unigram["charsmap"])
    messages = []
    for node in range(int.from_bytes(stored[:4], "little") // 4):
        table = np.frombuffer(stored, np.uint8).copy()
        table[4 + 4 * node + 1 : 8 + 4 * node] |= 0x7D  # the offset, not the byte that leads here
        try:
            tokenizer = build_unigram(make_gguf, unigram, precompiled_charsmap=table)
            tokenizer.encode("ﬁle oﬃce ½ … e\u0301 \u200b Ａ\t")
        except TokenizerError as error:
            messages.append(str(error))
    assert messages
    assert all("precompiled_charsmap: no " in message for message in messages)


def test_a_unigram_model_needs_an_unknown_token(make_gguf: Maker) -> None:
    with pytest.raises(TokenizerError, match="unknown_token_id is missing"):
        build(make_gguf, ["a", "b"], [NORMAL] * 2, model="t5", scores=np.zeros(2, np.float32))


# ---- longest match -------------------------------------------------------------------------------


def test_longest_match(make_gguf: Maker) -> None:
    words = {
        "aa": b"aa",
        "aab": b"aab",
        "\\n\\n": b"\n\n",
        "\\xe4\\xb8": b"\xe4\xb8",
        "a\\tb": b"a\tb",
    }
    every_byte = {f"\\x{byte:02x}": bytes([byte]) for byte in range(256)}
    texts = ["<s>", *every_byte, *words]
    tokenizer = build(
        make_gguf, texts, [CONTROL] + [NORMAL] * (len(texts) - 1), model="rwkv", eos_token_id=0
    )
    known = [b"<s>", *every_byte.values(), *words.values()]
    assert [tokenizer.token_bytes(i) for i in range(len(known))] == known

    @settings(max_examples=150, deadline=None)
    @given(st.text("aab\n\té世丸\\ <s>"))
    def check(text: str) -> None:
        raw, expected = text.encode(), []
        while raw:
            longest = max((k for k in known[1:] if raw.startswith(k)), key=len)
            expected.append(known.index(longest))
            raw = raw[len(longest) :]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text

    check()
    assert tokenizer.encode("a<s>", parse_special=True) == [1 + ord("a"), 0]


def test_bytes_that_begin_no_token(make_gguf: Maker) -> None:
    tokens = ["<unk>", "ab", "b"]
    some = build(make_gguf, tokens, [UNKNOWN, NORMAL, NORMAL], model="rwkv", unknown_token_id=0)
    assert some.encode("abaéb") == [1, 0, 0, 0, 2]
    assert build(make_gguf, tokens[1:], [NORMAL] * 2, model="rwkv").encode("abaéb") == [0, 1]


# ---- PLaMo-2 -------------------------------------------------------------------------------------


def plamo(make_gguf: Maker, pieces: dict[str, float], **keys: Any) -> Tokenizer:
    tokens = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", *BYTES, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = np.array([0] * 259 + list(pieces.values()), np.float32)
    return build(make_gguf, tokens, types, **{"model": "plamo2", "scores": scores} | keys)


def test_plamo_takes_the_cheapest_way(make_gguf: Maker) -> None:
    """Of all ways of cutting the cheapest, and of equals that with the longest first piece."""
    rnd = random.Random(9)
    words = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab", repeat=n)]
    costs = {word: round(rnd.uniform(1, 4) * len(word) ** 0.7, 2) for word in words}
    tokenizer = plamo(make_gguf, {word: -cost for word, cost in costs.items()})

    def key(way: list[str]) -> tuple[int, list[int]]:
        return sum(round(costs[p] * 100) for p in way), [-len(p) for p in way]

    for _ in range(40):
        text = "".join(rnd.choices("ab", k=rnd.randint(1, 9)))
        best = min(ways(text, costs), key=key)
        assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == best
    assert tokenizer.end_ids == {2}


def test_plamo_spells_the_rest_in_bytes(make_gguf: Maker) -> None:
    tokenizer = plamo(make_gguf, {"a": -1.0, "世": -2.0, "never": -2500.0, "none": math.inf})
    for text in ("a世é😀\n", "never none", "<|plamo:eos|><0x41>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(i > 2 for i in ids)
    assert tokenizer.encode("é") == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("\ufeffa\ufeff") == tokenizer.encode("a\ufeff")  # a byte order mark
    renamed = ["A" if token == "<0x41>" else token for token in BYTES]
    scores = np.zeros(256, np.float32)
    with pytest.raises(TokenizerError, match="has no token <0x41>"):
        build(make_gguf, renamed, [NORMAL] * 256, model="plamo2", scores=scores)


def test_of_equal_ways_the_longest_first_piece(make_gguf: Maker) -> None:
    tokenizer = plamo(make_gguf, {"a": -1.0, "aa": -1.0})
    assert [tokenizer.token_text(i) for i in tokenizer.encode("aaa")] == ["aa", "a"]


# ---- BPE over spaced text ------------------------------------------------------------------------


def spaced(make_gguf: Maker, merges: list[str], more: list[str], **keys: Any) -> Tokenizer:
    letters = sorted({char for merge in merges for char in merge if char != " "} | {"▁"})
    made = [merge.replace(" ", "") for merge in merges]
    tokens = ["<unk>", "<bos>", "<eos>", *BYTES, *dict.fromkeys([*letters, *made, *more])]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    defaults = {"model": "gemma4", "merges": merges, "bos_token_id": 1, "eos_token_id": 2}
    return build(make_gguf, tokens, types, **defaults | keys)


def test_spaced_bpe(make_gguf: Maker) -> None:
    tokenizer = spaced(make_gguf, ["a b", "▁ ab", "> ▁", "▁ ▁", "\n \n"], ["\n\n\n"])

    def texts(text: str) -> list[str]:
        return [tokenizer.token_text(i) for i in tokenizer.encode(text)]

    assert texts("ab ab  ab") == ["ab", "▁ab", "▁", "▁ab"]
    assert texts("a>  b") == ["a", ">▁", "▁", "b"]  # a merge across the start of a word
    assert texts("a\n\n\nb") == ["a", "\n\n\n", "b"]  # a token, which no merge makes
    assert texts("\n\n\n\n") == ["\n\n", "\n\n"]
    assert texts("é") == ["<0xC3>", "<0xA9>"]
    assert tokenizer.end_ids == {2}
    assert tokenizer.adds_bos
    assert spaced(make_gguf, ["a b"], [], add_bos_token=False).adds_bos  # wrong in old files
    sarvam = spaced(make_gguf, ["a b"], ["\n\n"], model="gpt2", pre="sarvam-moe")
    assert not sarvam.adds_bos
    assert [sarvam.token_text(i) for i in sarvam.encode("ab\n\n")] == ["ab", "<0x0A>", "<0x0A>"]
    for text in ("ab ab  ab", " a\n\n\n b😀>  x ", "<eos><0x41>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_are_merged_alike_alone_and_in_a_line(make_gguf: Maker) -> None:
    """Text is cut before it is merged, where no token reaches across: the library does not cut."""
    merges = ["a b", "▁ ab", "▁ ▁", "▁▁ ▁▁", "b a", "> ▁", "a ▁ab", "ab a"]
    tokenizer = spaced(make_gguf, merges, [])
    vocab = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    library = Library(models.BPE(vocab, pairs, byte_fallback=True))

    @settings(max_examples=200, deadline=None)
    @given(st.text("ab >é", min_size=1))
    def check(text: str) -> None:
        assert tokenizer.encode(text) == library.encode(text.replace(" ", "▁")).ids

    check()
