"""Chat templates: render conversations to prompts and tokenise them.

Control tokens ("<|im_end|>") are parsed in the template's markup only, not in what users wrote
(message contents, calls of tools and their results, descriptions of tools): no user can forge a
turn by typing one. To tell the two apart in the rendered text, every character of users' texts that
can begin a control token is replaced by a stand-in before rendering (`marking`). Afterwards their
positions are passed to `Tokenizer.encode` as `opaque`. The rest is still encoded in one piece with
the surrounding markup, as in training.

Limits: a template does not see control tokens within contents (it cannot cut at them). A template
that spells half a control token itself and lets a message complete it is not guarded against.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from urdir.model.errors import LongConversationError, NoTemplateError, TemplateError
from urdir.model.files.model_file import ModelFile
from urdir.model.owner import Owner
from urdir.model.text import generic_tools
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.earlier_calls import as_written
from urdir.model.text.marking import Marker, texts_of, unused_character
from urdir.model.text.named_templates import fitting_template, named_template, template_text
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.system_text import SystemText, Turn
from urdir.model.text.tags import shared_length
from urdir.model.text.template_forms import find_answer_format
from urdir.model.text.template_worker import OUTPUT_LIMIT
from urdir.model.text.tokenizer import Span, Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"
_DERIVE_LIMIT = 10.0  # seconds of a processor in which a template shows how it writes answers


def find_template(gguf: ModelFile, tokenizer: Callable[[], Tokenizer]) -> str:
    """The file's template, or the one that its vocabulary is made for, with a warning.

    The ``tokenizer`` is built in the second case only. NoTemplateError if the format is uncertain.
    """
    source = gguf.metadata.optional(TEMPLATE_KEY, str, None)
    if source is not None and source.strip():
        return source
    name = fitting_template(gguf.metadata, tokenizer().special_texts())
    if name is None:
        raise NoTemplateError(
            f"{gguf.path}: the file has no chat template ({TEMPLATE_KEY}), and its vocabulary "
            "fits no known one: give its name (chatml, llama3, ...), or continue plain prompts"
        )
    warnings.warn(
        f"the file has no chat template: {name} is used, because it fits the vocabulary",
        stacklevel=2,
    )
    return named_template(name)


#: Roles in a conversation.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Optional fields of a message that templates see beside role and content.
MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: ``role`` is one of `ROLES`, or another that your own template
    handles; ``more`` are fields of `MESSAGE_FIELDS` (tool calls, reasoning), as JSON values."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Message | Mapping[str, Any]) -> Message:
        """A message, or a dictionary of its fields as in OpenAI's API: a content may be a list of
        text parts, other fields and None values are ignored. Raises TemplateError."""
        if isinstance(message, Message):
            return message
        if not isinstance(message, Mapping):
            raise TemplateError(f"{message!r:.80} is not a message: {_EXAMPLE}")
        more = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
        role, content = message.get("role"), message.get("content")
        if content is None and "tool_calls" in more:
            content = ""
        if isinstance(content, list | tuple):
            parts = [part.get("text") for part in content if isinstance(part, Mapping)]
            texts = [text for text in parts if isinstance(text, str)]
            content = "\n".join(texts) if len(texts) == len(content) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise TemplateError(
                f"a message needs a role and a content, both texts, or text parts: {message!r:.80}"
            )
        return cls(role, content, more)


_EXAMPLE = "give a list of messages, such as [{'role': 'user', 'content': 'Hi'}]"


def conversation(messages: Iterable[Message | Mapping[str, Any]], template: str) -> list[Message]:
    """Messages as objects, with roles mapped to those of a template, given as source.

    Raises TemplateError for anything but a list of messages, for an empty list, and for a role
    outside `ROLES`.
    """
    if isinstance(messages, str | bytes | Mapping | Message) or not isinstance(messages, Iterable):
        raise TemplateError(f"{messages!r:.80} is not a conversation: {_EXAMPLE}")
    found = [Message.of(message) for message in messages]
    if not found:
        raise TemplateError(f"the conversation is empty: {_EXAMPLE}")
    for number, message in enumerate(found):
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise TemplateError(
                f"message {number} has the role {message.role!r:.40}: expected {known}"
            )
    return [replace(message, role=role_in(template, message.role)) for message in found]


def role_in(template: str, role: str) -> str:
    """Map one of `ROLES` to a template's: developer becomes system if the template has no
    developer."""
    return "system" if role == "developer" and role not in template else role


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    text: str
    opaque: tuple[Span, ...]  # character spans of messages, where no control token begins
    begun: str = ""  # the end of `text`, from an open message that the answer continues

    @property
    def before(self) -> str:
        """The text up to the answer."""
        return self.text.removesuffix(self.begun)


class ChatTemplate(Owner):
    """Renders and tokenises conversations; a context manager that owns the rendering process."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> None:
        """`source` is the Jinja template; this object owns `process`, started or not, from now
        on."""
        self.source = source
        self._tokenizer = tokenizer
        self._process = process or TemplateProcess()
        self._marker = Marker(source, tokenizer.control_tokens())
        self._system = SystemText(self._render_turns)
        self._derived: tuple[str, AnswerFormat | None] = "", None

    @classmethod
    def of(cls, gguf: ModelFile, tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
        """The ``given`` template (Jinja, or a name of `template_names`), or the file's.

        Without either, the format that the vocabulary is made for, with a warning;
        NoTemplateError if that is uncertain.
        """
        if given is not None:
            return cls(template_text(given), tokenizer)
        return cls(find_template(gguf, lambda: tokenizer), tokenizer)

    @property
    def form(self) -> AnswerFormat:
        """How the model writes reasoning and calls, derived by rendering the template with some."""
        source, form = self._derived
        if form is None or source != self.source:
            form = self._derive()
            self._derived = self.source, form
        return form

    def _derive(self) -> AnswerFormat:
        exceeded, first = False, None

        def render(turns: list[Turn], tools: list[Turn], more: Mapping[str, Any]) -> str:
            nonlocal exceeded, first
            if exceeded:
                raise TemplateError("the chat template exceeds a limit")
            try:
                return self._render_turns(turns, tools, more)
            finally:
                used = self._process.used_seconds
                first = used if first is None else first
                exceeded = used is None or first is None or used - first > _DERIVE_LIMIT

        tokenizer = self._tokenizer
        ends = [tokenizer.token_text(token) for token in tokenizer.end_ids]
        return find_answer_format(self.source, render, tokenizer.control_tokens(), ends)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation up to the assistant's answer, with BOS if the model wants
        it.

        Raises TemplateError, or TokenizerError for contents that are not valid Unicode.
        """
        return self.tokens(self.render(messages))

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a rendered conversation, with BOS if the model wants it.

        Raises TokenizerError for contents that are not valid Unicode.
        """
        return self._tokenizer.encode(
            prompt.text, parse_special=True, add_bos=True, opaque=prompt.opaque
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: str | None = None,
    ) -> Prompt:
        """Render the conversation up to the assistant's answer.

        ``tools`` are descriptions in OpenAI's form, ``variables`` are other values for the template
        ("enable_thinking"); both are JSON. A template without a known call format gets tools, calls
        and results as text (`generic_tools`). ``continues`` is the field of the last message that
        the answer continues: the prompt ends with it. Raises TemplateError: exceeded limits,
        syntax, sandbox, an error raised by the template, or a template that drops this field.
        """
        turns: list[Turn] = [{"role": m.role, "content": m.content, **m.more} for m in messages]
        written: list[Any] = [turns, tools or None, dict(variables or {})]
        texts = set(texts_of(written))  # refuses values nested too deeply for the steps below
        if self.form.is_generic:
            written[:2] = _as_text(turns, tools), None
            texts = set(texts_of(written))
        elif self.form.calls is not None:
            written[0] = as_written(turns, self.form.calls)
            texts |= set(texts_of(written[0]))  # of arguments that came as JSON
        if (length := sum(map(len, texts))) > OUTPUT_LIMIT:
            raise LongConversationError(
                f"the conversation has {length:,} characters: at most {OUTPUT_LIMIT:,} go through "
                "a chat template"
            )
        if continues is None:
            return self._render_safely(written)
        return self._open(written, continues)

    def _open(self, written: list[Any], name: str) -> Prompt:
        """Render up to the end of a field of the last message.

        A character that occurs in no text marks the end of the field during rendering. Trimming by
        the template, and text that it adds after the message, do not matter.
        """
        turns, tools, more = written
        field = turns[-1].get(name, "")
        end = unused_character([self.source, *texts_of(written)])
        turns = [*turns[:-1], {**turns[-1], name: field + end}]
        prompt = self._render_safely([turns, tools, {**more, "add_generation_prompt": False}])
        at = prompt.text.rfind(end)
        if at < 0:
            raise TemplateError(
                f"the chat template drops the last message's {name}, so it cannot be continued"
            )
        text = prompt.text[:at]
        length = shared_length(text[::-1], field[::-1])
        opaque = tuple(span for span in prompt.opaque if span[1] <= at)
        return Prompt(text, opaque, text[len(text) - length :])

    def _render_safely(self, written: list[Any]) -> Prompt:
        """Render users' contents as text, with the template's own tags kept if they do no harm."""
        prompt = self._render(written, keeps_tags=False)
        if self._marker.has_tags(written):
            with_tags = self._render(written, keeps_tags=True)
            if self._markup(with_tags) == self._markup(prompt):
                return with_tags
        return prompt

    def _render(self, written: list[Any], keeps_tags: bool) -> Prompt:
        """Render users' contents as text; ``keeps_tags`` leaves tags that the template names."""
        (turns, tools, more), original = self._marker.marked(written, self.source, keeps_tags)
        rendered = self._render_turns(self._system.placed(turns), tools, more)
        opaque = tuple((i, i + 1) for i, char in enumerate(rendered) if char in original)
        return Prompt("".join(original.get(char, char) for char in rendered), opaque)

    def _markup(self, prompt: Prompt) -> list[int]:
        """The control tokens of a prompt, in order."""
        return [token for token in self.tokens(prompt) if self._tokenizer.is_markup(token)]

    def close(self) -> None:
        """End the rendering process. Idempotent."""
        self._process.close()

    def _render_turns(
        self, turns: list[Turn], tools: Any = None, more: Mapping[str, Any] | None = None
    ) -> str:
        """Render turns. A template that fails with tools None is given undefined tools."""
        variables = self._variables(turns, tools, more or {})
        try:
            return self._process.render(self.source, variables)
        except TemplateError as error:
            if tools is not None or self._process.pid is None:  # it exceeded a limit
                raise
            del variables["tools"]
            try:
                return self._process.render(self.source, variables)
            except TemplateError:
                raise error from None

    def _variables(self, turns: list[Turn], tools: Any, more: Mapping[str, Any]) -> dict[str, Any]:
        """Variables that templates expect."""
        return {
            "add_generation_prompt": True,
            "documents": None,
            **more,
            "messages": turns,
            "tools": tools,
            "bos_token": self._text(self._tokenizer.bos_id),
            "eos_token": self._text(self._tokenizer.eos_id),
        }

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.token_text(token_id)


def _as_text(turns: list[Turn], tools: Sequence[Mapping[str, Any]] | None) -> list[Turn]:
    """A conversation with its tools, calls and results as text. Raises TemplateError."""
    try:
        return generic_tools.as_text(turns, tools)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        raise TemplateError(
            "a tool, a call or a result does not have OpenAI's form, or nests too deeply"
        ) from None
