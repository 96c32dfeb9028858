"""Derives how a model writes calls and reasoning from its chat template.

The template is rendered with known calls, thoughts and contents. What stands around them is the
form; where renderings with one call and with two differ is what stands around each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from urdir.model.text import harmony
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import GENERIC, CallForm, Part, Slot, Tagged, controls_in, tags
from urdir.model.text.form_exceptions import exception_of
from urdir.model.text.reasoning import THINK_TAGS, ThinkTags
from urdir.model.text.template_calls import ARGUMENTS, Found, Known, find_call
from urdir.model.text.template_probe import (
    CONTENT,
    NAMES,
    THOUGHT,
    Probe,
    Render,
    shared_end,
    shared_start,
)
from urdir.model.text.wrapped import ContentTags

_LONG_IDS = ("call_0123456789abcdef01234567", "call_123456789abcdef012345678")
_SHORT_IDS = ("a1b2c3d4e", "b2c3d4e5f")
_KIMI_IDS = tuple(f"functions.{name}:{index}" for index, name in enumerate(NAMES))
_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SWITCHES = ("enable_thinking", "thinking")
_TAG_ENDS = (" ", "\n", "\t", ">", "]")
_PYTHON_TAG = "<|python_tag|>"  # of Llama 3; templates write calls without it


def find_answer_format(
    source: str, render: Render, controls: Collection[str] = (), ends: Collection[str] = ()
) -> AnswerFormat:
    """Derive the format of the answers of a template, which ``render`` renders. ``controls`` are
    the texts of control tokens, ``ends`` of those that end an answer."""
    if all(tag in source for tag in harmony.EVIDENCE):
        return AnswerFormat(is_harmony=True)
    if not source:
        return AnswerFormat(GENERIC)
    derived = _Derived(source, Probe(render), ends)
    calls = derived.calls() or exception_of(source)
    thinks = derived.thinks()
    if calls is None:
        return AnswerFormat(GENERIC, thinks, derived.content(thinks))
    if calls.is_bare and (_PYTHON_TAG in controls or _PYTHON_TAG in source):
        calls = replace(calls, others=(_PYTHON_TAG,))
    calls = replace(calls, controls=controls_in(calls.literals(), controls))
    return AnswerFormat(calls, thinks, derived.content(thinks))


class _Derived:
    """What is derived from renderings of a template."""

    def __init__(self, source: str, probe: Probe, ends: Collection[str]) -> None:
        self._source = source
        self._probe = probe
        self._ends = ends
        self._prompt = probe.prompt() or ""
        self._plain = probe.answer() or ""
        self._content_end = ""

    @property
    def _tail(self) -> str:
        """The text after an answer's content."""
        return self._plain.rpartition(CONTENT)[2]

    # ---- calls ----

    def calls(self) -> CallForm | None:
        """The form of calls; None where the template writes none."""
        if "tool_calls" not in self._source or not self._plain:
            return None
        trials = product((_LONG_IDS, _SHORT_IDS, _KIMI_IDS), (False, True), ("", None))
        for ids, as_text, content in trials:
            known = [Known(*each) for each in zip(NAMES, ids, ARGUMENTS, strict=True)]
            if (form := self._form(known, as_text, content)) is not None:
                return replace(form, as_text=as_text, short_ids=ids is _SHORT_IDS)
        return None

    def _form(self, known: list[Known], as_text: bool, content: str | None) -> CallForm | None:
        """The form of known calls."""
        turns = [call.turn(as_text=as_text) for call in known]
        text = self._probe.answer(content, tool_calls=turns[:1])
        if text is None:
            return None
        alike = shared_start(text, self._plain)
        alike = alike[: max(map(alike.rfind, _TAG_ENDS)) + 1]
        start = max(len(shared_start(text, self._prompt)), len(alike))
        one = text[start:]
        if (first := find_call(one, known[0])) is None:
            return None
        before = one[: first.start]
        ended = shared_start(before, self._tail)
        if ended.strip():
            self._content_end, before = ended.strip(), before[len(ended) :]
        after = self._without_tail(one[first.end :], self._tail.removeprefix(ended))
        form = CallForm(first.parts, keys=first.keys, arguments=first.arguments)
        text = self._probe.answer(content, tool_calls=turns)
        gap = None if text is None else self._gap(text[start:], first, known)
        if gap is None:
            form = replace(form, begin=before, end=after)
            return self._typed(form, as_text, content)
        between, parts = gap
        begin = shared_end(before, between)
        end = shared_start(after, between[: len(between) - len(begin)])
        form = replace(
            form,
            parts=parts,
            begin=begin,
            end=end,
            between=between[len(end) : len(between) - len(begin)],
            section_begin=before[: len(before) - len(begin)],
            section_end=after[len(end) :],
        )
        return self._typed(_as_list(form), as_text, content)

    def _gap(
        self, text: str, first: Found, known: list[Known]
    ) -> tuple[str, tuple[Part, ...]] | None:
        """What stands between two calls, and the parts of a call as both have them."""
        found = find_call(text, known[0])
        if found is None or found.parts != first.parts:
            return None
        second = find_call(text[found.end :], known[1])
        if second is None or (parts := _common(first.parts, second.parts)) is None:
            return None
        return text[found.end : found.end + second.start], parts

    def _without_tail(self, text: str, tail: str) -> str:
        """A text without what ends a turn, which ``tail`` is after content."""
        text = text.removesuffix(shared_end(text, tail))
        ends = filter(None, (tail.strip(), *self._ends))
        return text[: min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))]

    def _typed(self, form: CallForm, as_text: bool, content: str | None) -> CallForm:
        """A form that says the types of values, with all of them."""
        written = form.arguments
        if not isinstance(written, Tagged) or not written.assigns:
            return form
        last = shared_end(written.assign, written.assigns[0][1])
        assigns = []
        values = {"number": 2.5, "boolean": True, "object": {"sub": 1}, "array": [3], "null": None}
        for kind, value in ("integer", 4711), *values.items():
            call = Known(NAMES[0], _SHORT_IDS[0], {"key_typed": value}).turn(as_text=as_text)
            text = self._probe.answer(content, tool_calls=[call]) or ""
            key = text.rfind("key_typed")
            if key >= 0 and (end := text.find(last, key)) >= 0:
                assigns.append((kind, text[key + len("key_typed") : end + len(last)]))
        return replace(form, arguments=replace(written, assigns=tuple(assigns)))

    # ---- thoughts and content ----

    def thinks(self) -> ThinkTags | None:
        """The tags around reasoning; None where the template knows none."""
        return next((tags for tags in self._all_thinks()), None)

    def _all_thinks(self) -> Iterator[ThinkTags]:
        for name in _THOUGHT_FIELDS:
            text = self._probe.answer(**{name: THOUGHT}) if name in self._source else None
            if text is None or text.find(THOUGHT) < 0 or CONTENT not in text:
                continue
            before, _, rest = text.partition(THOUGHT)
            begin = before[len(shared_start(before, self._prompt)) :].strip()
            end = rest.partition(CONTENT)[0]
            end = (end.removesuffix(self._before_content()) or end).strip()
            if not begin:  # the prompt has it
                begin = self._prompt[len(shared_start(self._prompt, self._plain)) :].strip()
            if not begin:
                begin, end = _opposite(before, end)
            if end:
                yield ThinkTags(begin, end)
        yield from (tags for tags in THINK_TAGS if tags.end in self._source)
        for name, value in product(_SWITCHES, (False, True)):
            if name in self._source:
                yield from self._closed(self._probe.prompt(**{name: value}) or "")
        yield from self._closed(self._prompt)

    def _closed(self, prompt: str) -> Iterator[ThinkTags]:
        """The tags of a thought without text at the end of a prompt."""
        rest = prompt[len(shared_start(prompt, self._plain)) :].strip()
        *begin, end = tags(rest) or [""]
        if begin and len(end) > 2 and re.search("think|thought", rest, re.IGNORECASE):
            yield ThinkTags("".join(begin).strip(), end)

    def _before_content(self) -> str:
        """The text between a prompt and the content of an answer."""
        before = self._plain.rpartition(CONTENT)[0]
        return before[len(shared_start(before, self._prompt)) :]

    def content(self, thinks: ThinkTags | None) -> ContentTags | None:
        """The tags around content, if there are any."""
        begin = self._before_content()
        if thinks is not None:
            begin = begin.rpartition(thinks.end)[2]
        elif not self._plain.startswith(self._prompt):
            return None
        begin = begin.lstrip()
        if not begin.strip():
            return None
        first, *others = [tag for tag in tags(self._tail) if tag.strip()] or [""]
        end = self._content_end or (first if others and first not in self._ends else "")
        return ContentTags(begin if begin[0] not in "<[" else begin.rstrip(), end)


def _as_list(form: CallForm) -> CallForm:
    """A form whose section has brackets is one of a list."""
    begin, end = form.section_begin.rstrip(), form.section_end.lstrip()
    if begin.endswith("[") and end.startswith("]"):
        begin, end = begin[:-1], end[1:]
        return replace(form, section_begin=begin, section_end=end, is_list=True)
    if not form.section_begin.strip():  # nothing to be ended
        return replace(form, section_end="")
    return form


def _opposite(before: str, end: str) -> tuple[str, str]:
    """The tag at the end of a text that is closed by the one at the start of ``end``, and that
    one: `<think>` and `</think>`, `<open>think<sep>` and `<close>think<sep>`."""
    opening, closing = tags(before.rstrip()), tags(end)
    counts = range(len(closing), 1, -1)
    count = next((n for n in counts if closing[1:n] == opening[len(opening) - n + 1 :]), 1)
    last = closing[:count] if count > 1 else closing
    return "".join(opening[-count:]), "".join(last)


def _common(first: tuple[Part, ...], second: tuple[Part, ...]) -> tuple[Part, ...] | None:
    """The parts of two calls, in which a number that differs is their index; None where anything
    else does."""
    if len(first) != len(second):
        return None
    parts: list[Part] = []
    for one, two in zip(first, second, strict=True):
        if isinstance(one, Slot) or isinstance(two, Slot) or one == two:
            if isinstance(one, Slot) is not isinstance(two, Slot):
                return None
            parts.append(one)
            continue
        before, after = shared_start(one, two), shared_end(one, two)
        number = one[len(before) : len(one) - len(after)]
        if not number.isdecimal():
            return None
        parts += [part for part in (before, Slot.INDEX, after) if part]
    return tuple(parts)
