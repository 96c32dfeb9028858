"""What `urdir show` says of drafts: heads that a model brings, and a file that is a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from urdir.model.commands.report import size_text

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile


#: Drafts in files of their own, by general.architecture.
_ASSISTANT = "gemma4-assistant"
_NAMES = {"eagle3": "EAGLE-3", "dflash": "DFlash", _ASSISTANT: "Gemma 4 assistant"}


def draft_facts(gguf: ModelFile) -> dict[str, Any]:
    """What a file has for drafting; nothing where it has none.

    Of a model with heads for predicting several tokens: how many ``heads``, and bytes of their
    ``weights`` and of the ``cache`` of a token (f16); or why they cannot be used (``refused``). Of
    a draft in a file of its own: the model's layers and width that it reads, its own width and
    tokens, and what it takes of the model (``shares``); ``weights`` and ``cache`` as well.
    """
    kind = str(gguf.metadata.get("general.architecture"))
    return _file_facts(gguf, kind) if kind in _NAMES else _nextn_facts(gguf)


def draft_text(facts: dict[str, Any]) -> str:
    """The same as a line."""
    if facts["kind"] == "mtp":
        heads = f"{facts['heads']} head{'s' * (facts['heads'] > 1)} for predicting several tokens"
        if "refused" in facts:
            return f"{heads} (MTP), not usable: {facts['refused']}"
        weights, cache = size_text(facts["weights"]), size_text(facts["cache"])
        return f"{heads} (--draft mtp): {weights} of weights, {cache} of cache for each token"
    if "refused" in facts:
        return f"{_NAMES[facts['kind']]}, not usable: {facts['refused']}"
    layers = ", ".join(map(str, facts["layers"]))
    read = f"streams before its layers {layers}" if layers else "streams before three of its layers"
    if facts["kind"] == _ASSISTANT:
        read = "keys and values of its last layers"
    shares = f"; {' and '.join(facts['shares'])} of the model" if facts["shares"] else ""
    tokens = f", {facts['tokens']:,} tokens of its own" if facts["tokens"] else ""
    return (
        f"{_NAMES[facts['kind']]} of {facts['width']} values for a model of "
        f"{facts['model_width']}, reads the "
        f"{read}{tokens}{shares} (-md): "
        f"{size_text(facts['weights'])} of weights, {size_text(facts['cache'])} of cache for each "
        "token"
    )


def _nextn_facts(gguf: ModelFile) -> dict[str, Any]:
    from urdir.model.errors import ConfigError, UnsupportedError
    from urdir.model.families.config import Config
    from urdir.model.families.tapped import nextn_heads
    from urdir.model.memory.cache_shape import CacheShape
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.model.memory.weight_sizes import weight_sizes

    heads = gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.nextn_predict_layers")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        return {}
    facts: dict[str, Any] = {"kind": "mtp", "heads": heads}
    try:
        config = Config.of(gguf, nextn=True)
        without = Config.of(gguf)
    except (ConfigError, UnsupportedError) as exc:
        return {**facts, "refused": str(exc).removeprefix(f"{gguf.path}: ")}
    more = sum(weight_sizes(gguf, config).values()) - sum(weight_sizes(gguf, without).values())
    cache = CacheShape.of(nextn_heads(config), SessionSettings(config.context_length), 1)
    return {**facts, "weights": more, "cache": cache.read_nbytes(1)}


def _file_facts(gguf: ModelFile, kind: str) -> dict[str, Any]:
    from urdir.model.errors import ConfigError
    from urdir.model.families.draft_file import reads_of
    from urdir.model.families.reader import Reader

    try:
        reads = reads_of(gguf)
        width = Reader.of(gguf).size("embedding_length_out") if kind == _ASSISTANT else reads.hidden
    except ConfigError as exc:
        return {"kind": kind, "refused": str(exc).removeprefix(f"{gguf.path}: ")}
    return {
        "kind": kind,
        "layers": list(reads.layers),
        "model_width": width or reads.own_hidden,
        "width": reads.own_hidden,
        "tokens": reads.tokens,
        "shares": [] if kind == _ASSISTANT else list(reads.shared),
        "weights": reads.weights,
        "cache": 2 * reads.cached,
    }
