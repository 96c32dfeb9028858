"""Choices of experts with the temporal locality of published traces, for measuring caches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.memory import Array
from urdir.model.errors import UnsupportedError

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.families.config import Config

#: What share of a token's choices is among the n most recently chosen of 128 experts of a layer: a
#: cache of n experts finds these, if the least recently used one makes room. Qwen3-30B-A3B, 8 of
#: 128 experts: a token repeats 45 % of the experts of the one before, and in steady state 51 find
#: 93.3 % (three prompts of 512 tokens: 90.0 to 95.3; github.com/kekzl/imp, pull request 1359).
#: For other n the differences of a second trace are added to 93.3 %. Its ten answers of 128 tokens
#: begin with empty caches: 16, 24, 32, 48, 64 and 96 experts find 57, 67, 76, 87, 91 and 93 %, and
#: 51 87.75 % between these (github.com/yassinebkr/beyondvram, docs/moe-track-plan.md).
FOUND = {0: 0.0, 8: 0.45, 16: 0.6255, 24: 0.7255, 32: 0.8155, 48: 0.9255, 51: 0.933}
FOUND |= {64: 0.9655, 96: 0.9855, 128: 1.0}
#: Tokens of a list, a power of two.
TOKENS = 16384


def choice_sizes(config: Config) -> dict[str, int]:
    """Bytes of the lists of choices that are drawn for a model, by name.

    Raises UnsupportedError for routers that choose groups of experts first, or by token."""
    return {_name(*kind): 4 * TOKENS * kind[1] for kind in _kinds(config)}


def drawn_choices(config: Config, arena: Mapping[str, Slice]) -> dict[tuple[int, int], Slice]:
    """Where these lists are, by the number of experts and of those that a row uses."""
    return {kind: arena[_name(*kind)] for kind in _kinds(config)}


def stated(config: Config) -> str:
    """What is drawn for a model, in words."""
    lines = []
    for experts, used in _kinds(config):
        sums = np.cumsum(recency_shares(experts, used)) / used
        found = (f"{count} find {sums[count - 1]:.1%}" for count in (experts // 4, experts // 2))
        lines.append(
            f"a row's {used} of {experts} experts are drawn by how recently it chose them, as in "
            f"traces of Qwen3-30B-A3B: of a layer the most recent {', '.join(found)} of the next"
        )
    return "\n".join(lines)


def _kinds(config: Config) -> dict[tuple[int, int], None]:
    if config.random_routing != "locality":
        return {}
    routers = [of.router for layer in config.layers for of in layer.mixtures]
    if any(of.groups > 1 or of.shares > 1 or of.by_token is not None for of in routers):
        raise UnsupportedError(
            "choices with the locality of a trace: not of routers that choose groups of experts "
            "first, or by token"
        )
    return dict.fromkeys((of.experts, of.used) for of in routers)


def _name(experts: int, used: int) -> str:
    return f"choices of {used} of {experts} experts"


def recency_shares(experts: int, used: int) -> Array:
    """How likely the most recently chosen expert, the next one, and so on are chosen: (experts,)
    f64, with the sum ``used``.

    `FOUND` for other numbers of experts goes by the share of them that a cache has. No expert is
    chosen more than once a token: what exceeds that goes to the next ones.
    """
    counts = np.array([*FOUND]) * experts / max(FOUND)
    chances = used * np.diff(np.interp(np.arange(experts + 1), counts, [*FOUND.values()]))
    left = 0.0
    for rank, chance in enumerate(chances):
        chances[rank] = min(1.0, chance + left)
        left += chance - chances[rank]
    return chances


@lru_cache(maxsize=4)
def local_choices(experts: int, used: int, tokens: int = TOKENS) -> Array:
    """Which experts of a layer each token chooses, (tokens, used) u32: a stack of experts, the most
    recently chosen first, of which each token takes some by `recency_shares` and puts them on top.

    Its places are drawn together, in an order that changes: systematic sampling (Madow 1949), which
    takes ``used`` different places, each as often as it should. At first the stack is in the order
    of the experts' numbers, as caches are filled that have seen nothing.
    """
    rng, chances = np.random.default_rng(0), recency_shares(experts, used)
    stack, choices = np.arange(experts), np.empty((tokens, used), np.uint32)
    for token in range(tokens):
        order = rng.permutation(experts)
        sums = np.cumsum(chances[order])
        at = np.searchsorted(sums, rng.random() + np.arange(used), side="right")
        places = order[np.minimum(at, experts - 1)]
        choices[token] = stack[places]
        stack = np.concatenate([stack[places], np.delete(stack, places)])
    return choices
