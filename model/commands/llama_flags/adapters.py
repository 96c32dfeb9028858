"""Flags of LoRA adapters."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Flag, Served
from urdir.model.engine.options import MOST_RANK

#: Commands that answer.
_ANSWERS = ("text", "server")

#: Those that `urdir logits` has as well.
GIVEN: tuple[Flag, ...] = (
    Served(
        "--lora",
        _ANSWERS,
        "a LoRA adapter: a GGUF file or a folder of peft; several between commas; repeatable",
        {
            "type": values.adapters,
            "action": "extend",
            "dest": "adapters",
            "default": [],
            "metavar": "FILE",
        },
    ),
    Served(
        "--lora-scaled",
        _ANSWERS,
        "the same, times a scale; several between commas; repeatable",
        {
            "type": values.scaled_adapters,
            "action": "extend",
            "dest": "adapters",
            "default": [],
            "metavar": "FILE:SCALE",
        },
    ),
)
SERVED: tuple[Flag, ...] = (
    *GIVEN,
    Served(
        "--lora-init-without-apply",
        ("server",),
        "requests have adapters only if they name them, or after POST /lora-adapters (default: "
        "those of --lora)",
        {"action": "store_true", "dest": "adapters_unapplied"},
    ),
    Served(
        "--max-loras",
        ("server",),
        "adapters, or sets of them, that requests use at the same time (default: as many as are "
        "given)",
        {"type": values.whole_number(1, MOST_RANK), "dest": "max_adapters", "metavar": "N"},
    ),
    Served(
        "--max-lora-rank",
        ("server",),
        "the highest rank of an adapter, or of a set of them together (default: that of those "
        "given, together unless --lora-init-without-apply)",
        {"type": values.whole_number(1, MOST_RANK), "dest": "max_adapter_rank", "metavar": "N"},
    ),
)
