"""The share of a model that one of several ranks has (tensor parallelism, arXiv 1909.08053).

A rank has some heads of attention, with the keys and values that these need, and some of the inner
values of dense networks and of every expert: rows of the matrices before them, columns of the
matrix after. The ranks' results of that last matrix add up to the network's; its bias is added by
rank 0 alone. Everything else is whole on every rank: the embedding, norms, routers, and networks
that cannot be cut evenly enough. Each rank makes the logits of a part of the vocabulary.

Columns can be cut between blocks of the tensor's type only: every 32 values, or every 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention, OutputGate, QkNorm
from urdir.model.families.description import Config, Share
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.stored import Linear, Normalization, StoredVector

#: Inner values of dense networks, and logits, come in as many at once where they can: whole groups
#: of the kernels' accesses, whole tiles of rows.
_GROUP, _TILE = 32, 16

#: The block of each tensor's type: values of a row that lie together.
Blocks = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Some of a row of things: from number ``first`` on, ``count`` of them."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """The number after the last."""
        return self.first + self.count

    def times(self, width: int) -> Span:
        """The values of these things, of ``width`` each."""
        return Span(width * self.first, width * self.count)


def shared(config: Config, blocks: Blocks, rank: int, ranks: int) -> Config:
    """The share of ``rank``, of ``ranks``, of a whole model.

    Raises UnsupportedError, naming layer and network, for mixers with a state and latent attention.
    """
    for index, layer in enumerate(config.layers):
        for network in layer.networks:
            _check(index, network)
    vocabulary = _logits(config.output.rows, ranks)
    mine = Span(sum(vocabulary[:rank]), vocabulary[rank])
    own_caches = all(mixer.shares_cache_of is None for mixer in config.attentions)
    cutter = _Cutter(blocks, rank, ranks, cuts_attention=own_caches)
    return replace(
        config,
        layers=tuple(map(cutter.layer, config.layers)),
        output=_rows(config.output, mine),
        share=Share(rank, vocabulary),
    )


def cut_networks(share: Config) -> tuple[int, int]:
    """How many networks a rank has a part of, and how many there are."""
    networks = [network for layer in share.layers for network in layer.networks]
    last = [n.o for n in networks if isinstance(n, Attention)]
    last += [n.down for n in networks if isinstance(n, Dense | Mixture)]
    return sum(linear.matrix.columns is not None for linear in last), len(networks)


def spans(things: int, ranks: int, fits: Callable[[int], bool]) -> list[Span] | None:
    """``things`` for each of ``ranks``, as evenly as boundaries that fit allow; None where a rank
    would have none."""
    allowed = [at for at in range(things + 1) if at in (0, things) or fits(at)]
    ends = [0]
    for rank in range(1, ranks + 1):
        ideal = things * rank / ranks
        left = [at for at in allowed if at > ends[-1]]
        if not left:
            return None
        ends.append(things if rank == ranks else min(left, key=lambda at: abs(at - ideal)))
    if ends[-2] >= things:
        return None
    return [Span(a, b - a) for a, b in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts networks for one rank."""

    blocks: Blocks
    rank: int
    ranks: int
    cuts_attention: bool

    def layer(self, of: LayerConfig) -> LayerConfig:
        """A layer with its networks cut."""
        return replace(of, blocks=tuple(map(self._block, of.blocks)))

    def _block(self, of: Block) -> Block:
        return replace(of, branches=tuple(map(self._branch, of.branches)))

    def _branch(self, of: Branch) -> Branch:
        return replace(of, network=self._network(of.network))

    def _network(self, of: Network) -> Network:
        if isinstance(of, Attention):
            return self._attention(of)
        if isinstance(of, Mixture):
            return self._mixture(of)
        return self._dense(of) if isinstance(of, Dense) else of

    def _attention(self, of: Attention) -> Attention:
        """Its heads and their keys, where they can be cut."""
        found = self._heads(of) if self.cuts_attention and _has_separate_heads(of) else None
        if found is None:
            return of
        heads, keys = found
        gate = of.gate
        if gate is not None:
            each = gate.linear.rows // of.heads
            gate = OutputGate(_rows(gate.linear, heads.times(each)), gate.activation)
        return replace(
            of,
            heads=heads.count,
            kv_heads=keys.count,
            q=_rows(of.q, heads.times(of.key_dim)),
            k=of.k and _rows(of.k, keys.times(of.key_dim)),
            v=of.v and _rows(of.v, keys.times(of.value_dim)),
            o=self._columns(of.o, heads.times(of.value_dim)),
            qk_norm=of.qk_norm and _head_norms(of.qk_norm, of, heads, keys),
            sinks=of.sinks and _values(of.sinks, heads),
            gate=gate,
        )

    def _heads(self, of: Attention) -> tuple[Span, Span] | None:
        """This rank's heads of queries and of keys; None where they cannot be cut."""
        group, block = of.heads // of.kv_heads, self._block_of(of.o)
        if self.ranks <= of.kv_heads:
            width = group * of.value_dim
            found = spans(of.kv_heads, self.ranks, lambda at: at * width % block == 0)
            return None if found is None else (found[self.rank].times(group), found[self.rank])
        each, odd = divmod(of.heads, self.ranks)
        if odd or self.ranks % of.kv_heads or each * of.value_dim % block:
            return None
        return Span(self.rank * each, each), Span(self.rank * of.kv_heads // self.ranks, 1)

    def _dense(self, of: Dense) -> Dense:
        """Its inner values, where they can be cut."""
        inner = self._inner(of.width, of.down)
        matrices = [linear for linear in (of.gate, of.up) if linear is not None]
        if inner is None or not all(map(_has_rows_together, matrices)):
            return of
        return replace(
            of,
            up=_rows(of.up, inner),
            gate=of.gate and _rows(of.gate, inner),
            down=self._columns(of.down, inner),
            divisors=of.divisors and _values(of.divisors, inner),
        )

    def _mixture(self, of: Mixture) -> Mixture:
        """The inner values of every expert, where they can be cut, and of the shared network.
        Experts of a narrower vector stay whole: there is a norm after their sum."""
        of = replace(of, shared=of.shared and self._dense(of.shared))
        inner = self._inner(of.width, of.down)
        if inner is None or of.latent is not None:
            return of
        return replace(
            of,
            up=rows_of_each(of.up, of.width, inner),
            gate=of.gate and rows_of_each(of.gate, of.width, inner),
            down=self._columns(of.down, inner),
        )

    def _inner(self, width: int, down: Linear) -> Span | None:
        """This rank's inner values of a network; None where they cannot be cut."""
        unit = max(self._block_of(down), _GROUP)
        found = spans(width, self.ranks, lambda at: at % unit == 0)
        return None if found is None else found[self.rank]

    def _columns(self, of: Linear, some: Span) -> Linear:
        """Some columns; the first rank adds the bias."""
        matrix = of.matrix.cut_columns(some.first, some.stop)
        return Linear(matrix, of.bias if self.rank == 0 else None)

    def _block_of(self, of: Linear) -> int:
        return self.blocks[of.matrix.name]


def _check(index: int, network: Network) -> None:
    """Raise UnsupportedError for what is on one GPU only."""
    reason = ""
    if isinstance(network, Recurrent):
        reason = "a mixer with a state"
    elif isinstance(network, Attention) and network.latent is not None:
        reason = "latent attention"
    if reason:
        raise UnsupportedError(
            f"layer {index} has {reason}, which runs on one GPU only: give no gpus"
        )


def _has_separate_heads(of: Attention) -> bool:
    """Whether nothing in attention is about all heads together."""
    norm_of_all = of.qk_norm is not None and of.qk_norm.over == "row"
    matrices = [of.q, of.k, of.v, None if of.gate is None else of.gate.linear]
    together = all(_has_rows_together(linear) for linear in matrices if linear is not None)
    return together and not norm_of_all and not of.max_bias


def _has_rows_together(of: Linear) -> bool:
    """Whether the rows are one run of the tensor's."""
    bias = of.bias is None or not of.bias.period
    return of.matrix.rows == of.matrix.each and bias


def _rows(of: Linear, some: Span) -> Linear:
    matrix = replace(of.matrix, first=of.matrix.first + some.first, each=some.count)
    return Linear(matrix, of.bias and _values(of.bias, some))


def rows_of_each(of: Linear, width: int, some: Span) -> Linear:
    """Some rows of every expert's ``width``, which lie one expert after the other, perhaps beside
    those of another matrix."""
    matrix, bias = of.matrix, of.bias
    period = width if matrix.each == matrix.period else matrix.period
    if bias is not None:
        size, first = bias.size // width * some.count, bias.first + some.first
        bias = replace(bias, first=first, size=size, each=some.count, period=period)
    first = matrix.first + some.first
    return Linear(replace(matrix, first=first, each=some.count, period=period), bias)


def _values(of: StoredVector, some: Span) -> StoredVector:
    return of.part(some.first, some.count)


def _head_norms(of: QkNorm, mixer: Attention, heads: Span, keys: Span) -> QkNorm:
    """Norms with weights for each head have those of some heads."""

    def norm(each: Normalization, some: Span) -> Normalization:
        def cut(vector: StoredVector | None) -> StoredVector | None:
            if vector is None or vector.size == mixer.key_dim:
                return vector
            return _values(vector, some.times(mixer.key_dim))

        return replace(each, weight=cut(each.weight), bias=cut(each.bias))

    return replace(of, q=norm(of.q, heads), k=norm(of.k, keys))


def _logits(count: int, ranks: int) -> tuple[int, ...]:
    """How many logits each rank makes."""
    found = spans(count, ranks, lambda at: at % _TILE == 0) or spans(count, ranks, bool)
    if found is None:
        raise UnsupportedError(f"a vocabulary of {count} is no work for {ranks} GPUs")
    return tuple(span.count for span in found)
