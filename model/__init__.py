"""Language models from GGUF files: loading, decode plans, sampling, the command line.

``__all__`` is the promise; everything else is private. Names are imported when first used:
importing the package loads neither numpy nor libcuda.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.model.chat import ChatTemplate, Message
    from urdir.model.config import Config
    from urdir.model.engine import Engine, demo_model
    from urdir.model.errors import ContextFullError, ModelError
    from urdir.model.generate import Finish, Generation, Statistics
    from urdir.model.gguf import Gguf, Tensor
    from urdir.model.sampling import SamplingSettings
    from urdir.model.session import Session
    from urdir.model.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Config",
    "ContextFullError",
    "Engine",
    "Finish",
    "Generation",
    "Gguf",
    "Message",
    "ModelError",
    "SamplingSettings",
    "Session",
    "Statistics",
    "Tensor",
    "Tokenizer",
    "demo_model",
]

#: Module -> the names of ``__all__`` that it defines; a module without any is one itself.
_MODULES: dict[str, tuple[str, ...]] = {
    "chat": ("ChatTemplate", "Message"),
    "config": ("Config",),
    "engine": ("Engine", "demo_model"),
    "errors": ("ContextFullError", "ModelError"),
    "generate": ("Finish", "Generation", "Statistics"),
    "gguf": ("Gguf", "Tensor"),
    "sampling": ("SamplingSettings",),
    "session": ("Session",),
    "tokenizer": ("Tokenizer",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_HOME.get(name, name)}")
        return getattr(module, name) if name in _HOME else module
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
