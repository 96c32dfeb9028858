"""Whether a model runs on this machine, and the memory that it needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from urdir.model.commands.opening import open_device
from urdir.model.commands.report import size_text

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.description import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.budget import MemoryPlan

#: Contexts at which the memory is told, as far as the model takes them.
_CONTEXTS = (4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it ``runs``, in words; its description (None where it has none), and the bytes that
    it needs by owner, for several contexts."""

    runs: bool
    text: str
    config: Config | None = None
    memory: list[dict[str, int]] = field(default_factory=list)


def verdict_of(gguf: ModelFile, args: argparse.Namespace) -> Verdict:
    """What becomes of a model on the device of the command line, with the context asked for.

    Raises SettingsError for a context that the model does not take.
    """
    from urdir.driver.errors import DriverError
    from urdir.model.engine.engine import chosen_context
    from urdir.model.errors import ConfigError, UnsupportedError
    from urdir.model.families.description import Config
    from urdir.ptxgen.tools.gpus import DEFAULT_GPU, GPUS

    try:
        config = Config.from_gguf(gguf)
    except (ConfigError, UnsupportedError) as exc:
        return Verdict(False, f"cannot run: {str(exc).removeprefix(f'{gguf.path}: ')}")
    context = chosen_context(config, args.ctx_size)
    try:
        with open_device(args) as device:
            plans = _plans(gguf, config, context, device.properties.sm_count)
            runs, text = _judge(gguf, device, context, plans[context])
    except DriverError as exc:
        plans = _plans(gguf, config, context, GPUS[DEFAULT_GPU].sm_count)
        runs, text = False, f"cannot run here: {exc}"
    memory = [_needs(tokens, plan) for tokens, plan in plans.items()]
    return Verdict(runs, text, config, memory)


def _needs(context: int, plan: MemoryPlan) -> dict[str, int]:
    """Bytes by owner and in total, with what the driver takes."""
    from urdir.model.memory.budget import RESERVE_BYTES

    total = plan.total + RESERVE_BYTES
    return {"context": context, **plan.as_dict(), "driver": RESERVE_BYTES, "total": total}


def _judge(gguf: ModelFile, device: Device, context: int, plan: MemoryPlan) -> tuple[bool, str]:
    from urdir.model.engine.engine import emulated_rate
    from urdir.model.memory.budget import RESERVE_BYTES

    needed = f"{size_text(plan.total + RESERVE_BYTES)} at a context of {context:,}"
    if device.is_emulated:
        rate = f"about {emulated_rate(gguf):.2g} tokens/s"
        why = f" ({device.note})" if device.note else ""
        return True, f"runs on the emulator{why}, {rate}; a GPU needs {needed}"
    free, total = device.memory_info()
    has = f"{device.properties.name} has {size_text(free)} of {size_text(total)} free"
    if plan.fits(device):
        return True, f"runs: needs {needed}, {has}"
    return False, f"cannot run here: needs {needed}, {has}; a shorter context (-c) needs less"


def _plans(gguf: ModelFile, config: Config, context: int, sm_count: int) -> dict[int, MemoryPlan]:
    """What is needed at the usual contexts, the model's and the one asked for."""
    from urdir.model.memory.budget import MemoryPlan, SessionBudget
    from urdir.model.memory.session_settings import SessionSettings

    most = config.context_length
    contexts = sorted({context, most, *(tokens for tokens in _CONTEXTS if tokens < most)})
    return {
        tokens: MemoryPlan.of(
            gguf,
            config,
            SessionBudget.of(config.at_context(tokens), sm_count, SessionSettings(tokens)),
        )
        for tokens in contexts
    }
