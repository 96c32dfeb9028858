"""Merging, against the BPE of the `tokenizers` library and against a definition spelled out."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from urdir.model.text import merging
from urdir.model.text.merging import Merger


def random_merges(rnd: random.Random, count: int) -> list[tuple[str, str]]:
    """Merges of which each joins what is there by then."""
    known = list("abcde")
    merges: dict[str, tuple[str, str]] = {}
    while len(merges) < count:
        left, right = rnd.choice(known), rnd.choice(known)
        if left + right not in merges and len(left + right) < 12:
            merges[left + right] = (left, right)
            known.append(left + right)
    return list(merges.values())


def test_merges_by_rank_as_the_library_does() -> None:
    rnd = random.Random(11)
    for count in (1, 3, 17, 90):
        merges = random_merges(rnd, count)
        tokens = [*"abcde", *(left + right for left, right in merges)]
        library = Library(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        merger = Merger({f"{le} {ri}": rank for rank, (le, ri) in enumerate(merges)}, " ")
        for _ in range(150):
            word = "".join(rnd.choices("abcde", k=rnd.randint(1, 70)))
            expected = library.encode(word).tokens
            assert merger(word) == expected
            assert merger(word) == expected  # remembered, up to 64 characters


def test_the_leftmost_of_equals_is_joined_first() -> None:
    merger = Merger({"aa": -1.0, "aaa": -1.0}, "")
    assert merger("a" * 5) == ["aaa", "aa"]  # aa a a a: the join left of the others goes on
    assert Merger({"aa": -1.0}, "")("a" * 5) == ["aa", "aa", "a"]
    assert Merger({"ab": -1.0, "bc": -1.0}, "")("abc") == ["ab", "c"]
    assert Merger({"ab": -2.0, "bc": -1.0}, "")("abc") == ["ab", "c"]
    assert Merger({"ab": -1.0, "bc": -2.0}, "")("abc") == ["a", "bc"]


def test_words_without_a_merge() -> None:
    assert Merger({}, " ")("héé") == ["h", "é", "é"]
    assert Merger({"a b": 0}, " ")("") == []
    assert Merger({"a b": 0}, " ")("a") == ["a"]


def test_words_that_never_come_again_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of characters that stay alone: a word of 64 takes 6 kB."""
    monkeypatch.setattr(merging, "_CACHED", 1 << 13)
    merger, rnd = Merger({}, " "), random.Random(3)
    tracemalloc.start()
    try:
        for _ in range(1_500):
            word = "".join(chr(rnd.randrange(0x4E00, 0x9FFF)) for _ in range(64))
            assert merger(word) == [*word]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_500_000
