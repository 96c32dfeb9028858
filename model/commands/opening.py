"""Engines and devices as the command line and the environment ask for them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from urdir.model.environment import Knobs, read_knobs

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.ptx_files import PtxFiles
    from urdir.model.engine.engine import Engine
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
    sequences: int = 1,
    text: bool = False,
) -> Engine:
    """`Engine.open` with what ``--device`` and the environment say about the rest."""
    from urdir.model.engine.engine import Engine

    knobs = read_knobs()
    return Engine.open(
        model,
        device=args.device or knobs.device,
        context=context,
        kv_dtype=kv_dtype,
        exact=exact,
        sequences=sequences,
        text=text,
        cache_folder=knobs.cache_dir,
        ptx_files=ptx_files(knobs),
        host_sampling=knobs.correctness_mode,
        observer=observer(knobs),
    )


def open_device(args: argparse.Namespace) -> Device:
    """`Device.open` with what ``--device`` and the environment say."""
    from urdir.driver.device import Device

    knobs = read_knobs()
    return Device.open(args.device or knobs.device, cache_folder=knobs.cache_dir)


def ptx_files(knobs: Knobs) -> PtxFiles:
    """The folders of edited PTX that the environment names."""
    from urdir.driver.ptx_files import PtxFiles

    return PtxFiles(knobs.ptx_override, knobs.ptx_dump)


def observer(knobs: Knobs) -> Observer | None:
    """Who looks at every step, if the environment asks for it."""
    from urdir.model.verify.observers import PhaseTimer, TensorSummaries

    if knobs.gpu_debug:
        return TensorSummaries()
    return PhaseTimer() if knobs.decode_timing else None
