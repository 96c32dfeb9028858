"""What drafts in files of their own have in common: the model's streams that they read, and what
they take of the model.

Keys, under the architecture's name: target_layers, target_hidden_size (default: the draft's own).
Tensors: fc, of the model's streams side by side; token_embd and output, where they are not the
model's; d2t, the model's token of each of the draft's, where the draft has fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.check import check_tensors
from urdir.model.families.config import Config
from urdir.model.families.description import Description, fields_of
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import head_dims, heads
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Linear, Stored, StoredMatrix
from urdir.model.files.limits import DRAFT_STREAMS
from urdir.model.files.model_file import ModelFile
from urdir.ptxgen.kernels.norm import Norm

MAP = "d2t"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DraftConfig(Config):
    """A draft as its file describes it, for one model: ``fc`` reads the streams before
    ``target_layers``, of ``target_hidden`` values each. Where it ``shares`` them, `embedding` and
    `output` are references to the model's. ``token_map``: the file has one."""

    target_layers: tuple[int, ...]
    target_hidden: int
    fc: Linear
    shares_embedding: bool
    shares_output: bool
    token_map: bool

    @property
    def lent(self) -> frozenset[Stored]:
        """What the model has."""
        embedding = [self.embedding] if self.shares_embedding else []
        output = [self.output.matrix] if self.shares_output else []
        return frozenset([*embedding, *output])


_D = TypeVar("_D", bound=DraftConfig)


def described(gguf: ModelFile, target: Config, describe: Callable[[Reader, Config], _D]) -> _D:
    """What ``describe`` makes of a file, checked against its tensors and the model. Raises
    ConfigError for metadata or tensors that are missing or inconsistent, UnsupportedError for what
    is not supported or does not fit the model: hidden states, layers, vocabulary."""
    try:
        found = describe(Reader.of(gguf), target)
        check_tensors(found, gguf)
        if found.token_map and (of := gguf.tensors[MAP].type_name) != "I64":
            raise UnsupportedError(f"tensor '{MAP}' has type {of}; supported there: I64")
        _check_fit(found, target)
    except (ConfigError, UnsupportedError) as error:
        prefix = f"{gguf.path}: "
        text = str(error)
        raise type(error)(text if text.startswith(prefix) else prefix + text) from None
    return found


def read_target_layers(file: Reader) -> tuple[int, ...]:
    """The layers before which the model's streams are read."""
    layers = tuple(file.integers("target_layers"))
    where = f"metadata key '{file.key('target_layers')}'"
    if not layers:
        raise ConfigError(f"{where} has 0 layers, expected 1 or more")
    DRAFT_STREAMS.check(len(layers), where, ConfigError)
    return layers


def read_ends(file: Reader, target: Config) -> tuple[StoredMatrix, Linear]:
    """Embedding and output, those that the file has or the model's."""
    hidden, embedding = file.hidden, _lent(target.embedding)
    if file.has("token_embd.weight"):
        embedding = file.matrix("token_embd", None, target.vocab_size, hidden)
    if file.has("output.weight"):
        rows = mapped(file) or target.vocab_size
        return embedding, Linear(file.matrix("output", None, rows, hidden))
    if file.has(MAP):
        raise ConfigError(f"tensor '{MAP}' needs an output of the draft's own")
    return embedding, Linear(_lent(target.output.matrix))


def draft_fields(
    file: Reader,
    target: Config,
    layers: tuple[LayerConfig, ...],
    norm: Norm,
    target_layers: tuple[int, ...],
) -> dict[str, Any]:
    """The fields of `DraftConfig` for a draft of these layers."""
    embedding, output = read_ends(file, target)
    streams = file.size("target_hidden_size", file.hidden)
    description = Description(
        architecture=file.architecture,
        layers=layers,
        hidden=file.hidden,
        vocab_size=output.rows,
        context_length=file.size("context_length"),
        embedding=embedding,
        output=output,
        output_norm=file.norm("output_norm", None, norm),
        unused_tensors=(MAP,) if file.has(MAP) else (),
        ignored_keys=file.ignored_keys,
    )
    return {
        **fields_of(description),
        "target_layers": target_layers,
        "target_hidden": streams,
        "fc": file.linear("fc", None, file.hidden, len(target_layers) * streams),
        "shares_embedding": not file.has("token_embd.weight"),
        "shares_output": not file.has("output.weight"),
        "token_map": file.has(MAP),
    }


def mapped(file: Reader) -> int:
    """How many tokens a draft has that are mapped to the model's; 0 where they are the model's."""
    if not file.has(MAP):
        return 0
    shape = file.stored[MAP]
    if len(shape) != 1 or not 0 < shape[0] < 2**31:
        raise ConfigError(f"tensor '{MAP}' has shape {shape}, expected a token for each row")
    return shape[0]


def read_token_map(gguf: ModelFile, target: Config) -> npt.NDArray[np.uint32]:
    """The model's token of each of the draft's, (n,) u32. Raises ConfigError for one that the model
    does not have."""
    tokens = np.ascontiguousarray(gguf.tensors[MAP].data[:]).view(np.int64)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= target.vocab_size))
    if len(wrong):
        raise ConfigError(
            f"{gguf.path}: tensor '{MAP}' maps token {wrong[0]} to {tokens[wrong[0]]}, the model "
            f"has {target.vocab_size} tokens"
        )
    return tokens.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Reads:
    """What a draft reads of a model: the streams before ``layers``, of ``hidden`` values (0: as
    many as the model has). It has ``own_hidden`` values and ``tokens`` of its own (0: those of the
    model), and takes the ``shared`` tensors of the model. ``weights`` are bytes in its file,
    ``cached`` the values that it keeps of a token."""

    layers: tuple[int, ...]
    hidden: int
    own_hidden: int
    tokens: int
    shared: tuple[str, ...]
    weights: int
    cached: int


def reads_of(gguf: ModelFile) -> Reads:
    """What the draft in a file reads, of whatever model; no layers where it depends on the model.
    Raises ConfigError."""
    file = Reader.of(gguf)
    shared = (name for name in ("token_embd", "output") if not file.has(f"{name}.weight"))
    hidden = file.count("target_hidden_size")
    layers = read_target_layers(file) if file.has_key("target_layers") else ()
    cached = 0
    if file.anywhere("attn_k.weight"):  # else it reads the model's cache
        layers_of = range(file.layer_count())
        cached = sum(heads(file, index)[1] for index in layers_of) * sum(head_dims(file))
    return Reads(
        *(layers, hidden, file.hidden, mapped(file), tuple(shared)),
        weights=sum(tensor.nbytes for tensor in gguf.tensors.values()),
        cached=cached,
    )


def _lent(of: StoredMatrix) -> StoredMatrix:
    """A reference to a matrix of the model, by a name that the draft's file has not."""
    return replace(of, name=f"target {of.name}")


def _check_fit(draft: DraftConfig, target: Config) -> None:
    """Raise UnsupportedError unless a draft is one of this model."""
    kind = draft.architecture
    if draft.target_hidden != target.hidden:
        raise UnsupportedError(
            f"a draft of hidden states of {draft.target_hidden} values "
            f"({kind}.target_hidden_size), the model's have {target.hidden}"
        )
    for layer in draft.target_layers:
        if not 0 <= layer <= target.n_layers:
            raise UnsupportedError(
                f"a draft of the stream before layer {layer} ({kind}.target_layers), the model has "
                f"{target.n_layers} layers"
            )
    shared = {"token_embd": draft.shares_embedding, "output": draft.shares_output}
    names = [name for name, is_shared in shared.items() if is_shared]
    if names and draft.hidden != target.hidden:
        raise UnsupportedError(
            f"a draft of {draft.hidden} values ({kind}.embedding_length) without "
            f"{' and '.join(names)} of its own: the model's have {target.hidden}"
        )
