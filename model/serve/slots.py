"""POST /slots/N?action=save|restore|erase, as llama-server has it."""

from __future__ import annotations

from typing import get_args

from urdir.model.engine.requests.slots import SlotAction, SlotDone, SlotKind
from urdir.model.serve.errors import ApiError
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json


def slot_action(slot: int, action: str | None, caller: bytes, fields: Fields) -> SlotAction:
    """The action that a caller asks for. Raises ApiError."""
    for kind in get_args(SlotKind):
        if kind == action:
            file = "" if kind == "erase" else fields.needed_text("filename")
            return SlotAction(kind, slot, file, caller)
    kinds = ", ".join(get_args(SlotKind))
    raise ApiError(f"action {str(action)[:80]!r}: expected one of {kinds}", param="action")


def slot_json(action: SlotAction, done: SlotDone) -> Json:
    """What was done."""
    found: Json = {"id_slot": action.slot}
    if action.kind == "erase":
        return {**found, "n_erased": done.tokens}
    counts = ("n_saved", "n_written") if action.kind == "save" else ("n_restored", "n_read")
    found |= {"filename": action.file, **dict(zip(counts, (done.tokens, done.nbytes), strict=True))}
    return {**found, "timings": {f"{action.kind}_ms": 1e3 * done.seconds}}
