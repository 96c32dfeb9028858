"""A session: room for sequences on a device, and the steps that process and continue them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.adapters import Adapters
from urdir.model.engine.budget import SessionBudget, check_context
from urdir.model.engine.decode_graphs import DecodeGraphs
from urdir.model.engine.paced_rows import PacedRows
from urdir.model.engine.rank import open_ranks
from urdir.model.engine.runner import Observer
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.speculation.drafting import Drafting
from urdir.model.engine.step_queue import StepQueue
from urdir.model.errors import ContextFullError, ModelError, UnsupportedError
from urdir.model.memory.draft_scope import DraftScope
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.speculation.model_source import Drafter
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.model.memory.prefix_files import PrefixFiles
    from urdir.model.text.matcher import ConstraintCompiler
    from urdir.model.text.tokenizer import Tokenizer


class Session(Owner):
    """Ranks with room for ``settings.sequences`` sequences, numbered from 0, and their steps.

    ``queue`` queues steps of the shapes that ``shapes`` has, on ``stream``; ``storage`` has what
    sequences hold. One owner at a time says which rows a step has (`in_use`): an `AnswerLoop`, or
    `EagerSteps`. ``observer`` looks at every step, launch by launch. ``weights`` are on ``device``;
    those of a share of the model are rank 0's, and ``peers`` those of the other ranks, on the other
    devices of its group. With ``drafters``, one for each of all weights, drafts are theirs, which
    are the same on every device. Raises ModelError for a
    context that the model does not take, OutOfMemoryError.
    """

    def __init__(
        self,
        device: Device,
        weights: Weights,
        settings: SessionSettings,
        *,
        observer: Observer | None = None,
        peers: Sequence[Weights] = (),
        drafters: Sequence[Drafter] = (),
    ) -> None:
        check_context(weights.config, settings.context)
        if settings.drafts is not None:
            _check_drafts(weights)
        model = drafters[0].model if drafters else None
        settings = replace(settings, draft_model=model)
        self.context = settings.context
        self.sequences = settings.sequences
        self.weights = weights
        scope = DraftScope(0 if model is None else model.tokens, _adapts(settings.drafts))
        all_weights = (weights, *peers)
        own, *others = (SessionBudget.of(each, settings).shapes for each in all_weights)
        self.shapes = replace(own.beside(others), scope=scope)
        self._user = threading.Lock()
        self._is_open = True
        with ExitStack() as owners:
            lead, self.exchange = open_ranks(owners, all_weights, settings, observer, drafters)
            self.cache, self.source = lead.cache, lead.source
            has_room = weights.config.takes_adapters
            #: The LoRA adapters, where there is room for some.
            self.adapters = Adapters(all_weights) if has_room else None
            self.parts, self.steps, self.storage = lead.parts, lead.steps, lead.storage
            self._encoder = lead.source_encoder
            self.stream = lead.stream
            self.graphs = DecodeGraphs(self.steps, self.shapes)
            self.queue = StepQueue(self.steps, self.parts.state, self.shapes, self.stream)
            rest = None if self.source is None else self.source.rest
            #: How many drafts steps have, by what became of earlier ones; None: none.
            self.drafting = Drafting.of(self.parts.state, rest, scope)
            #: How many answers have a row in steps without drafts, by what these take; None: all
            #: have one. An emulator's times say nothing, and its answers depend on no clock.
            is_timed = self.drafting is None and not self.parts.device.is_emulated
            self.paced = PacedRows() if is_timed else None
            #: Where prefixes of slots are saved; None: nowhere.
            self.prefix_files: PrefixFiles | None = None
            self._compilers: dict[Tokenizer, ConstraintCompiler] = {}
            self._compilers_lock = threading.Lock()
            self._owners = owners.pop_all()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The caller alone steps the sequences meanwhile. Raises ModelError while another does, and
        once it is closed."""
        self.check_open()
        if not self._user.acquire(blocking=False):
            raise ModelError(
                "the sequences are in use: close the answer, or the service, first; for several "
                "answers at once there are generate_all, chat_async and generate_async"
            )
        try:
            yield
        finally:
            self.queue.forget_rows()
            self._user.release()

    def begin_drafts(self, sequence: int, length: int, p_min: float | None = None) -> None:
        """Tell a draft model that a sequence begins: see `DraftSource.begin`."""
        if self.source is not None:
            self.source.begin(sequence, length, p_min)

    @property
    def takes_sources(self) -> bool:
        """Whether the model is an encoder-decoder, whose sequences have sources."""
        return self._encoder is not None

    def check_predicts_texts(self) -> None:
        """Raise UnsupportedError for an encoder-decoder: it reads a text whole, and predicts its
        answer alone."""
        if self.takes_sources:
            raise UnsupportedError(
                "an encoder-decoder predicts its answer, not its text: see Engine.logits"
            )

    def begin_sources(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Queue the encoding of sequences' sources, for which their caches have room. Raises
        DriverError."""
        if self._encoder is not None and sources:
            for sequence, source in sources.items():
                self.parts.state.set_source(sequence, len(source))
            self._encoder.encode(sources)

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError when this many tokens of a sequence do not fit."""
        if (more := tokens - self.context) > 0:
            raise ContextFullError(
                f"{tokens} tokens exceed the context of {self.context} by {more}: open with a "
                "larger one, or shorten the prompt"
            )

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ModelError for a token id outside the vocabulary."""
        size = self.parts.config.vocab_size
        for token in {min(tokens, default=0), max(tokens, default=0)}:
            if not 0 <= token < size:
                raise ModelError(f"token id {token} is outside the vocabulary of {size} tokens")

    def check_settings(self, settings: SamplingSettings) -> None:
        """Raise ModelError for a bias of a token outside the vocabulary."""
        size = self.parts.config.vocab_size
        for token, _ in settings.logit_bias:
            if token >= size:
                raise ModelError(f"logit_bias of token {token}: the vocabulary has {size} tokens")

    def compiler(self, tokenizer: Tokenizer) -> ConstraintCompiler:
        """The compiler of constraints for the answers of a tokeniser, one for all of them: its
        processes start with the first constraint, and end with the session. Callable from any
        thread. Raises ModelError where the extra is missing."""
        from urdir.model.text.matcher import ConstraintCompiler

        with self._compilers_lock:
            if tokenizer not in self._compilers:
                made = self._owners.enter_context(ConstraintCompiler(tokenizer))
                self._compilers[tokenizer] = made
            return self._compilers[tokenizer]

    def check_processors(self) -> None:
        """Raise UnsupportedError where the host cannot change logits within a step."""
        if self.parts.config.stage is not None:
            raise UnsupportedError(
                "logit processors: the model is split by layers, which is not supported: open it "
                "without, or with host_sampling=True"
            )

    def check_open(self) -> None:
        """Raise ModelError once it is closed."""
        if not self._is_open:
            raise ModelError("the engine is closed: no answer goes on")

    def close(self) -> None:
        """Free graphs, cache, state and workspace. Idempotent."""
        self._is_open = False
        self._owners.close()


def _adapts(drafts: DraftSettings | None) -> bool:
    """Whether texts decide which tokens are drafted: not where their number is set, and not where
    drafts are accepted by chance, as texts are not the model's then."""
    return drafts is not None and drafts.tokens is None and drafts.chance is None


def _check_drafts(weights: Weights) -> None:
    """Raise UnsupportedError for a model whose steps do not verify drafts."""
    if weights.config.stage is not None:
        raise UnsupportedError(
            "drafts of the next tokens: the model is split by layers, which is not supported: open "
            "it without drafts"
        )
