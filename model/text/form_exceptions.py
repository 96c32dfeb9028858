"""Call forms that a chat template does not write itself, though it describes tools."""

from __future__ import annotations

from dataclasses import replace

from urdir.model.text.call_form import GENERIC, CallForm, Pairs, Slot

_JSON_LIST = replace(GENERIC, begin="", end="", between=", ", is_list=True)

#: Texts of a template, and the form that its model was trained with. The first match wins.
_FORMS: tuple[tuple[tuple[str, ...], CallForm], ...] = (
    (("<|tool|>", "<|/tool|>"),  # Phi-4-mini
     replace(_JSON_LIST, section_begin="<|tool_call|>", section_end="<|/tool_call|>")),
    (("<|tool_call|>",),  # Granite 3
     replace(_JSON_LIST, section_begin="<|tool_call|>")),
    (("<|tool_list_start|>",),  # LFM2
     CallForm((Slot.NAME, Slot.ARGUMENTS), between=", ", section_begin="<|tool_call_start|>",
              section_end="<|tool_call_end|>", is_list=True,
              arguments=Pairs("(", "=", ", ", ")", '"'))),
    (("<tool_call>", "</tool_call>"), replace(GENERIC)),  # SmolLM3, Hermes 2
)  # fmt: skip


def exception_of(source: str) -> CallForm | None:
    """The form of a template's model, by texts of the template; None where that is not known."""
    for texts, form in _FORMS:
        if all(text in source for text in texts):
            return replace(form, is_shown="tool_calls" in source)
    return None
