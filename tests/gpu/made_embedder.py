"""Folders of text encoders as sentence-transformers writes them, with random weights, and texts of
an exact number of tokens.

Needs torch, transformers and tokenizers. Weights are F16. The words are made of syllables, and some
are as much more frequent than others as those of a language: the vocabularies that `tokenizers`
learns from them cut frequent words into one token, and rare ones into several.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers import decoders as td
from tokenizers import models as tm
from tokenizers import normalizers as tn
from tokenizers import pre_tokenizers as tp
from tokenizers import processors as ts
from tokenizers import trainers as tt

_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "st", "tr", "sh", "pl"]
_VOWELS = [*"aeiou", "ai", "ou", "ee"]
_WORDS, _LEARNT_FROM = 60_000, 300_000
#: Standard deviation of a matrix's values times the square root of its columns. With the 0.02 of
#: BERT's own start all texts have nearly the same embedding.
_SPREAD = 1.2


@dataclass(frozen=True, slots=True)
class EmbedderShape:
    """The shape of an encoder with 64 columns a head; ``modern``: ModernBERT, else BERT."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int
    modern: bool = False


EMBEDDERS = {
    "bert-base": EmbedderShape(12, 768, 3072, 30522),
    "bge-large": EmbedderShape(24, 1024, 4096, 30522),
    "modernbert-large": EmbedderShape(28, 1024, 2624, 50368, modern=True),
    "tiny-bert": EmbedderShape(2, 128, 256, 1200),
    "tiny-modernbert": EmbedderShape(3, 128, 192, 1200, modern=True),
}


def write_embedder(folder: Path, shape: EmbedderShape, device: str) -> tuple[Tokenizer, list[str]]:
    """Write the model, made on torch's ``device``, its tokeniser, and sentence-transformers' list
    of modules: pooling (BERT: the first token's state; ModernBERT: the mean) and unit length.
    Returns the tokeniser and the words that it learnt from, the most frequent ones first."""
    import torch
    import transformers

    rng = np.random.default_rng(7)
    words = _made_words(rng)
    tokenizer = _tokenizer(shape, [words[i] for i in _drawn(rng, len(words), _LEARNT_FROM)])
    model = _model(shape, device)
    torch.manual_seed(7)
    with torch.no_grad():
        for values in model.parameters():
            if values.dim() == 2:
                values.normal_(0.0, _SPREAD / values.shape[1] ** 0.5)
    model.to(torch.float16).save_pretrained(folder)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, **dict(zip(names, _SPECIALS, strict=True))
    ).save_pretrained(folder)
    _write_modules(folder, shape)
    return tokenizer, words


def texts_of(tokenizer: Tokenizer, words: Sequence[str], texts: int, tokens: int) -> list[str]:
    """Different texts of exactly so many tokens, the special ones at both ends included."""
    rng = np.random.default_rng(texts)
    cut = tokenizer.encode_batch([f" {word}" for word in words], add_special_tokens=False)
    lengths = [len(of) for of in cut]
    short = lengths.index(1)
    drawn = np.reshape(_drawn(rng, len(words), texts * tokens), (texts, tokens))
    marks = rng.choice(["", ",", "."], drawn.shape, p=(0.85, 0.1, 0.05))
    made: list[str] = []
    for chosen, mark_of in zip(drawn.tolist(), marks.tolist(), strict=True):
        left, text = tokens - len(tokenizer.encode("")), ""
        for word, mark in zip(chosen, mark_of, strict=True):
            length = lengths[word] + len(mark)  # a mark is a token
            word, mark, length = (word, mark, length) if length <= left else (short, "", 1)
            text, left = f"{text} {words[word]}{mark}", left - length
            if not left:
                break
        made.append(text)
    assert {len(found) for found in tokenizer.encode_batch(made)} == {tokens}
    return made


def _made_words(rng: np.random.Generator) -> list[str]:
    """Different words of one to four syllables."""
    words: dict[str, None] = {}
    while len(words) < _WORDS:
        count = int(rng.integers(1, 5))
        onsets, vowels = rng.integers(len(_ONSETS), size=count + 1), rng.integers(8, size=count)
        word = "".join(_ONSETS[a] + _VOWELS[b] for a, b in zip(onsets, vowels, strict=False))
        words[word + _ONSETS[onsets[-1]] * int(rng.integers(2))] = None
    return list(words)


def _drawn(rng: np.random.Generator, words: int, count: int) -> list[int]:
    """Numbers of words, each as frequent as its rank is small (Zipf's law)."""
    weights = 1.0 / np.arange(1, words + 1)
    drawn: list[int] = rng.choice(words, count, p=weights / weights.sum()).tolist()
    return drawn


def _tokenizer(shape: EmbedderShape, words: Sequence[str]) -> Tokenizer:
    """BERT's WordPiece or ModernBERT's byte-level BPE, learnt from words."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "special_tokens": _SPECIALS,
        "show_progress": False,
    }
    if shape.modern:
        made = Tokenizer(tm.BPE())
        made.normalizer = tn.NFC()
        made.pre_tokenizer = tp.ByteLevel(add_prefix_space=False)
        made.decoder = td.ByteLevel()
        trainer: Any = tt.BpeTrainer(initial_alphabet=tp.ByteLevel.alphabet(), **common)
    else:
        made = Tokenizer(tm.WordPiece(unk_token="[UNK]"))
        made.normalizer = tn.BertNormalizer()
        made.pre_tokenizer = tp.BertPreTokenizer()
        made.decoder = td.WordPiece()
        trainer = tt.WordPieceTrainer(initial_alphabet=[*"abcdefghijklmnopqrstuvwxyz,."], **common)
    made.train_from_iterator((f" {word}" for word in words), trainer)
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = ts.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return made


def _model(shape: EmbedderShape, device: str) -> Any:
    """The model of transformers."""
    import torch
    import transformers

    fields = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // 64,
    }
    if shape.modern:
        ids = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3}
        config: Any = transformers.ModernBertConfig(**fields, **ids, eos_token_id=3)
        kind: Any = transformers.ModernBertModel
    else:
        config, kind = transformers.BertConfig(**fields), transformers.BertModel
    with torch.device(device):
        return kind(config)


def _write_modules(folder: Path, shape: EmbedderShape) -> None:
    """Files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {
        "word_embedding_dimension": shape.hidden,
        "pooling_mode_cls_token": not shape.modern,
        "pooling_mode_mean_tokens": shape.modern,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
