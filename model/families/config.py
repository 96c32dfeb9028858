"""What a GGUF file says a model is: sizes from metadata, checked against every tensor's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.rope import RopeConfig, read_rope
from urdir.model.files.model_file import ModelFile
from urdir.ptxgen.kernels.rotation import RopeStyle

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What tells one supported architecture from another.

    A file shows by its tensors whether queries, keys and values have biases and whether queries and
    keys are normalised; an architecture says whether they may.
    """

    rope_style: RopeStyle
    may_have_qk_norm: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(rope_style="interleaved"),
    "qwen2": Architecture(rope_style="half"),
    "qwen3": Architecture(rope_style="half", may_have_qk_norm=True),
}

# ggml types that a matrix may have; norms and RoPE factors are F32 in every file.
_FLOATS = frozenset({"F32", "F16", "BF16"})
_BLOCKS_OF_32 = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})
_BLOCKS_OF_256 = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
MATRIX_TYPES = _FLOATS | _BLOCKS_OF_32 | _BLOCKS_OF_256
VECTOR_TYPES = frozenset({"F32"})


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a model; see `Config.from_gguf`."""

    architecture: str
    n_layers: int
    hidden: int
    n_heads: int  # of queries
    n_kv_heads: int  # n_heads is a multiple
    head_dim: int
    ffn: int
    vocab_size: int  # rows of the embedding; a tokeniser may know fewer
    context_length: int  # trained for
    rms_eps: float
    rope: RopeConfig
    tied: bool  # no output.weight: the embedding is used again
    has_rope_factors: bool  # rope_freqs.weight (rope.dim / 2,) is there
    qkv_bias: bool = False  # attn_{q,k,v}.bias are there
    qk_norm: bool = False  # attn_{q,k}_norm.weight (head_dim,) are there: RMSNorm of each head
    output_bias: bool = False  # output.bias (vocab_size,) is there

    @classmethod
    def from_gguf(cls, gguf: ModelFile) -> Config:
        """Read the metadata and check all tensors; needs no tokeniser.

        Raises UnsupportedError (architecture, experts, tensor types, tensors we would have to
        ignore) or ConfigError (a key or tensor missing or inconsistent), naming the key or tensor.
        """
        try:
            config = _read(gguf)
            _check_sizes(config)
            _check_tensors(config, gguf)
        except (ConfigError, UnsupportedError) as error:
            prefix = f"{gguf.path}: "
            if str(error).startswith(prefix):
                raise
            raise type(error)(prefix + str(error)) from None
        return config


def expected_tensors(config: Config) -> Iterator[tuple[str, Shape]]:
    """Name and shape, rows first, of every tensor that a model of this configuration has."""
    c = config
    q_rows, kv_rows = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    yield "token_embd.weight", (c.vocab_size, c.hidden)
    yield "output_norm.weight", (c.hidden,)
    if not c.tied:
        yield "output.weight", (c.vocab_size, c.hidden)
    if c.has_rope_factors:
        yield "rope_freqs.weight", (c.rope.dim // 2,)
    if c.output_bias:
        yield "output.bias", (c.vocab_size,)
    for layer in range(c.n_layers):
        at = f"blk.{layer}."
        if c.qkv_bias:
            yield at + "attn_q.bias", (q_rows,)
            yield at + "attn_k.bias", (kv_rows,)
            yield at + "attn_v.bias", (kv_rows,)
        if c.qk_norm:
            yield at + "attn_q_norm.weight", (c.head_dim,)
            yield at + "attn_k_norm.weight", (c.head_dim,)
        yield at + "attn_norm.weight", (c.hidden,)
        yield at + "attn_q.weight", (q_rows, c.hidden)
        yield at + "attn_k.weight", (kv_rows, c.hidden)
        yield at + "attn_v.weight", (kv_rows, c.hidden)
        yield at + "attn_output.weight", (c.hidden, q_rows)
        yield at + "ffn_norm.weight", (c.hidden,)
        yield at + "ffn_gate.weight", (c.ffn, c.hidden)
        yield at + "ffn_up.weight", (c.ffn, c.hidden)
        yield at + "ffn_down.weight", (c.hidden, c.ffn)


def _read(gguf: ModelFile) -> Config:
    metadata, arch = gguf.metadata, gguf.architecture
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {arch!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    if experts := metadata.optional(f"{arch}.expert_count", int, 0):
        raise UnsupportedError(f"a mixture of {experts} experts ({arch}.expert_count)")

    def size(name: str, default: int | None = None) -> int:
        key = f"{arch}.{name}"
        if default is None:
            value = metadata.require(key, int)
        else:
            value = metadata.optional(key, int, default)
        if value <= 0:
            raise ConfigError(f"metadata key '{key}' is {value}, expected a positive number")
        return value

    hidden, n_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // n_heads)
    if (value_length := size("attention.value_length", hidden // n_heads)) != head_dim:
        raise UnsupportedError(
            f"heads of {head_dim} for keys and {value_length} for values "
            f"({arch}.attention.key_length, value_length); they must agree"
        )
    context_length = size("context_length")
    style = ARCHITECTURES[arch].rope_style
    return Config(
        architecture=arch,
        n_layers=size("block_count"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=size("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn=size("feed_forward_length"),
        vocab_size=_vocab_size(gguf),
        context_length=context_length,
        rms_eps=metadata.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope=read_rope(metadata, arch, style, head_dim, context_length),
        tied="output.weight" not in gguf.tensors,
        has_rope_factors="rope_freqs.weight" in gguf.tensors,
        qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
        qk_norm=ARCHITECTURES[arch].may_have_qk_norm and "blk.0.attn_q_norm.weight" in gguf.tensors,
        output_bias="output.bias" in gguf.tensors,
    )


def _vocab_size(gguf: ModelFile) -> int:
    """The embedding's rows: the metadata may lack the number, and a vocabulary may be shorter."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _check_sizes(config: Config) -> None:
    if config.n_heads % config.n_kv_heads:
        raise ConfigError(
            f"{config.n_heads} query heads are no multiple of {config.n_kv_heads} KV heads "
            f"({config.architecture}.attention.head_count, head_count_kv)"
        )
    if config.rms_eps <= 0:
        raise ConfigError(
            f"metadata key '{config.architecture}.attention.layer_norm_rms_epsilon' is "
            f"{config.rms_eps}, expected a positive number"
        )


def _check_tensors(config: Config, gguf: ModelFile) -> None:
    expected: dict[str, Shape] = {}
    for name, shape in expected_tensors(config):
        expected[name] = shape
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"tensor '{name}' {_text(shape)} is missing")
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor '{name}' has shape {_text(tensor.shape)}, "
                f"the metadata asks for {_text(shape)}"
            )
        supported = MATRIX_TYPES if len(shape) == 2 else VECTOR_TYPES
        if tensor.type_name not in supported:
            raise UnsupportedError(
                f"tensor '{name}' has type {tensor.type_name}; supported there: "
                f"{', '.join(sorted(supported))}"
            )
    # A tensor left out would change the answers silently.
    for name in gguf.tensors:
        if name not in expected:
            raise UnsupportedError(
                f"tensor '{name}' is no part of a '{config.architecture}' model as supported here"
            )


def _text(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
