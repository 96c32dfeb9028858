"""The vocabulary of a GGUF file: token texts, their types, and the ids with a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata, StringArray

_PREFIX = "tokenizer.ggml."

# Control tokens that end an answer whatever the metadata says, as llama.cpp treats them.
END_NAMES = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
# Old files list these as ordinary text; typed by a user they must not become markup.
CONTROL_NAMES = END_NAMES | {
    "<|im_start|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
}


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id; see `read_vocabulary`."""

    tokens: list[str]  # as stored: byte-level or SentencePiece alphabet
    types: list[int]  # TokenType of each
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None  # end of turn
    eom_id: int | None  # end of message, before a tool's answer
    unknown_id: int | None
    more_end_ids: frozenset[int] = frozenset()
    strips_after: frozenset[int] = frozenset()  # tokens that take the white space after them
    strips_before: frozenset[int] = frozenset()

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens after which an answer is over."""
        known = {i for i, token in enumerate(self.tokens) if token in END_NAMES}
        given = {self.eos_id, self.eot_id, self.eom_id}
        return self.more_end_ids | known | {i for i in given if i is not None}

    def ids(self, *types: TokenType) -> list[int]:
        """The tokens of the given types."""
        return [i for i, token_type in enumerate(self.types) if token_type in types]


def read_vocabulary(metadata: Metadata, default_ids: Mapping[str, int]) -> Vocabulary:
    """Read `tokenizer.ggml.{tokens,token_type,*_token_id}`; `default_ids` by role ("bos").

    Raises ConfigError or TokenizerError, naming the key that is missing or wrong.
    """
    tokens = list(metadata.require(_PREFIX + "tokens", StringArray))
    if not tokens:
        raise TokenizerError(f"{_PREFIX}tokens is empty")

    def role(name: str) -> int | None:
        key = f"{_PREFIX}{name}_token_id"
        token_id = metadata.optional(key, int, None)
        if token_id is None:
            default = default_ids.get(name, len(tokens))
            return default if default < len(tokens) else None
        if not 0 <= token_id < len(tokens):
            raise TokenizerError(f"{key} is {token_id}, the vocabulary has {len(tokens)} tokens")
        return token_id

    return Vocabulary(
        tokens=tokens,
        types=_read_types(metadata, tokens),
        bos_id=role("bos"),
        eos_id=role("eos"),
        eot_id=role("eot"),
        eom_id=role("eom"),
        unknown_id=role("unknown"),
    )


def _read_types(metadata: Metadata, tokens: Sequence[str]) -> list[int]:
    key = _PREFIX + "token_type"
    array = metadata.optional(key, np.ndarray, None)
    types = [int(TokenType.NORMAL)] * len(tokens) if array is None else array.tolist()
    if len(types) != len(tokens):
        raise TokenizerError(f"{key} has {len(types)} entries for {len(tokens)} tokens")
    for token_id, token in enumerate(tokens):
        if token in CONTROL_NAMES:
            types[token_id] = TokenType.CONTROL
    return types
