"""The first phase of an engine: all except the weights is ready, and nothing can run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from urdir.model.engine.engine_parts import EngineParts, open_parts
from urdir.model.engine.opening import Opening
from urdir.model.engine.pieces import driver_loader
from urdir.model.errors import ModelError, UnsupportedError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.batch import ShapeBuckets
    from urdir.model.engine.encoding.encoder import Encoder
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.requests.request import Request
    from urdir.model.engine.requests.warm_up import WarmUp
    from urdir.model.engine.session import Session
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.text.chat import ChatTemplate
    from urdir.model.text.tokenizer import Tokenizer


class Loading(Owner):
    """A model whose weights are being loaded: prompts can be tokenised and steps recorded.

    ``Engine(loading)`` waits for the weights and owns all of it from then on. Until then closing it
    ends the threads and frees what they made. The file is checked whole before a device is opened,
    with what ``text`` and ``chat`` need, and a vocabulary that it has; the memory that it needs is
    compared with what is free before anything is allocated. Raises ModelError, and DriverError for
    a device that is absent or fails; nothing stays open then, and no thread runs.
    """

    def __init__(self, options: EngineOptions) -> None:
        with ExitStack() as unless_done:
            self._opening = unless_done.enter_context(Opening(driver_loader(options.device)))
            self._parts = open_parts(self._opening, options)
            unless_done.pop_all()
        self._is_open = True

    @property
    def config(self) -> Config:
        """The model's description."""
        return self._parts.config

    @property
    def file(self) -> ModelFile:
        """The open file."""
        return self._parts.file

    @property
    def device(self) -> Device:
        """The device, or that of rank 0."""
        return self._parts.group[0]

    @property
    def session(self) -> Session:
        """The sequences. Raises UnsupportedError for a model that makes embeddings."""
        return answering(self._parts.session, self.config)

    @property
    def shapes(self) -> ShapeBuckets:
        """The shapes of the steps that the engine will have."""
        return self.session.shapes

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Engine.tokenizer`."""
        return self._parts.texts.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """See `Engine.template`."""
        return self._parts.texts.template

    def prepare(self, request: Request) -> None:
        """Record the graphs of a request's prompt and of its first token."""
        from urdir.model.engine.batch import Output, StepShape

        session = self.session
        output = Output.of(request.settings, masked=request.constraint is not None)
        output = Output.LOGITS if self._parts.host_sampling else output
        revised = bool(request.processors) and output is not Output.LOGITS
        end = 1 if session.takes_sources else min(len(request.prompt), session.context)
        shapes: list[StepShape] = []
        with self._opening.timed("graphs"):
            for shape in session.shapes.prompts(0, end, output):
                chooses = shape.output is not Output.NONE
                shapes += shape.halves if revised and chooses else (shape,)
            session.steps.record(shapes)

    def warm_up(self, **likely: Any) -> WarmUp:
        """What records the steps of a first request, and the likeliest others, now or later;
        ``likely`` is for `likely_shapes`."""
        from urdir.model.engine.batch import Output
        from urdir.model.engine.requests.warm_up import WarmUp, first_shapes, likely_shapes

        session = self.session
        states = session.storage.shared_states
        divided = states is not None and states.places > 0
        shapes = likely_shapes(session.shapes, **likely, divided=divided)
        first = likely.get("outputs", (Output.SAMPLE,))[0]
        needed = first_shapes(session.shapes, first, divided)
        return WarmUp(session.steps, shapes, needed)

    def finish(self) -> tuple[EngineParts, ExitStack]:
        """Wait for the weights: all parts, and what closes them. It can be done once."""
        if not self._is_open:
            raise ModelError("the model is closed, or an engine already")
        self._opening.wait_for_upload()
        self._is_open = False
        return self._parts, self._opening.hand_over()

    def close(self) -> None:
        """End the threads and free all of it, unless an engine owns it."""
        self._is_open = False
        self._opening.close()


def finished(loading: Loading) -> tuple[EngineParts, ExitStack]:
    """What `Loading.finish` returns. Raises TypeError for anything else, such as a path."""
    if not isinstance(loading, Loading):
        raise TypeError(f"Engine.open({loading!r:.80}) opens a model; Engine() takes a Loading")
    return loading.finish()


def answering(session: Session | None, config: Config) -> Session:
    """The sequences of a model. Raises UnsupportedError without them."""
    if session is not None:
        return session
    if config.diffuses:
        raise UnsupportedError(
            f"'{config.architecture}' models fill masked tokens (diffuse), and give no answers"
        )
    raise UnsupportedError(
        "the model is open for embeddings and scores (embed, rerank), it gives no answers; a "
        "decoder does if it is opened with embeddings=False"
    )


def embedding(encoder: Encoder | None) -> Encoder:
    """What makes embeddings. Raises UnsupportedError without it."""
    if encoder is None:
        raise UnsupportedError(
            "the model is open for answers: open it with embeddings=True to embed texts"
        )
    return encoder


def filling_masks(encoder: Encoder | None, config: Config) -> Encoder:
    """What fills masked tokens. Raises UnsupportedError for a model that does not."""
    if not config.diffuses:
        raise UnsupportedError(
            f"'{config.architecture}' models do not fill masked tokens: use generate"
        )
    return embedding(encoder)
