"""Models as lists of them have them: of OpenAI, llama-server and ollama."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import iso_time
from urdir.model.serve.ollama_model import digest
from urdir.model.serve.router.model import Model


def status_json(model: Model) -> Json:
    """Where a model stands, as llama-server has it; "cause" says why it failed."""
    value = "loaded" if model.status == "unloading" else model.status
    if value == "unloaded" and model.loading is not None:  # others are loaded before
        value = "loading"
    status: Json = {"value": value}
    if model.cause is not None and value == "unloaded":
        status |= {"failed": True, "cause": model.cause}
    return status


#: Of an entry of /v1/models, what the model's own server says.
_KNOWN = ("max_model_len", "max_input_tokens", "max_tokens", "meta")


def model_json(model: Model, name: str) -> Json:
    """An entry of /v1/models, with what was known of the model when it was loaded last."""
    spec = model.spec
    known = model.info.get("model", {})
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": spec.name,
        "created_at": iso_time(spec.modified),
        "created": int(spec.modified),
        "owned_by": "urdir",
        **{key: known[key] for key in _KNOWN if key in known},
        "status": status_json(model),
    }


_NO_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def tag_json(model: Model) -> Json:
    """An entry of ollama's /api/tags."""
    known: Mapping[str, Any] = model.info.get("tag", {})
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": iso_time(model.spec.modified),
        "size": known.get("size", model.spec.nbytes),
        "digest": digest(model.name),
        "details": known.get("details", _NO_DETAILS),
    }


def running_json(model: Model) -> Json:
    """What an entry of /api/ps has more."""
    limit = model.spec.idle_seconds
    known: Mapping[str, Any] = model.info.get("model", {})
    return {
        "expires_at": "9999-12-31T23:59:59Z" if limit is None else _end_of(model, limit),
        "size_vram": model.info.get("tag", {}).get("size", model.spec.nbytes),
        "context_length": known.get("max_model_len", 0),
    }


def _end_of(model: Model, limit: float) -> str:
    """When an idle model is unloaded."""
    since = 0.0 if model.open else time.monotonic() - model.used
    return iso_time(time.time() + max(0.0, limit - since))
