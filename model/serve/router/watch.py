"""GET /models/sse: how the models of a router change, as llama-server has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from urdir.model.serve.interface import Json
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.listing import model_json, status_json
from urdir.model.serve.stream import DATA


async def model_events(fleet: Fleet, pulse_seconds: float) -> AsyncGenerator[bytes, None]:
    """An event for each model whose status has changed, and one when models came or went, until the
    server stops; a comment after so long a silence."""
    known = _standing(fleet)
    while not fleet.changes.has_ended:
        if not await _changed(fleet, known, pulse_seconds):
            yield DATA.pulse
        now = _standing(fleet)
        events: list[Json] = [  # at once: models come and go while a client is slow
            {"model": name, "event": "status_change", "data": _status(fleet, name, status)}
            for name, status in now.items()
            if status != known.get(name, status)
        ]
        if now.keys() != known.keys():
            events.append({"model": "*", "event": "models_reload"})
        known = now
        for event in events:
            yield DATA.write(event)


async def _changed(fleet: Fleet, known: dict[str, Json], seconds: float) -> bool:
    """Wait for a change, or the end of the server; whether one came in time."""
    changes = fleet.changes
    return await changes.until(lambda: changes.has_ended or _standing(fleet) != known, seconds)


def _standing(fleet: Fleet) -> dict[str, Json]:
    return {name: status_json(model) for name, model in fleet.models.items()}


def _status(fleet: Fleet, name: str, status: Json) -> Json:
    """A status; of a model that is loaded with its entry of /models."""
    value = status["value"]
    others: Json = {key: status[key] for key in ("failed", "cause") if key in status}
    if value == "loaded":
        others["info"] = model_json(fleet.models[name], name)
    return {"status": value, **others}
