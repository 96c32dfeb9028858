"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115): llama with biases on Q, K and V.

Keys and formula: `decoder`; llama.cpp's is `src/models/qwen2.cpp`. The halves of a head turn
together.
"""

from __future__ import annotations

from urdir.model.families.decoder import read_decoder
from urdir.model.families.description import Config
from urdir.model.families.reader import Reader


def describe(file: Reader) -> Config:
    """The description of a file of this architecture."""
    return read_decoder(file, "half")
