"""Checks a description against its file: every tensor there, of its shape and a type that fits."""

from __future__ import annotations

import math
from collections.abc import Collection

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.description import Description
from urdir.model.families.stored import Shape, Stored, StoredMatrix, stored_in
from urdir.model.files.model_file import ModelFile
from urdir.ptxgen.weights.formats import FORMATS

#: Types that a vector may have.
VECTOR_TYPES = ("F32", "F16", "BF16")


def check_tensors(description: Description, file: ModelFile) -> None:
    """Raise ConfigError for a tensor that is missing or has another shape, UnsupportedError for a
    type that is not supported there and for a tensor that the description does not name.
    """
    named = set(description.unused_tensors)
    for reference in stored_in(description):
        if reference not in description.lent:
            named.add(reference.name)
            _check(reference, file)
    # A tensor left out would change the answers silently.
    for name in file.tensors:
        if name not in named:
            kind = description.architecture
            raise UnsupportedError(
                f"tensor '{name}' is no part of a '{kind}' model as supported here"
            )


def _check(reference: Stored, file: ModelFile) -> None:
    name, tensor = reference.name, file.tensors.get(reference.name)
    if tensor is None:
        raise ConfigError(f"tensor '{name}' {_text(reference.shape)} is missing")
    if _kept(tensor.shape) != _kept(reference.shape):
        raise ConfigError(
            f"tensor '{name}' has shape {_text(tensor.shape)}, "
            f"the metadata asks for {_text(reference.shape)}"
        )
    if not _is_within(reference):
        raise ConfigError(
            f"tensor '{name}' {_text(reference.shape)} has not the rows that the metadata ask for"
        )
    types: Collection[str] = FORMATS if isinstance(reference, StoredMatrix) else VECTOR_TYPES
    if tensor.type_name not in types:
        raise UnsupportedError(
            f"tensor '{name}' has type {tensor.type_name}; supported there: "
            f"{', '.join(sorted(types))}"
        )


def _is_within(reference: Stored) -> bool:
    """Whether a part lies within its tensor: several sizes of the metadata decide where it ends."""
    if isinstance(reference, StoredMatrix):
        return reference.first + reference.each <= reference.period
    if reference.period:
        return (
            reference.first + reference.each <= reference.period
            and math.prod(reference.shape) % reference.period == 0
        )
    return reference.first + reference.size // reference.repeat <= math.prod(reference.shape)


def _kept(shape: Shape) -> Shape:
    """Without leading ones: a GGUF file does not keep them."""
    first = next((index for index, size in enumerate(shape) if size != 1), len(shape) - 1)
    return shape[first:]


def _text(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
