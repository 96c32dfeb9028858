"""Vocabulary of a GGUF file: token texts, their types, and special token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import TokenizerError
from urdir.model.files.limits import CONTROL_TOKENS, TOKEN_NBYTES, TOKENS
from urdir.model.files.metadata import Metadata, StringArray
from urdir.model.text.end_tokens import FILL_ROLES, find_end_ids, find_markup, find_shown_ids

_PREFIX = "tokenizer.ggml."
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "seperator")
_ADDS = ("add_bos_token", "add_eos_token", "add_sep_token")


class TokenType(IntEnum):
    """tokenizer.ggml.token_type; unknown numbers become `UNDEFINED`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for metadata that a file lacks; ids beyond the vocabulary are ignored."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    always_adds_bos: bool = False  # overrides the file
    sep: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id; see `read_vocabulary`."""

    tokens: list[str]  # as stored: byte-level or SentencePiece alphabet
    types: bytes  # TokenType of each
    id_of: dict[str, int]  # by text, the first of duplicates; without empty texts
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None  # end of turn
    eom_id: int | None  # end of message, before a tool result
    unknown_id: int | None
    end_ids: frozenset[int]  # an answer ends with one of these
    shown_ids: frozenset[int]  # printed although their type may be CONTROL
    adds_bos: bool  # prompts begin with BOS, which exists
    adds_eos: bool  # complete texts end with EOS, which exists
    strips_after: frozenset[int] = frozenset()  # tokens that absorb the white space after them
    strips_before: frozenset[int] = frozenset()
    sep_id: int | None = None  # between the two texts of a pair
    closing_id: int | None = None  # what complete texts end with instead of EOS
    adds_sep: bool = False

    def ids(self, *types: TokenType) -> list[int]:
        """The tokens of the given types."""
        stored = np.frombuffer(self.types, np.uint8)
        found: list[int] = np.flatnonzero(np.isin(stored, types)).tolist()
        return found

    def words(self) -> dict[str, int]:
        """Ids of the tokens that ordinary text can become: all but control and unknown."""
        words = self.id_of.copy()
        for token_id in self.ids(TokenType.CONTROL, TokenType.UNKNOWN):
            token = self.tokens[token_id]
            if words.get(token) == token_id:
                del words[token]
        return words


def check_vocabulary(metadata: Metadata) -> int:
    """Check without decoding any token; returns their number. Raises as `read_vocabulary`."""
    count = len(stored_tokens(metadata))
    for name in (*_ROLES, *FILL_ROLES):
        read_role(metadata, name, count)
    for name in _ADDS:
        metadata.optional(_PREFIX + name, bool, False)
    read_types(metadata, count)
    return count


def read_vocabulary(
    metadata: Metadata,
    defaults: Defaults,
    is_word: Callable[[str], bool] = lambda token: False,
) -> Vocabulary:
    """Read `tokenizer.ggml.{tokens,token_type,*_token_id,add_*_token}`, and the tokens that end
    answers of a folder's model, `tokenizer.huggingface.end_token_ids`.

    Tokens known as markup become control tokens whatever the file says, unless `is_word`.
    Raises ConfigError or TokenizerError, naming the missing or wrong key.
    """
    tokens = stored_tokens(metadata).decoded()
    id_of = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    id_of.pop("", None)

    def role(name: str, default: int | None = None) -> int | None:
        return read_role(metadata, name, len(tokens), default)

    bos, eos = role("bos", defaults.bos), role("eos", defaults.eos)
    eot, eom, sep = role("eot"), role("eom"), role("seperator", defaults.sep)
    adds = defaults.adds_bos, defaults.adds_eos, False
    adds_bos, adds_eos, adds_sep = (
        metadata.optional(_PREFIX + name, bool, default)
        for name, default in zip(_ADDS, adds, strict=True)
    )
    given = [i for i in (eos, eot, eom) if i is not None]
    of_folder = metadata.optional("tokenizer.huggingface.end_token_ids", np.ndarray, None)
    if of_folder is not None:
        given += [i for i in of_folder.tolist() if type(i) is int and 0 <= i < len(tokens)]
    end_ids = find_end_ids(id_of, given, {name: role(name) for name in FILL_ROLES})
    types = read_types(metadata, len(tokens))
    for name, token_id in find_markup(id_of, end_ids).items():
        if not is_word(name):
            types[token_id] = TokenType.CONTROL
    return Vocabulary(
        tokens=tokens,
        types=types.tobytes(),
        id_of=id_of,
        bos_id=bos,
        eos_id=eos,
        eot_id=eot,
        eom_id=eom,
        unknown_id=role("unknown", defaults.unknown),
        end_ids=end_ids,
        shown_ids=find_shown_ids(id_of),
        adds_bos=(adds_bos or defaults.always_adds_bos) and bos is not None,
        adds_eos=adds_eos and eos is not None,
        sep_id=sep,
        adds_sep=adds_sep and sep is not None,
    )


def stored_tokens(metadata: Metadata) -> StringArray:
    """The tokens as stored; ConfigError if missing, TokenizerError if there are none, too many, or
    too long ones."""
    stored = metadata.require(_PREFIX + "tokens", StringArray)
    if not stored:
        raise TokenizerError(f"{_PREFIX}tokens is empty")
    TOKENS.check(len(stored), f"{_PREFIX}tokens", TokenizerError)
    TOKEN_NBYTES.check(stored.longest, f"{_PREFIX}tokens", TokenizerError)
    return stored


def read_role(
    metadata: Metadata, name: str, n_tokens: int, default: int | None = None
) -> int | None:
    """The token with a role ("bos"); TokenizerError if it is outside the vocabulary."""
    key = f"{_PREFIX}{name}_token_id"
    token_id = metadata.optional(key, int, None)
    if token_id is None:
        return default if default is not None and default < n_tokens else None
    if not 0 <= token_id < n_tokens:
        raise TokenizerError(f"{key} is {token_id}, the vocabulary has {n_tokens} tokens")
    return token_id


def read_types(metadata: Metadata, n_tokens: int) -> NDArray[np.uint8]:
    """The type of each token; TokenizerError for a wrong number of them, or too many special
    tokens."""
    key = _PREFIX + "token_type"
    array = metadata.optional(key, np.ndarray, None)
    if array is None:
        return np.full(n_tokens, TokenType.NORMAL, np.uint8)
    if len(array) != n_tokens:
        raise TokenizerError(f"{key} has {len(array)} entries for {n_tokens} tokens")
    known = (array >= 0) & (array <= max(TokenType))
    types = np.where(known, array, TokenType.UNDEFINED).astype(np.uint8)
    cut_out = int(np.isin(types, (TokenType.CONTROL, TokenType.USER_DEFINED)).sum())
    CONTROL_TOKENS.check(cut_out, key, TokenizerError)
    return types
