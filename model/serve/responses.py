"""POST /v1/responses: OpenAI's conversations as items, which the server keeps for a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from urdir.model.serve.asked import Asked, Follows
from urdir.model.serve.conversations import make_conversation
from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import read_format, read_response_format, refuse_beside_call
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.item_references import Missing, resolved
from urdir.model.serve.json_reader import JsonReader
from urdir.model.serve.limits import Limits
from urdir.model.serve.parameters import read_limit, read_parameters
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import RESPONSES
from urdir.model.serve.response_items import Items
from urdir.model.serve.response_shape import ResponseShape
from urdir.model.serve.tools import read_tools
from urdir.model.text.chat import Message
from urdir.model.text.formats import Format

_NAMES = {"reasoning_effort": "reasoning.effort"}  # of fields that others have, too
_NOTHING: Json = {"input": [], "response": {"output": []}}


def read_response(fields: Fields, model: ServedModel, limits: Limits) -> Asked | Follows:
    """Read the request in ``fields``; ApiError if it is invalid."""
    refuse_unsupported(fields, RESPONSES)
    previous = fields.text("previous_response_id")
    new = fields.raw("input")
    new = [{"role": "user", "content": new}] if isinstance(new, str) else new
    if not new or not isinstance(new, list):
        fields.fail("input", "must be a text or a list of items")

    def read(kept: Mapping[str, Json]) -> Asked | Follows:
        """The request, given what was kept of some responses."""
        items = resolved(new, kept)
        if isinstance(items, Missing):
            return find(items.name, kept)
        earlier = _NOTHING if previous is None else kept[previous]
        return _read(fields, model, limits, earlier, items)

    def find(name: str, kept: Mapping[str, Json]) -> Follows:
        return Follows(name, lambda found: read({**kept, name: found}))

    return read({}) if previous is None else find(previous, {})


def _read(
    fields: Fields, model: ServedModel, limits: Limits, earlier: Json, new: list[Any]
) -> Asked:
    """The request with its ``new`` items, after what was kept of an ``earlier`` one."""
    fields = fields.named(_NAMES)
    limit = read_limit(fields, model, "max_output_tokens")
    parameters = read_parameters(fields, model, limits, limit, None)
    tools = read_tools(fields, limits, functions_alone=True)  # Codex always has others, too
    form = _read_form(fields, limits)
    if tools.is_required:
        refuse_beside_call(fields)
    items = [*earlier["input"], *earlier["response"]["output"]]
    background = fields.flag("background")
    fields.flag("store")  # which `ResponseShape` reads
    if background and fields.raw("store") is False:
        fields.fail("background", "needs 'store': the response is asked for later")
    if earlier["response"].get("status") in ("queued", "in_progress"):
        fields.fail("previous_response_id", "names a response that has not ended")
    reader = Items(model, JsonReader(limits))
    if (instructions := fields.text("instructions")) is not None:
        reader.messages.append(Message("system", instructions))
    for item in Fields({"earlier": items}).objects("earlier"):
        reader.read(item)
    for item in Fields({"input": new}).objects("input"):
        reader.read(item)
    reader.end_turn()
    chat = make_conversation(fields, model, reader.messages, tools)
    items += new
    shape = partial(ResponseShape, fields.values, items)
    return Asked((chat,), parameters, form, shape, background=background)


def _read_form(fields: Fields, limits: Limits) -> Format | None:
    text = fields.object("text")
    form = None if text is None else text.object("format")
    return read_format(fields, limits) if form is None else read_response_format(form, limits)
