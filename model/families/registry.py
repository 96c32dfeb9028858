"""From a file's architecture to its family, and from there to a checked description."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families import llama, qwen2, qwen3
from urdir.model.families.description import Config
from urdir.model.families.reader import Reader
from urdir.model.families.tensors import check_tensors
from urdir.model.files.model_file import ModelFile

#: How the metadata of an architecture becomes a description. A new one needs its line here.
FAMILIES: Mapping[str, Callable[[Reader], Config]] = {
    "llama": llama.describe,
    "qwen2": qwen2.describe,
    "qwen3": qwen3.describe,
}


def read_config(file: ModelFile) -> Config:
    """Read the metadata and check all tensors; needs no tokeniser.

    Raises UnsupportedError (architecture, experts, tensor types, tensors we would have to
    ignore) or ConfigError (a key or tensor missing or inconsistent), naming the key or tensor.
    """
    try:
        config = describe(Reader.of(file))
        check_tensors(config, file)
    except (ConfigError, UnsupportedError) as error:
        prefix = f"{file.path}: "
        if str(error).startswith(prefix):
            raise
        raise type(error)(prefix + str(error)) from None
    return config


def describe(file: Reader) -> Config:
    """The description that the family of ``file`` makes; tensors are not checked yet."""
    architecture = file.architecture
    if architecture not in FAMILIES:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    return FAMILIES[architecture](file)
