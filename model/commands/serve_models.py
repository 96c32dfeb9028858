"""Models of `urdir serve --models-dir` and `--models-preset`, and the flags of each."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options
from urdir.model.commands.opening import MEMORY_SHARE
from urdir.model.commands.options import UsageError
from urdir.model.commands.serve_opening import makes_embeddings

if TYPE_CHECKING:
    from urdir.model.files.hub import FoundModel
    from urdir.model.serve.router.spec import ModelSpec, Serve

    ServeOne = Callable[..., None]

_MOST_NAME = 256  # characters


class Models:
    """The models that the flags name."""

    def __init__(self, args: argparse.Namespace, serve_one: ServeOne) -> None:
        self._args = args
        self._serve_one = serve_one
        presets: dict[str, argparse.Namespace] = getattr(args, "presets", {})
        self._common = presets.get("", args)
        self._presets = {name: preset for name, preset in presets.items() if name}

    def check(self) -> None:
        """Raise UsageError for flags that do not go together, and for presets of no model."""
        args = self._args
        if sys.platform == "win32":
            raise UsageError("models are loaded on demand on Linux and macOS alone")
        if args.ray:
            raise UsageError("--ray serves one model: leave --models-dir and the like out")
        if not args.models_dir and not args.models_preset:
            return
        if options.one_model(args) is not None:
            raise UsageError("-m with --models-dir or --models-preset: give one or the other")
        if args.alias:
            raise UsageError("--alias with several models: give it in the table of one")
        found = {model.name for model in self._in_folder()}
        for name, preset in self._presets.items():
            if not name or len(name) > _MOST_NAME or not name.isprintable():
                raise UsageError(f"--models-preset: {name[:40]!r} cannot be the name of a model")
            if options.one_model(preset) is None and name not in found:
                raise UsageError(
                    f"--models-preset: {args.models_dir or 'the file'} has no model {name!r}: "
                    f'give its file in its table, model = "/path/model.gguf"'
                )
        if not args.models_dir and not self._presets:
            raise UsageError(f"--models-preset {args.models_preset}: it has no table of a model")

    def find(self) -> Iterator[ModelSpec]:
        """The models of the folder and the presets, as they are now. Raises ModelError for a folder
        that cannot be read."""
        args = self._args
        if not args.models_dir and not args.models_preset:
            yield self._single()
            return
        presets = dict(self._presets)
        for model in self._in_folder():
            preset = presets.get(model.name)
            if preset is None or options.one_model(preset) is None:
                presets.pop(model.name, None)
                yield self._spec(model.name, preset or self._common, model)
        for name, preset in presets.items():
            if options.one_model(preset) is not None:
                yield self._spec(name, preset)

    def _in_folder(self) -> list[FoundModel]:
        from urdir.model.files.models_folder import models_in

        folder = self._args.models_dir
        return [] if folder is None else models_in(Path(folder))

    def _spec(
        self, name: str, given: argparse.Namespace, found: FoundModel | None = None
    ) -> ModelSpec:
        """A model with its flags; ``found`` is its file in the folder."""
        from urdir.model.engine.adapters import adapter_names
        from urdir.model.serve.router.spec import ModelSpec

        args = copy.copy(given)
        others = () if found is None or found.path.is_dir() else (f"{name}.gguf",)
        args.model = options.one_model(given) if found is None else str(found.path)
        args.file = None
        path = Path(args.model or "")
        status = path.stat() if path.is_file() else None
        args.alias = [name, *(given.alias or ())]
        adapters = adapter_names([path for path, _ in args.adapters])
        names = tuple(dict.fromkeys((*args.alias, *adapters)))
        args.alias += others
        return ModelSpec(
            names,
            self._serve(args),
            partial(_check, args) if found or path.exists() else _no_check,
            others,
            nbytes=found.nbytes if found else status.st_size if status else 0,
            modified=found.modified if found else status.st_mtime if status else 0.0,
            idle_seconds=_idle(args),
            load_on_startup=getattr(args, "load_on_startup", False),
            memory_share=args.gpu_memory_share,
            folder=str(path.parent),
        )

    def _single(self) -> ModelSpec:
        """The one model of -m."""
        from urdir.model.files.demo import DEMO
        from urdir.model.serve.router.spec import ModelSpec

        args = self._args
        given = options.one_model(args) or DEMO
        names = tuple(args.alias or (Path(given).name,))
        return ModelSpec(
            names,
            self._serve(args),
            idle_seconds=_idle(args),
            load_on_startup=True,
            memory_share=args.gpu_memory_share or MEMORY_SHARE,
            any_name=True,
        )

    def _serve(self, args: argparse.Namespace) -> Serve:
        """What serves a model; of its flags, all that can be sent to a process."""
        sent = argparse.Namespace(
            **{
                name: value
                for name, value in vars(args).items()
                if name not in ("presets", "handler", "whole")
            }
        )
        return partial(self._serve_one, sent)


def _check(args: argparse.Namespace) -> None:
    """Raise ModelError for files that cannot be served."""
    from urdir.model.files.source import open_model

    with open_model(args.model):
        makes_embeddings(args)


def _no_check() -> None:
    """Of a model on the hub."""


def _idle(args: argparse.Namespace) -> float | None:
    return None if args.sleep_idle_seconds < 0 else float(args.sleep_idle_seconds)
