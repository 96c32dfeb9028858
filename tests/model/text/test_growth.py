"""What a tokenizer.json can make of one byte: against the library, and refused before it."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata
from urdir.model.text import charsmap, growth
from urdir.model.text.charsmap import CharsMap
from urdir.model.text.huggingface import HuggingFaceTokens

#: One of each kind, and a character of which it makes the most (None: none grows as far as is said,
#: since several steps in one would have to).
NORMALIZERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "BertNormalizer": (
        {
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        None,
    ),
    "ByteLevel": ({}, "\x01"),
    "Lowercase": ({}, "\u0130"),
    "NFC": ({}, "\U0001d160"),
    "NFD": ({}, "\u0390"),
    "NFKC": ({}, "\ufdfa"),
    "NFKD": ({}, "\ufdfa"),
    "Nmt": ({}, "a"),
    "Prepend": ({"prepend": "▁é"}, "a"),
    "Replace": ({"pattern": {"String": "a"}, "content": "日本"}, "a"),
    "Strip": ({"strip_left": True, "strip_right": True}, "a"),
    "StripAccents": ({}, "a"),
}
PRE_TOKENIZERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "BertPreTokenizer": ({}, "a"),
    "ByteLevel": ({"add_prefix_space": True, "trim_offsets": True, "use_regex": True}, "\x01"),
    "CharDelimiterSplit": ({"delimiter": "a"}, None),
    "Digits": ({"individual_digits": True}, "a"),
    "FixedLength": ({"length": 2}, "a"),
    "Metaspace": ({"replacement": "▁", "prepend_scheme": "always", "split": True}, "a"),
    "Punctuation": ({"behavior": "Isolated"}, "a"),
    "Split": ({"pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}, "a"),
    "UnicodeScripts": ({}, "a"),
    "Whitespace": ({}, "a"),
    "WhitespaceSplit": ({}, "a"),
}
REGEX = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "ab"}


def tokenizer_json(**parts: Any) -> dict[str, Any]:
    """A small byte-level tokenizer.json with other parts."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(vocab, []))
    description: dict[str, Any] = json.loads(library.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return description | {"decoder": byte_level | {"use_regex": True}} | parts


def nbytes_after(kind: str, step: dict[str, Any], text: str) -> int:
    """Bytes that the library makes of a text by one step."""
    library = Library.from_str(json.dumps(tokenizer_json(**{kind: step})))
    if kind == "normalizer":
        return len(library.normalizer.normalize_str(text).encode())
    return sum(len(piece.encode()) for piece, _ in library.pre_tokenizer.pre_tokenize_str(text))


def texts() -> list[str]:
    rnd = random.Random(3)
    alphabet = "aB \n\x01éÅ日本ﷺ½ﬃ\u0130\u0390\u0344\U0001d160각İẞ\u200bx.7▁"
    return ["".join(rnd.choices(alphabet, k=rnd.randint(1, 12))) for _ in range(300)]


@pytest.mark.parametrize(
    ("part", "name", "options", "most"),
    [
        *(("normalizer", name, *case) for name, case in NORMALIZERS.items()),
        *(("pre_tokenizer", name, *case) for name, case in PRE_TOKENIZERS.items()),
        ("normalizer", "Replace", REGEX, None),
    ],
)
def test_no_text_grows_by_more(
    part: str, name: str, options: dict[str, Any], most: str | None
) -> None:
    step = {"type": name} | options
    allowed = growth.text_growth(tokenizer_json(**{part: step}))
    constant = 2 if step is not REGEX else 4  # an empty match at the end, too
    for text in texts():
        found = nbytes_after(part, step, text)
        assert found <= allowed * len(text.encode()) + constant * (name == "Replace"), text
    if most is not None:
        assert nbytes_after(part, step, most) == allowed * len(most.encode())


def test_every_step_of_the_library_is_known() -> None:
    for module, known in (
        (normalizers, growth._NORMALIZERS),
        (pre_tokenizers, growth._PRE_TOKENIZERS),
        (processors, growth._POST_PROCESSORS),
    ):
        names = {name for name, of in vars(module).items() if isinstance(of, type)}
        names -= {"Sequence", "Normalizer", "PreTokenizer", "PostProcessor"}
        assert names == set(known)
    assert set(NORMALIZERS) | {"Precompiled"} == set(growth._NORMALIZERS)
    assert set(PRE_TOKENIZERS) == set(growth._PRE_TOKENIZERS)


def sequence(part: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {part: {"type": "Sequence", growth._INNER[part]: steps}}


TWICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [TEXT] * 300, "pair": [], "special_tokens": {}}
HOSTILE: dict[str, dict[str, Any]] = {
    "doubled forty times": sequence("normalizer", [TWICE] * 40),
    "within each other": sequence(
        "normalizer", [sequence("normalizer", [TWICE] * 40)["normalizer"]]
    ),
    "a long content": {"normalizer": TWICE | {"content": "x" * 300}},
    "a long content between bytes": {"normalizer": REGEX | {"content": "x" * 300}},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "x" * 300}},
    "bytes forty times": sequence("pre_tokenizer", [BYTES] * 40),
    "bytes of both kinds": sequence("normalizer", [{"type": "ByteLevel"}] * 6)
    | sequence("pre_tokenizer", [BYTES] * 3),
    "a template that repeats": {"post_processor": TEMPLATE},
    "a step that is not known": {"normalizer": {"type": "Explode"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_grows_without_bounds_is_refused(name: str) -> None:
    """In a process of its own: where the library is given such a file, it ends the process."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from urdir.model.errors import ModelError\n"
        "from urdir.model.files.metadata import Metadata\n"
        "from urdir.model.text.huggingface import HuggingFaceTokens\n"
        "try: HuggingFaceTokens(Metadata({'tokenizer.huggingface.json': sys.stdin.read()}))\n"
        "except ModelError as error: print(error)\n"
    )
    text = json.dumps(tokenizer_json(**HOSTILE[name]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=text, env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("tokenizer.json cannot be used: it"), done.stdout


@pytest.mark.parametrize("name", ["unk_token", "continuing_subword_prefix", "end_of_word_suffix"])
def test_a_long_option_of_the_model_is_refused(name: str) -> None:
    description = tokenizer_json()
    description["model"][name] = "x" * 5000
    with pytest.raises(TokenizerError, match=f"its {name} has more than 256"):
        HuggingFaceTokens(Metadata({"tokenizer.huggingface.json": json.dumps(description)}))


def test_what_published_models_do_is_allowed(data: Path) -> None:
    charsmap = json.loads((data / "vocab" / "unigram.json").read_text())["charsmap"]
    metaspace = {"type": "Metaspace"} | PRE_TOKENIZERS["Metaspace"][0]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    steps: list[dict[str, Any]] = [
        {"type": "Precompiled", "precompiled_charsmap": charsmap},
        spaces,
    ]
    described = tokenizer_json(**sequence("normalizer", steps), pre_tokenizer=metaspace)
    assert growth.text_growth(described) == 1.5 * 4 * 4  # 11 of NFKC, where the table has 1.5
    legacy = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    assert growth.text_growth(tokenizer_json(**sequence("normalizer", legacy))) == 12
    nfc = tokenizer_json(normalizer={"type": "NFC"}, pre_tokenizer=BYTES)
    assert growth.text_growth(nfc) == 6


def test_a_text_that_would_become_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    description = tokenizer_json(normalizer=TWICE, pre_tokenizer=BYTES)
    tokens = HuggingFaceTokens(Metadata({"tokenizer.huggingface.json": json.dumps(description)}))
    monkeypatch.setattr(growth, "MOST_BYTES", 4000)
    assert len(tokens.encode("a" * 1000, False)) == 2000
    for encode in (tokens.encode, tokens.encode_inside):
        with pytest.raises(TokenizerError, match="1,001 characters"):
            encode("a" * 1001, False)


def table(*pairs: tuple[bytes, bytes]) -> bytes:
    """A table of replacements of one-byte keys."""
    nodes, text = np.zeros(1 << 12, np.uint32), b""
    nodes[0] = 256 << 10  # children of the root lie from 256 on
    for number, (key, made) in enumerate(pairs):
        place, leaf = 256 ^ key[0], 1024 + 256 * number
        nodes[place] = key[0] | 0x100 | (place ^ leaf) << 10
        nodes[leaf] = 0x80000000 | len(text)
        text += made + b"\0"
    return nodes.nbytes.to_bytes(4, "little") + nodes.tobytes() + text


def test_the_growth_of_a_table(data: Path) -> None:
    """Of a real one by a walk over all of its keys."""
    stored = base64.b64decode(json.loads((data / "vocab" / "unigram.json").read_text())["charsmap"])
    found = CharsMap.parse(stored)
    most, keys, waiting = 1.0, 0, [(found._children(0), b"")]
    while waiting:
        place, key = waiting.pop()
        for byte in range(1, 256):
            at = place ^ byte
            if at < len(found._nodes) and found._nodes[at] & 0x800000FF == byte:
                waiting.append((at ^ found._children(at), key + bytes([byte])))
                if found._nodes[at] & 0x100:
                    made = found.replace(waiting[-1][1].decode("utf-8", "surrogateescape"))
                    most, keys = max(most, len(made.encode()) / (len(key) + 1)), keys + 1
    assert keys > 5
    assert found.growth == most

    assert CharsMap.parse(table((b"a", b"x" * 30), (b"b", b"yy"))).replace("ab") == "x" * 30 + "yy"
    assert CharsMap.parse(table((b"a", b"x" * 30), (b"b", b"yy"))).growth == 30
    with pytest.raises(TokenizerError, match="expands text 65 times, at most 64"):
        CharsMap.parse(table((b"b", b"yy"), (b"a", b"x" * 65)))
    with pytest.raises(TokenizerError, match="at most 4,194,304"):
        CharsMap.parse(bytes(5 << 20))


def test_a_trie_without_end() -> None:
    """Each node leads to another, so that there is no longest key."""
    nodes = np.full(1 << 20, 1 | 1 << 10, np.uint32)
    rng = np.random.default_rng(4)
    for hostile in (nodes, rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)):
        assert charsmap._growth(hostile, b"x" * 300 + b"\0") >= 1.0
