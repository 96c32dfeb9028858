"""What every protocol's requests are translated to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from urdir.model.serve.answer import Answer
from urdir.model.serve.conversations import Conversation, template_of
from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.parameters import Parameters
from urdir.model.serve.stream import Shape
from urdir.model.serve.tokens import check_length, encode_text
from urdir.model.text.chat import Prompt
from urdir.model.text.constraints import Constraint
from urdir.model.text.fill import FillTokens
from urdir.model.text.formats import Format
from urdir.model.text.thought_limit import ThoughtLimit

Text = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixed:
    """Texts, in which no control token begins, and token ids between them."""

    parts: tuple[str | int, ...]


def fill_tokens(model: ServedModel) -> FillTokens:
    """The tokens around a gap; ApiError if the model has none."""
    if model.fill is None:
        raise ApiError("the model has no tokens to fill in the middle", code="no_infill")
    return model.fill


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: ``parameters.n`` answers to each of ``inputs``, which are conversations of a chat,
    or texts and token ids to be continued. ``shape`` makes the response of its protocol.

    With ``echo`` answers begin with the text that they continue. Texts get BOS, if they are
    ``special`` and the model wants it.
    """

    inputs: tuple[Conversation | Text | Mixed, ...]
    parameters: Parameters
    form: Format | None
    shape: Callable[[ServedModel, Parameters, Sequence[Answer]], Shape]
    echo: bool = False
    special: bool = True
    earlier: tuple[int, ...] = ()  # tokens before each input
    background: bool = False  # it is answered without its connection

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return any(isinstance(each, Conversation) for each in self.inputs)


@dataclass(frozen=True, slots=True)
class Follows:
    """A request that goes on from what was kept under ``name``; ``then`` is given that, and may
    need more."""

    name: str
    then: Callable[[Json], Asked | Follows]


@dataclass(frozen=True, slots=True)
class Begun:
    """An input as the model reads it."""

    source: Conversation | Text | Mixed
    tokens: tuple[int, ...]
    rendered: Prompt | None = None

    @classmethod
    def of_text(cls, model: ServedModel, text: Text | Mixed, special: bool) -> Begun:
        """A text or its tokens."""
        if isinstance(text, str):
            return cls(text, encode_text(model, text, special))
        if isinstance(text, Mixed):
            ids = [*encode_text(model, "", special)]
            for part in text.parts:
                ids += [part] if isinstance(part, int) else encode_text(model, part, False, False)
            return cls(text, tuple(ids))
        return cls(text, text)

    @classmethod
    def of_conversation(cls, model: ServedModel, chat: Conversation, rendered: Prompt) -> Begun:
        """A conversation, given its text."""
        return cls(chat, tuple(template_of(model).tokens(rendered)), rendered)

    def answer(self, model: ServedModel, index: int, asked: Asked) -> Answer:
        """An answer to it, before its first token."""
        if not isinstance(self.source, Conversation):
            echo = self._text(model) if asked.echo else ""
            return Answer(index, self.tokens, echo=echo)
        assert self.rendered is not None
        tools = self.source.tools
        return Answer(
            index,
            self.tokens,
            model.answer_parser(self.rendered, tools.schemas),
            echo=self.source.messages[-1].content if asked.echo else "",
            parallel=tools.parallel,
        )

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call a tool."""
        return isinstance(self.source, Conversation) and self.source.tools.is_required

    def constraint(self, model: ServedModel, form: Format | None) -> Constraint | None:
        """The constraint on its answers; None: free text."""
        tools = None
        if isinstance(self.source, Conversation):
            assert self.rendered is not None
            tools = self.source.tools
            if tools.is_required:
                return model.required_call(tools.schemas, self.rendered, tools.name, tools.parallel)
        if form is None:
            return None
        if tools is None:
            return model.constraint(form, None)
        return model.constraint(form, self.rendered, tools.schemas, tools.parallel)

    def thoughts(self, model: ServedModel, tokens: int | None) -> ThoughtLimit | None:
        """The limit of reasoning of its answers."""
        return None if self.rendered is None else model.thought_limit(tokens, self.rendered)

    def _text(self, model: ServedModel) -> str:
        source = self.source
        return source if isinstance(source, str) else model.tokenizer.decode(self.tokens)


def render(model: ServedModel, chat: Conversation) -> Prompt:
    """A conversation as text that may fit the context."""
    prompt = chat.render(model)
    check_length(model, prompt.text)
    return prompt
