"""Text decoders within other models: what config.json may leave out of ``text_config``.

Until 4.49 transformers wrote of an object within another what differs from its class alone, as in
the folders of LLaVA, Idefics 2, Pixtral and Qwen2-Audio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
#: Fields of classes, by ``model_type``: those without which a decoder has no size, or another one.
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "mistral": {
        **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": {
        **_LLAMA, "intermediate_size": 22016, "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip
#: Fields that the class of a whole model sets in its text decoder, by ``model_type`` of the whole.
_SET: Mapping[str, Mapping[str, Any]] = {
    "paligemma": {"use_bidirectional_attention": True},  # prompts are no causal text
}


def completed(inner: Mapping[str, Any], outer: object) -> dict[str, Any]:
    """The fields of ``text_config`` in a model of type ``outer``, with those that classes have."""
    own = inner.get("model_type")
    usual = CLASSES.get(own, {}) if isinstance(own, str) else {}
    of_whole = _SET.get(outer, {}) if isinstance(outer, str) else {}
    absent = {name: value for name, value in of_whole.items() if inner.get(name) is None}
    return {**usual, **inner, **absent}
