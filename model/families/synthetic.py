"""Models of real shapes with random weights, made block by block while they are uploaded: for
measuring speed without a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import SettingsError
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.stored import Stored, StoredMatrix, stored_in
from urdir.model.files.gguf import Tensor
from urdir.model.files.metadata import Metadata
from urdir.model.owner import Owner
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout

_POOL_BLOCKS = 4096  # distinct blocks of a type; tensors repeat them


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a published model (its config.json)."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_base: float
    tied: bool


SHAPES = {
    "llama-3.2-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, 5e5, True),
    "llama-3.2-3b": Shape("llama", 28, 3072, 24, 8, 128, 8192, 128256, 5e5, True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 5e5, False),
    "llama-3.1-70b": Shape("llama", 80, 8192, 64, 8, 128, 28672, 128256, 5e5, False),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 1e6, True),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 1e6, True),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 1e6, False),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e6, False),
}
#: The type of a tensor whose rows are no multiple of its type's block, as llama.cpp's quantiser
#: chooses it.
_FALLBACK = {
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    **{name: "IQ4_NL" for name in FORMATS if name.startswith("IQ") and name != "IQ4_NL"},
}
#: A tensor that files of an architecture have in every layer, though llama's do not.
_OPTIONAL = {
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}
TYPES = ("q4_k_m", *(name.lower() for name in FORMATS))


class SyntheticModel(Owner):
    """What a GGUF file of that shape and type would hold; stands in for an open ``Gguf``. Vectors
    (norms, biases) are ones.

    ``kind`` is "q4_k_m" (Q4_K, with Q6_K where llama.cpp's recipe has it) or one type for all
    matrices. Raises SettingsError for an unknown shape or type.
    """

    def __init__(self, shape_name: str, kind: str) -> None:
        if shape_name not in SHAPES:
            raise SettingsError(f"--shape {shape_name}: one of {', '.join(SHAPES)}")
        if kind not in TYPES:
            raise SettingsError(f"--type {kind}: one of {', '.join(TYPES)}")
        shape = SHAPES[shape_name]
        self.path = Path(f"{shape_name}-{kind}")
        self.architecture = shape.arch
        self.metadata = Metadata(_metadata(shape, str(self.path)), str(self.path))
        config = describe(_reader(shape, self.metadata))
        pools: dict[str, RepeatedBlocks] = {}
        self.tensors: dict[str, Tensor] = {}
        for stored in stored_in(config):
            fmt = _format_of(stored, shape, kind)
            nbytes = math.prod(stored.shape) // fmt.block * fmt.nbytes
            data: Any
            if isinstance(stored, StoredMatrix):
                if fmt.name not in pools:
                    pools[fmt.name] = RepeatedBlocks.of(fmt, 0.7 / math.sqrt(shape.hidden))
                data = pools[fmt.name].sized(nbytes)
            else:
                data = np.ones(stored.shape, np.float32).view(np.uint8)
            name = stored.name
            self.tensors[name] = Tensor(name, fmt.ggml_type, stored.shape, 0, nbytes, data)

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Bytes of a tensor that repeats a pool of random blocks; a slice is made when it is read."""

    pool: Bytes
    nbytes: int = 0

    @classmethod
    def of(cls, fmt: Format, deviation: float) -> RepeatedBlocks:
        """A pool of weights of about that standard deviation."""
        rng = np.random.default_rng(0)
        columns = 256
        rows = _POOL_BLOCKS * fmt.block // columns or 1
        layout = Layout(fmt, rows, columns)
        count = rows * columns // fmt.block
        weights = layout.unpack(layout.pack(random_blocks(fmt, count, rng)))
        scale = deviation / float(weights.std())
        return cls(random_blocks(fmt, count, np.random.default_rng(0), scale).reshape(-1))

    def sized(self, nbytes: int) -> RepeatedBlocks:
        """The same pool for a tensor of ``nbytes`` bytes."""
        return RepeatedBlocks(self.pool, nbytes)

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Bytes:
        begin, end, _ = part.indices(self.nbytes)
        skip = begin % len(self.pool)
        repeats = -(-(skip + end - begin) // len(self.pool))
        return np.tile(self.pool, repeats)[skip : skip + end - begin]


def _metadata(shape: Shape, name: str) -> dict[str, Any]:
    arch = shape.arch
    return {
        "general.architecture": arch,
        "general.name": name,
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": 131072,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.ffn,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": shape.rope_base,
        f"{arch}.rope.dimension_count": shape.head_dim,
    }


def _reader(shape: Shape, metadata: Metadata) -> Reader:
    """The reader for a family; it lists only the tensors that show which optional parts exist."""
    stored: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, shape.hidden)}
    if not shape.tied:
        stored["output.weight"] = (shape.vocab, shape.hidden)
    stored |= {f"blk.0.{name}": () for name in _OPTIONAL.get(shape.arch, ())}
    stored["blk.0.ffn_gate.weight"] = ()
    return Reader(metadata, shape.arch, stored, shape.layers)


def _format_of(stored: Stored, shape: Shape, kind: str) -> Format:
    """The type of a tensor: F32 for vectors, else what the recipe says and its rows allow."""
    if not isinstance(stored, StoredMatrix):
        return FORMATS["F32"]
    wanted = "Q6_K" if kind == "q4_k_m" and _is_larger(stored.name, shape) else kind.upper()
    fmt = FORMATS["Q4_K" if wanted == "Q4_K_M" else wanted]
    while stored.cols % fmt.block:
        fmt = FORMATS[_FALLBACK.get(fmt.name, "F16")]
    return fmt


def _is_larger(name: str, shape: Shape) -> bool:
    """Whether llama.cpp's Q4_K_M recipe stores a matrix as Q6_K."""
    if name in ("token_embd.weight", "output.weight"):
        return name.startswith("token_embd" if shape.tied else "output")
    _, number, role, _ = name.split(".")
    if role not in ("attn_v", "ffn_down"):
        return False
    layer, eighth = int(number), shape.layers // 8
    return layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
