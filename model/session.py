"""One sequence on a device: its cache, its state, and the recorded steps that advance it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.driver import execute
from urdir.model.decode_state import DecodeState
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.kv_cache import KvCache, rounded_capacity
from urdir.model.layer import workspace_sizes
from urdir.model.owner import Owner
from urdir.model.step import StepParts, greedy_plan, logits_plan, prompt_plan
from urdir.model.weights import Weights
from urdir.ptxgen.kernels.kv_append import KvDtype

if TYPE_CHECKING:
    from urdir.driver.graph import RecordedGraph
    from urdir.driver.plan import Plan

PlanBuilder = Callable[[StepParts], "Plan"]


class Session(Owner):
    """A sequence of at most ``context`` tokens: fed, continued greedily or by the host's sampler.

    ``length`` tokens are in the cache. At most one token, the *pending* one, is known but not yet
    processed; ``greedy_step`` and ``logits_step`` process it.
    """

    def __init__(self, weights: Weights, context: int, kv_dtype: KvDtype = "f16") -> None:
        config, device = weights.config, weights.device
        if not 0 < context <= config.context_length:
            raise ModelError(
                f"a context of {context} tokens: the model takes 1 to {config.context_length}"
            )
        self.context = context
        self.weights = weights
        self.length = 0
        self._known = 0
        self._graphs: dict[PlanBuilder, RecordedGraph] = {}
        self._stream = device.create_stream()
        max_len = rounded_capacity(context)
        self.parts = StepParts(
            config,
            weights,
            KvCache(device, config, max_len, kv_dtype),
            DecodeState(device, max_len),
            device.arena(workspace_sizes(config), "workspace"),
        )

    def feed(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``, processing all but the last, which is left pending.

        Raises ModelError for a token id outside the vocabulary and ContextFullError when they do
        not fit; the sequence is then as it was.
        """
        if not tokens:
            return
        vocab = self.parts.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab:
                raise ModelError(f"token id {token} is outside the vocabulary of {vocab} tokens")
        self.check_room(self._known + len(tokens))
        self.parts.state.write_tokens(self._known, tokens)
        self._known += len(tokens)
        graph = self._graph(prompt_plan)
        while self.length < self._known - 1:
            graph.launch(self._stream)
            self.length += 1

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError when a sequence of that many tokens does not fit the context."""
        if tokens > self.context:
            raise ContextFullError(
                f"{tokens} tokens exceed the context of {self.context} by {tokens - self.context}: "
                "raise -c or shorten the prompt"
            )

    def greedy_step(self) -> int:
        """Process the pending token; the most likely next one becomes pending and is returned."""
        self._check_pending()
        self._graph(greedy_plan).launch(self._stream)
        self.length += 1
        self._known = min(self._known + 1, self.context)
        return int(self.parts.state.sampled.download(np.uint32, (1,))[0])

    def logits_step(self) -> npt.NDArray[np.float32]:
        """Process the pending token and return the logits (n_vocab,) of the one after it."""
        self._check_pending()
        self._graph(logits_plan).launch(self._stream)
        self.length += 1
        return self.parts.work["logits"].download(np.float32, (self.parts.config.vocab_size,))

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on; nothing is pending then."""
        if not 0 <= length <= self.length:
            raise ModelError(f"cannot truncate {self.length} tokens to {length}")
        self.parts.state.seek(length, length)
        self.length = self._known = length

    @property
    def is_full(self) -> bool:
        """True when no further token fits the context."""
        return self.length >= self.context

    def _check_pending(self) -> None:
        if self.is_full:
            raise ContextFullError(f"the context of {self.context} tokens is full: raise -c")
        if self._known <= self.length:
            raise ModelError("no pending token: feed() one before a step")

    def _graph(self, build: PlanBuilder) -> RecordedGraph:
        graph = self._graphs.get(build)
        if graph is None:
            graph = execute.record(build(self.parts), self.weights.device)
            self._graphs[build] = graph
        return graph

    def close(self) -> None:
        """Free graphs, cache, state and workspace; closing twice does nothing."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._stream.close()
        self.parts.cache.close()
        self.parts.state.close()
        self.parts.work.close()
