"""Conversations to prompts, by the model's own chat template.

The template's markup is parsed for control tokens ("<|im_end|>"). What users wrote is not (message
contents, calls of tools and their results, descriptions of tools): nobody forges a turn by typing
one. To tell the two apart in the rendered text, characters of users' texts with which a control
token can begin are replaced by stand-ins before rendering (`marking`). Their places afterwards are
what `Tokenizer.encode` takes as `opaque`, and the rest is still encoded in one piece with the
markup around it, as the model was trained.

Limits: a template does not see control tokens that stand in contents (it cannot cut at them), and
one that spells half a control token itself and lets a message complete it is not guarded against.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from urdir.model.errors import NoTemplateError, TemplateError
from urdir.model.files.model_file import ModelFile
from urdir.model.owner import Owner
from urdir.model.text import generic_tools
from urdir.model.text.answers import find_answer_format
from urdir.model.text.marking import Marker, texts_of, unused_character
from urdir.model.text.named_templates import fitting_template, named_template, template_text
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.system_text import SystemText, Turn
from urdir.model.text.tags import shared_length
from urdir.model.text.template_worker import OUTPUT_LIMIT
from urdir.model.text.tokenizer import Span, Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"


def find_template(gguf: ModelFile, tokenizer: Callable[[], Tokenizer]) -> str:
    """The file's template, or the one that its vocabulary is made for, which is said in a warning:
    the ``tokenizer`` is asked for in this case alone. NoTemplateError where that is not certain."""
    source = gguf.metadata.optional(TEMPLATE_KEY, str, None)
    if source is not None:
        return source
    name = fitting_template(gguf.metadata, tokenizer().special_texts())
    if name is None:
        raise NoTemplateError(
            f"{gguf.path}: the file has no chat template ({TEMPLATE_KEY}), and its vocabulary "
            "fits no known one: name it (chatml, llama3, ...), or continue plain prompts"
        )
    warnings.warn(
        f"the file has no chat template: {name} is used, as its tokens have it", stacklevel=2
    )
    return named_template(name)


#: Who speaks in a conversation.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: What templates see of a message beside its role and content, where it has that.
MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str  # one of `ROLES`, unless it is for a template of your own
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)  # `MESSAGE_FIELDS`: JSON

    @classmethod
    def of(cls, message: Message | Mapping[str, Any]) -> Message:
        """A message, or a dictionary of its fields as OpenAI has them; other fields, and those that
        are None, are ignored. Raises TemplateError."""
        if isinstance(message, Message):
            return message
        if not isinstance(message, Mapping):
            raise TemplateError(f"{message!r:.80} is no message: {_EXAMPLE}")
        more = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
        role, content = message.get("role"), message.get("content")
        if content is None and "tool_calls" in more:
            content = ""
        if not isinstance(role, str) or not isinstance(content, str):
            raise TemplateError(
                f"a message needs a role and a content, both texts: {message!r:.80}"
            )
        return cls(role, content, more)


_EXAMPLE = "give a list of messages, such as [{'role': 'user', 'content': 'Hi'}]"


def conversation(messages: Iterable[Message | Mapping[str, Any]], template: str) -> list[Message]:
    """Messages as objects, with the roles that a template (its source) has for them.

    Raises TemplateError for what is no list of messages, for none, and for a role that is none of
    `ROLES`.
    """
    if isinstance(messages, str | bytes | Mapping | Message) or not isinstance(messages, Iterable):
        raise TemplateError(f"{messages!r:.80} is no conversation: {_EXAMPLE}")
    found = [Message.of(message) for message in messages]
    if not found:
        raise TemplateError(f"the conversation is empty: {_EXAMPLE}")
    for number, message in enumerate(found):
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise TemplateError(f"message {number} is by {message.role!r:.40}: expected {known}")
    return [replace(message, role=role_in(template, message.role)) for message in found]


def role_in(template: str, role: str) -> str:
    """The role that a template has for one of `ROLES`: a developer is the system to those that know
    no developer."""
    return "system" if role == "developer" and role not in template else role


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    text: str
    opaque: tuple[Span, ...]  # characters of messages with which no control token begins
    begun: str = ""  # the end of `text` that the answer goes on with, of a message that is open

    @property
    def before(self) -> str:
        """The text up to the answer."""
        return self.text.removesuffix(self.begun)


class ChatTemplate(Owner):
    """Renders and tokenises conversations; a context manager that owns the rendering process."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> None:
        """`source` is the Jinja template; `process`, which may have begun, is owned from now on."""
        self.source = source
        self._tokenizer = tokenizer
        self._process = process or TemplateProcess()
        self._marker = Marker(source, tokenizer.control_tokens())
        self._system = SystemText(self._render_turns)

    @classmethod
    def from_gguf(
        cls, gguf: ModelFile, tokenizer: Tokenizer, given: str | None = None
    ) -> ChatTemplate:
        """The template that is ``given`` (Jinja, or a name of `template_names`), or the file's.

        For a file without one the format that its vocabulary is made for, with a warning;
        NoTemplateError where that is none.
        """
        if given is not None:
            return cls(template_text(given), tokenizer)
        return cls(find_template(gguf, lambda: tokenizer), tokenizer)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation up to where the assistant answers, BOS as the model wants.

        Raises TemplateError, or TokenizerError for contents that are no valid Unicode.
        """
        return self.tokens(self.render(messages))

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a rendered conversation, BOS as the model wants.

        Raises TokenizerError for contents that are no valid Unicode.
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
        """The conversation up to where the assistant answers, as text.

        ``tools`` are descriptions in OpenAI's form, ``variables`` what else the template may read
        ("enable_thinking"); both are JSON. A template without a known form of calls gets tools,
        calls and results as texts (`generic_tools`). ``continues`` is the field of the last message
        that the answer goes on with: the prompt ends with it. Raises TemplateError: exceeded
        limits, syntax, sandbox, the template's own complaint, or that it drops this field.
        """
        turns: list[Turn] = [{"role": m.role, "content": m.content, **m.more} for m in messages]
        written: list[Any] = [turns, tools or None, dict(variables or {})]
        texts = set(texts_of(written))  # which refuses what nests too deeply for all that follows
        if find_answer_format(self.source).is_generic:
            written[:2] = _told(turns, tools), None
            texts = set(texts_of(written))
        if (length := sum(map(len, texts))) > OUTPUT_LIMIT:
            raise TemplateError(
                f"the conversation has {length:,} characters: at most {OUTPUT_LIMIT:,} go through "
                "a chat template"
            )
        if continues is None:
            return self._render_safely(written)
        return self._open(written, continues)

    def _open(self, written: list[Any], name: str) -> Prompt:
        """The conversation up to the end of a field of its last message.

        A character that no text has stands after the field while the template renders: what the
        template trims, and what it adds after the message, does not matter.
        """
        turns, tools, more = written
        field = turns[-1].get(name, "")
        end = unused_character([self.source, *texts_of(written)])
        turns = [*turns[:-1], {**turns[-1], name: field + end}]
        prompt = self._render_safely([turns, tools, {**more, "add_generation_prompt": False}])
        at = prompt.text.rfind(end)
        if at < 0:
            raise TemplateError(
                f"the chat template leaves out the last message's {name}, which cannot be continued"
            )
        text = prompt.text[:at]
        length = shared_length(text[::-1], field[::-1])
        opaque = tuple(span for span in prompt.opaque if span[1] <= at)
        return Prompt(text, opaque, text[len(text) - length :])

    def _render_safely(self, written: list[Any]) -> Prompt:
        """What users wrote, as text, with tags that the template names where they do no harm."""
        prompt = self._render(written, keeps_tags=False)
        if self._marker.has_tags(written):
            with_tags = self._render(written, keeps_tags=True)
            if self._markup(with_tags) == self._markup(prompt):
                return with_tags
        return prompt

    def _render(self, written: list[Any], keeps_tags: bool) -> Prompt:
        """What users wrote, as text; ``keeps_tags`` leaves tags that the template names."""
        (turns, tools, more), original = self._marker.marked(written, self.source, keeps_tags)
        rendered = self._render_turns(self._system.placed(turns), tools, more)
        opaque = tuple((i, i + 1) for i, char in enumerate(rendered) if char in original)
        return Prompt("".join(original.get(char, char) for char in rendered), opaque)

    def _markup(self, prompt: Prompt) -> list[int]:
        """The control tokens of a prompt, in order."""
        return [token for token in self.tokens(prompt) if self._tokenizer.is_markup(token)]

    def close(self) -> None:
        """End the rendering process; closing twice does nothing."""
        self._process.close()

    def _render_turns(
        self, turns: list[Turn], tools: Any = None, more: Mapping[str, Any] | None = None
    ) -> str:
        """Their text. A template that fails on tools that are none sees them undefined."""
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
        """What templates expect to be defined."""
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


def _told(turns: list[Turn], tools: Sequence[Mapping[str, Any]] | None) -> list[Turn]:
    """A conversation with its tools, calls and results as texts. Raises TemplateError."""
    try:
        return generic_tools.as_text(turns, tools)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        raise TemplateError(
            "a tool, a call or a result has not the form that OpenAI gives it, or nests too deeply"
        ) from None
