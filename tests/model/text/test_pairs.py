"""Whole texts and pairs of a tokenizer.json: what its post-processor puts around them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from urdir.model.files.metadata import Metadata
from urdir.model.text.huggingface import HuggingFaceTokens
from urdir.model.text.tokenizer import Tokenizer


def _tokenizer(engine: Engine, **settings: Any) -> Tokenizer:
    found = {f"tokenizer.huggingface.{name}": of for name, of in settings.items()}
    description = {"tokenizer.huggingface.json": engine.to_str()}
    return Tokenizer(HuggingFaceTokens(Metadata({**description, **found}, "a folder")))


@pytest.fixture
def bert() -> Engine:
    """BERT's kind: WordPiece, [CLS] before and [SEP] after a text."""
    words = {word: i for i, word in enumerate(("[UNK]", "[CLS]", "[SEP]", "a", "b", "##b"))}
    engine = Engine(models.WordPiece(words, unk_token="[UNK]"))
    engine.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return engine


@pytest.fixture
def roberta() -> Engine:
    """RoBERTa's kind: two separators between the texts of a pair."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate(("<s>", "</s>", *alphabet))}
    engine = Engine(models.BPE(vocab, []))
    engine.add_special_tokens(["<s>", "</s>"])
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.post_processor = processors.RobertaProcessing(
        ("</s>", 1), ("<s>", 0), add_prefix_space=False
    )
    return engine


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_texts_and_pairs_are_those_of_the_library(
    kind: str, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(kind)
    tokenizer = _tokenizer(engine)
    assert tokenizer.encode_whole("ab b") == engine.encode("ab b").ids
    assert [*tokenizer.encode_pair("ab", "b a")] == engine.encode("ab", "b a").ids
    assert tokenizer.encode("ab") == engine.encode("ab", add_special_tokens=False).ids


def test_the_closing_token_may_be_another_than_the_one_that_ends_answers(roberta: Engine) -> None:
    """Qwen3-Embedding: answers end with <|im_end|>, texts with <|endoftext|>."""
    description = json.loads(roberta.to_str())
    description["post_processor"] = json.loads(
        processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)]).__getstate__()
    )
    engine = Engine.from_str(json.dumps(description))
    tokenizer = _tokenizer(engine, eos_token="<s>")
    assert tokenizer.eos_id == 0
    assert tokenizer.encode_whole("ab") == engine.encode("ab").ids
    assert tokenizer.encode_whole("ab")[-1] == 1


def test_words_of_wordpiece_are_spelled_with_spaces(bert: Engine) -> None:
    tokenizer = _tokenizer(bert)
    assert tokenizer.decode(bert.encode("ab b", add_special_tokens=False).ids) == "ab b"
