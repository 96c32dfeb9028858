"""A whole answer to a conversation: text, thoughts and calls of tools apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from urdir.model.engine.generate import Generation, Statistics
from urdir.model.errors import TemplateError
from urdir.model.text.answers import AnswerParser
from urdir.model.text.chat import ChatTemplate, Message, conversation
from urdir.model.text.deltas import ToolCall, whole_calls

Messages = Sequence[Message | Mapping[str, Any]]
ToolDescriptions = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered; as text, its ``content``."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    statistics: Statistics

    def __str__(self) -> str:
        return self.content

    @property
    def message(self) -> Message:
        """The reply as a turn, to go on with."""
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name,
             "arguments": call.arguments}}
            for call in self.tool_calls
        ]  # fmt: skip
        return Message("assistant", self.content, {"tool_calls": calls} if calls else {})


def reply_to(
    template: ChatTemplate,
    messages: Messages,
    tools: ToolDescriptions | None,
    variables: Mapping[str, Any] | None,
    begin: Callable[[Sequence[int], frozenset[str]], Generation],
) -> Reply:
    """Answer a conversation (see `Engine.chat`) with the generation that ``begin`` makes of the
    prompt's tokens and of the control tokens that belong to the text."""
    schemas = _schemas(tools)
    prompt = template.render(conversation(messages, template.source), tools, variables)
    form = template.form
    generation = begin(template.tokens(prompt), form.shown)
    parser = AnswerParser(form, prompt=prompt.text, tools=schemas)
    deltas = [delta for piece in generation.text() for delta in parser.push(piece)]
    deltas += parser.finish()
    return Reply(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(whole_calls(deltas)),
        statistics=generation.statistics,
    )


def _schemas(tools: ToolDescriptions | None) -> dict[str, Mapping[str, Any]] | None:
    """The parameters of each tool, by its name. Raises TemplateError."""
    try:
        functions = [tool["function"] for tool in tools or ()]
        return {function["name"]: function.get("parameters", {}) for function in functions} or None
    except (TypeError, LookupError, AttributeError):
        raise TemplateError(
            f"{tools!r:.80} are no tools: give a list of descriptions, such as "
            "[{'type': 'function', 'function': {'name': 'add', 'parameters': {...}}}]"
        ) from None
