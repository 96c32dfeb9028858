"""Verdict whether a model runs on this machine, and the memory that it needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from urdir.model.commands.opening import engine_options, open_group
from urdir.model.commands.report import size_text

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.budget import MemoryPlan
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.measure.streaming import Streaming

#: Contexts for which the memory is shown, up to the model's own.
_CONTEXTS = (4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the model ``runs``, in words; its description (None without one), and the bytes that
    it needs by owner for several contexts, per rank if there are several; ``streamed``: what is
    streamed from host memory, and how fast that can be."""

    runs: bool
    text: str
    config: Config | None = None
    memory: list[dict[str, int]] = field(default_factory=list)
    streamed: Streaming | None = None


def verdict_of(gguf: ModelFile, args: argparse.Namespace) -> Verdict:
    """The verdict for a model on the selected devices, with the requested context.

    Raises SettingsError for a context that the model does not take.
    """
    from urdir.driver.errors import DriverError
    from urdir.model.engine.options import chosen_context
    from urdir.model.engine.placing import placed
    from urdir.model.errors import ConfigError, ModelError, SettingsError, UnsupportedError
    from urdir.model.families.config import Config
    from urdir.model.measure.paper_device import paper_device
    from urdir.model.measure.streaming import Streaming
    from urdir.model.memory.weight_sizes import shares_of
    from urdir.ptxgen.tools.gpus import DEFAULT_GPU, GPUS

    try:
        config = Config.of(gguf)
        shares = shares_of(config, gguf, _count(args.gpus), args.split)
    except (ConfigError, UnsupportedError) as exc:
        return Verdict(False, f"cannot run: {str(exc).removeprefix(f'{gguf.path}: ')}")
    context = chosen_context(config, args.ctx_size)
    contexts = _contexts(config, context)
    streamed = None
    try:
        with open_group(args) as group:
            config = placed(config, gguf, [*group], engine_options(args, None, context))
            if config.streaming is not None:
                shares = shares_of(config, gguf, len(group), args.split)
                streamed = Streaming.of(gguf, shares, group[0])
            plans = [_plans(gguf, share, contexts, group[0]) for share in shares]
            needed = [plan[context] for plan in plans]
            runs, text = _judge(gguf, [*zip(group, needed, strict=True)], context)
    except SettingsError:
        raise
    except ModelError as exc:
        return Verdict(False, f"cannot run here: {exc}", config)
    except DriverError as exc:
        gpu = GPUS[DEFAULT_GPU]
        with paper_device(gpu.target, gpu.sm_count) as device:
            plans = [_plans(gguf, share, contexts, device) for share in shares]
        runs, text = False, f"cannot run here: {exc}"
    memory = [
        _needs(tokens, rank if len(plans) > 1 else None, plan[tokens])
        for tokens in contexts
        for rank, plan in enumerate(plans)
    ]
    return Verdict(runs, text, config, memory, streamed)


def _count(gpus: int | tuple[int, ...] | None) -> int:
    """How many GPUs ``--gpus`` names."""
    return gpus if isinstance(gpus, int) else len(gpus or (0,))


def _needs(context: int, rank: int | None, plan: MemoryPlan) -> dict[str, int]:
    """Bytes by owner and in total, including the driver's; for one ``rank`` if there are
    several."""
    from urdir.model.engine.budget import RESERVE_BYTES

    at = {"context": context} | ({} if rank is None else {"rank": rank})
    total = plan.total + RESERVE_BYTES
    return {**at, **plan.as_dict(), "driver": RESERVE_BYTES, "total": total}


def _judge(
    gguf: ModelFile, ranks: Sequence[tuple[Device, MemoryPlan]], context: int
) -> tuple[bool, str]:
    """Whether each rank fits its device, and in words: of the rank that has the least left."""
    from urdir.model.engine.budget import RESERVE_BYTES
    from urdir.model.engine.pieces import emulated_rate_text

    device, plan = min(ranks, key=lambda rank: rank[0].usable_memory() - rank[1].total)
    gpus = "a GPU needs" if len(ranks) == 1 else f"each of {len(ranks)} GPUs needs up to"
    needs = "needs" if len(ranks) == 1 else gpus
    needed = f"{size_text(plan.total + RESERVE_BYTES)} at a context of {context:,}"
    if device.is_emulated and plan.fits(device):
        rate = f"about {emulated_rate_text(gguf)} tokens/s"
        why = f"{device.note}; " if device.note else ""
        return True, f"runs on the emulator, {rate}; {why}{gpus} {needed}"
    free, total = device.usable_memory(), device.memory_info()[1]
    has = f"{device.properties.name} has {size_text(free)} of {size_text(total)} free"
    if plan.fits(device):
        return True, f"runs: {needs} {needed}, {has}"
    return False, f"cannot run here: {needs} {needed}, {has}; a shorter context (-c) needs less"


def _contexts(config: Config, context: int) -> list[int]:
    """The usual contexts, the model's and the one asked for."""
    most = config.context_length
    return sorted({context, most, *(tokens for tokens in _CONTEXTS if tokens < most)})


def _plans(
    gguf: ModelFile, share: Config, contexts: Sequence[int], device: Device
) -> dict[int, MemoryPlan]:
    """What a share of the model needs, by context."""
    from urdir.model.engine.budget import MemoryPlan, SessionBudget
    from urdir.model.engine.encoding.budget import EncoderSettings, encoder_plan
    from urdir.model.lower.paper import paper_weights
    from urdir.model.memory.session_settings import SessionSettings

    if not share.is_causal:
        weights = paper_weights(gguf, share, device)
        return {
            tokens: encoder_plan(
                gguf, weights, EncoderSettings.of(share, tokens, emulated=device.is_emulated)
            )
            for tokens in contexts
        }
    return {
        tokens: MemoryPlan.of(
            gguf,
            share,
            SessionBudget.of(
                paper_weights(gguf, share.at_context(tokens), device), SessionSettings(tokens)
            ),
        )
        for tokens in contexts
    }
