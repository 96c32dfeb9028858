"""Prefixes of slots that are saved to files, and restored from them, as llama-server has it.

A slot is a sequence: it has what the last answer that ended there left in the prefix cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from urdir.model.errors import PrefixFileError

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.memory.prefix_files import PrefixFiles

SlotKind = Literal["save", "restore", "erase"]


@dataclass(frozen=True, slots=True)
class SlotAction:
    """What to do with the prefix of a ``slot`` for a caller with this ``scope``: save it to a file,
    restore it from one, or erase it."""

    kind: SlotKind
    slot: int
    file: str = ""
    scope: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotDone:
    """How many ``tokens`` and bytes of a file an action was of, and how long it took."""

    tokens: int
    nbytes: int
    seconds: float


def act_on_slot(session: Session, action: SlotAction) -> SlotDone:
    """Do it, between steps. Raises PrefixFileError, and
    DriverError."""
    if not 0 <= action.slot < session.sequences:
        raise PrefixFileError(f"slot {action.slot}: there are {session.sequences}, from 0 on")
    begun, storage = time.perf_counter(), session.storage
    scope, tokens = storage.ended(action.slot)
    nbytes, count = 0, 0
    if action.kind == "restore":
        files = _files(session)
        prefix, nbytes = files.read(action.file, storage.prefix_shapes, session.context)
        session.check_tokens(prefix.tokens)
        storage.write_prefix(action.slot, prefix, action.scope)
        count = len(prefix.tokens)
    elif not tokens or scope != action.scope:
        raise PrefixFileError(f"slot {action.slot} has nothing of this caller")
    elif action.kind == "save":
        files = _files(session)
        prefix = storage.read_prefix(tokens, scope)
        if not prefix.tokens:
            raise PrefixFileError(f"slot {action.slot}: nothing is cached of it any more")
        nbytes, count = files.write(action.file, prefix), len(prefix.tokens)
    else:
        count = storage.erase(action.slot)
    return SlotDone(count, nbytes, time.perf_counter() - begun)


def _files(session: Session) -> PrefixFiles:
    if session.prefix_files is None:
        raise PrefixFileError("no prefix is saved: there is no folder for them (--prefix-dir)")
    return session.prefix_files
