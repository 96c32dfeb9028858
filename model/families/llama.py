"""Llama 1 to 3, Mistral, TinyLlama, SmolLM and others that GGUF calls "llama".

Keys and formula: `decoder`; llama.cpp's is `src/models/llama.cpp`. The converter permutes the rows
of Q and K, so that neighbours turn together. Llama 3.1 and later bring RoPE factors as a tensor.
"""

from __future__ import annotations

from urdir.model.families.decoder import read_decoder
from urdir.model.families.description import Config
from urdir.model.families.reader import Reader


def describe(file: Reader) -> Config:
    """The description of a file of this architecture."""
    return read_decoder(file, "interleaved")
