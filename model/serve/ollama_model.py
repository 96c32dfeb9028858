"""The model as ollama's clients see it: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.json_response import iso_time
from urdir.model.serve.limits import Limits
from urdir.model.serve.ollama import named
from urdir.model.serve.parameters import check_model, names_of

#: The version of ollama whose protocol this is; clients look whether it is new enough.
VERSION = "0.13.0"


def version(model: ServedModel) -> Json:
    """GET /api/version."""
    return {"version": VERSION}


def tags(model: ServedModel) -> Json:
    """GET /api/tags."""
    return {"models": [_entry(model, name) for name in names_of(model)]}


def running(model: ServedModel) -> Json:
    """GET /api/ps: the model is there as long as the server."""
    more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": model.facts.bytes}
    more["context_length"] = model.context
    return {"models": [_entry(model, name) | more for name in model.names]}


def show(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """POST /api/show."""
    check_model(named(fields) or named(fields.named({"model": "name"})), model)
    facts, source = model.facts, model.template.source if model.template else ""
    family = facts.architecture
    return {
        "modelfile": "",
        "parameters": "",
        "template": source,
        "license": "",
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.parameters,
            f"{family}.context_length": model.context,
        },
        "capabilities": _capabilities(model),
        "modified_at": iso_time(model.created),
    }


def _capabilities(model: ServedModel) -> list[str]:
    if model.facts.embeds:
        return ["embedding"]
    template, form = model.template, model.template.form if model.template else None
    can = ["completion", *(["tools"] if template and template.source else [])]
    can += ["insert"] if model.fill else []
    if form is not None and (form.is_harmony or form.thinks is not None):
        can.append("thinking")
    return can


def _entry(model: ServedModel, name: str) -> Json:
    return {
        "name": name,
        "model": name,
        "modified_at": iso_time(model.created),
        "size": model.facts.bytes,
        "digest": digest(name),
        "details": _details(model),
    }


def digest(name: str) -> str:
    """64 hexadecimal digits, the same wherever a model of this name is served. ollama's command
    shows the first twelve, and fails where there are fewer."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _details(model: ServedModel) -> dict[str, Any]:
    facts = model.facts
    count = facts.parameters
    return {
        "parent_model": "",
        "format": "gguf",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": facts.type,
    }
