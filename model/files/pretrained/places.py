"""Where a folder has the tensors of a description: the one place that knows stored names.

`find_places` takes the names and shapes of a folder's tensors and gives, for every tensor that a
description may name ("blk.0.attn_q.weight"), the stored tensors it consists of and their
arrangement. It knows nothing of types: a reader of a quantised checkpoint calls it with the name
that the float tensor would have ("model.layers.0.mlp.up_proj.weight") and its logical shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import PLAIN, Layout
from urdir.model.files.pretrained.names import ENDS, LAYER

#: The key of the number of layers in each of `Family.stacks`.
LAYERS_PER_STACK = "hrm.layers_per_stack"
#: The key of the numbers of layers that a folder has and text does not use.
SKIPPED_LAYERS = "own.skipped_layers"
#: The number in the description (of the first stack) of each stored layer that is read.
Layers = Mapping[int, int]
#: Outer modules, any number of them, and the list of layers.
_OUTER = re.compile(
    r"^(model|transformer|backbone|gpt_neox|decoder|language_model|text_model|thinker)\."
)
_LAYERS = re.compile(r"^(?:layers?|h|blocks)\.(\d{1,9})\.(.+)$")
_OWN_ATTENTION = re.compile(r"\blayers\.(\d{1,9})\.self_attn\.")
#: Tensors of an adapter that was saved with its model.
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer)(\.|$)")
_ADAPTER_HINT = (
    ": it is of an adapter (merge it by merge_and_unload of peft, or give its folder as an adapter)"
)
#: The only layer of EAGLE-3 heads.
_MIDLAYER = re.compile(r"^midlayer\.")
_NUMBERS = re.compile(r"(?<=\.)\d{1,9}(?=\.|$)|(?<=\.shard_)\d{1,9}(?=\.)")
#: Parts of multi-modal models beside the text decoder, and heads that predict further tokens.
_OTHER_PARTS = (
    *("vision_tower.", "visual.", "vision_model.", "embed_vision.", "vision_embed_tokens."),
    *("vit.", "mlp_AR.", "multi_modal_projector.", "mm_projector.", "connector."),
    *("image_newline", "audio_tower.", "embed_audio.", "mtp."),
    *("image_tower.", "video_tower.", "vision_encoder.", "high_res_vision_", "resampler_model."),
    *("query_tokens", "qformer.", "language_projection."),  # BLIP-2
    *("aligner.", "merger.", "projector.", "mlp1.", "vision_projection.", "vision_projector."),
    *("vit_large_projector.", "visual_embeddings_table.", "talker.", "token2wav.", "code2wav."),
    *("acoustic_tokenizer_encoder.", "semantic_tokenizer_encoder.", "vqmodel.", "generation_"),
)
#: Buffers of checkpoints that follow from the configuration.
_BUFFERS = (
    *(".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias", ".attention.bias"),
    *(".attention.masked_bias", ".diagonal_decay", ".key_decay", ".query_decay", ".slope_rate"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Stored tensors of equal shape, one after the other (the experts of a layer), and how the
    tensor is made of each."""

    parts: tuple[str, ...]
    layout: Layout = PLAIN


@dataclass(frozen=True, slots=True)
class Places:
    """The `Place` of every tensor of the description, and the stored names that belong to none:
    other modalities, further prediction heads, buffers."""

    found: Mapping[str, Place]
    unused: tuple[str, ...]


def find_places(names: Iterable[str], family: Family, layers: Layers, path: Path) -> Places:
    """Sort stored tensor names by the tensor of the description that they are part of.

    Raises UnsupportedError for a name that the family does not have, SafetensorsError for one that
    occurs twice, and for a missing expert.
    """
    groups: dict[str, dict[int | None, str]] = {}
    unused = []
    for stored in names:
        known = _tensors_of(stored, family, layers)
        if known is None:
            unused.append(stored)
            continue
        if not known:
            raise UnsupportedError(
                f"{path}: tensor '{stored}' is not supported in a '{family.architecture}' model"
                + (_ADAPTER_HINT if _ADAPTER.search(stored) else "")
            )
        for name, number in known:
            group = groups.setdefault(name, {})
            if number in group:
                raise SafetensorsError(
                    f"{path}: tensors '{stored}' and '{group[number]}' are the same"
                )
            group[number] = stored
    found = {
        name: Place(_in_order(name, group, path), _layout(name, family))
        for name, group in groups.items()
    }
    return Places(found, tuple(unused))


def first_experts(places: Places, family: Family, keys: Mapping[str, Any]) -> Places:
    """The experts of text alone; those of other modalities are unused."""
    if not family.other_experts:
        return places
    count = int(keys.get("expert_count", 0))
    found, others = {}, list(places.unused)
    for name, place in places.found.items():
        kept = count if "_exps." in name else len(place.parts)
        found[name] = replace(place, parts=place.parts[:kept])
        others += place.parts[kept:]
    return Places(found, tuple(others))


def is_unused(stored: str, family: Family, layers: Layers) -> bool:
    """Whether a stored tensor belongs to no part of the description, as `Places.unused`."""
    if family.place is not None:
        return stored in family.unused
    return _located(stored, family, layers) is None


def _located(stored: str, family: Family, layers: Layers) -> tuple[str, int, str] | None:
    """The number of the layer as it is written, "" without one, its number in the description, and
    the module there; None if the tensor is unused."""
    name = _inner(stored, family)
    if name is None:
        return None
    stack, inner = _of_stack(name, family)
    match = _LAYERS.match(_MIDLAYER.sub("layers.0.", inner))
    if match is None:
        return "", 0, name
    number = layers.get(int(match[1]))
    return None if number is None else (match[1], stack * len(layers) + number, match[2])


def _tensors_of(stored: str, family: Family, layers: Layers) -> list[tuple[str, int | None]] | None:
    """The tensors of the description that a stored one is part of, and as which number; none if
    its name is unknown, None if it is unused."""
    if family.place is not None:
        found = None if stored in family.unused else family.place(stored)
        return None if found is None else [(found, None)] if found else []
    located = _located(stored, family, layers)
    if located is None:
        return None
    table: dict[str, str | tuple[str, ...]]
    layer, number_of_layer, module = located
    if not layer:
        prefix, table = "", {**ENDS, **family.ends}
    else:
        prefix, table = f"blk.{number_of_layer}.", {**LAYER, **family.names}
        if layer != str(int(layer)):
            return []
    base, _, suffix = module.rpartition(".")
    known = None if module in table else table.get(base)
    if known is not None and suffix in ("weight", "bias"):
        return [(_joined(prefix, of, suffix), None) for of in _each(known)]
    numbers = _NUMBERS.findall(module)
    if len(numbers) > 1 or any(number != str(int(number)) for number in numbers):
        return []
    number = int(numbers[0]) if numbers else None
    pattern = _NUMBERS.sub("{}", module)
    whole = table.get(pattern)
    if whole is not None:  # a parameter without a module
        return [(_joined(prefix, of, "weight"), number) for of in _each(whole)] or None
    base, _, suffix = pattern.rpartition(".")
    known = table.get(base)
    if known is None or suffix not in ("weight", "bias"):
        return []
    return [(_joined(prefix, of, suffix), number) for of in _each(known)]


def stored_layers(family: Family, keys: Mapping[str, Any]) -> Layers:
    """The layers that are read, of each stack; some run more than once, some are skipped."""
    count = keys[LAYERS_PER_STACK] if family.stacks else keys["block_count"]
    skipped = {*np.asarray(keys.get(SKIPPED_LAYERS, ())).tolist()}
    stored = (number for number in range(count + len(skipped)) if number not in skipped)
    return {number: layer for layer, number in enumerate(stored)}


def check_skipped(names: Iterable[str], skipped: Iterable[int], path: Path) -> None:
    """Raise SafetensorsError for a tensor of self-attention in a layer that text skips, since it
    attends to pictures."""
    numbers = {*skipped}
    for name in names:
        match = _OWN_ATTENTION.search(name)
        if match is not None and int(match[1]) in numbers:
            raise SafetensorsError(
                f"{path}: tensor '{name}' is of a layer that 'cross_attention_layers' names"
            )


def _of_stack(name: str, family: Family) -> tuple[int, str]:
    """The number of the stack that a module is in, and its name there."""
    for number, stack in enumerate(family.stacks):
        if name.startswith(f"{stack}."):
            return number, name.removeprefix(f"{stack}.")
    return 0, name


def _inner(stored: str, family: Family) -> str | None:
    """A name without outer modules; None if it is unused."""
    name = stored
    while True:
        if name.startswith(_OTHER_PARTS) or name.endswith(_BUFFERS):
            return None
        if (shorter := _OUTER.sub("", name, count=1)) == name:
            break
        name = shorter
    for prefix in family.outer:
        name = name.removeprefix(prefix)
    return None if name.startswith(family.unused) else name


def _each(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _joined(prefix: str, name: str, suffix: str) -> str:
    return prefix + (name.removesuffix(".") if "." in name else f"{name}.{suffix}")


def _in_order(name: str, group: Mapping[int | None, str], path: Path) -> tuple[str, ...]:
    if None in group:
        if len(group) > 1:
            raise SafetensorsError(f"{path}: {name}: stored whole and in parts")
        return (group[None],)
    for number in range(len(group)):
        if number not in group:
            raise SafetensorsError(f"{path}: {name}: expert {number} of {len(group)} is missing")
    return tuple(group[number] for number in range(len(group)))


_LAYER_NUMBER = re.compile(r"^blk\.\d+\.")


def _layout(name: str, family: Family) -> Layout:
    return family.layouts.get(_LAYER_NUMBER.sub("", name), PLAIN)
