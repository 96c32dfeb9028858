"""Served flags of llama.cpp: lengths, stops and sampling."""

from __future__ import annotations

from collections.abc import Callable

from urdir.model.commands import values
from urdir.model.commands.flags import Served
from urdir.model.engine.sampling_settings import DEFAULTS, SETTINGS


def setting_flag(name: str, names: str = "") -> Served:
    """The flag of a sampling setting that is a number."""
    setting, default = SETTINGS[name], getattr(DEFAULTS, name)
    bounds = setting.bounds
    assert bounds is not None
    kind: Callable[[str], float] = values.real_number(bounds.low, bounds.high)
    if bounds.is_whole:
        kind = values.whole_number(int(bounds.low), int(bounds.high))
    arguments = {"type": kind, "default": None, "metavar": "N", "dest": name}
    text = f"{setting.does} (default: the file's, or {default:g})"
    return Served(names or setting.flags, ("sampling",), text, arguments)


_SEED = Served(
    SETTINGS["seed"].flags,
    ("sampling",),
    "random seed; -1: a new one (default: -1)",
    {"type": values.seed, "metavar": "N"},
)
_BIAS = Served(
    SETTINGS["logit_bias"].flags,
    ("sampling",),
    "add to a token's logit, as 15043+1 or 15043-1; repeatable",
    {"type": values.bias, "action": "append", "default": [], "metavar": "ID(+/-)BIAS"},
)
_NUMBERS = [
    name for name, of in SETTINGS.items() if of.flags and of.flags not in (_SEED.names, _BIAS.names)
]

SERVED: tuple[Served, ...] = (
    Served(
        "-n --predict --n-predict",
        ("generation",),
        "tokens to generate at most; -1: until the end or a full context (default: -1)",
        {"type": values.token_limit, "dest": "n_predict", "metavar": "N"},
    ),
    Served(
        "-r --reverse-prompt --stop",
        ("generation",),
        "end at this text; repeatable",
        {
            "type": values.stop_text,
            "action": "append",
            "default": [],
            "dest": "stop",
            "metavar": "TEXT",
        },
    ),
    Served("--ignore-eos", ("generation",), "go on past the model's end", {"action": "store_true"}),
    _SEED,
    *map(setting_flag, _NUMBERS),
    _BIAS,
)
