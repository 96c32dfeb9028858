"""The plans of a step: one token through the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.driver.plan import Plan
from urdir.model.config import Config
from urdir.model.decode_state import DecodeState
from urdir.model.kv_cache import KvCache
from urdir.model.layer import append_layer, append_matvec, append_rms_norm
from urdir.model.weights import Weights
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.embedding import Embedding

if TYPE_CHECKING:
    from urdir.driver.memory import Arena


@dataclass(frozen=True, slots=True)
class StepParts:
    """The owners of everything that a step reads and writes."""

    config: Config
    weights: Weights
    cache: KvCache
    state: DecodeState
    work: Arena


def prompt_plan(parts: StepParts) -> Plan:
    """Process the token at ``position`` into the cache and advance; the next token is known."""
    plan = Plan("prompt step")
    _append_layers(plan, parts)
    _append_advance(plan, parts, sampling=False)
    return plan


def logits_plan(parts: StepParts) -> Plan:
    """The same, leaving the logits in ``work["logits"]``; the host supplies the next token."""
    plan = Plan("logits step")
    _append_layers(plan, parts)
    _append_head(plan, parts)
    _append_advance(plan, parts, sampling=False)
    return plan


def greedy_plan(parts: StepParts) -> Plan:
    """The same, and the most likely token becomes the next one, all on the device."""
    plan = Plan("greedy step")
    _append_layers(plan, parts)
    _append_head(plan, parts)
    plan.launch(
        Argmax(n=parts.config.vocab_size),
        "argmax",
        logits=parts.work["logits"],
        index=parts.state.sampled,
    )
    _append_advance(plan, parts, sampling=True)
    return plan


def _append_layers(plan: Plan, parts: StepParts) -> None:
    c, weights, state, work = parts.config, parts.weights, parts.state, parts.work
    embedding = weights.embedding
    plan.launch(
        Embedding(embedding.format, c.vocab_size, c.hidden, parts.cache.max_len),
        "token_embd",
        weights=embedding.data,
        tokens=state.tokens,
        position=state.position,
        y=work["hidden"],
    )
    for index, layer in enumerate(weights.layers):
        append_layer(plan, c, index, layer, parts.cache, state.position, weights.rope_table, work)


def _append_head(plan: Plan, parts: StepParts) -> None:
    work, weights = parts.work, parts.weights
    append_rms_norm(
        plan, "output_norm", parts.config, work["hidden"], weights.output_norm, work["normed"]
    )
    append_matvec(plan, "output", weights.output, work["normed"], work["logits"])


def _append_advance(plan: Plan, parts: StepParts, *, sampling: bool) -> None:
    state = parts.state
    args = {"position": state.position}
    if sampling:
        args |= {"tokens": state.tokens, "known": state.known, "sampled": state.sampled}
    plan.launch(Advance(max_len=parts.cache.max_len, sampling=sampling), "advance", **args)
