"""A file of an encoder with a vocabulary of words, small enough to open in a moment."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WORDS = ("a", "warp", "has", "32", "threads", "the", "weft", "crosses", "cotton", "##s", "?", ".")
#: The ids of what BERT's texts begin and end with, and of a word that is not known.
UNKNOWN, BEGIN, END = 1, 2, 3
HIDDEN, HEADS, FFN, LAYERS, CONTEXT = 32, 2, 48, 2, 40


def vocabulary() -> list[str]:
    """The tokens as GGUF files write them."""
    words = [word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]


def write_encoder(path: Path, *, ranks: bool = False, seed: int = 0, unused: int = 0) -> Path:
    """Write a BERT with random weights: of embeddings (the mean), or one that ``ranks``. Its
    vocabulary has ``unused`` tokens more."""
    rng = np.random.default_rng(seed)
    tokens = vocabulary() + [f"unused {number}" for number in range(unused)]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("tiny encoder")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if ranks else gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * len(WORDS)
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * unused])
    writer.add_bos_token_id(BEGIN)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_sep_token_id(END)

    def matrix(name: str, rows: int, cols: int) -> None:
        values = rng.standard_normal((rows, cols)) / np.sqrt(cols)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        writer.add_tensor(f"{name}.bias", (0.1 * rng.standard_normal(HIDDEN)).astype(np.float32))

    matrix("token_embd", len(tokens), HIDDEN)
    matrix("token_types", 2, HIDDEN)
    matrix("position_embd", CONTEXT, HIDDEN)
    norm("token_embd_norm")
    for layer in range(LAYERS):
        for part in ("q", "k", "v", "output"):
            matrix(f"blk.{layer}.attn_{part}", HIDDEN, HIDDEN)
        norm(f"blk.{layer}.attn_output_norm")
        matrix(f"blk.{layer}.ffn_up", FFN, HIDDEN)
        matrix(f"blk.{layer}.ffn_down", HIDDEN, FFN)
        norm(f"blk.{layer}.layer_output_norm")
    if ranks:
        matrix("cls", HIDDEN, HIDDEN)
        matrix("cls.output", 1, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
