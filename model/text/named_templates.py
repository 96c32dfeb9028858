"""Built-in chat templates for files without one: by name, or inferred from the vocabulary.

Names are llama.cpp's (`--chat-template`), formats those of the models' cards. Each template is a
file in `data/chat_templates`.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from urdir.model.errors import SettingsError
from urdir.model.files.metadata import Metadata
from urdir.model.foreign import one_line

_FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
#: Formats that differ only in tool calls, which these templates omit.
_ALIASES = {"granite-4.0": "granite", "granite-4.1": "granite"}

#: Special tokens that identify a format: the first row whose tokens are all in the vocabulary.
_BY_TOKENS: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (name, frozenset(tokens.split()))
    for name, tokens in (
        ("phi4", "<|im_start|> <|im_sep|> <|im_end|>"),
        ("chatml", "<|im_start|> <|im_end|>"),
        ("kimi-k2", "<|im_user|> <|im_assistant|> <|im_middle|>"),
        ("llama3", "<|start_header_id|> <|end_header_id|> <|eot_id|>"),
        ("llama4", "<|header_start|> <|header_end|> <|eot|>"),
        ("gemma", "<start_of_turn> <end_of_turn>"),
        ("command-r", "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|>"),
        ("gpt-oss", "<|start|> <|channel|> <|message|> <|return|>"),
        ("solar-open", "<|begin|> <|content|> <|end|>"),
        ("granite", "<|start_of_role|> <|end_of_role|>"),
        ("deepseek3", "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>"),
        ("dots1", "<|userprompt|> <|endofuserprompt|> <|response|>"),
        ("seed_oss", "<seed:bos> <seed:eos>"),
        ("hunyuan-dense", "<｜hy_User｜> <｜hy_Assistant｜>"),
        ("megrez", "<|role_start|> <|role_end|> <|turn_end|>"),
        ("exaone4", "[|system|] [|user|] [|assistant|] [|endofturn|]"),
        ("chatglm4", "[gMASK] <sop> <|user|> <|assistant|>"),
    )
)
#: As above, for formats that depend on the kind of tokeniser.
_BY_KIND: tuple[tuple[frozenset[str], dict[str, str]], ...] = (
    (
        frozenset({"[INST]", "[/INST]", "[SYSTEM_PROMPT]"}),
        {"llama": "mistral-v7", "gpt2": "mistral-v7-tekken"},
    ),
    (frozenset({"[INST]", "[/INST]"}), {"llama": "mistral-v3", "gpt2": "mistral-v3-tekken"}),
    (frozenset({"<|user|>", "<|assistant|>", "<|end|>"}), {"llama": "phi3"}),
)
#: Tokens of later models that share an earlier one's tokens but not its format.
_LATER = ("<end_of_utterance>", "<|START_RESPONSE|>", "<think>", "/nothink", "[THINK]")


@cache
def template_names() -> tuple[str, ...]:
    """Every name that `named_template` accepts."""
    return tuple(sorted([*(path.stem for path in _FOLDER.glob("*.jinja")), *_ALIASES]))


def named_template(name: str) -> str:
    """The Jinja template of that name; SettingsError if unknown."""
    if name not in template_names():
        near = get_close_matches(name, template_names(), 5, 0.5)
        near += [other for other in template_names() if other.startswith(name) and name]
        which = "near it" if near else "there are"
        raise SettingsError(
            f"no chat template has the name {one_line(name)!r}; {which}: "
            + ", ".join(dict.fromkeys(near or template_names()))
        )
    return (_FOLDER / f"{_ALIASES.get(name, name)}.jinja").read_text(encoding="utf-8")


def template_text(given: str) -> str:
    """``given`` if it is a Jinja template, else the template of that name, or SettingsError."""
    return given if is_template(given) else named_template(given)


def is_template(text: str) -> bool:
    """Whether a text is a Jinja template, which names of templates are not."""
    return "{{" in text or "{%" in text


def fitting_template(metadata: Metadata, special: Collection[str]) -> str | None:
    """The name of the only format that fits a vocabulary with these ``special`` tokens.

    None where several formats are possible, as for most SentencePiece vocabularies.
    """
    found = frozenset(special)
    if not found.isdisjoint(_LATER):
        return None
    for name, tokens in _BY_TOKENS:
        if tokens <= found:
            return name
    kind = metadata.optional("tokenizer.ggml.model", str, "")
    return next((names.get(kind) for tokens, names in _BY_KIND if tokens <= found), None)
