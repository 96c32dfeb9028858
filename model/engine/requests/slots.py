"""Prefixes of slots that are saved to files, and restored from them, as llama-server has it.

A slot is a sequence: it has what the last answer that ended there left in the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from urdir.model.errors import PrefixFileError

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.memory.prefix_copy import PrefixBytes
    from urdir.model.memory.prefix_files import PrefixFiles

_Result = TypeVar("_Result")

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


class Between(Protocol):
    """Runs work between two steps, in the thread that steps."""

    def __call__(self, work: Callable[[], _Result]) -> _Result:
        """The result of the work, which is waited for. Raises what it does."""


def act_on_slot(session: Session, action: SlotAction, between: Between) -> SlotDone:
    """Do it: what concerns the device ``between`` steps, and files in the calling thread. Raises
    PrefixFileError, ContextFullError without room for a prefix, and DriverError."""
    if not 0 <= action.slot < session.sequences:
        raise PrefixFileError(f"slot {action.slot}: there are {session.sequences}, from 0 on")
    begun = time.perf_counter()
    tokens, nbytes = _ACTIONS[action.kind](session, action, between)
    return SlotDone(tokens, nbytes, time.perf_counter() - begun)


def _save(session: Session, action: SlotAction, between: Between) -> tuple[int, int]:
    files, storage = _files(session), session.storage

    def read() -> PrefixBytes:
        return storage.read_prefix(_ended(session, action), action.scope)

    prefix = between(read)
    if not prefix.tokens:
        raise PrefixFileError(f"slot {action.slot}: nothing is cached of it any more")
    return len(prefix.tokens), files.write(action.file, prefix)


def _restore(session: Session, action: SlotAction, between: Between) -> tuple[int, int]:
    storage = session.storage
    files = _files(session)
    prefix, nbytes = files.read(action.file, storage.prefix_shapes, session.context)
    session.check_tokens(prefix.tokens)
    between(lambda: storage.write_prefix(action.slot, prefix, action.scope))
    return len(prefix.tokens), nbytes


def _erase(session: Session, action: SlotAction, between: Between) -> tuple[int, int]:
    def erase() -> int:
        _ended(session, action)
        return session.storage.erase(action.slot)

    return between(erase), 0


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}


def _ended(session: Session, action: SlotAction) -> tuple[int, ...]:
    """What the slot held when an answer ended there, if that was of the caller."""
    scope, tokens = session.storage.ended(action.slot)
    if not tokens or scope != action.scope:
        of = "" if session.adapters is None else ", without adapters"
        raise PrefixFileError(f"slot {action.slot} has nothing of this caller{of}")
    return tokens


def _files(session: Session) -> PrefixFiles:
    if session.prefix_files is None:
        raise PrefixFileError("no prefix is saved: the engine has no folder for them (prefix_dir)")
    return session.prefix_files
