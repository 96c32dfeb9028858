"""Memory of n-grams, read from a file: rows of a table for the last tokens, gated into the streams
of a residual (Qwen 4).

Keys, under the architecture's name: ple.layers (one layer at most), ple.ngram_size,
ple.heads_per_ngram, ple.conv_kernel, ple.eos_token_id, ple.layer_multipliers, ple.head_offsets,
ple.head_vocab_sizes; embedding_length_per_layer_input (values of a row). ple.image_token_id is of
no use for text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.hyper import norm_of_streams
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.stored import Linear, Normalization, StoredMatrix, StoredVector
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.ngram_rows import NgramHash
from urdir.ptxgen.kernels.recurrent.dilated_conv import MOST_BACK, ring_slots
from urdir.ptxgen.kernels.streams import STREAMS


@dataclass(frozen=True, slots=True)
class NgramMemory(Recurrent):
    """g + silu(conv(norm g)), with g = `GateStreams` of the norms of ``key`` e and of the streams,
    and of ``value`` e; e are the rows of the ``table`` that ``hash`` gives for the last tokens,
    side by side. Norms are of each stream. The taps of ``conv`` (streams * hidden, taps) are
    ``dilation`` tokens apart."""

    kind: ClassVar = "memory of n-grams"

    table: StoredMatrix
    hash: NgramHash
    key: Linear
    o: Linear  # the values
    key_norm: Normalization
    query_norm: Normalization
    conv_norm: Normalization
    conv: StoredVector
    dilation: int

    @property
    def taps(self) -> int:
        """Tokens that a result of the convolution depends on."""
        return self.conv.shape[-1]

    @property
    def channels(self) -> int:
        """Values of all streams."""
        return self.conv.size // self.taps

    @property
    def state(self) -> Mapping[str, int]:
        """Number of values of a sequence's state, by name."""
        return self.state_with(0)

    def state_with(self, drafts: int) -> Mapping[str, int]:
        """The same in steps of up to ``drafts`` drafts of a sequence."""
        slots = ring_slots((self.taps - 1) * self.dilation, drafts)
        return {"ngram tail": self.channels * slots}


def ngram_layer(file: Reader) -> int | None:
    """The layer with a memory of n-grams, if there is one."""
    layers = file.integers("ple.layers")
    if len(layers) > 1:
        raise UnsupportedError(
            f"{file.key('ple.layers')} lists {len(layers)} layers; one is supported"
        )
    if layers and not 0 <= layers[0] < file.layer_count():
        raise ConfigError(f"{file.key('ple.layers')}: there is no layer {layers[0]}")
    return layers[0] if layers else None


def ngram_memory(file: Reader, layer: int) -> NgramMemory:
    """The memory of n-grams of a layer."""
    n, each, taps = (
        file.size(f"ple.{name}") for name in ("ngram_size", "heads_per_ngram", "conv_kernel")
    )
    width = file.size("embedding_length_per_layer_input")
    hidden = file.hidden
    streams = STREAMS * file.hidden
    if not 2 <= taps <= 1 + MOST_BACK // n:
        raise UnsupportedError(
            f"{file.key('ple.conv_kernel')} is {taps}: supported are 2 or more taps, {n} tokens "
            f"apart, of which the first is {MOST_BACK} tokens back at most"
        )
    hash = _hash(file, n, each)
    if hash.heads * width != hidden:
        raise ConfigError(
            f"{hash.heads} rows of {width} values ({file.key('embedding_length_per_layer_input')}) "
            f"are not as wide as the stream, {hidden} values"
        )
    # a folder has the table among the layer's tensors
    name, at = ("ple_table", layer) if file.of_folder else ("per_layer_token_embd", None)
    stored = f"{name}.weight" if at is None else f"blk.{at}.{name}.weight"
    rows, *_ = file.stored.get(stored) or (hash.rows,)
    if rows < hash.rows:
        raise ConfigError(
            f"tensor '{stored}' has {rows} rows, {file.key('ple.head_offsets')} and "
            f"ple.head_vocab_sizes require {hash.rows}"
        )
    return NgramMemory(
        table=file.matrix(name, at, rows, width),
        hash=hash,
        key=file.linear("ple_key", layer, streams, hidden),
        o=file.linear("ple_value", layer, hidden, hidden),
        key_norm=norm_of_streams(file, "ple_norm_key", layer),
        query_norm=norm_of_streams(file, "ple_norm_query", layer),
        conv_norm=norm_of_streams(file, "ple_norm_conv", layer),
        conv=file.vector("ple_conv1d.weight", layer, streams, taps),
        dilation=n,
    )


def _hash(file: Reader, n: int, each: int) -> NgramHash:
    """What rows of the table the last ``n`` tokens have."""
    file.optional("ple.image_token_id", int, 0)
    given: list[tuple[int, ...]] = []
    counts = {"layer_multipliers": n, "head_offsets": (n - 1) * each}
    counts["head_vocab_sizes"] = counts["head_offsets"]
    for name, count in counts.items():
        values = file.integers(f"ple.{name}", wide=name == "layer_multipliers")
        if len(values) < count or min(values, default=0) < 0:
            raise ConfigError(
                f"metadata key '{file.key(f'ple.{name}')}' has {len(values)} numbers, expected "
                f"{count} from 0 on"
            )
        given.append(tuple(values[:count]))
    boundary = file.required("ple.eos_token_id", int)
    if not 0 <= boundary < 1 << 31:
        raise ConfigError(f"metadata key '{file.key('ple.eos_token_id')}' is {boundary}: no token")
    multipliers, offsets, sizes = given
    try:
        return NgramHash(multipliers, offsets, sizes, boundary)
    except PtxgenError as error:
        raise UnsupportedError(f"{file.key('ple')}: {error}") from None
