"""Checks of a description against its file: presence, shape and type of every tensor."""

from __future__ import annotations

import math
from collections.abc import Collection

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.description import Description
from urdir.model.families.stored import Shape, Stored, StoredMatrix, stored_in
from urdir.model.files.model_file import ModelFile
from urdir.ptxgen.weights.formats import EVERY

#: Types supported for vectors.
VECTOR_TYPES = ("F32", "F16", "BF16")
#: Types of tables of several vectors, and of those with numbers of experts (`Router.by_token`).
TABLE_TYPES, NUMBER_TYPES = (*VECTOR_TYPES, "Q8_0"), (*VECTOR_TYPES, "I32")


def check_tensors(description: Description, file: ModelFile) -> None:
    """Raise an error if the file's tensors do not match the description.

    ConfigError for a missing tensor or a wrong shape; UnsupportedError for a type that is not
    supported in that place and for a tensor that the description does not name.
    """
    named = set(description.unused_tensors)
    mixtures = (of for layer in description.layers for of in layer.mixtures)
    numbers = {of.router.by_token for of in mixtures}
    for reference in stored_in(description):
        if reference not in description.lent:
            named.add(reference.name)
            _check(reference, file, _types(reference, reference in numbers))
    # Ignoring a tensor would change answers silently.
    for name in file.tensors:
        if name not in named:
            kind = description.architecture
            raise UnsupportedError(f"tensor '{name}' is not supported in a '{kind}' model")


def _types(reference: Stored, has_numbers: bool) -> Collection[str]:
    """The types of tensors that a reference can be of."""
    if isinstance(reference, StoredMatrix):
        return EVERY
    if has_numbers:
        return NUMBER_TYPES
    return TABLE_TYPES if len(reference.shape) > 1 else VECTOR_TYPES


def _check(reference: Stored, file: ModelFile, types: Collection[str]) -> None:
    name, tensor = reference.name, file.tensors.get(reference.name)
    if tensor is None:
        raise ConfigError(f"tensor '{name}' {_text(reference.shape)} is missing")
    if _kept(tensor.shape) != _kept(reference.shape):
        raise ConfigError(
            f"tensor '{name}' has shape {_text(tensor.shape)}, "
            f"the metadata require {_text(reference.shape)}"
        )
    if not _is_within(reference):
        raise ConfigError(
            f"tensor '{name}' {_text(reference.shape)} has fewer rows than the metadata require"
        )
    if tensor.type_name not in types:
        raise UnsupportedError(
            f"tensor '{name}' has type {tensor.type_name}; supported here: "
            f"{', '.join(sorted(types))}"
        )


def _is_within(reference: Stored) -> bool:
    """Whether a reference lies within its tensor; its end follows from several metadata sizes."""
    if isinstance(reference, StoredMatrix):
        return reference.first + reference.each <= reference.period
    if reference.period:
        return (
            reference.first + reference.each <= reference.period
            and math.prod(reference.shape) % reference.period == 0
        )
    return reference.first + reference.size // reference.repeat <= math.prod(reference.shape)


def _kept(shape: Shape) -> Shape:
    """A shape without leading ones, which GGUF files drop."""
    first = next((index for index, size in enumerate(shape) if size != 1), len(shape) - 1)
    return shape[first:]


def _text(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
