"""The description of a model as plain data: a family makes it, everything else reads it.

A layer is a token mixer and a feed-forward network, each with an RMSNorm before it and a residual
after it. Whatever may differ between layers is in the layer's own description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.families.rope import RopeConfig

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal softmax attention (GQA) over all tokens before, scaled by 1 / sqrt(key_dim)."""

    heads: int  # of queries
    kv_heads: int  # heads is a multiple
    key_dim: int  # of a head of queries and keys
    value_dim: int  # of a head of values
    rope: RopeConfig
    qkv_bias: bool = False  # on the products Q, K and V
    qk_norm: bool = False  # RMSNorm of each head of queries and keys, weights (key_dim,)

    @property
    def query_width(self) -> int:
        """Values of all heads of queries."""
        return self.heads * self.key_dim

    @property
    def key_width(self) -> int:
        """Values of all heads of keys."""
        return self.kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Values of all heads of values."""
        return self.kv_heads * self.value_dim

    @property
    def output_width(self) -> int:
        """Values of all heads of the result."""
        return self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Dense:
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate x) * up x)."""

    width: int  # rows of gate and up


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer."""

    mixer: Attention
    ffn: Dense


@dataclass(frozen=True, slots=True)
class Config:
    """A whole model; see `Config.from_gguf`."""

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden: int
    vocab_size: int  # rows of the embedding; a tokeniser may know fewer
    context_length: int  # trained for
    rms_eps: float
    tied: bool  # the embedding is the output matrix too
    output_bias: bool = False

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ways in which layers rotate, in order of first use."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers))

    @classmethod
    def from_gguf(cls, gguf: ModelFile) -> Config:
        """The description of a file; see `registry.read_config`."""
        from urdir.model.families.registry import read_config

        return read_config(gguf)
