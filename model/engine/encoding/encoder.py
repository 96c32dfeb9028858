"""An encoder: room for steps of texts on a device, and the steps that make embeddings of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from urdir.model.engine.budget import GRAPH_BYTES, check_context
from urdir.model.engine.encoding.budget import EncoderSettings, workspace_of
from urdir.model.engine.encoding.results import QueuedResults, Waiting
from urdir.model.engine.text_graphs import TextGraphs
from urdir.model.engine.text_steps import (
    MOST_TEXTS,
    EncodeShape,
    build_plan,
    row_bucket,
    text_bucket,
)
from urdir.model.errors import ContextFullError, ModelError, SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.embedding import Embedding
from urdir.model.families.pooling import POOLINGS, Pooling
from urdir.model.layers.pooled import RESULT, pooled_width
from urdir.model.lower.parts import LayerParts
from urdir.model.memory.text_rows import TextKeys, TextRows
from urdir.model.memory.weights import Weights
from urdir.model.memory.workspace import Workspace
from urdir.model.owner import Owner
from urdir.model.text.pair import Pair
from urdir.ptxgen.kernels.attention.short_texts import MOST_TOKENS

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.plan import Plan
    from urdir.model.engine.runner import Observer

#: Rows of the first step of texts that are made as they are asked for.
FIRST_ROWS = 1024

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.integer]


def check_encodes(config: Config) -> None:
    """Raise UnsupportedError for a model whose steps need a cache."""
    why = None
    if config.recurrents:
        why = "layers with a state"
    elif any(mixer.latent is not None for mixer in config.attentions):
        why = "latent attention"
    elif any(mixer.compression is not None for mixer in config.attentions):
        why = "attention to compressed blocks"
    elif any(mixer.shares_cache_of is not None for mixer in config.attentions):
        why = "caches shared between layers"
    elif config.switch is not None:
        why = "adapters that tokens switch on"
    elif len(config.attentions) != config.n_layers:
        why = "layers without attention"
    if why is not None:
        raise UnsupportedError(f"embeddings of '{config.architecture}' models: {why}")


class Encoder(Owner):
    """Steps of whole texts side by side, each a recorded graph of its shape.

    Texts are tokens, those of special tokens included. Raises UnsupportedError for a model that
    needs a cache, SettingsError, ModelError if memory is short.
    """

    def __init__(
        self,
        device: Device,
        weights: Weights,
        settings: EncoderSettings,
        observer: Observer | None = None,
    ) -> None:
        config = weights.config
        check_encodes(config)
        check_context(config, settings.context)
        self.config, self.settings = config, settings
        self.embedding = config.embedding_of_texts or Embedding(None)
        with ExitStack() as owners:
            self.stream = owners.enter_context(device.create_stream())
            keys = owners.enter_context(TextKeys(device, config, settings.rows, settings.dtype))
            self._state = owners.enter_context(
                TextRows(device, settings.rows_shape(config), self.stream)
            )
            work = owners.enter_context(Workspace(device, workspace_of(weights, settings)))
            self._parts = LayerParts(
                device=device,
                config=config,
                weights=weights,
                cache=keys,
                work=work,
                exact=settings.exact,
            )
            build = partial(build_plan, self._parts, self._state)
            graphs = TextGraphs(device, self.stream, build, GRAPH_BYTES, observer)
            self._graphs = owners.enter_context(graphs)
            self._results = owners.enter_context(QueuedResults(device, self.stream))
            self._owners = owners.pop_all()
        self._is_open = True

    def encode(
        self,
        texts: Iterable[Sequence[int]],
        pooling: Pooling | None = None,
        each: Callable[[Floats], Floats] = np.copy,
    ) -> Floats:
        """What is made of texts: embeddings (n, width), of a ranking model the scores (n, labels),
        or with the pooling "none" the states of all tokens, text after text. Not normalised. Texts
        are asked for while the device has those before; where they are not a sequence, that is,
        made as they are asked for, the first steps are small, so that the device begins early.

        ``pooling`` replaces the file's. ``each`` makes the results of a step what they are to be,
        while the device has the steps after. Raises SettingsError for a pooling that is not known,
        UnsupportedError for scores of a model without them, ContextFullError for a text that is too
        long, SettingsError for one without tokens or with a token outside the vocabulary. Numbers
        of tokens in a sequence of texts are checked before any step; tokens, and texts of an
        iterator, each at its turn, while the device has those before.
        """
        self._check_open()
        chosen = self.chosen_pooling(pooling)
        width = self.check_pooling(chosen)
        if isinstance(texts, Sequence):
            self.check_lengths(texts)
        waiting = Waiting(each)
        try:
            for some in self._steps(texts):
                self._queue(some, chosen, width, waiting)
        finally:
            waiting.take_all()  # a text that is refused leaves no step behind
        made = waiting.made
        rows = np.concatenate(made) if made else np.zeros((0, width), np.float32)
        scorer = self.embedding.scorer
        if chosen == "rank" and scorer is not None and scorer.softmax:
            weights = np.exp(rows - rows.max(axis=1, keepdims=True))
            rows = weights / weights.sum(axis=1, keepdims=True)
        return rows

    def logits(self, text: Sequence[int], rows: Sequence[int]) -> Floats:
        """The logits (rows, vocabulary) of some tokens of a text, of a model that `diffuses`.
        Raises UnsupportedError for others, and as `encode`."""
        self._check_open()
        if not self.config.diffuses:
            raise UnsupportedError(f"'{self.config.architecture}' models make no logits of texts")
        tokens = self.check_texts([text])
        bucket = row_bucket(len(text))
        shape = EncodeShape(bucket, text_bucket(len(rows), bucket), "logits")
        self._state.write(tokens, shape.rows, shape.texts, picked=rows)
        self._graphs.launch(shape)
        self.stream.synchronize()
        return self._parts.work[RESULT].download(np.float32, (len(rows), self.config.vocab_size))

    def chosen_pooling(self, pooling: Pooling | None) -> Pooling:
        """A pooling, or the file's. Raises SettingsError without either."""
        chosen = pooling or self.embedding.pooling
        if chosen is None:
            raise SettingsError(
                "the file does not say how the states of a text are pooled: give a pooling, "
                f"{', '.join(POOLINGS)}"
            )
        if chosen not in POOLINGS:
            raise SettingsError(f"pooling {chosen!r}: expected one of {', '.join(POOLINGS)}")
        return chosen

    def check_pooling(self, pooling: Pooling) -> int:
        """Values of a result. Raises UnsupportedError for scores of a model without them."""
        return pooled_width(self.embedding, self.config.hidden, pooling)

    def check_texts(self, texts: Sequence[Sequence[int]]) -> list[Tokens]:
        """The tokens of each text. Raise ContextFullError or SettingsError for a text that
        `encode` does not take."""
        return [self._checked(number, text) for number, text in enumerate(texts)]

    def check_lengths(self, texts: Iterable[str | Sequence[int]]) -> None:
        """Raise as `encode` for texts that have no tokens or too many, or that are no texts.
        Strings, which are not tokenised, pass."""
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                self._check_length(number, text)

    def prepare(self, lengths: Sequence[int], pooling: Pooling | None = None) -> None:
        """Record the graph of a step of texts of this many tokens each. Raises DriverError."""
        self._graphs.make_ready(_shape(lengths, self.chosen_pooling(pooling)))

    def plan(self, lengths: Sequence[int], pooling: Pooling | None = None) -> Plan:
        """The launches of a step of texts of this many tokens each."""
        shape = _shape(lengths, self.chosen_pooling(pooling))
        return build_plan(self._parts, self._state, shape)

    @property
    def context(self) -> int:
        """Most tokens of a text."""
        return self.settings.context

    @property
    def nbytes(self) -> int:
        """Bytes on the device beside the weights."""
        cache = cast("TextKeys", self._parts.cache)
        return cache.nbytes + self._parts.work.buffer.nbytes

    def close(self) -> None:
        """Free graphs and memory. Idempotent."""
        self._is_open = False
        self._owners.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ModelError("the engine is closed")

    # ---- steps ----

    def _steps(self, texts: Iterable[Sequence[int]]) -> Iterator[_Texts]:
        """The texts of each step, in order, as many as fit; see `encode`."""
        tokens, seconds, rows, largest = list[Tokens](), list[int](), 0, self.settings.rows
        most = largest if isinstance(texts, Sequence) else min(FIRST_ROWS, largest)
        for number, text in enumerate(texts):
            of = self._checked(number, text)
            if tokens and (rows + len(of) > most or len(tokens) == MOST_TEXTS):
                yield _Texts(tokens, seconds, rows)
                tokens, seconds, rows, most = [], [], 0, min(2 * most, largest)
            tokens.append(of)
            seconds.append(text.second if isinstance(text, Pair) else len(of))
            rows += len(of)
        if tokens:
            yield _Texts(tokens, seconds, rows)

    def _checked(self, number: int, text: Sequence[int]) -> Tokens:
        """The tokens of a text; raises as `check_texts`."""
        vocab = self.config.vocab_size
        tokens = np.asarray(text)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise _no_text(number)
        self._check_length(number, tokens)
        if not 0 <= tokens.min() <= tokens.max() < vocab:
            raise SettingsError(
                f"text {number} has a token outside the vocabulary of {vocab} tokens"
            )
        return tokens

    def _check_length(self, number: int, text: Sequence[int] | Tokens) -> None:
        """Raise as `check_texts` for a text without tokens or with too many."""
        try:
            length, most = len(text), self.settings.context
        except TypeError:
            raise _no_text(number) from None
        if not length:
            raise SettingsError(f"text {number} has no tokens")
        if length > most:
            raise ContextFullError(
                f"text {number} has {length} tokens, {most} fit: shorten it, or open the model "
                f"with a larger context (it takes {self.config.context_length})"
            )

    def _queue(self, some: _Texts, pooling: Pooling, width: int, waiting: Waiting) -> None:
        """Queue a step. Its rows are put together while the device has the one before."""
        texts, seconds, count = some
        shape = _shape([len(text) for text in texts], pooling)
        scorer = self.embedding.scorer
        reads = scorer.reads if pooling == "rank" and scorer is not None else pooling
        self._state.write(texts, shape.rows, shape.texts, last=reads == "last", seconds=seconds)
        self._graphs.launch(shape)
        results = count if pooling == "none" else len(texts)
        self._results.rows(waiting, self._parts.work[RESULT], (results, width))


def _shape(lengths: Sequence[int], pooling: Pooling) -> EncodeShape:
    """The step of texts of this many tokens each."""
    rows = row_bucket(sum(lengths))
    texts = text_bucket(len(lengths), rows)
    return EncodeShape(rows, texts, pooling, short=max(lengths) <= MOST_TOKENS)


def _no_text(number: int) -> SettingsError:
    return SettingsError(f"text {number} is neither a text nor a list of token ids")


class _Texts(NamedTuple):
    """The texts of a step: their tokens, where the second text of each begins, and all rows."""

    tokens: list[Tokens]
    seconds: list[int]
    rows: int
