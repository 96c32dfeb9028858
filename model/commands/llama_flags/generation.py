"""Flags of lengths, stops and sampling."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ANSWERS, SERVER, TEXT


def _number(
    names: str, low: float, high: float | None, default: float, text: str, **options: object
) -> Served:
    """A sampling flag with a real number."""
    kind = {"type": values.real_number(low, high), "default": default, "metavar": "N"}
    return Served(names, ("sampling",), f"{text} (default: {default:g})", {**kind, **options})


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
    _number("--temp --temperature", 0, None, 0.8, "temperature; 0 is greedy", dest="temp"),
    Served(
        "--top-k",
        ("sampling",),
        "keep the K likeliest; 0 keeps all (default: 40)",
        {"type": values.whole_number(0), "default": 40, "metavar": "N"},
    ),
    _number("--top-p", 0, 1, 0.95, "share of probability kept; 1 keeps all"),
    _number("--min-p", 0, 1, 0.05, "drop less than this of the best; 0 drops none"),
    _number("--repeat-penalty", 1e-3, None, 1.0, "divide logits of repeated tokens; 1 is off"),
    Served(
        "--repeat-last-n",
        ("sampling",),
        "tokens that --repeat-penalty looks back on, also the prompt's; -1: all (default: 64)",
        {"type": values.whole_number(-1), "default": 64, "metavar": "N"},
    ),
    Served(
        "--presence-penalty",
        ("sampling",),
        "subtract from logits of tokens that the answer has: OpenAI's, the prompt does not count "
        "(default: 0, off)",
        {"type": values.real_number(-100, 100), "default": 0.0, "metavar": "N"},
    ),
    Served(
        "--frequency-penalty",
        ("sampling",),
        "the same for each time that the answer has them (default: 0, off)",
        {"type": values.real_number(-100, 100), "default": 0.0, "metavar": "N"},
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
