"""End-of-answer tokens, and tokens that are markup by their text alone.

Metadata name only some of them. The names and exceptions are those of llama.cpp (llama-vocab.cpp,
`special_eog_ids`), so that answers end at the same token as there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_END_NAMES = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)

# Fill-in-the-middle tokens by role. If metadata give the role, the names do not count.
_FILL_END_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FILL_ROLES = tuple(_FILL_END_NAMES)

# Separators of the messages in one answer of gpt-oss.
_CHANNEL_NAMES = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})

# Old files list these as ordinary text; typed by a user they must not become markup.
_MARKUP_NAMES = (
    _END_NAMES.union(*_FILL_END_NAMES.values())
    | {"<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"}
    | {"<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"}
    | {"<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"}
    | {"<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"}
    | {"<|prefix|>", "<|suffix|>", "<|middle|>"}
    | {"<|im_start|>", "<|begin_of_text|>", "<start_of_turn>"}
    | {"<|start_header_id|>", "<|end_header_id|>"}
    | _CHANNEL_NAMES
)


def find_end_ids(
    id_of: Mapping[str, int], given: Iterable[int], fill: Mapping[str, int | None]
) -> frozenset[int]:
    """Tokens that end an answer.

    `given` are the ids that the metadata name (end of sequence, of turn, of message), `fill` those
    of `FILL_ROLES`.
    """
    ends = {id_of[name] for name in _END_NAMES if name in id_of} | set(given)
    for role, names in _FILL_END_NAMES.items():
        if (token_id := fill.get(role)) is not None:
            ends.add(token_id)
        else:
            ends.update(id_of[name] for name in names if name in id_of)

    def has(*names: str) -> bool:
        return any(id_of.get(name) in ends for name in names)

    if _end_closes_a_message(id_of):
        ends.discard(id_of["<|end|>"])
    if has("<|tool_response>", "<|plamo:eos|>"):  # HTML's </s>, an ordinary word there
        ends.discard(id_of.get("</s>", -1))
    return frozenset(ends)


def find_markup(id_of: Mapping[str, int], end_ids: Collection[int]) -> dict[str, int]:
    """Tokens that are control tokens whatever type a file gives them."""
    found = {name: id_of[name] for name in _MARKUP_NAMES if name in id_of}
    if "</s>" in found and found["</s>"] not in end_ids:
        del found["</s>"]
    return found


def find_shown_ids(id_of: Mapping[str, int]) -> frozenset[int]:
    """Markup that is printed: gpt-oss and Solar Open write several messages per answer."""
    names = _CHANNEL_NAMES | ({"<|end|>"} if _end_closes_a_message(id_of) else set())
    return frozenset(id_of[name] for name in names if name in id_of)


def _end_closes_a_message(id_of: Mapping[str, int]) -> bool:
    """Whether an answer continues after <|end|>, until <|return|>, <|call|> or <|flush|>."""
    calls = "<|call|>" in id_of or "<|calls|>" in id_of
    return "<|end|>" in id_of and calls and ("<|return|>" in id_of or "<|flush|>" in id_of)
