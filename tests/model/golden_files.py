"""Writes the files of `tests/data/golden` whose logits are kept there, but whose weights are not.

Their weights are random: numpy's generator with seed 0 gives each of them again, byte for byte. The
digest of a file is compared, as its logits were computed from these very bytes. Formats of blocks:
`ggml-common.h` of ggml.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[1] / "data" / "golden"

Q4_0, Q4_1 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1
Q5_0, Q5_1 = GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1
Q3_K, Q4_K = GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q4_K
Q5_K, Q6_K = GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K
F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16


@dataclass(frozen=True)
class _Shape:
    """A model of the llama family of two layers."""

    arch: str = "llama"
    rope_base: float = 1e4
    eps: float = 1e-5
    tied: bool = False
    experts: int = 0
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    network: int = 256
    vocabulary: int = 320

    layers, head_dim, context, experts_used = 2, 64, 512, 2


_LLAMA = _Shape()
_NARROW = _Shape(width=128, heads=2, kv_heads=1, network=160, vocabulary=200)
#: For each file: its shape, its type (None: the mixture Q4_K_M), the start of its SHA-256.
FILES: dict[str, tuple[_Shape, GGMLQuantizationType | None, str]] = {
    "nano-llama-f32": (_NARROW, F32, "b334eb72f35e8e83"),
    "nano-llama-f16": (_NARROW, F16, "f70845209ad4de48"),
    "nano-llama-bf16": (_NARROW, BF16, "8924d48d40c9d939"),
    "nano-llama-q3_k": (_LLAMA, Q3_K, "2ab67ced90abff77"),
    "nano-llama-q4_0": (_LLAMA, Q4_0, "a326abba595e1045"),
    "nano-llama-q4_1": (_LLAMA, Q4_1, "f23db5173af324b2"),
    "nano-llama-q5_0": (_LLAMA, Q5_0, "b27b0a4e6d59852a"),
    "nano-llama-q5_1": (_LLAMA, Q5_1, "5c02aa448e50face"),
    "nano-llama-q5_k": (_LLAMA, Q5_K, "8e586efab2781c4e"),
    "nano-llama-q6_k": (_LLAMA, Q6_K, "793456d96c2863bf"),
    "nano-mixtral-q4_k_m": (_Shape(rope_base=1e6, experts=4), None, "6a42d0e4aecec1d7"),
    "nano-qwen2-q4_k_m": (
        _Shape("qwen2", rope_base=1e6, eps=1e-6, tied=True),
        None,
        "128132d702a6544e",
    ),
}


def write(name: str, path: Path) -> None:
    """Writes a file of `FILES`.

    Raises:
        AssertionError: The bytes are not those that the logits were computed from: numpy's
            generator or gguf's writer has changed.
    """
    shape, kind, digest = FILES[name]
    _Writer(name, path, shape, kind).write()
    written = hashlib.sha256(path.read_bytes()).hexdigest()
    assert written.startswith(digest), f"{name}: {written}, not {digest}..."


class _Writer:
    """Draws the tensors in the file's order."""

    def __init__(
        self, name: str, path: Path, shape: _Shape, kind: GGMLQuantizationType | None
    ) -> None:
        self._shape, self._kind = shape, kind
        self._random = np.random.default_rng(0)
        self._file = GGUFWriter(path, shape.arch)
        self._file.add_name("-".join(name.split("-")[:2]))

    def write(self) -> None:
        shape, file = self._shape, self._file
        self._metadata()
        self._matrix("token_embd", shape.vocabulary, std=1 / 16 if shape.tied else 1.0)
        self._vector("output_norm.weight", shape.width)
        if not shape.tied:
            self._matrix("output", shape.vocabulary)
        for layer in range(shape.layers):
            self._attention(f"blk.{layer}.")
            self._network(f"blk.{layer}.")
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()

    def _metadata(self) -> None:
        shape, file = self._shape, self._file
        file.add_block_count(shape.layers)
        file.add_context_length(shape.context)
        file.add_embedding_length(shape.width)
        file.add_feed_forward_length(shape.network)
        file.add_head_count(shape.heads)
        file.add_head_count_kv(shape.kv_heads)
        file.add_key_length(shape.head_dim)
        file.add_value_length(shape.head_dim)
        file.add_vocab_size(shape.vocabulary)
        file.add_rope_dimension_count(shape.head_dim)
        file.add_rope_freq_base(shape.rope_base)
        file.add_layer_norm_rms_eps(shape.eps)
        if shape.experts:
            file.add_expert_count(shape.experts)
            file.add_expert_used_count(shape.experts_used)
        file.add_tokenizer_model("no_vocab")

    def _attention(self, layer: str) -> None:
        shape = self._shape
        rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._vector(f"{layer}attn_norm.weight", shape.width)
        self._matrix(f"{layer}attn_q", rows)
        self._matrix(f"{layer}attn_k", kv_rows)
        self._matrix(f"{layer}attn_v", kv_rows)
        if shape.arch == "qwen2":
            for part, n in (("q", rows), ("k", kv_rows), ("v", kv_rows)):
                self._vector(f"{layer}attn_{part}.bias", n, mean=0.0)
        self._matrix(f"{layer}attn_output", shape.width, rows)

    def _network(self, layer: str) -> None:
        shape = self._shape
        self._vector(f"{layer}ffn_norm.weight", shape.width)
        suffix = ""
        if shape.experts:
            suffix = "_exps"
            router = self._random.standard_normal((shape.experts, shape.width))
            router *= 0.7 / np.sqrt(shape.width)
            self._file.add_tensor(f"{layer}ffn_gate_inp.weight", router.astype(np.float32))
        for part in ("gate", "up"):
            self._matrix(f"{layer}ffn_{part}{suffix}", shape.network, copies=shape.experts)
        self._matrix(f"{layer}ffn_down{suffix}", shape.width, shape.network, copies=shape.experts)

    def _vector(self, name: str, n: int, mean: float = 1.0) -> None:
        drawn = mean + 0.1 * self._random.standard_normal(n)
        self._file.add_tensor(name, drawn.astype(np.float32))

    def _matrix(
        self, name: str, rows: int, columns: int = 0, copies: int = 0, std: float = 0.0
    ) -> None:
        """A matrix (rows, columns; the width by default), or ``copies`` of them."""
        columns = columns or self._shape.width
        kind = self._kind_of(name) if self._kind is None else self._kind
        drawn = self._drawn(kind, rows * max(copies, 1), columns, std or 0.7 / math.sqrt(columns))
        if copies:
            drawn = drawn.reshape(copies, rows, -1)
        self._file.add_tensor(f"{name}.weight", drawn, raw_dtype=kind)

    def _kind_of(self, name: str) -> GGMLQuantizationType:
        """The type of a matrix in Q4_K_M of two layers, the second of which has more bits."""
        is_head = name == ("token_embd" if self._shape.tied else "output")
        return Q6_K if is_head or name in ("blk.1.attn_v", "blk.1.ffn_down") else Q4_K

    def _drawn(
        self, kind: GGMLQuantizationType, rows: int, columns: int, std: float
    ) -> NDArray[np.generic]:
        """Weights (rows, columns), in the type's blocks as uint8 (rows, bytes)."""
        if kind in (F32, F16, BF16):
            values = self._random.standard_normal((rows, columns), np.float32) * np.float32(std)
            if kind == BF16:
                high = (values.view(np.uint32) >> 16).astype(np.uint16)
                return high.view(np.uint8).reshape(rows, -1)
            return values.astype(np.float16 if kind == F16 else np.float32)
        size, nbytes = GGML_QUANT_SIZES[kind]
        return self._blocks(kind, rows * columns // size, nbytes, np.float32(std)).reshape(rows, -1)

    def _blocks(
        self, kind: GGMLQuantizationType, n: int, nbytes: int, std: np.float32
    ) -> NDArray[np.uint8]:
        """Blocks (n, nbytes) of random bits, with scales that give the standard deviation."""
        blocks = np.frombuffer(self._random.bytes(n * nbytes), np.uint8).reshape(n, nbytes).copy()
        place, spread, middle = _SCALES[kind]
        if kind == Q6_K:
            scales = self._random.integers(-20, 21, (n, 16), dtype=np.int8)
            blocks[:, 192:208] = scales.view(np.uint8)
        steps = np.full(n, std / spread, np.float32)
        steps = (steps * self._random.uniform(0.8, 1.2, n).astype(np.float32)).astype(np.float16)
        blocks[:, place : place + 2] = steps.view(np.uint8).reshape(n, 2)
        if middle:
            least = (steps.astype(np.float32) * middle).astype(np.float16)
            blocks[:, place + 2 : place + 4] = least.view(np.uint8).reshape(n, 2)
        return blocks


#: Of each type: the byte of its scale, the standard deviation of its numbers in units of the scale,
#: and the minimum beside the scale that brings the mean to zero (0: there is none).
_SCALES: dict[GGMLQuantizationType, tuple[int, float, float]] = {
    Q3_K: (108, 18.5 * 2.3, 0.0),
    Q4_0: (0, 4.6, 0.0),
    Q4_1: (0, 4.6, -7.5),
    Q4_K: (0, 257.0, 7.5),
    Q5_0: (0, 9.2, 0.0),
    Q5_1: (0, 9.2, -15.5),
    Q5_K: (0, 530.0, 15.5),
    Q6_K: (208, 11.8 * 18.5, 0.0),
}
