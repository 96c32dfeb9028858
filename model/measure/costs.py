"""What tokens cost: bytes that a decode step reads, bytes that its launches move, operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.stored import StoredMatrix, StoredVector, stored_in
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.ptxgen.kernels.attention.decode import DecodeAttention

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile


def bytes_per_step(
    gguf: ModelFile, config: Config, cache: CacheShape, length: int, sequences: int = 1
) -> int:
    """Bytes a decode step must read: every weight once as stored in the file (the embedding table
    only where it is the output matrix, of a mixture's experts as many as a token uses), and the
    keys and values that a token of each sequence attends to at ``length``, once. The states of
    recurrent layers are read and written.
    """
    states = 2 * RecurrentShape.of(config, sequences).nbytes
    return weight_bytes(gguf, config) + (cache.read_nbytes(length) + states) * sequences


def weight_bytes(gguf: ModelFile, config: Config) -> int:
    """Bytes of the weights that a token needs, as stored in the file."""
    total = 0.0
    for stored, values in _values_of_a_token(config):
        total += gguf.tensors[stored.name].nbytes * values / math.prod(stored.shape)
    return round(total)


def flops_of(config: Config, tokens: int, start: int = 0, outputs: int = 1) -> float:
    """Operations of ``tokens`` of one sequence from ``start`` on: two for each value of the
    matrices that a token is multiplied with, the output matrix for ``outputs`` of them alone, and
    two for each value of the keys and values that it attends to, of latent vectors those of heads.
    """
    output = config.output.matrix
    each = {
        stored: values
        for stored, values in _values_of_a_token(config)
        if isinstance(stored, StoredMatrix)
    }
    last = each.pop(output, 0.0)
    total = 2 * (tokens * sum(each.values()) + outputs * last)
    for layer in config.layers:
        if (mixer := layer.attention) is not None:
            mixer = mixer.written_out or mixer
            length = start + (tokens + 1) / 2  # on average
            keys = min(length, mixer.span or length)
            total += 2 * tokens * keys * mixer.heads * (mixer.key_dim + mixer.value_dim)
    return total


def _values_of_a_token(config: Config) -> Iterator[tuple[StoredMatrix | StoredVector, float]]:
    """Everything stored that a token needs, with the number of its values: of a mixture's experts
    as many as it uses; no tables, where it looks up a row; of a latent vector's two forms one."""
    others = {config.embedding, config.positions} - {config.output.matrix}
    if config.layer_embeddings is not None:
        others.add(config.layer_embeddings.table)
    latents = (mixer.latent for mixer in config.attentions)
    others |= {of.keys.matrix for of in latents if of is not None and of.keys is not None}
    shares = {
        stored: mixture.router.used / mixture.router.experts
        for layer in config.layers
        for mixture in layer.networks
        if isinstance(mixture, Mixture)
        for part in (mixture.gate, mixture.up, mixture.down)
        for stored in stored_in(part)
    }
    for stored in stored_in(config):
        if stored not in others:
            size = stored.rows * stored.cols if isinstance(stored, StoredMatrix) else stored.size
            yield stored, size * shares.get(stored, 1.0)


def moved_per_step(plan: Plan, length: int, sequences: int = 1) -> int:
    """Bytes that the launches of a decode step's plan move, by their own account.

    Attention counts the ``length`` stored keys and values, not the plan's capacity.
    """
    total = 0
    for operation in plan:
        kernel = operation.kernel if isinstance(operation, Launch) else None
        if isinstance(kernel, DecodeAttention):
            others = (u for u in operation.uses() if u.name not in ("k_cache", "v_cache"))
            total += sum(use.stop - use.start for use in others)
            keys = min(length, kernel.scores.span or length, kernel.layout.max_len)
            total += keys * kernel.layout.pair_nbytes * sequences
        else:
            total += operation.bytes_moved()
    return total
