"""The name of a file's type of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile


def file_type(file: ModelFile) -> str | None:
    """The type that most of the weights have, as it is usually written: "Q4_K_M"; None if the file
    does not say."""
    from gguf import LlamaFileType

    number = file.metadata.get("general.file_type")
    try:
        name: str = LlamaFileType(number).name
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
