"""POST /slots/N?action=save|restore|erase, as llama-server has it."""

from __future__ import annotations

from hashlib import blake2b
from typing import get_args

from urdir.model.engine.requests.slots import SlotAction, SlotDone, SlotKind
from urdir.model.serve.errors import ApiError
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json

_MOST_DIGITS = 9  # of a slot's number


def slot_action(slot: str, action: str | None, caller: bytes, fields: Fields) -> SlotAction:
    """The action that a caller asks for, on files of that caller alone. Raises ApiError."""
    if not (slot.isascii() and slot.isdecimal() and len(slot) <= _MOST_DIGITS):
        raise ApiError(f"no slot {slot[:80]!r}", status=404, kind="not_found_error")
    for kind in get_args(SlotKind):
        if kind == action:
            file = "" if kind == "erase" else _owner(caller) + _file(fields)
            return SlotAction(kind, int(slot), file, caller)
    kinds = ", ".join(get_args(SlotKind))
    raise ApiError(f"action {str(action)[:80]!r}: expected one of {kinds}", param="action")


def slot_json(action: SlotAction, done: SlotDone) -> Json:
    """What was done."""
    found: Json = {"id_slot": action.slot}
    if action.kind == "erase":
        return {**found, "n_erased": done.tokens}
    counts = ("n_saved", "n_written") if action.kind == "save" else ("n_restored", "n_read")
    found |= {"filename": action.file.removeprefix(_owner(action.scope))}
    found |= dict(zip(counts, (done.tokens, done.nbytes), strict=True))
    return {**found, "timings": {f"{action.kind}_ms": 1e3 * done.seconds}}


def _file(fields: Fields) -> str:
    name = fields.needed_text("filename")
    if not name.isascii():  # of other names `PrefixFiles` says what is wrong
        fields.fail("filename", "must have letters, digits, '.', '_' and '-'", "invalid_value")
    return name


def _owner(caller: bytes) -> str:
    """The beginning of the names of a caller's files. It does not tell the API key."""
    return blake2b(b"files", key=caller, digest_size=8).hexdigest() + "." if caller else ""
