"""tokenizer.json files against the library that runs them, used by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from urdir.model.errors import TokenizerError, UnsupportedError
from urdir.model.files.metadata import Metadata
from urdir.model.text.huggingface import HuggingFaceTokens
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

TEXTS = (
    "", "a", " a", "hello world", "  two  spaces ", "<|user|> hello<|stop|>\n\n hello",
    "hello<|user|>hello world", "<|stop|><|stop|>", "wörld é 🙂 \n\t", "<s>hello <|plain|>hello",
    "<|user|>\n hello <|stop|>", " <|user|>", "hello\n<|user|>",
)  # fmt: skip


def _byte_level() -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"he": 256, "ll": 257, "Ġw": 258}
    library = Library(models.BPE(vocab, [("h", "e"), ("l", "l"), ("Ġ", "w")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _spm(scheme: str) -> Library:
    """SentencePiece's alphabet, with its prefix by a normalizer ("legacy") or by Metaspace."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"helo wrd▁a",
        "he",
        "▁he",
        "▁w",
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("h", "e"), ("▁", "he"), ("▁", "w")]
    library = Library(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "legacy":
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if scheme != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)
    return library


KINDS = {
    "byte level": _byte_level,
    "legacy": lambda: _spm("legacy"),
    "first": lambda: _spm("first"),
    "always": lambda: _spm("always"),
    "never": lambda: _spm("never"),
}


def _library(kind: str) -> Library:
    library = KINDS[kind]()
    library.add_special_tokens(
        [
            AddedToken("<s>", normalized=False),
            AddedToken("<|user|>", normalized=False, rstrip=True, lstrip=True),
            AddedToken("<|stop|>", normalized=False),
        ]
    )
    library.add_tokens([AddedToken("<|plain|>", normalized=False)])
    return library


def _ours(library: Library, **values: Any) -> Tokenizer:
    keys = {f"tokenizer.{key}": value for key, value in values.items()}
    json_text = {"tokenizer.huggingface.json": library.to_str()}
    return Tokenizer(HuggingFaceTokens(Metadata(json_text | keys)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_the_library_does(kind: str, text: str) -> None:
    library = _library(kind)
    expected = library.encode(text, add_special_tokens=False).ids
    assert _ours(library).encode(text, parse_special=True) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_texts_together_are_as_each_alone(kind: str) -> None:
    tokenizer = _ours(_library(kind), **{"ggml.bos_token_id": 5, "ggml.add_bos_token": True})
    assert tokenizer.encode_each(TEXTS) == [tokenizer.encode_whole(text) for text in TEXTS]
    assert tokenizer.encode_each([]) == []
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.encode_each(["a", "b\ud800"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello world", "wörld é 🙂", "hello <|plain|>hello", " a"])
def test_decodes_as_the_library_does(kind: str, text: str) -> None:
    library = _library(kind)
    ids = library.encode(text, add_special_tokens=False).ids
    expected = library.decode(ids, skip_special_tokens=True)
    tokenizer = _ours(library)
    assert tokenizer.decode(ids) == expected
    stream = TextStream(tokenizer)
    pieces = "".join([*(stream.push(token) for token in ids), stream.finish()])
    assert pieces in (expected, " " + expected)  # a stream does not know where a text begins


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_text_unless_asked_for(kind: str) -> None:
    tokenizer = _ours(_library(kind))
    for text in ("hello<|stop|>", "<|user|>hello"):
        ids = tokenizer.encode(text)
        assert not any(tokenizer.is_control(token) for token in ids)
        assert tokenizer.decode(ids) == text
    opaque = tokenizer.encode("<|stop|><|stop|>", parse_special=True, opaque=[(0, 1)])
    assert [token for token in opaque if tokenizer.is_control(token)] == opaque[-1:]


def test_markup_that_is_listed_as_text_cannot_be_typed() -> None:
    library = _byte_level()
    library.add_tokens([AddedToken("<|im_end|>", normalized=False)])
    tokenizer = _ours(library)
    assert tokenizer.is_control(tokenizer.encode("<|im_end|>", parse_special=True)[0])
    assert not any(tokenizer.is_control(token) for token in tokenizer.encode("<|im_end|>"))


def test_ids_with_a_role() -> None:
    library = _library("byte level")
    ends = np.array([library.token_to_id("<|stop|>"), library.token_to_id("<s>"), 10**6])
    tokenizer = _ours(library, **{"huggingface.end_token_ids": ends, "ggml.bos_token_id": 3})
    assert (tokenizer.bos_id, tokenizer.eos_id) == (3, ends[0])
    assert tokenizer.end_ids == set(ends[:2].tolist())
    named = {"huggingface.bos_token": "<s>", "huggingface.eos_token": "<|user|>"}
    tokenizer = _ours(library, **named)
    assert tokenizer.bos_id == library.token_to_id("<s>")
    assert tokenizer.end_ids == {library.token_to_id("<|user|>")}


def test_bos_is_added_where_the_post_processor_does() -> None:
    library = _library("byte level")
    role = {"huggingface.bos_token": "<s>"}
    assert not _ours(library, **role).adds_bos
    bos = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    assert _ours(library, **role).adds_bos
    assert _ours(library, **role).encode("a", add_bos=True) == library.encode("a").ids
    assert not _ours(library, **role, **{"ggml.add_bos_token": False}).adds_bos


def test_files_that_are_none(data: Path) -> None:
    good = json.loads((data / "safetensors" / "llama-bf16" / "tokenizer.json").read_text())
    for text in ("", "{", "[]", "{}", json.dumps(good | {"model": {"type": "Odd"}})):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be used"):
            HuggingFaceTokens(Metadata({"tokenizer.huggingface.json": text}))
    decoder = {"type": "BPEDecoder", "suffix": "</w>"}
    other = json.dumps(good | {"decoder": decoder})
    with pytest.raises(UnsupportedError, match=r"has the decoder BPEDecoder"):
        HuggingFaceTokens(Metadata({"tokenizer.huggingface.json": other}))
