"""Engines and devices as the command line and the environment ask for them."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options
from urdir.model.commands.options import UsageError
from urdir.model.environment import Environment, read_environment

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.group import Group
    from urdir.driver.ptx_files import PtxFiles
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.warm_up import WarmUp
    from urdir.model.engine.runner import Observer
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.ptxgen.kernels.attention.kv_layout import KvDtype


def open_engine(
    args: argparse.Namespace,
    model: str | SyntheticModel | None,
    context: int | None,
    *,
    kv_dtype: KvDtype = "f16",
    exact: bool = False,
    sequences: int | None = 1,
    memory_share: float = 0.0,
    chunk: int | None = None,
    text: bool = False,
    chat: bool | None = False,
    chat_template: str | None = None,
    meanwhile: Callable[[Engine], None] | None = None,
) -> Engine:
    """`Engine.open` with what ``--device``, ``-ngl`` and the environment say about the rest."""
    from urdir.model.engine.engine import Engine

    def check_then(engine: Engine) -> None:
        check_layers(args, engine)
        if meanwhile is not None:
            meanwhile(engine)

    environment = read_environment()
    return Engine.open(
        model,
        quantize=getattr(args, "quantize", None),
        device=args.device or environment.device,
        gpus=getattr(args, "gpus", None),
        split=getattr(args, "split", "tensors"),
        context=context,
        kv_dtype=kv_dtype,
        exact=exact,
        sequences=sequences,
        memory_share=memory_share,
        chunk=chunk,
        text=text,
        chat=chat,
        chat_template=chat_template,
        cache_folder=environment.cache_dir,
        ptx_files=ptx_files(environment),
        host_sampling=environment.correctness_mode,
        observer=observer(environment),
        meanwhile=check_then,
    )


def open_for_answers(
    args: argparse.Namespace,
    *,
    chat: bool,
    chat_template: str | None,
    meanwhile: Callable[[Engine], None] | None = None,
) -> Engine:
    """The engine of one user, as the flags of ``run`` and ``chat`` say."""
    return open_engine(
        args,
        args.model,
        args.ctx_size,
        kv_dtype=options.kv_dtype(args),
        chunk=options.chunk(args),
        text=True,
        chat=chat,
        chat_template=chat_template,
        meanwhile=meanwhile,
    )


def begin_warm_up(engine: Engine, seconds: float, **likely: Any) -> WarmUp | None:
    """Record graphs of the likeliest steps, with progress, for so long. None on the emulator, whose
    steps take longer than their graphs. ``likely`` is what `likely_shapes` is to know.

    What graphs are made of is frozen: those of an 8B model are millions of objects, and the
    collector stops all threads while it looks at each of them (half a million took 0.27 s on a core
    of a cloud Xeon). They go without it: they are in no cycle.
    """
    from urdir.model.engine.requests.warm_up import WarmUp, likely_shapes
    from urdir.model.progress import Progress

    if engine.device.is_emulated:
        return None
    session = engine.session
    states = session.storage.shared_states
    divided = states is not None and states.places > 0
    shapes = likely_shapes(session.shapes, **likely, divided=divided)
    warm_up = WarmUp(session.steps, shapes, on_graph=gc.freeze)
    with Progress("recording graphs", warm_up.left) as progress:
        warm_up.run(seconds, progress.reach)
    return warm_up


def check_layers(args: argparse.Namespace, engine: Engine) -> None:
    """Refuse fewer layers on the GPU than the model has."""
    asked, layers = getattr(args, "gpu_layers", None), engine.config.n_layers
    if asked is not None and asked < layers:
        raise UsageError(
            f"-ngl {asked}: all {layers} layers go to the GPU, none stays on the CPU: leave it out"
        )


def open_device(args: argparse.Namespace) -> Device:
    """`Device.open` with what ``--device`` and the environment say."""
    from urdir.driver.device import Device

    environment = read_environment()
    return Device.open(args.device or environment.device, cache_folder=environment.cache_dir)


def open_group(args: argparse.Namespace) -> Group:
    """`Group.open` with what ``--device``, ``--gpus`` and the environment say."""
    from urdir.driver.group import Group

    environment = read_environment()
    name = args.device or environment.device
    return Group.open(name, args.gpus, cache_folder=environment.cache_dir)


def ptx_files(environment: Environment) -> PtxFiles:
    """The folders of edited PTX that the environment names."""
    from urdir.driver.ptx_files import PtxFiles

    return PtxFiles(environment.ptx_override, environment.ptx_dump)


def observer(environment: Environment) -> Observer | None:
    """Who looks at every step, if the environment asks for it."""
    if not environment.gpu_debug and not environment.decode_timing:
        return None
    from urdir.model.verify.observers import PhaseTimer, TensorSummaries

    if environment.gpu_debug:
        return TensorSummaries()
    return PhaseTimer()
