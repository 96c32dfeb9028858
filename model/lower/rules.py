"""All rules, in the order in which they are tried: those of more operations first."""

from __future__ import annotations

from urdir.model.lower import (
    adapters,
    altup,
    attention,
    blocks,
    collectives,
    compression,
    latent,
    linear,
    moe,
    ngrams,
    norms,
    recurrent,
    rwkv,
    selection,
    stream,
    streams,
    switch,
)
from urdir.model.lower.rule import RuleBook

_ROOMS = (
    *(adapters, moe, selection, compression, latent, attention, rwkv, linear),
    *(altup, recurrent, collectives, norms, stream, streams, blocks, switch, ngrams),
)
#: What a step is lowered by.
RULES = RuleBook([rule for room in _ROOMS for rule in room.RULES])
