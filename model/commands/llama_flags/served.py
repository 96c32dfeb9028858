"""Served flags of llama.cpp: the model, prompts, and chat templates."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Served
from urdir.model.families.streaming import ALL_LAYERS

MODEL_HELP = (
    "GGUF file, any part of a split one, a folder with config.json and safetensors, "
    "hf:org/repo[:file-or-type] on the Hugging Face hub, or demo"
)

_CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "fp8", "q4_0")

_TEMPLATE = ("template",)

_TEXT = {"type": values.text, "metavar": "TEXT"}

SERVED: tuple[Served, ...] = (
    Served(
        "-m --model",
        ("model",),
        f"{MODEL_HELP} (default: demo)",
        {"metavar": "FILE"},
        one_of="model",
    ),
    Served(
        "-hf -hfr --hf-repo",
        ("model",),
        "the same as -m hf:ORG/REPO[:TYPE] (default of TYPE: Q4_K_M, or its only one)",
        {"dest": "model", "type": lambda text: f"hf:{text}", "metavar": "ORG/REPO[:TYPE]"},
        one_of="model",
    ),
    Served(
        "-c --ctx-size",
        ("context",),
        "context in tokens; 0: the model's (default: the smaller of the model's and 4096)",
        {"type": values.whole_number(0), "metavar": "N"},
    ),
    Served(
        "-ctk --cache-type-k",
        ("memory", "cache"),
        f"how keys are stored: {', '.join(_CACHE_TYPES)} (default: f16)",
        {"type": str.lower, "choices": _CACHE_TYPES, "metavar": "TYPE"},
    ),
    Served(
        "-ctv --cache-type-v",
        ("memory", "cache"),
        "how values are stored: any of these types (default: f16)",
        {"type": str.lower, "choices": _CACHE_TYPES, "metavar": "TYPE"},
    ),
    Served(
        "-b --batch-size",
        ("memory",),
        "tokens of a prompt that are processed at once, at most (default: 2048, with "
        "--split layers 256)",
        {"type": values.whole_number(1), "metavar": "N"},
    ),
    Served(
        "-ub --ubatch-size",
        ("memory",),
        "the same; the smaller of the two counts",
        {"type": values.whole_number(1), "metavar": "N"},
    ),
    Served(
        "-ngl --gpu-layers --n-gpu-layers",
        ("placement",),
        "matrices of how many of the last layers stay on the GPU, where the output counts as one; "
        "others are streamed from host memory (default: all)",
        {"type": values.gpu_layers, "dest": "gpu_layers", "metavar": "N"},
    ),
    Served(
        "-cmoe --cpu-moe",
        ("placement",),
        "stream the experts of all layers from host memory",
        {"action": "store_const", "const": ALL_LAYERS, "dest": "host_experts", "default": 0},
        "experts",
    ),
    Served(
        "-ncmoe --n-cpu-moe",
        ("placement",),
        "the same of the first N layers",
        {"type": values.whole_number(0), "dest": "host_experts", "metavar": "N", "default": 0},
        "experts",
    ),
    Served(
        "-ot --override-tensor",
        ("placement",),
        "tensors whose names match are streamed from host memory (CPU), or stay (CUDA0); between "
        "commas, repeatable",
        {
            "type": values.overrides,
            "action": "extend",
            "dest": "overrides",
            "metavar": "PATTERN=CPU|CUDA0",
            "default": [],
        },
    ),
    Served(
        "-fit --fit",
        ("placement",),
        "stream as much as does not fit the GPU: on or auto (default: off)",
        {"nargs": "?", "const": "on", "choices": ("on", "auto", "off"), "default": "off"},
    ),
    Served("-p --prompt", ("prompt",), "the prompt", _TEXT, one_of="prompt"),
    Served("-f --file", ("prompt",), "read the prompt from a file", {"metavar": "FILE"}, "prompt"),
    Served(
        "-e --escape",
        ("prompt",),
        '\\n, \\t, \\" and others in -p and -sys mean what they mean in C (default: off)',
        {"action": "store_true"},
        one_of="escape",
    ),
    Served(
        "--no-escape",
        ("prompt",),
        "the opposite",
        {"action": "store_false", "dest": "escape"},
        one_of="escape",
    ),
    Served(
        "--grammar",
        ("format",),
        "answer as a grammar in GBNF allows, after any reasoning",
        _TEXT,
        one_of="format",
    ),
    Served("--grammar-file", ("format",), "read it from a file", {"metavar": "FILE"}, "format"),
    Served(
        "-j --json-schema",
        ("format",),
        "answer in JSON as a schema says; {} is any",
        {"type": values.json_object, "metavar": "SCHEMA"},
        one_of="format",
    ),
    Served(
        "-jf --json-schema-file", ("format",), "read it from a file", {"metavar": "FILE"}, "format"
    ),
    Served(
        "-sys --system-prompt --system",
        ("prompt",),
        "system message",
        {"dest": "system", **_TEXT},
        one_of="system",
    ),
    Served(
        "-sysf --system-prompt-file",
        ("prompt",),
        "read it from a file",
        {"dest": "system_file", "metavar": "FILE"},
        one_of="system",
    ),
    Served(
        "-v --verbose --log-verbose",
        ("prompt",),
        "say on stderr what is used",
        {"action": "store_true"},
    ),
    Served(
        "--no-show-timings",
        ("prompt",),
        "no line of statistics after an answer",
        {"action": "store_false", "dest": "show_timings"},
    ),
    Served(
        "--show-timings --perf",
        ("prompt",),
        "the opposite (default)",
        {"action": "store_true", "dest": "show_timings", "default": True},
    ),
    Served(
        "-co --color",
        ("chat",),
        "colours: on, off or auto, which has them on a terminal (default: auto)",
        {"nargs": "?", "const": "on", "default": "auto", "choices": ("on", "off", "auto")},
    ),
    Served("-st --single-turn", ("chat",), "leave after one answer", {"action": "store_true"}),
    Served(
        "--chat-template",
        _TEMPLATE,
        "in place of the file's: a name (chatml, llama3, gemma, mistral-v3, ...) or a Jinja text",
        {"type": values.text, "metavar": "NAME"},
        one_of="template",
    ),
    Served(
        "--chat-template-file",
        _TEMPLATE,
        "the same, a Jinja file",
        {"metavar": "FILE"},
        one_of="template",
    ),
    Served(
        "--chat-template-kwargs",
        _TEMPLATE,
        'variables of the template, a JSON object: {"enable_thinking": false}',
        {"type": values.json_object, "default": {}, "metavar": "JSON"},
    ),
    Served(
        "-rea --reasoning",
        _TEMPLATE,
        "whether the model thinks first, where its template asks for enable_thinking: on, off or "
        "auto, which leaves it to the template (default: auto)",
        {"choices": ("on", "off", "auto"), "default": "auto", "metavar": "on|off|auto"},
    ),
    Served(
        "--reasoning-budget",
        _TEMPLATE,
        "the most tokens of reasoning, which then ends and the answer goes on; 0: no reasoning, "
        "-1: no limit (default: -1)",
        {"type": values.whole_number(-1), "default": -1, "metavar": "N"},
    ),
    Served(
        "--reasoning-budget-message",
        _TEMPLATE,
        "the last words of reasoning that is ended so",
        {"default": "", **_TEXT},
    ),
    Served(
        "--reasoning-effort",
        _TEMPLATE,
        "how long it thinks, where its template asks for reasoning_effort: low, medium, high, ...",
        {"metavar": "LEVEL"},
    ),
)
