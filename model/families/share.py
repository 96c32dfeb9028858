"""Tensor parallelism (arXiv 1909.08053): the part of a model on one of several ranks.

A rank has some attention heads with their KV heads, some heads or channels of recurrent mixers
(`share_recurrent`), and some inner values of dense FFNs and of every expert: rows of the first
matrices, columns of the last. The ranks' results of that last matrix sum to the FFN's; rank 0 adds
its bias. Everything else is replicated: embedding, norms, routers, latent vectors, and networks
that cannot be cut evenly enough. Each rank computes the logits of a part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention, Latent, OutputGate, QkNorm
from urdir.model.families.config import Config
from urdir.model.families.cut import (
    Blocks,
    Cut,
    Span,
    of_heads,
    rows_of_each,
    spans,
    values_of_heads,
)
from urdir.model.families.description import Share
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.share_recurrent import share_of_recurrent
from urdir.model.families.stored import Normalization, StoredVector

#: Logits are cut in multiples of this where possible: whole tiles of rows.
_TILE = 16


def shared(config: Config, blocks: Blocks, rank: int, ranks: int) -> Config:
    """The share of rank ``rank`` of ``ranks`` of a whole model. Raises UnsupportedError if there
    are more ranks than logits."""
    vocabulary = _logits(config.output.rows, ranks)
    mine = Span(sum(vocabulary[:rank]), vocabulary[rank])
    own_caches = all(mixer.shares_cache_of is None for mixer in config.attentions)
    cutter = _Cutter(Cut(blocks, rank, ranks), cuts_attention=own_caches)
    return replace(
        config,
        layers=tuple(map(cutter.layer, config.layers)),
        output=config.output.pick(mine.run),
        share=Share(rank, vocabulary),
    )


def cut_networks(share: Config) -> tuple[int, int]:
    """How many networks are cut, and how many there are in all."""
    networks = [network for layer in share.layers for network in layer.networks]
    last = [n.o for n in networks if isinstance(n, Attention | Recurrent)]
    last += [n.down for n in networks if isinstance(n, Dense | Mixture)]
    return sum(linear.matrix.columns is not None for linear in last), len(networks)


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts the networks of one rank."""

    cut: Cut
    cuts_attention: bool

    def layer(self, of: LayerConfig) -> LayerConfig:
        """Cut the networks of a layer."""
        return replace(of, blocks=tuple(map(self._block, of.blocks)))

    def _block(self, of: Block) -> Block:
        return replace(of, branches=tuple(map(self._branch, of.branches)))

    def _branch(self, of: Branch) -> Branch:
        return replace(of, network=self._network(of.network))

    def _network(self, of: Network) -> Network:
        if isinstance(of, Attention):
            return self._attention(of)
        if isinstance(of, Recurrent):
            return share_of_recurrent(of, self.cut)
        if isinstance(of, Mixture):
            return self._mixture(of)
        return self._dense(of) if isinstance(of, Dense) else of

    def _attention(self, of: Attention) -> Attention:
        """Cut heads and KV heads, if possible."""
        if not self.cuts_attention or not _has_separate_heads(of):
            return of
        width, group = of.o.cols // of.heads, of.heads // of.kv_heads
        # heads of a latent vector share one key, which all ranks keep
        heads = self.cut.heads(of.heads, group if of.latent is None else 1, width, of.o)
        if heads is None:
            return of
        keys = heads.groups(group)
        gate = of.gate
        if gate is not None:
            gate = OutputGate(of_heads(gate.linear, of.heads, heads), gate.activation)
        cut = replace(
            of,
            heads=heads.count,
            q=of_heads(of.q, of.heads, heads),
            o=self.cut.columns(of.o, heads.times(width).run),
            sinks=of.sinks and of.sinks.pick(heads.run),
            gate=gate,
        )
        if of.latent is not None:
            return replace(cut, latent=_latent(of.latent, of.heads, heads))
        return replace(
            cut,
            kv_heads=keys.count,
            k=of.k and of_heads(of.k, of.kv_heads, keys),
            v=of.v and of_heads(of.v, of.kv_heads, keys),
            qk_norm=of.qk_norm and _head_norms(of.qk_norm, of, heads, keys),
        )

    def _dense(self, of: Dense) -> Dense:
        """Cut the inner values, if possible."""
        whole = of.norm is not None or of.deviations is not None or of.up.low is not None
        inner = None if whole else self.cut.inner(of.width, of.down)
        if inner is None:
            return of
        return replace(
            of,
            up=of.up.pick(inner.run),
            gate=of.gate and of.gate.pick(inner.run),
            down=self.cut.columns(of.down, inner.run),
            divisors=of.divisors and of.divisors.pick(inner.run),
        )

    def _mixture(self, of: Mixture) -> Mixture:
        """Cut the inner values of every expert and of the shared FFN, if possible."""
        shared = of.shared and self._dense(of.shared)
        chunks = of.chunks and self._mixture(of.chunks)
        of = replace(of, shared=shared, chunks=chunks)
        inner = self.cut.inner(of.width, of.down)
        if inner is None:
            return of
        return replace(
            of,
            up=rows_of_each(of.up, of.width, inner),
            gate=of.gate and rows_of_each(of.gate, of.width, inner),
            down=self.cut.columns(of.down, inner.run),
        )


def _has_separate_heads(of: Attention) -> bool:
    """Whether no part of attention spans all heads."""
    norm_of_all = of.qk_norm is not None and of.qk_norm.over == "row"
    together = of.norm is not None or of.compression is not None
    return not norm_of_all and not of.max_bias and not together


def _latent(of: Latent, heads: int, some: Span) -> Latent:
    """The latent projections of some heads."""
    return replace(
        of,
        q_still=of.q_still and of_heads(of.q_still, heads, some),
        absorb=of.absorb and of_heads(of.absorb, heads, some),
        expand=of_heads(of.expand, heads, some),
        keys=of.keys and of_heads(of.keys, heads, some),
    )


def _head_norms(of: QkNorm, mixer: Attention, heads: Span, keys: Span) -> QkNorm:
    """Select per-head norm weights of some heads."""

    def norm(each: Normalization, count: int, some: Span) -> Normalization:
        def cut(vector: StoredVector | None) -> StoredVector | None:
            if vector is None or vector.size == mixer.key_dim:
                return vector
            return values_of_heads(vector, count, some)

        return replace(each, weight=cut(each.weight), bias=cut(each.bias))

    return replace(of, q=norm(of.q, mixer.heads, heads), k=norm(of.k, mixer.kv_heads, keys))


def _logits(count: int, ranks: int) -> tuple[int, ...]:
    """Number of logits of each rank."""
    found = spans(count, ranks, lambda at: at % _TILE == 0) or spans(count, ranks, bool)
    if found is None:
        raise UnsupportedError(f"a vocabulary of {count} cannot be split between {ranks} GPUs")
    return tuple(span.count for span in found)
