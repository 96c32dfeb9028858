"""Opens model files of every kind by the name that a user gives."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError, SettingsError
from urdir.model.files.demo import BUILT_IN
from urdir.model.files.gguf import Gguf
from urdir.model.files.hub import PREFIX, HubName, download
from urdir.model.files.model_file import is_part_of_folder
from urdir.model.foreign import foreign, one_line

if TYPE_CHECKING:
    from urdir.model.files.pretrained.model import SafetensorsModel

_OLLAMA = re.compile(r"[a-z][\w.-]*(/[\w.-]+)?:[\w.-]+|[a-z-]+\d[\w.-]*")
_HUB_HOST = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")


def open_model(
    source: str | os.PathLike[str], *, quantize: str | None = None
) -> Gguf | SafetensorsModel:
    """Open "demo", its draft "demo-draft", a GGUF file (any part of a split one), a transformers
    folder, or either of them on the Hugging Face hub ("hf:org/repo[:file-or-type]", see `hub`).

    ``quantize`` is the type that the matrices of a folder get while loading. Raises ModelError.
    """
    with foreign(one_line(str(source)), ModelError):
        return _open(source, quantize)


def ollama_hint(name: str) -> str:
    """What to give in place of a name as ollama has them ("llama3:8b"); "" for other names."""
    if (match := _HUB_HOST.match(name)) is not None:
        return f"give {PREFIX}{name[match.end() :]} for a model on the Hugging Face hub"
    if _OLLAMA.fullmatch(name) is None or name.endswith((".gguf", ".safetensors")):
        return ""
    return (
        "a name as of ollama means no model here; give a GGUF file, a folder, or a model on the "
        f"Hugging Face hub, such as {PREFIX}ORG/{name.partition(':')[0].upper()}-GGUF:Q4_K_M"
    )


def located(source: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """The file or folder of that name, downloaded if the hub has it, and the hub's name for it.

    Raises ModelError.
    """
    path, name = BUILT_IN.get(str(source)) or Path(source), None
    if str(source).startswith(PREFIX):
        asked = HubName.parse(str(source).removeprefix(PREFIX))
        path, name = download(asked), asked.repo.partition("/")[2]
    if not path.exists() and (hint := ollama_hint(str(source))):
        raise ModelError(f"{source}: no such file: {hint}")
    return path, name


def _open(source: str | os.PathLike[str], quantize: str | None) -> Gguf | SafetensorsModel:
    path, name = located(source)
    if path.is_dir():
        from urdir.model.files.pretrained.model import SafetensorsModel

        return SafetensorsModel(path, quantize, name)
    if is_part_of_folder(path):
        raise ModelError(f"{path}: a part of a model: give its folder, {path.parent}")
    if quantize is not None:
        raise SettingsError(
            f"{path}: quantize applies to safetensors only; a GGUF file has its types, and "
            "'urdir quantize' writes one with others"
        )
    return Gguf(path)
