"""Flags of lengths, stops and sampling."""

from __future__ import annotations

from collections.abc import Callable

from urdir.model.commands import values
from urdir.model.commands.flags import Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ANSWERS, SERVER, TEXT
from urdir.model.engine.sampling_settings import BOUNDS, DEFAULTS


def _setting(names: str, setting: str, text: str, **options: object) -> Served:
    """A flag of a sampling setting that is a number."""
    bounds, default = BOUNDS[setting], getattr(DEFAULTS, setting)
    kind: Callable[[str], float] = values.real_number(bounds.low, bounds.high)
    if bounds.is_whole:
        kind = values.whole_number(int(bounds.low), int(bounds.high))
    arguments = {"type": kind, "default": default, "metavar": "N", **options}
    return Served(names, ("sampling",), f"{text} (default: {default:g})", arguments)


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
    Served(
        "-s --seed",
        ("sampling",),
        "random seed; -1: a new one (default: -1)",
        {"type": values.seed, "metavar": "N"},
    ),
    _setting("--temp --temperature", "temperature", "temperature; 0 is greedy", dest="temp"),
    _setting("--top-k", "top_k", "keep the K likeliest; 0 keeps all"),
    _setting("--top-p", "top_p", "share of probability kept; 1 keeps all"),
    _setting("--min-p", "min_p", "drop less than this of the best; 0 drops none"),
    _setting("--repeat-penalty", "repeat_penalty", "divide logits of repeated tokens; 1 is off"),
    _setting(
        "--repeat-last-n",
        "repeat_last_n",
        "tokens that --repeat-penalty looks back on, also the prompt's; -1: all",
    ),
    _setting(
        "--presence-penalty",
        "presence_penalty",
        "subtract from logits of tokens that the answer has: OpenAI's, the prompt does not count; "
        "0 is off",
    ),
    _setting(
        "--frequency-penalty",
        "frequency_penalty",
        "the same for each time that the answer has them; 0 is off",
    ),
    Served(
        "-l --logit-bias",
        ("sampling",),
        "add to a token's logit, as 15043+1 or 15043-1; repeatable",
        {"type": values.bias, "action": "append", "default": [], "metavar": "ID(+/-)BIAS"},
    ),
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
