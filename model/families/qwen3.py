"""Qwen 3 (arXiv 2505.09388), dense: each head of queries and keys is normalised before it turns.

Keys and formula: `decoder`; llama.cpp's is `src/models/qwen3.cpp`. The halves of a head turn
together.
"""

from __future__ import annotations

from urdir.model.families.decoder import read_decoder
from urdir.model.families.description import Config
from urdir.model.families.reader import Reader


def describe(file: Reader) -> Config:
    """The description of a file of this architecture."""
    return read_decoder(file, "half", may_have_qk_norm=True)
