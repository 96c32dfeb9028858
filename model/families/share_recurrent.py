"""Tensor parallelism of recurrent mixers: some heads or channels with their states and
convolutions.

Key heads shared by several value heads are on every rank with one of these. A mixer whose norm
spans all heads is replicated, and so is one that is not named here.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.families.cut import Cut, Span, values_of_heads
from urdir.model.families.recurrent import (
    Convolution,
    Convolved,
    KimiDelta,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.families.stored import Run


def share_of_recurrent(of: Recurrent, cut: Cut) -> Recurrent:
    """Cut heads or channels, if possible; all of it otherwise."""
    match of:
        case ShortConv():
            return _short_conv(of, cut)
        case Recurrence():
            return _recurrence(of, cut)
        case Selective():
            return _selective(of, cut)
        case KimiDelta():
            return _kimi_delta(of, cut)
        case _:  # the norm of lightning attention spans all heads
            return of


def _short_conv(of: ShortConv, cut: Cut) -> ShortConv:
    channels = cut.inner(of.conv.channels, of.o)
    if channels is None:
        return of
    return replace(
        of,
        values=of.values.pick(channels.run),
        input_gate=of.input_gate.pick(channels.run),
        output_gate=of.output_gate.pick(channels.run),
        conv=_convolution(of.conv, channels.run),
        o=cut.columns(of.o, channels.run),
    )


def _recurrence(of: Recurrence, cut: Cut) -> Recurrence:
    found = _heads_and_keys(of, cut)
    if found is None:
        return of
    heads, keys = found
    count = sum(span.count for span in heads)
    mixed = _runs_of_mixed(of, heads, keys)
    runs = [span.times(of.value_dim).run for span in heads]
    each = [span.run for span in heads]
    norm = of.norm
    if norm is not None and norm.weight is not None and _norms_groups(of):
        norm = replace(norm, weight=values_of_heads(norm.weight, of.key_heads, keys))
    return replace(
        of,
        mixed=of.mixed.pick(*mixed),
        conv=_convolution(of.conv, *mixed),
        gate=of.gate.pick(*runs),
        alpha=of.alpha.pick(*each),
        beta=of.beta and of.beta.pick(*each),
        a=of.a.pick(*each),
        dt_bias=of.dt_bias.pick(*each),
        skip=of.skip and of.skip.pick(*each),
        norm=norm,
        o=cut.columns(of.o, *runs),
        heads=count,
        key_heads=keys.count,
    )


def _heads_and_keys(of: Recurrence, cut: Cut) -> tuple[list[Span], Span] | None:
    """This rank's value heads (contiguous, or every ``key_heads``-th one) and key heads; None if
    they cannot be cut. A group norm spans the heads that share keys."""
    group, width = of.heads // of.key_heads, of.value_dim
    if of.tiled:
        if of.key_heads * width % cut.block(of.o):
            return None
        keys = cut.heads(of.key_heads, 1, width, of.o)
        return (
            None if keys is None else ([keys.after(n * of.key_heads) for n in range(group)], keys)
        )
    if _norms_groups(of):
        keys = cut.heads(of.key_heads, 1, group * width, of.o)
        return None if keys is None else ([keys.times(group)], keys)
    heads = cut.heads(of.heads, group, width, of.o)
    return None if heads is None else ([heads], heads.groups(group))


def _norms_groups(of: Recurrence) -> bool:
    """Whether the norm has weights for all heads and spans the heads that share keys; otherwise all
    heads use the same weights."""
    weight = None if of.norm is None else of.norm.weight
    return weight is not None and weight.size > of.value_dim


def _runs_of_mixed(of: Recurrence, heads: list[Span], keys: Span) -> list[Run]:
    """The rows of queries, keys and values of some heads, in storage order."""
    every, start = of.key_heads * of.key_dim, 0
    runs: list[Run] = []
    for name in of.order:
        some, dim = (heads, of.value_dim) if name == "v" else ([keys], of.key_dim)
        runs += [span.times(dim).after(start).run for span in some]
        start += of.width if name == "v" else every
    return runs


def _selective(of: Selective, cut: Cut) -> Selective:
    """Cut channels, whole heads of them if there are heads. The ranks' partial products sum to the
    steps, b and c."""
    total, after = of.conv.channels, (of.o, of.low, of.b, of.c)
    count = of.heads or total
    width = total // count
    some = cut.heads(count, 1, width, *after) if of.heads else cut.inner(total, *after)
    if some is None:
        return of
    channels = some.times(width).run
    return replace(
        of,
        mixed=of.mixed.pick(channels),
        conv=_convolution(of.conv, channels),
        gate=of.gate.pick(channels),
        low=cut.columns(of.low, channels),
        b=cut.columns(of.b, channels),
        c=cut.columns(of.c, channels),
        step=of.step.pick(some.run),
        a=values_of_heads(of.a, count, some),
        skip=of.skip.pick(some.run),
        o=cut.columns(of.o, channels),
    )


def _kimi_delta(of: KimiDelta, cut: Cut) -> KimiDelta:
    heads = cut.heads(of.heads, 1, of.dim, of.o)
    if heads is None:
        return of
    run = heads.times(of.dim).run

    def convolved(part: Convolved) -> Convolved:
        return Convolved(part.linear.pick(run), _convolution(part.conv, run))

    return replace(
        of,
        q=convolved(of.q),
        k=convolved(of.k),
        v=convolved(of.v),
        decay=of.decay.pick(run),
        beta=of.beta.pick(heads.run),
        gate=of.gate.pick(run),
        a=of.a.pick(heads.run),
        dt_bias=of.dt_bias.pick(run),
        o=cut.columns(of.o, run),
    )


def _convolution(of: Convolution, *channels: Run) -> Convolution:
    """The convolution of some channels."""
    taps = [(of.taps * start, of.taps * stop) for start, stop in channels]
    return Convolution(of.weight.pick(*taps), of.bias and of.bias.pick(*channels))
