"""EAGLE-3 drafts (Li et al. 2025, arXiv 2503.01840) for a model: one layer that reads the streams
of some of the model's layers. llama.cpp: `src/models/eagle3.cpp`.

    g = fc . [the streams before the target layers]           with norm_before_fc: fc . norm([..])
    a = [norm(embedding of the next token) ; norm(g)]
    x = g + O attention(rope(Q a), rope(K a), V a)            with norm_before_residual: norm(g) +
    x += down(silu(gate x') * up x')                          x' = norm(x)
    logits of the token after the next = output . norm(x)

When the draft continues from a drafted token, x replaces g. Keys: those of `parts` and
`rope`, attention.layer_norm_rms_epsilon; target_layers, target_hidden_size, norm_before_fc,
norm_before_residual. Tensors: fc, enc.output_norm (before fc), attn_norm (of the embedding),
attn_norm_2 (of g); d2t, the model's token of each of the draft's, where the draft has fewer. What
it lacks of token_embd and output is the model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.check import check_tensors
from urdir.model.families.config import Config
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.parts import dense, head_dims, heads, rms_norm, sequential
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.stored import Linear, Normalization, Stored, StoredMatrix
from urdir.model.files.model_file import ModelFile
from urdir.ptxgen.kernels.norm import Norm

ARCHITECTURE = "eagle3"
#: How many streams a draft may read.
MOST_STREAMS = 16
_MAP = "d2t"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Eagle3(Config):
    """A draft as its file describes it: a model of one layer, of ``hidden`` values. The matrices of
    its attention have twice as many columns. Where it ``shares`` them, `embedding` and `output`
    are references to the model's."""

    target_layers: tuple[int, ...]
    target_hidden: int
    fc: Linear
    streams_norm: Normalization | None
    token_norm: Normalization
    hidden_norm: Normalization
    norm_before_residual: bool
    shares_embedding: bool
    shares_output: bool
    token_map: bool

    @property
    def lent(self) -> frozenset[Stored]:
        """What the model has."""
        embedding = [self.embedding] if self.shares_embedding else []
        output = [self.output.matrix] if self.shares_output else []
        return frozenset([*embedding, *output])

    @property
    def mixer(self) -> Attention:
        """The attention of its layer."""
        mixer = self.layers[0].attention
        assert mixer is not None
        return mixer

    @property
    def network(self) -> tuple[Dense, Normalization]:
        """The network of its layer, and the norm before it."""
        branch = self.layers[0].blocks[1].branches[0]
        assert isinstance(branch.network, Dense)
        assert branch.norm is not None
        return branch.network, branch.norm


def eagle3(gguf: ModelFile, target: Config) -> Eagle3:
    """The draft in a file, for the model ``target``. Raises ConfigError for metadata or tensors
    that are missing or inconsistent, UnsupportedError for what is not supported or does not fit the
    model: hidden states, layers, vocabulary."""
    try:
        found = _described(Reader.of(gguf), target)
        check_tensors(found, gguf)
        if found.token_map and (of := gguf.tensors[_MAP].type_name) != "I64":
            raise UnsupportedError(f"tensor '{_MAP}' has type {of}; supported there: I64")
        _check_fit(found, target)
    except (ConfigError, UnsupportedError) as error:
        prefix = f"{gguf.path}: "
        text = str(error)
        raise type(error)(text if text.startswith(prefix) else prefix + text) from None
    return found


@dataclass(frozen=True, slots=True)
class Reads:
    """What a draft reads of a model: the streams before ``layers``, of ``hidden`` values. It has
    ``own_hidden`` values and ``tokens`` of its own (0: those of the model), and takes the
    ``shared`` tensors of the model."""

    layers: tuple[int, ...]
    hidden: int
    own_hidden: int
    tokens: int
    shared: tuple[str, ...]


def reads_of(gguf: ModelFile) -> Reads:
    """What the draft in a file reads, of whatever model. Raises ConfigError."""
    file = Reader.of(gguf)
    shared = (name for name in ("token_embd", "output") if not file.has(f"{name}.weight"))
    return Reads(
        _target_layers(file),
        file.size("target_hidden_size", file.hidden),
        file.hidden,
        _mapped(file) if file.has(_MAP) else 0,
        tuple(shared),
    )


def read_token_map(gguf: ModelFile, target: Config) -> npt.NDArray[np.uint32]:
    """The model's token of each of the draft's, (n,) u32. Raises ConfigError for one that the model
    does not have."""
    tensor = gguf.tensors[_MAP]
    tokens = np.ascontiguousarray(tensor.data[:]).view(np.int64)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= target.vocab_size))
    if len(wrong):
        raise ConfigError(
            f"{gguf.path}: tensor '{_MAP}' maps token {wrong[0]} to {tokens[wrong[0]]}, the model "
            f"has {target.vocab_size} tokens"
        )
    return tokens.astype(np.uint32)


def _described(file: Reader, target: Config) -> Eagle3:
    if file.layer_count() != 1:
        raise UnsupportedError(f"a draft of {file.layer_count()} layers: one is supported")
    norm, hidden = rms_norm(file), file.hidden
    layers, streams = _target_layers(file), file.size("target_hidden_size", hidden)
    wide = len(layers) * streams
    before_fc = file.optional("norm_before_fc", bool, False)
    description = _layer(file, norm, target)
    return Eagle3(
        **{field.name: getattr(description, field.name) for field in fields(description)},
        target_layers=layers,
        target_hidden=streams,
        fc=file.linear("fc", None, hidden, wide, bias="absent"),
        streams_norm=file.norm("enc.output_norm", None, norm, wide) if before_fc else None,
        token_norm=file.norm("attn_norm", 0, norm),
        hidden_norm=file.norm("attn_norm_2", 0, norm),
        norm_before_residual=file.optional("norm_before_residual", bool, False),
        shares_embedding=not file.has("token_embd.weight"),
        shares_output=not file.has("output.weight"),
        token_map=file.has(_MAP),
    )


def _target_layers(file: Reader) -> tuple[int, ...]:
    layers = tuple(file.integers("target_layers"))
    if not 1 <= len(layers) <= MOST_STREAMS:
        raise ConfigError(
            f"metadata key '{file.key('target_layers')}' has {len(layers)} layers, expected 1 to "
            f"{MOST_STREAMS}"
        )
    return layers


def _layer(file: Reader, norm: Norm, target: Config) -> Description:
    """The draft as a model of one layer, with its own embedding and output or the model's."""
    hidden, embedding = file.hidden, _lent(target.embedding)
    if file.has("token_embd.weight"):
        embedding = file.matrix("token_embd", None, target.vocab_size, hidden)
    output = Linear(_lent(target.output.matrix))
    if file.has("output.weight"):
        rows = _mapped(file) if file.has(_MAP) else target.vocab_size
        output = Linear(file.matrix("output", None, rows, hidden))
    elif file.has(_MAP):
        raise ConfigError(f"tensor '{_MAP}' needs an output of the draft's own")
    before = file.norm("ffn_norm", 0, norm)
    layer = sequential(_attention(file), dense(file, 0, bias="absent"), (None, before))
    return Description(
        architecture=file.architecture,
        layers=(layer,),
        hidden=hidden,
        vocab_size=output.rows,
        context_length=file.size("context_length"),
        embedding=embedding,
        output=output,
        output_norm=file.norm("output_norm", None, norm),
        unused_tensors=(_MAP,) if file.has(_MAP) else (),
        ignored_keys=file.ignored_keys,
    )


def _lent(of: StoredMatrix) -> StoredMatrix:
    """A reference to a matrix of the model, by a name that the draft's file has not."""
    return replace(of, name=f"target {of.name}")


def _mapped(file: Reader) -> int:
    shape = file.stored[_MAP]
    if len(shape) != 1 or not 0 < shape[0] < 2**31:
        raise ConfigError(f"tensor '{_MAP}' has shape {shape}, expected a token for each row")
    return shape[0]


def _attention(file: Reader) -> Attention:
    (queries, keys), (dim, value_dim) = heads(file, 0), head_dims(file)
    hidden = file.hidden

    def product(name: str, rows: int) -> Linear:
        return file.linear(f"attn_{name}", 0, rows, 2 * hidden, bias="absent")

    return Attention(
        heads=queries,
        kv_heads=keys,
        key_dim=dim,
        value_dim=value_dim,
        scale=1.0 / math.sqrt(dim),
        q=product("q", queries * dim),
        k=product("k", keys * dim),
        v=product("v", keys * value_dim),
        o=file.linear("attn_output", 0, hidden, queries * value_dim, bias="absent"),
        rope=read_rope(file, "interleaved", dim),
    )


def _check_fit(draft: Eagle3, target: Config) -> None:
    """Raise UnsupportedError unless a draft is one of this model."""
    if draft.target_hidden != target.hidden:
        raise UnsupportedError(
            f"a draft of hidden states of {draft.target_hidden} values "
            f"({ARCHITECTURE}.target_hidden_size), the model's have {target.hidden}"
        )
    for layer in draft.target_layers:
        if not 0 <= layer <= target.n_layers:
            raise UnsupportedError(
                f"a draft of the stream before layer {layer} ({ARCHITECTURE}.target_layers), the "
                f"model has {target.n_layers} layers"
            )
    shared = {"token_embd": draft.shares_embedding, "output": draft.shares_output}
    names = [name for name, is_shared in shared.items() if is_shared]
    if names and draft.hidden != target.hidden:
        raise UnsupportedError(
            f"a draft of {draft.hidden} values ({ARCHITECTURE}.embedding_length) without "
            f"{' and '.join(names)} of its own: the model's have {target.hidden}"
        )
