"""Qwen 4 (qwen4_exp): the table of its n-grams, its indexer and its streams.

Source: transformers' `modular_qwen4_exp.py`.
"""

from __future__ import annotations

from itertools import count, islice
from math import isqrt

import numpy as np

from urdir.model.files.pretrained.family import Found
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.layouts import Keys, Rows
from urdir.model.files.pretrained.steps.common import layers_of, number

_GAMMA = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
#: The most rows of the table for a hash; primes beyond take long to find.
_MOST_BASE, _MOST_HEADS = 1 << 28, 64


def qwen4_layers(fields: Fields, found: Found) -> None:
    """Attention by its published name, the pools of its indexer, and the kind of gates of delta
    rules."""
    fields.fix("indexer_kv_heads", (1,))
    kinds = fields.items("layer_types", str)
    if kinds is not None:
        full = ["full_attention" if of == "indexed_attention" else of for of in kinds]
        fields.put("layer_types", full)
    layers = layers_of(fields, found)
    ratio = fields.size("indexer_compress_ratio")
    found["attention.compress_ratios"] = np.full(layers, ratio, np.int32)
    gates = fields.given("output_gate_type", str, fields.given("hidden_act", str, "silu"))
    if gates not in ("silu", "sigmoid"):
        raise fields.refused("output_gate_type", "silu and sigmoid are supported")
    found["own.silu_gates"] = gates == "silu"


def ngram_table(fields: Fields, found: Found) -> None:
    """The hashes of n-grams: their multipliers, and where each one's rows are in the table. Layers
    are counted from 1."""
    numbers = sorted(set(fields.items("ple_layer_ids", int) or ()))
    n, each = fields.size("ngram_size", 3), fields.size("heads_per_ngram", 8)
    base, seed = fields.size("ngram_vocab_size_base", 20_000_000), fields.given("seed", int, 1234)
    taps = fields.size("ple_conv_kernel_size", 4)
    width = fields.size("ple_embed_dim", number(found, "embedding_length"))
    fields.ignore(("split_ngram_parts", "make_ngram_vocab_size_divisible_by"))
    if not numbers:
        return
    heads = (n - 1) * each
    if base > _MOST_BASE:
        raise fields.refused("ngram_vocab_size_base", f"up to {_MOST_BASE} are supported")
    if not 0 < heads <= _MOST_HEADS:
        raise fields.refused("heads_per_ngram", f"up to {_MOST_HEADS} hashes are supported")
    if width % heads:
        raise fields.wrong("ple_embed_dim", f"{width} for {heads} hashes")
    end = fields.peek("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int:
        raise fields.wrong("eos_token_id", end)
    vocabulary = fields.peek("vocab_size")
    if type(vocabulary) is not int or not 0 < vocabulary < 1 << 31:
        raise fields.wrong("vocab_size", vocabulary)
    half = max(1, ((1 << 63) - 1) // vocabulary // 2)
    sizes = list(islice(filter(_is_prime, count(base)), heads))
    found |= {
        "ple.layers": np.array([layer - 1 for layer in numbers]),
        "ple.ngram_size": n,
        "ple.heads_per_ngram": each,
        "ple.conv_kernel": taps,
        "ple.eos_token_id": end,
        "embedding_length_per_layer_input": width // heads,
        "ple.layer_multipliers": np.array(
            [2 * (_mixed(seed + _GAMMA * (i + 1)) % half) + 1 for i in range(n)]
        ),
        "ple.head_offsets": np.cumsum([0, *sizes[:-1]]),
        "ple.head_vocab_sizes": np.array(sizes),
    }


def _mixed(value: int) -> int:
    """splitmix64 (Steele et al. 2014)."""
    value = (value + _GAMMA) & _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % of for of in range(2, isqrt(value) + 1))


def index_queries(keys: Keys, rows: int) -> Rows:
    """Rows of queries of the indexer, before those of its key."""
    return np.arange(min(rows, _queries(keys)))


def index_keys(keys: Keys, rows: int) -> Rows:
    """Rows of the indexer's key."""
    return np.arange(_queries(keys), rows)


def _queries(keys: Keys) -> int:
    heads, dim = (int(keys[f"attention.indexer.{of}"]) for of in ("head_count", "key_length"))
    return heads * dim


def streams(keys: Keys) -> tuple[int, ...]:
    """Values of each stream."""
    return (int(keys["hyper_connection.count"]), -1)


def ngram_taps(keys: Keys) -> tuple[int, ...]:
    """Channels and taps of the convolution of n-grams."""
    return (-1, int(keys["ple.conv_kernel"]))
