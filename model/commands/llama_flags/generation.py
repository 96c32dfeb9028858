"""Flags of lengths, stops and sampling."""

from __future__ import annotations

from collections.abc import Callable

from urdir.model.commands import values
from urdir.model.commands.flags import Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ANSWERS, SERVER, TEXT
from urdir.model.engine.sampling_settings import DEFAULTS, SETTINGS


def setting_flag(name: str, names: str = "") -> Served:
    """The flag of a sampling setting that is a number."""
    setting, default = SETTINGS[name], getattr(DEFAULTS, name)
    bounds = setting.bounds
    assert bounds is not None
    kind: Callable[[str], float] = values.real_number(bounds.low, bounds.high)
    if bounds.is_whole:
        kind = values.whole_number(int(bounds.low), int(bounds.high))
    arguments = {"type": kind, "default": default, "metavar": "N", "dest": name}
    text = f"{setting.does} (default: {default:g})"
    return Served(names or setting.flags, ("sampling",), text, arguments)


#: Settings whose flags are more than a number within bounds.
_OTHER_SETTINGS: tuple[Served, ...] = (
    Served(
        SETTINGS["seed"].flags,
        ("sampling",),
        "random seed; -1: a new one (default: -1)",
        {"type": values.seed, "metavar": "N"},
    ),
    Served(
        SETTINGS["logit_bias"].flags,
        ("sampling",),
        "add to a token's logit, as 15043+1 or 15043-1; repeatable",
        {"type": values.bias, "action": "append", "default": [], "metavar": "ID(+/-)BIAS"},
    ),
)
_NUMBERS = tuple(
    setting_flag(name)
    for name, setting in SETTINGS.items()
    if setting.flags and setting.flags not in {other.names for other in _OTHER_SETTINGS}
)

FLAGS: tuple[Flag, ...] = (
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
        {"action": "append", "default": [], "dest": "stop", "metavar": "TEXT"},
    ),
    Served("--ignore-eos", ("generation",), "go on past the model's end", {"action": "store_true"}),
    _OTHER_SETTINGS[0],
    *_NUMBERS,
    *_OTHER_SETTINGS[1:],
    Refused(
        "--mirostat --mirostat-lr --mirostat-ent",
        ANSWERS,
        "Mirostat",
        "use --top-p and --min-p",
        off=0,
    ),
    Refused("--typical --typical-p", ANSWERS, "typical sampling", "use --top-p and --min-p", off=1),
    Refused("--top-nsigma --top-n-sigma", ANSWERS, "top-n-sigma sampling", "use --min-p", off=-1),
    Refused("--xtc-probability", ANSWERS, "XTC sampling", "use --temp", off=0),
    Refused("--xtc-threshold", ANSWERS, "XTC sampling", "use --temp", off=1),
    Refused("--dry-multiplier", ANSWERS, "DRY sampling", "use --repeat-penalty", off=0),
    Refused(
        "--dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker",
        ANSWERS,
        "DRY sampling",
        "use --repeat-penalty",
    ),
    Refused("--dynatemp-range", ANSWERS, "dynamic temperature", "use --temp", off=0),
    Refused("--dynatemp-exp", ANSWERS, "dynamic temperature", "use --temp", off=1),
    Refused("--adaptive-target --adaptive-decay", ANSWERS, "adaptive-p sampling", "use --top-p"),
    Refused(
        "--samplers --sampler-seq --sampling-seq", ANSWERS, "order of samplers", "it is llama.cpp's"
    ),
    Accepted("-bs --backend-sampling", ANSWERS, "tokens are always chosen on the GPU"),
    *(
        Refused(
            "--grammar --grammar-file -j --json-schema -jf --json-schema-file",
            group,
            "grammar",
            nearest,
        )
        for group, nearest in (
            (TEXT, "urdir serve has it, by request ('response_format')"),
            (SERVER, "clients send 'response_format' or 'structured_outputs'"),
        )
    ),
)
