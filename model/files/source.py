"""Opens model files of every kind by the name that a user gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError, SettingsError
from urdir.model.files.demo import BUILT_IN
from urdir.model.files.gguf import Gguf
from urdir.model.files.hub import PREFIX, HubName, download
from urdir.model.foreign import foreign, one_line

if TYPE_CHECKING:
    from urdir.model.files.pretrained.model import SafetensorsModel


def open_model(
    source: str | os.PathLike[str], *, quantize: str | None = None
) -> Gguf | SafetensorsModel:
    """Open "demo", its draft "demo-draft", a GGUF file (any part of a split one), a transformers
    folder, or either of them on the Hugging Face hub ("hf:org/repo[:file-or-type]", see `hub`).

    ``quantize`` is the type that the matrices of a folder get while loading. Raises ModelError.
    """
    with foreign(one_line(str(source)), ModelError):
        return _open(source, quantize)


def _open(source: str | os.PathLike[str], quantize: str | None) -> Gguf | SafetensorsModel:
    path, name = BUILT_IN.get(str(source)) or Path(source), None
    if str(source).startswith(PREFIX):
        asked = HubName.parse(str(source).removeprefix(PREFIX))
        path, name = download(asked), asked.repo.partition("/")[2]
    if path.is_dir():
        from urdir.model.files.pretrained.model import SafetensorsModel

        return SafetensorsModel(path, quantize, name)
    if quantize is not None:
        raise SettingsError(
            f"{path}: quantize applies to safetensors only; a GGUF file has its types"
        )
    return Gguf(path)
