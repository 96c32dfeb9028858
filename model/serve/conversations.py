"""Conversations in requests: messages, tools, and variables of the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from urdir.model.serve.errors import ApiError
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.messages import read_messages
from urdir.model.serve.parameters import THINKING_FIELDS
from urdir.model.serve.tools import Tools, read_tools
from urdir.model.text.chat import ChatTemplate, Message, Prompt

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OPEN = ("content", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of the chat template."""

    messages: list[Message]
    tools: Tools
    variables: Json  # further variables of the template
    continues: str | None  # the field of the last message that the answer continues

    def render(self, model: ServedModel) -> Prompt:
        """Render the conversation as text. May take as long as the template needs. Not thread-safe.

        Raises TemplateError.
        """
        switch = {"enable_thinking": False} if model.defaults.thinking == 0 else {}
        variables = switch | model.defaults.variables | self.variables
        return template_of(model).render(
            self.messages, self.tools.offered, variables, continues=self.continues
        )


def read_conversation(fields: Fields, model: ServedModel, limits: Limits) -> Conversation:
    """Read OpenAI's conversation in ``fields``; ApiError if it is invalid."""
    messages = read_messages(fields, template_of(model).source, limits)
    return make_conversation(fields, model, messages, read_tools(fields, limits))


def make_conversation(
    fields: Fields,
    model: ServedModel,
    messages: list[Message],
    tools: Tools,
    variables: Json | None = None,
) -> Conversation:
    """A conversation with what ``fields`` say of the template beside messages and tools."""
    variables = (variables or {}) | _read_variables(fields, template_of(model))
    continues = _read_continued(fields, messages, variables.get("add_generation_prompt"))
    if continues is not None and tools.is_required:
        fields.fail("tool_choice", "cannot require a call if the last message is continued")
    return Conversation(messages, tools, variables, continues)


def template_of(model: ServedModel) -> ChatTemplate:
    """The model's template; ApiError if it has none."""
    if model.template is None:
        raise ApiError(
            "the model has no chat template: use /v1/completions", code="no_chat_template"
        )
    return model.template


def _read_variables(fields: Fields, template: ChatTemplate) -> Json:
    """What the template may read beside messages and tools."""
    variables, source = _read_effort(fields, template), template.source
    for name in THINKING_FIELDS:
        if fields.raw(name) == 0:
            variables.setdefault("enable_thinking", False)
    if documents := fields.objects("documents"):
        if "documents" not in source:
            fields.fail("documents", "is not supported by the chat template")
        variables["documents"] = [document.values for document in documents]
    if (given := fields.object("chat_template_kwargs")) is not None:
        variables |= given.values
    if fields.raw("add_generation_prompt") is not None:
        variables["add_generation_prompt"] = fields.flag("add_generation_prompt")
    return variables


def _read_effort(fields: Fields, template: ChatTemplate) -> dict[str, Any]:
    """reasoning_effort, as the variables that templates have for it; ApiError where this one has
    none."""
    effort = fields.choice("reasoning_effort", _EFFORTS)
    if effort is None:
        return {}
    form, source = template.form, template.source
    can_think = form.is_harmony or form.thinks is not None
    if effort == "none":
        is_known = "enable_thinking" in source or not can_think
    else:
        is_known = "enable_thinking" in source or "reasoning_effort" in source
    if not is_known:
        fields.fail("reasoning_effort", f"cannot be {effort}: the chat template has no way to it")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _read_continued(fields: Fields, messages: Sequence[Message], adds: Any) -> str | None:
    """The field of the last message that goes on, as vLLM and llama-server have it; ``adds`` is
    add_generation_prompt."""
    name, last = "continue_final_message", messages[-1]
    asked = fields.raw(name)
    if asked is None:
        asked = adds is None and last.role == "assistant" and not last.more.get("tool_calls")
    elif not isinstance(asked, bool) and asked not in _OPEN:
        fields.fail(name, f"must be true, false, {' or '.join(_OPEN)}", "invalid_value")
    if not asked:
        return None
    if adds:
        fields.fail(name, "cannot be combined with 'add_generation_prompt': true")
    if last.role != "assistant" or last.more.get("tool_calls"):
        fields.fail(name, "needs a last message of the assistant's, without calls")
    if asked is not True:
        return str(asked)
    thinks = "reasoning_content" in last.more and not last.content
    return "reasoning_content" if thinks else "content"
