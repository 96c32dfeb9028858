"""The pieces that an engine is opened from: driver, devices, file, chat template."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.errors import NoTemplateError, SettingsError
from urdir.model.figures import rounded
from urdir.model.files.demo import DEMO

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.group import Group
    from urdir.driver.ptx_files import PtxFiles
    from urdir.model.files.model_file import ModelFile
    from urdir.model.text.tokenizer import Tokenizer

#: Above this the emulator says beforehand how slow it will be.
LARGE_MODEL_BYTES = 100_000_000
#: Weight bytes that the emulator gets through in a second, on two cores (measured with the demo).
EMULATOR_BYTES_PER_SECOND = 25_000_000


def driver_loader(name: str) -> Callable[[], None]:
    """What loads the driver of a GPU, and imports what opens a device; no context is made.

    The bindings are imported at once: in a thread they would wait for other imports, and loading
    the driver, for which everything later waits, would begin later.
    """
    from urdir.driver import bindings

    load = None if name.startswith("emulator") else bindings.driver_loader()

    def load_all() -> None:
        if load is not None:
            load()
        import urdir.driver.group  # noqa: F401

    return load_all


def open_group(
    name: str,
    gpus: int | Sequence[int] | None,
    cache_folder: str | os.PathLike[str] | None,
    ptx_files: PtxFiles | None,
) -> Group:
    """The device of that name, or ``gpus`` of its kind; see `Engine.open`."""
    from urdir.driver.group import Group

    return Group.open(name, gpus, cache_folder=folder_of(cache_folder), ptx_files=ptx_files)


def folder_of(cache_folder: str | os.PathLike[str] | None) -> Path | None:
    """The folder of compiled kernels that is meant."""
    from urdir.model.cache_folder import user_cache_folder

    if cache_folder == "user":
        return user_cache_folder()
    return None if cache_folder is None else Path(cache_folder)


def open_file(path: str | os.PathLike[str] | ModelFile | None, quantize: str | None) -> ModelFile:
    """The model that a name or path means (None: the demo); one that is open stays as it is."""
    from urdir.model.files.source import open_model

    if path is None or isinstance(path, str | os.PathLike):
        return open_model(path or DEMO, quantize=quantize)
    if quantize is not None:
        raise SettingsError(f"{path.path}: quantize applies to folders: this model is open")
    return path


def template_of(file: ModelFile, tokenizer: Callable[[], Tokenizer], needed: bool) -> str | None:
    """The chat template of a file; None if it has none and none is ``needed``."""
    from urdir.model.text.chat import find_template

    try:
        return find_template(file, tokenizer)
    except NoTemplateError:
        if needed:
            raise
        return None


def announce(device: Device, file: ModelFile) -> None:
    """Say on stderr when the emulator stands in for a GPU, and what that means for speed."""
    if not device.is_emulated:
        return
    if device.note:
        print(f"{device.note}: using the emulator, which is slow", file=sys.stderr)
    if sum(t.nbytes for t in file.tensors.values()) > LARGE_MODEL_BYTES:
        print(f"expect about {emulated_rate_text(file)} tokens/s for this model", file=sys.stderr)


def emulated_rate_text(file: ModelFile) -> str:
    """Tokens per second on the emulator, very roughly: to two digits."""
    rate = EMULATOR_BYTES_PER_SECOND / max(1, sum(t.nbytes for t in file.tensors.values()))
    return rounded(rate, 2)
