"""Tokenisers: the published cases exactly, round trips, special tokens, broken vocabularies."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from urdir.model.errors import ConfigError, ModelError, TokenizerError, UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.text.pretokenizers import PRE_TOKENIZERS
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.vocabulary import TokenType

Maker = Callable[..., Path]
VOCABULARIES = ["llama-bpe", "llama-spm", "qwen2"]
OTHER_VOCABULARIES = ["gemma-4", "mpt", "qwen35", "refact"]
_, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = map(int, TokenType)


@pytest.fixture(scope="module")
def tokenizers(vocab_file: Callable[[str], Path], demo_file: Path) -> dict[str, Tokenizer]:
    files = {name: vocab_file(name) for name in VOCABULARIES} | {"demo": demo_file}
    return {name: Tokenizer.of(Gguf(path)) for name, path in files.items()}


def published_cases(data: Path, name: str) -> list[tuple[str, list[int]]]:
    stem = data / "vocab" / f"ggml-vocab-{name}.gguf"
    # newline="" keeps the "\r" that a case holds
    with open(f"{stem}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")[: len(texts)]
    return [
        (text, [int(token) for token in line.split()])
        for text, line in zip(texts, lines, strict=True)
    ]


# ---- real vocabularies ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("parse_special", [False, True])
def test_published_cases(
    tokenizers: dict[str, Tokenizer], data: Path, name: str, parse_special: bool
) -> None:
    cases = published_cases(data, name)
    assert len(cases) == 47
    for text, expected in cases:
        assert tokenizers[name].encode(text, parse_special=parse_special) == expected, text
        assert tokenizers[name].decode(expected) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_VOCABULARIES)
def test_published_cases_of_other_vocabularies(
    vocab_file: Callable[[str], Path], data: Path, name: str
) -> None:
    tokenizer = Tokenizer.of(Gguf(vocab_file(name)))
    cases = published_cases(data, name)
    assert len(cases) == {"gemma-4": 46, "qwen35": 51}.get(name, 47)
    for text, expected in cases:
        for parse_special in (False, True):
            assert tokenizer.encode(text, parse_special=parse_special) == expected, text
        assert tokenizer.decode(expected) == text
    # what llama.cpp says of the file
    ends = {
        "gemma-4": {1, 50, 106},  # <eos>, <|tool_response>, <turn|>, and not </s>
        "mpt": {0},
        "qwen35": {128247, 151643, 151645},
        "refact": {0, 4, 18},
    }
    assert tokenizer.end_ids == ends[name]
    assert tokenizer.adds_bos == (name == "gemma-4")


@pytest.mark.parametrize("name", [*VOCABULARIES, "demo"])
def test_random_text_comes_back(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    # U+2581 is how SentencePiece writes a space
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="▁")

    @settings(max_examples=150, deadline=None)
    @given(st.text(characters))
    @example("\0")
    @example("  leading and trailing  ")
    @example("<s><|im_end|><unk><0x0A>")
    @example("🏳️‍🌈 é é ﷺ\r\n\t")
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not any(tokenizer.is_control(token) for token in ids)

    check()


def test_ids_with_a_role(tokenizers: dict[str, Tokenizer]) -> None:
    llama3, spm, qwen2, demo = (tokenizers[n] for n in (*VOCABULARIES, "demo"))
    assert (llama3.bos_id, llama3.eos_id, llama3.adds_bos) == (128000, 128001, True)
    assert llama3.end_ids == {128001, 128009}  # <|end_of_text|> is eos, <|eot_id|> by name
    assert (spm.bos_id, spm.eos_id, spm.adds_bos, spm.end_ids) == (1, 2, True, {2})
    # 128247 is </s>, which ends an answer by its name
    assert (qwen2.adds_bos, qwen2.end_ids) == (False, {128247, 151643, 151645})
    assert (demo.adds_bos, demo.end_ids, demo.vocab_size) == (False, {0, 2}, 2048)


def test_special_tokens_only_where_markup_is_parsed(tokenizers: dict[str, Tokenizer]) -> None:
    demo = tokenizers["demo"]
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed = demo.encode(text, parse_special=True)
    assert parsed == [1, *demo.encode("user\nhi"), 2]
    assert demo.decode(parsed) == "user\nhi"
    assert demo.decode(parsed, keep_control=True) == text
    plain = demo.encode(text)
    assert not {1, 2} & set(plain)
    assert demo.decode(plain) == text


def test_opaque_spans_hide_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    demo = tokenizers["demo"]
    text = "a<|im_end|>b<|im_end|>c<|im_end|>"
    expected = [*demo.encode("a"), 2, *demo.encode("b<|im_end|>c"), 2]  # the second is text
    for opaque in [(11, 14)], [(14, 15)], [(12, 22)], [(0, 1), (13, 14), (22, 23)]:
        assert demo.encode(text, parse_special=True, opaque=opaque) == expected
    assert demo.encode(text, parse_special=True, opaque=[(0, len(text))]) == demo.encode(text)


def test_bos_is_added_once(tokenizers: dict[str, Tokenizer]) -> None:
    spm, demo = tokenizers["llama-spm"], tokenizers["demo"]
    assert spm.encode("Hello", add_bos=True) == [1, 15043]
    assert spm.encode("<s>Hello", add_bos=True, parse_special=True) == [1, 15043]
    assert spm.encode("", add_bos=True) == [1]
    assert demo.encode("Hello", add_bos=True) == demo.encode("Hello")  # add_bos_token is false


def test_sentencepiece_starts_anew_after_a_special_token(tokenizers: dict[str, Tokenizer]) -> None:
    spm = tokenizers["llama-spm"]
    assert spm.encode("Hello</s>Hello", parse_special=True) == [15043, 2, 15043]
    assert spm.decode([15043, 2, 15043]) == "HelloHello"


def test_the_golden_chat_of_the_demo_model(tokenizers: dict[str, Tokenizer], data: Path) -> None:
    golden = np.load(data / "demo" / "demo-q4_k_m.npz")["tokens"].tolist()
    text = tokenizers["demo"].decode(golden, keep_control=True)
    assert tokenizers["demo"].encode(text, parse_special=True) == golden


def test_token_bytes_join_to_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    text = "Grüße, 世界 🦙"
    for tokenizer in tokenizers.values():
        raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert raw.decode().lstrip(" ") == text


def test_ids_outside_the_vocabulary(tokenizers: dict[str, Tokenizer]) -> None:
    demo = tokenizers["demo"]
    for token in (-1, 2048):
        with pytest.raises(TokenizerError, match=f"token id {token} is outside .* 2048 tokens"):
            demo.token_bytes(token)
    assert demo.is_control(2048)  # a padding row of the embedding


def test_lone_surrogates_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
            tokenizer.encode("ab\ud800")


@pytest.mark.slow
def test_a_large_vocabulary_builds_within_a_second_or_so(
    vocab_file: Callable[[str], Path],
) -> None:
    path = vocab_file("gemma-4")  # 262,144 tokens, 514,906 merges
    started = time.process_time()
    Tokenizer.of(Gguf(path))
    assert time.process_time() - started < 5.0  # 0.5 s on an idle core


def sentencepiece_reference(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its definition goes: repeat the best merge, leftmost among equals."""
    symbols = list("▁" + text.replace(" ", "▁"))
    following: list[int | None] = [*range(1, len(symbols)), None]
    before: list[int | None] = [None, *range(len(symbols) - 1)]
    queue: list[tuple[float, int, str]] = []

    def offer(left: int | None) -> None:
        if left is not None and (right := following[left]) is not None:
            joined = symbols[left] + symbols[right]
            if joined in scores:
                heapq.heappush(queue, (-scores[joined], left, joined))

    for place in range(len(symbols)):
        offer(place)
    while queue:
        _, left, joined = heapq.heappop(queue)
        right = following[left]
        if not symbols[left] or right is None or symbols[left] + symbols[right] != joined:
            continue  # one of the two has been merged meanwhile
        symbols[left], symbols[right] = joined, ""
        following[left] = after = following[right]
        if after is not None:
            before[after] = left
        offer(left)
        offer(before[left])
    return [symbol for symbol in symbols if symbol]


def test_sentencepiece_merges_by_score(
    tokenizers: dict[str, Tokenizer], vocab_file: Callable[[str], Path]
) -> None:
    tokenizer = tokenizers["llama-spm"]
    metadata = Gguf(vocab_file("llama-spm")).metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    values = metadata["tokenizer.ggml.scores"].tolist()  # type: ignore[union-attr]
    scores = dict(zip(tokens[259:], values[259:], strict=True))
    words = [piece.replace("▁", " ") for piece in scores if piece.isprintable()]
    pieces = st.one_of(st.sampled_from(words), st.text("abcdefgh .,'\n0123456789", max_size=4))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(pieces, min_size=1, max_size=20).map("".join).filter(bool))
    @example("aaaaaaaaaaaaaaaa bbbbbbb                 cc")
    def check(text: str) -> None:
        symbols = sentencepiece_reference(text, scores)
        expected = [
            token
            for symbol in symbols
            for token in (
                [tokens.index(symbol)] if symbol in scores
                else [3 + byte for byte in symbol.encode()]
            )
        ]  # fmt: skip
        assert tokenizer.encode(text) == expected

    check()


# ---- small vocabularies made for a case ----------------------------------------------------------


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, "he", "ll", "hell", markup."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*map(chr, printable), *others, "he", "ll", "hell", "<|im_end|>", "<tool>", "<a>"]
    types = [NORMAL] * 259 + [NORMAL, USER_DEFINED, CONTROL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary with a byte token for every byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["▁", "a", "b", "s", ">", "<", "▁a", "ab", "s>", "<s"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 10
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def build(make_gguf: Maker, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.of(Gguf(make_gguf(metadata)))


def texts(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


def test_byte_level_merges(make_gguf: Maker) -> None:
    tokenizer = build(make_gguf, byte_level())
    assert texts(tokenizer, "hello") == ["hell", "o"]
    assert texts(tokenizer, "hel\n") == ["he", "l", "Ċ"]
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos


def test_user_defined_tokens_are_always_found_control_tokens_are_not(make_gguf: Maker) -> None:
    tokenizer = build(make_gguf, byte_level())
    assert texts(tokenizer, "he<tool>he<a>") == ["he", "<tool>", "he", "<", "a", ">"]
    assert texts(tokenizer, "he<tool>he<a>", parse_special=True)[-1] == "<a>"
    assert tokenizer.decode(tokenizer.encode("<tool>")) == "<tool>"
    # typed as ordinary text by its file, but known to end a turn
    end = tokenizer.encode("<|im_end|>", parse_special=True)
    assert len(end) == 1
    assert tokenizer.is_control(end[0])
    assert tokenizer.end_ids == set(end)
    assert len(tokenizer.encode("<|im_end|>")) == 10


def test_longer_special_tokens_are_found_first_whatever_their_type(make_gguf: Maker) -> None:
    base = byte_level()["tokenizer.ggml.tokens"][:256]
    tokens = [*base, "<a>", "<a><b>", "<b><c>", "<b><c><d>"]
    types = np.array([NORMAL] * 256 + [CONTROL, USER_DEFINED, CONTROL, USER_DEFINED], np.int32)
    tokenizer = build(make_gguf, byte_level(tokens=tokens, token_type=types, merges=["h e"]))
    markup = {"parse_special": True}
    assert texts(tokenizer, "<a><b><c>", **markup) == ["<a><b>", "<", "c", ">"]
    assert texts(tokenizer, "<a><b><c><d>", **markup) == ["<a>", "<b><c><d>"]
    assert texts(tokenizer, "x<b><c><a>", **markup) == ["x", "<b><c>", "<a>"]
    assert texts(tokenizer, "<b><c><d><a>") == ["<b><c><d>", "<", "a", ">"]
    assert list(tokenizer.control_tokens()) == ["<b><c>", "<a>"]


def test_a_word_that_ends_answers_by_its_name_stays_a_word(make_gguf: Maker) -> None:
    """Qwen2 has HTML's </s> as a word, which its merges make."""
    base = byte_level()["tokenizer.ggml.tokens"][:256]
    merges = ["< /", "s >", "</ s>"]
    made = byte_level(pre="bloom", tokens=[*base, "</", "s>", "</s>"], merges=merges)
    del made["tokenizer.ggml.token_type"]
    tokenizer = build(make_gguf, made)
    assert tokenizer.end_ids == {258}
    assert texts(tokenizer, "<b></s>") == ["<", "b", ">", "</s>"]
    assert tokenizer.decode(tokenizer.encode("<b></s>")) == "<b></s>"
    # without the merge it is markup: of a user it is text
    made["tokenizer.ggml.merges"] = merges[:2]
    assert texts(build(make_gguf, made), "</s>") == ["</", "s>"]
    assert texts(build(make_gguf, made), "</s>", parse_special=True) == ["</s>"]
    # a merge cannot make a token that the file says is markup
    made["tokenizer.ggml.merges"] = merges
    made["tokenizer.ggml.token_type"] = np.array([NORMAL] * 258 + [CONTROL], np.int32)
    assert texts(build(make_gguf, made), "</s>") == ["<", "/", "s", ">"]


def test_markup_between_the_messages_of_an_answer_is_printed(make_gguf: Maker) -> None:
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    base = byte_level()["tokenizer.ggml.tokens"][:258]
    types = np.array([NORMAL] * 258 + [CONTROL] * 6, np.int32)
    made = byte_level(tokens=[*base, *names], token_type=types, merges=["h e"], eos_token_id=262)
    tokenizer = build(make_gguf, made)
    answer = "<|channel|>final<|message|>hello<|return|>"
    ids = tokenizer.encode(answer, parse_special=True)
    assert tokenizer.decode(ids) == answer.removesuffix("<|return|>")
    assert tokenizer.end_ids == {262, 263}  # not <|end|>
    assert len(tokenizer.encode("<|start|>")) == len("<|start|>")  # of a user: text


def test_spaces_after_the_markup_of_phi_3_belong_to_it(make_gguf: Maker) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
    tokens += ["<|user|>", "<|endoftext|>"]
    types = np.array([UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 3 + [CONTROL] * 2)
    made = sentencepiece(tokens=tokens, token_type=types.astype(np.int32))
    made["tokenizer.ggml.scores"] = -np.arange(len(tokens), dtype=np.float32)
    text = "<|user|>\n \ta<|endoftext|> a</s> a"
    stripped = ["<|user|>", "▁a", "<|endoftext|>", "▁", "▁a", "</s>", "▁a"]
    for name in ("Phi-3 mini", "phi3"):
        tokenizer = build(make_gguf, {**made, "general.name": name})
        assert texts(tokenizer, text, parse_special=True) == stripped
    kept = ["<|user|>", "▁", "<0x0A>", "▁", "<0x09>", "a", *stripped[2:6], "▁", "▁a"]
    assert texts(build(make_gguf, made), text, parse_special=True) == kept


def test_end_of_text_is_added_where_the_file_says_so(make_gguf: Maker) -> None:
    ends = build(make_gguf, sentencepiece(add_eos_token=True))
    assert ends.adds_eos
    assert texts(ends, "a", add_eos=True) == ["▁a", "</s>"]
    assert texts(ends, "a</s>", add_eos=True, parse_special=True) == ["▁a", "</s>"]
    assert texts(ends, "a") == ["▁a"]
    assert texts(build(make_gguf, sentencepiece()), "a", add_eos=True) == ["▁a"]
    assert not build(make_gguf, byte_level(add_eos_token=True)).adds_eos  # there is none


def test_types_that_do_not_exist_are_no_type(make_gguf: Maker) -> None:
    types = np.array([-7, 259, 6000] + [NORMAL] * 259, np.int32)
    tokenizer = build(make_gguf, byte_level(token_type=types))
    assert not any(map(tokenizer.is_control, range(3)))
    assert tokenizer.decode(tokenizer.encode('!!"he')) == '!!"he'


@pytest.mark.parametrize("rows", [261, 262, 270])
def test_tokens_need_rows_of_the_embedding(make_gguf: Maker, rows: int) -> None:
    tensors = {"token_embd.weight": (0, (rows, 2), bytes(8 * rows))}
    gguf = Gguf(make_gguf(byte_level(), tensors))
    if rows >= 262:  # rows without a token are padding
        assert Tokenizer.of(gguf).is_control(269)
        return
    with pytest.raises(TokenizerError, match="262 tokens, more than the 261 rows of token_embd"):
        Tokenizer.of(gguf)


def test_pieces_without_a_token_are_spelled(make_gguf: Maker) -> None:
    """A merge may make what is no token, and a vocabulary lack bytes."""
    tokenizer = build(make_gguf, byte_level(merges=["x y", "h e"]))
    assert texts(tokenizer, "xyhe") == ["x", "y", "he"]
    some = byte_level(tokens=["a", "b"], merges=["a b"])
    del some["tokenizer.ggml.token_type"]
    assert texts(build(make_gguf, some), "abca") == ["a", "b", "a"]


def test_whole_words_are_taken_before_merges_where_the_model_does(make_gguf: Maker) -> None:
    words = {"tokens": [*byte_level()["tokenizer.ggml.tokens"], "world"]}
    words["token_type"] = np.array([NORMAL] * 263, np.int32)
    assert len(texts(build(make_gguf, byte_level(**words)), "world")) == 5
    llama3 = build(make_gguf, byte_level(**words, pre="llama-bpe", bos_token_id=3))
    assert texts(llama3, "world") == ["world"]
    assert llama3.adds_bos
    assert not build(make_gguf, byte_level(pre="llama-bpe")).adds_bos  # no BOS to add


def test_no_merge_makes_a_control_token(make_gguf: Maker) -> None:
    tokenizer = build(make_gguf, sentencepiece())
    assert texts(tokenizer, "<s>") == ["▁", "<", "s>"]
    assert texts(tokenizer, "<s>", parse_special=True) == ["<s>"]


def test_sentencepiece_without_a_space_in_front(make_gguf: Maker) -> None:
    assert texts(build(make_gguf, sentencepiece()), "ab") == ["▁a", "b"]
    tokenizer = build(make_gguf, sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert texts(tokenizer, "ab") == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
    assert not tokenizer.adds_bos


def test_characters_without_a_piece_become_bytes(make_gguf: Maker) -> None:
    assert texts(build(make_gguf, sentencepiece()), "aé") == ["▁a", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize(
    "pre", sorted(name for name, entry in PRE_TOKENIZERS.items() if entry.byte_level)
)
def test_every_pre_tokenizer_keeps_the_text(make_gguf: Maker, pre: str) -> None:
    tokenizer = build(make_gguf, byte_level(pre=pre))
    for text in (
        "I'll pay $1,234,567.89 on 2024-01-31!\r\n\n\t x  ",
        "HTTPServer naïve Straße 你好世界 カタカナ हिन्दी ١٢٣٤ éé",
        "don't DON'T `code`\n\n\n  indented ***",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["ab", " 1234567", "!?", "\n\n", " c"]),
        ("default", ["ab", " ", "123", "456", "7", "!?", "\n\n", " c"]),
        ("qwen2", ["ab", " ", "1", "2", "3", "4", "5", "6", "7", "!?\n\n", " c"]),
        ("llama-bpe", ["ab", " ", "123", "456", "7", "!?\n\n", " c"]),
        ("smollm", ["ab", " ", "1", "2", "3", "4", "5", "6", "7", "!?", "\n\n", " c"]),
        ("deepseek-v3", ["ab", " ", "123", "456", "7", "!?\n\n", " c"]),
    ],
)
def test_where_pre_tokenizers_cut(make_gguf: Maker, pre: str, words: list[str]) -> None:
    """With every substring in the vocabulary, each word becomes one token."""
    text = "ab 1234567!?\n\n c"
    escaped = text.replace(" ", "Ġ").replace("\n", "Ċ")
    merged: list[str] = []
    merges: list[str] = []
    for length in range(2, len(escaped) + 1):
        for start in range(len(escaped) - length + 1):
            piece = escaped[start : start + length]
            if piece not in merged:
                merged.append(piece)
                merges += [f"{piece[:cut]} {piece[cut:]}" for cut in range(1, len(piece))]
    base = byte_level()["tokenizer.ggml.tokens"][:256]
    made = byte_level(pre=pre, tokens=[*base, *merged], merges=merges)
    del made["tokenizer.ggml.token_type"]
    tokenizer = build(make_gguf, made)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)] == words


def test_a_file_without_a_vocabulary(
    make_gguf: Maker, reference_file: Callable[[str], Path], tmp_path: Path
) -> None:
    for path in (reference_file("nano-llama-f32"), make_gguf({"general.name": "x"})):
        with pytest.raises(TokenizerError, match="no vocabulary") as caught:
            Tokenizer.of(Gguf(path))
        assert str(caught.value).startswith(f"{path}: ")
    folder: Any = SimpleNamespace(path=tmp_path, metadata=Gguf(path).metadata)
    with pytest.raises(TokenizerError, match=r"the folder has no tokeniser \(tokenizer\.json"):
        Tokenizer.of(folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "plamo9"}, UnsupportedError, "tokeniser 'plamo9'"),
        ({"pre": "nobody"}, UnsupportedError, r"pre-tokeniser 'nobody' \(tokenizer.ggml.pre\)"),
        ({"tokens": []}, TokenizerError, "tokens is empty"),
        ({"tokens": 3}, ConfigError, "tokenizer.ggml.tokens' is int '3'"),
        ({"token_type": np.ones(7, np.int32)}, TokenizerError, "token_type has 7 entries for 262"),
        ({"merges": ["h e", "hello"]}, TokenizerError, "merges: 'hello' is not a pair"),
        ({"eos_token_id": 262}, TokenizerError, "eos_token_id is 262, the vocabulary has 262"),
        ({"bos_token_id": -1}, TokenizerError, "bos_token_id is -1"),
        ({"bos_token_id": "a"}, ConfigError, "bos_token_id"),
    ],
)
def test_broken_byte_level_vocabularies(
    make_gguf: Maker, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        build(make_gguf, byte_level(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_missing_keys_are_named(make_gguf: Maker, key: str) -> None:
    metadata = byte_level()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ConfigError, match=rf"'tokenizer\.ggml\.{key}' is missing"):
        build(make_gguf, metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": np.zeros(3, np.float32)}, "scores has 3 entries for 269 tokens"),
        ({"scores": np.full(269, np.nan, np.float32)}, "scores contains NaN"),
        ({"tokens": ["<0xZZ>"] * 269}, "is not a byte token such as <0x0A>"),
    ],
)
def test_broken_sentencepiece_vocabularies(
    make_gguf: Maker, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        build(make_gguf, sentencepiece(**changes))


def test_a_vocabulary_of_ever_longer_tokens(make_gguf: Callable[..., Path]) -> None:
    """Small files that would take quadratic time or memory to read, or to cut a text."""

    def tokenizer(longest: int) -> Tokenizer:
        tokens = ["<unk>", "<s>", "</s>", *("a" * n for n in range(1, longest + 1))]
        metadata = {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.arange(len(tokens), dtype="<f4"),
            "tokenizer.ggml.add_space_prefix": False,
        }  # fmt: skip
        return Tokenizer.of(Gguf(make_gguf(metadata)))

    started = time.process_time()
    ids = tokenizer(4096).encode("a" * 10_000)
    assert ids == [4098, 4098, 10_000 - 2 * 4096 + 2]
    assert time.process_time() - started < 2.0
    with pytest.raises(TokenizerError, match=r"tokens: 4,097 bytes of a token, at most 4,096"):
        tokenizer(4097)


@pytest.mark.parametrize(
    ("count", "token_type", "message"),
    [(65_537, CONTROL, "65,537 control tokens"), ((1 << 20) + 1, NORMAL, "tokens of a vocabulary")],
)
def test_too_many_tokens(make_gguf: Maker, count: int, token_type: int, message: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [""] * count,
        "tokenizer.ggml.token_type": np.full(count, token_type, "<i4"),
    }  # fmt: skip
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.of(Gguf(make_gguf(metadata)))
