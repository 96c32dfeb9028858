"""Engines and devices as configured by the command line and the environment."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options, values
from urdir.model.environment import Environment, read_environment
from urdir.model.turns import take_short_turns, take_shorter_turns

#: Of the free memory, what serves many requests without another share.
MEMORY_SHARE = 0.9

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.group import Group
    from urdir.driver.ptx_files import PtxFiles
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.loading import Loading
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.requests.warm_up import WarmUp
    from urdir.model.engine.runner import Observer
    from urdir.model.families.placement import Placement
    from urdir.model.families.synthetic import SyntheticModel


def engine_options(
    args: argparse.Namespace, model: str | SyntheticModel | None, context: int | None
) -> EngineOptions:
    """Engine options from the model, context, ``--quantize``, ``--device``, ``--gpus``,
    ``--split``, ``--prompt-arithmetic``, those of adapters and the environment."""
    from urdir.model.engine.options import EngineOptions

    environment = read_environment()
    return EngineOptions(
        model,
        quantize=getattr(args, "quantize", None),
        device=device_name(args, environment),
        gpus=getattr(args, "gpus", None),
        split=getattr(args, "split", "tensors"),
        placement=placement(args) if "overrides" in args else None,
        device_memory=getattr(args, "device_memory", None),
        host_memory=getattr(args, "host_memory", None),
        stream_dir=getattr(args, "stream_dir", None),
        random_routing=getattr(args, "routing", None),
        prompt_arithmetic=getattr(args, "prompt_arithmetic", "f16"),
        adapters=tuple(getattr(args, "adapters", ())),
        max_adapters=getattr(args, "max_adapters", None),
        max_adapter_rank=getattr(args, "max_adapter_rank", None),
        context=context,
        cache_folder=environment.cache_dir,
        ptx_files=ptx_files(environment),
        host_sampling=environment.correctness_mode,
        observer=observer(environment),
        embeddings=False,
    )


def answer_options(
    args: argparse.Namespace, *, chat: bool, chat_template: str | None
) -> EngineOptions:
    """Options of a single-user engine, from the flags of ``run`` and ``chat``."""
    return replace(
        engine_options(args, args.model, args.ctx_size),
        kv_dtype=args.cache_type_k or "f16",
        value_dtype=args.cache_type_v or "f16",
        chunk=options.chunk(args),
        drafts=options.drafts(args),
        draft=options.draft(args),
        text=True,
        chat=chat,
        chat_template=chat_template,
    )


def service_options(
    args: argparse.Namespace, model: str | SyntheticModel | None, context: int | None
) -> EngineOptions:
    """Options of a multi-user engine, from the flags of ``serve`` and ``bench --load``."""
    return replace(
        engine_options(args, model, context),
        kv_dtype=args.cache_type_k or "f16",
        value_dtype=args.cache_type_v or "f16",
        sequences=args.parallel,
        memory_share=args.gpu_memory_share or MEMORY_SHARE,
        prefix_host_memory=args.prefix_host_memory,
        prefix_dir=args.prefix_dir,
        chunk=options.chunk(args),
        warms_up=True,
        embeddings=None,
    )


def load(wanted: EngineOptions) -> Loading:
    """Begin to load a model's weights, in a process whose threads take short turns."""
    from urdir.model.engine.loading import Loading

    take_short_turns()
    return Loading(wanted)


def open_engine(wanted: EngineOptions) -> Engine:
    """Open an engine."""
    from urdir.model.engine.engine import Engine

    with load(wanted) as loading:
        return Engine(loading)


def begin_warm_up(loading: Loading, seconds: float, **likely: Any) -> WarmUp | None:
    """Record graphs of the likeliest steps, with progress, for at most ``seconds``.

    Returns None on the emulator, whose steps take longer than their graphs. ``likely`` are the
    arguments of `likely_shapes`. See `collect_no_graphs`.
    """
    from urdir.model.engine.requests.warm_up import collect_no_graphs
    from urdir.model.progress import Progress

    if loading.device.is_emulated:
        return None
    loading.device.begin_compilers()
    collect_no_graphs(loading.session.steps)
    warm_up = loading.warm_up(**likely)
    with Progress("recording graphs", warm_up.left) as progress:
        warm_up.run(seconds, progress.reach)
    return warm_up


def go_on_beside_answers(warm_up: WarmUp | None) -> None:
    """Have threads take shorter turns until a warm-up is done; once the engine is open."""
    if warm_up is not None and warm_up.left:
        take_shorter_turns()
        warm_up.on_end = take_short_turns


def placement(args: argparse.Namespace) -> Placement | None:
    """What stays on the device, as the flags say; None for all of it."""
    from urdir.model.families.placement import Placement

    found = Placement(
        gpu_layers=args.gpu_layers,
        host_experts=args.host_experts,
        overrides=tuple(args.overrides),
        expert_slots=args.expert_slots,
        fit=args.fit != "off" or args.device_memory is not None,
    )
    return None if found == Placement() else found


def device_name(args: argparse.Namespace, environment: Environment) -> str:
    """The device of ``--device``, or else of the environment. Raises UsageError, which names the
    variable."""
    if args.device is not None:
        return str(args.device)
    try:
        return values.device(environment.device)
    except argparse.ArgumentTypeError as exc:
        raise options.UsageError(f"$URDIR_DEVICE: {exc}") from None


def open_device(args: argparse.Namespace) -> Device:
    """`Device.open` with the settings of ``--device`` and the environment."""
    from urdir.driver.device import Device

    environment = read_environment()
    return Device.open(device_name(args, environment), cache_folder=environment.cache_dir)


def open_group(args: argparse.Namespace) -> Group:
    """`Group.open` with the settings of ``--device``, ``--gpus`` and the environment."""
    from urdir.driver.group import Group

    environment = read_environment()
    name = device_name(args, environment)
    return Group.open(name, args.gpus, cache_folder=environment.cache_dir)


def ptx_files(environment: Environment) -> PtxFiles:
    """The folders of edited PTX that the environment names."""
    from urdir.driver.ptx_files import PtxFiles

    return PtxFiles(environment.ptx_override, environment.ptx_dump)


def observer(environment: Environment) -> Observer | None:
    """The observer of every step, if the environment requests one."""
    if not environment.gpu_debug and not environment.decode_timing:
        return None
    from urdir.model.verify.observers import PhaseTimer, TensorSummaries

    if environment.gpu_debug:
        return TensorSummaries()
    return PhaseTimer()
