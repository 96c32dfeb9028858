"""What `urdir bench` measures, a file or a made model, and on which device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import bench_report as report
from urdir.model.commands import options
from urdir.model.commands.report import installed_version
from urdir.model.engine.options import MODEL_DRAFTS, NGRAM
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.measure.bench import Rates


def model_source(args: argparse.Namespace) -> str | SyntheticModel | None:
    """The model: a path or name, or random weights of ``--shape``; None for the demo."""
    from urdir.model.families.synthetic import SyntheticModel

    model = options.one_model(args)
    if args.shape and model:
        raise options.UsageError(f"--shape {args.shape} beside a model: give one of them")
    return SyntheticModel(args.shape, args.type) if args.shape else model


def draft_settings(args: argparse.Namespace) -> DraftSettings | None:
    """Draft settings from --draft and its related flags; None for no drafts."""
    if args.draft is None:
        if args.accept is not None:
            raise options.UsageError("--accept: of which drafts? Give --draft, too")
        return None
    kind, usual = "model", MODEL_DRAFTS
    if args.draft == NGRAM:
        kind, usual = NGRAM, DraftSettings().most
    most, least = args.draft_max or usual, args.draft_min
    if least > most:
        raise options.UsageError(f"--draft-min {least} of --draft-max {most}")
    tokens = args.draft_vocab
    return DraftSettings(kind=kind, most=most, least=least, chance=args.accept, tokens=tokens)


def draft_source(args: argparse.Namespace) -> str | SyntheticModel | None:
    """Whose drafts steps verify: the file of a draft model, or one of a shape."""
    from urdir.model.families.config import Config
    from urdir.model.families.shapes import SHAPES
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.families.synthetic_draft import DRAFT_SHAPES, SyntheticDraft

    draft: str | None = args.draft
    if draft is None or Path(draft).exists():
        return draft
    if draft in SHAPES:
        return SyntheticModel(draft)
    if draft in DRAFT_SHAPES:
        source = model_source(args)
        if not isinstance(source, SyntheticModel):
            raise options.UsageError(f"--draft {args.draft}: a shape needs a model of --shape")
        return SyntheticDraft(draft, Config.of(source))
    return draft


def device_rates(device: Device) -> Rates:
    """Peak rates of the device; warns if they are lower than expected."""
    from urdir.model.measure.bandwidth import doubt, read_bandwidth
    from urdir.model.measure.bench import Rates
    from urdir.model.measure.product_rate import product_rate

    with Progress("measuring the device"):
        rates = Rates(read_bandwidth(device), product_rate(device))
    if device.is_emulated:
        print("no GPU: these are figures of the emulator", file=sys.stderr)
    if reason := doubt(device.properties.name, rates.read):
        print(f"warning: {reason}", file=sys.stderr)
    return rates


def device_conditions(device: Device, model: str, rates: Rates, gpus: int = 1) -> report.Conditions:
    """Conditions of the measurement; with several GPUs, rates, memory and traffic are per GPU."""
    free, total = device.memory_info()
    name = device.properties.name
    return report.Conditions(
        model=model,
        device=name if gpus == 1 else f"each of {gpus} x {name}",
        emulated=device.is_emulated,
        driver=".".join(map(str, device.properties.driver_version)),
        version=installed_version("urdir"),
        read_gb_per_s=rates.read / 1e9,
        product_tflop_per_s=rates.product / 1e12,
        vram_bytes=total - free,
    )
