"""The flags of llama.cpp (llama-cli, llama-completion, llama-bench, llama-batched-bench): one table
of what is served, what changes nothing here, and what is refused. Parsers and tests read it.

Groups: "model", "context", "memory", "prompt", "chat", "generation", "sampling" and "bench" are
added by the commands that have them; "text" is what is accepted or refused by run and chat.
"""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import PERHAPS, VALUE, Accepted, Flag, Refused, Served

MODEL_HELP = (
    "GGUF file, any part of a split one, a folder with config.json and safetensors, "
    "hf:org/repo[:file-or-type] on the Hugging Face hub, or demo"
)

_TEXT, _BENCH, _BOTH = ("text",), ("bench",), ("text", "bench")
_CACHE_TYPES = ("f16", "bf16", "f32", "q8_0")
_CPU = "the GPU computes, the CPU waits for it"
_ON_GPU = "nothing is left on the CPU"
_LOADING = "files are read as suits the device"
_LOG = "nothing is logged but what stderr has"
_DRAFT = "urdir runs one model"
_LIST = "N,..."


def _number(
    names: str, low: float, high: float | None, default: float, text: str, **options: object
) -> Served:
    """A sampling flag with a real number."""
    kind = {"type": values.real_number(low, high), "default": default, "metavar": "N"}
    return Served(names, ("sampling",), f"{text} (default: {default:g})", {**kind, **options})


_MODEL: tuple[Flag, ...] = (
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
        "the same as -m hf:ORG/REPO[:TYPE] (default of TYPE: Q4_K_M, or what there is)",
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
        ("memory",),
        f"how keys are stored: {', '.join(_CACHE_TYPES)} (default: f16); -ctv must be the same",
        {"choices": _CACHE_TYPES, "metavar": "TYPE"},
    ),
    Served(
        "-ctv --cache-type-v",
        ("memory",),
        "how values are stored; -ctk must be the same",
        {"choices": _CACHE_TYPES, "metavar": "TYPE"},
    ),
    Served(
        "-b --batch-size",
        ("memory",),
        "tokens of a prompt that are processed at once, at most (default: 2048)",
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
        ("memory",),
        "every layer is on the GPU: a number of layers or more, all or auto",
        {"type": values.gpu_layers, "dest": "gpu_layers", "metavar": "N"},
    ),
    Refused("-mu --model-url", _TEXT, "download by URL", "-hf ORG/REPO downloads from the hub"),
    Refused("-dr --docker-repo", _TEXT, "Docker registry", "-hf ORG/REPO downloads from the hub"),
    Refused("-hff --hf-file", _BOTH, "separate file name", "give it as -hf ORG/REPO:FILE"),
    Refused(
        "-hft --hf-token", _BOTH, "token on the command line", "set HF_TOKEN, or hf auth login"
    ),
    Refused("--offline", _BOTH, "flag for that", "set HF_HUB_OFFLINE=1", takes=0),
    Refused("--lora --lora-scaled", _TEXT, "LoRA adapter", "merge it into the model file first"),
    Refused(
        "--control-vector --control-vector-scaled", _TEXT, "control vector", "there is nothing near"
    ),
    Refused(
        "-mm --mmproj -mmu --mmproj-url --image --audio --video",
        _TEXT,
        "multi-modal projector: only text is read",
        "describe it in the prompt",
    ),
    Accepted("--no-mmproj --no-mmproj-auto", _TEXT, "only text is read"),
    Refused(
        "-md --model-draft --spec-draft-model -hfd --hf-repo-draft --spec-draft-hf --spec-type",
        _TEXT,
        "draft model",
        _DRAFT,
    ),
    Refused(
        "--draft --draft-n --draft-max --draft-min --spec-draft-n-max --spec-draft-n-min",
        _TEXT,
        "speculative decoding",
        _DRAFT,
        off=0,
    ),
    Refused("--override-kv", _TEXT, "changed metadata", "gguf-set-metadata changes a file's"),
    Refused(
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
        "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        _TEXT,
        "RoPE other than the file's",
        "gguf-set-metadata changes a file's",
    ),
)

_PLACE: tuple[Flag, ...] = (
    Accepted("-fa --flash-attn", _TEXT, "attention is always done in one pass", PERHAPS),
    Accepted("-fa --flash-attn", _BENCH, "attention is always done in one pass", VALUE),
    Accepted("-t --threads -tb --threads-batch", _BOTH, _CPU, VALUE),
    Accepted("-C --cpu-mask -Cr --cpu-range --cpu-strict --poll --prio", _BOTH, _CPU, VALUE),
    Accepted("-Cb --cpu-mask-batch -Crb --cpu-range-batch --numa", _TEXT, _CPU, VALUE),
    Accepted("--cpu-strict-batch --poll-batch --prio-batch", _TEXT, _CPU, VALUE),
    Accepted("--numa", _BENCH, _CPU, VALUE),
    Accepted("--mmap --no-mmap --mlock -dio --direct-io -ndio --no-direct-io", _TEXT, _LOADING),
    Accepted("-mmp --mmap -dio --direct-io", _BENCH, _LOADING, VALUE),
    Accepted("-lm --load-mode", _BOTH, _LOADING, VALUE),
    Accepted("-kvo --kv-offload", _TEXT, "the cache is on the GPU"),
    Accepted("--op-offload --repack --no-host", _TEXT, _ON_GPU),
    Accepted("-fit --fit", _TEXT, "memory is checked before anything is loaded", PERHAPS),
    Accepted(
        "-fitt --fit-target -fitc --fit-ctx", _BOTH, "memory is checked before loading", VALUE
    ),
    Accepted("--swa-full", _TEXT, "windows keep what they need"),
    Accepted("-ctxcp --ctx-checkpoints --swa-checkpoints -cram --cache-ram", _TEXT, _ON_GPU, VALUE),
    Accepted("-dt --defrag-thold", _TEXT, "caches are not fragmented", VALUE),
    Accepted("-np --parallel", _TEXT, "a command has one conversation", VALUE),
    Accepted("--check-tensors", _TEXT, "names, types and sizes of tensors are always checked"),
    Accepted("--warmup --no-warmup", _TEXT, "nothing is slower the first time but compiling"),
    Accepted("--no-warmup --progress", _BENCH, "every test runs once before it is timed"),
    Accepted("-sm --split-mode", _BOTH, "one GPU is used", VALUE, values=("none", "layer")),
    Refused("-nkvo --no-kv-offload", _TEXT, "cache on the CPU", "-ctk q8_0 -ctv q8_0 halve it", 0),
    Refused("-nkvo --no-kv-offload", _BENCH, "cache on the CPU", "-ctk q8_0 halves it", off=0),
    Refused("-cmoe --cpu-moe", _TEXT, "experts on the CPU", _ON_GPU, takes=0),
    Refused("-ncmoe --n-cpu-moe", _BOTH, "experts on the CPU", _ON_GPU, off=0),
    Refused("-nr --no-repack --no-op-offload", _TEXT, "weights as stored", _ON_GPU, takes=0),
    Refused("-ot --override-tensor", _BOTH, "tensor elsewhere", _ON_GPU),
    Refused("-ts --tensor-split", _BOTH, "uneven parts of a model", "--gpus N makes even ones"),
    Refused("-mg --main-gpu", _BOTH, "number of a GPU", "--device cuda:i chooses one"),
    Refused("-rpc --rpc", _BOTH, "remote device", "--device cuda:i is one of this machine"),
    Refused("--list-devices", _BOTH, "list in this command", "urdir env lists devices", takes=0),
)

_PROMPT: tuple[Flag, ...] = (
    Served("-p --prompt", ("prompt",), "the prompt", {"metavar": "TEXT"}, one_of="prompt"),
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
        "-sys --system-prompt --system",
        ("prompt",),
        "system message",
        {"dest": "system", "metavar": "TEXT"},
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
        "--chat-template",
        ("prompt",),
        "Jinja template in place of the file's",
        {"metavar": "TEXT"},
        one_of="template",
    ),
    Served(
        "--chat-template-file",
        ("prompt",),
        "read it from a file",
        {"metavar": "FILE"},
        one_of="template",
    ),
    Served(
        "--chat-template-kwargs",
        ("prompt",),
        'variables of the template, a JSON object: {"enable_thinking": false}',
        {"type": values.json_object, "default": {}, "metavar": "JSON"},
    ),
    Served("-v --verbose", ("prompt",), "say on stderr what is used", {"action": "store_true"}),
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
    Accepted("--jinja", _TEXT, "templates are always Jinja"),
    Accepted("--no-perf", _TEXT, "--no-show-timings drops the line of statistics"),
    Accepted("--simple-io -mli --multiline-input", _TEXT, "chat finds out by itself"),
    Accepted("-cnv --conversation -i --interactive -if --interactive-first", ("chat",), "it is so"),
    Accepted("--no-display-prompt", _TEXT, "the prompt is never repeated"),
    Accepted("--no-context-shift", _TEXT, "a context is never shifted"),
    Accepted("--log-disable --log-prefix --log-timestamps --no-log-prefix", _TEXT, _LOG),
    Accepted("--log-colors", _TEXT, _LOG, PERHAPS),
    Accepted("-lv --verbosity --log-verbosity", _TEXT, "-v says what is used", VALUE),
    Accepted("-ptc --print-token-count", _TEXT, "statistics follow the answer", VALUE),
    Accepted("--verbose-prompt", _TEXT, "-v says what is used"),
    Accepted("-st --single-turn -no-cnv --no-conversation", ("run",), "run is a single turn"),
    Accepted("-co --color", ("run",), "run has no colours", PERHAPS),
    Accepted("-v --verbose", _BENCH, "progress is on stderr"),
    Refused(
        "-cnv --conversation -i --interactive -if --interactive-first",
        ("run",),
        "conversation",
        "urdir chat holds one",
        takes=0,
    ),
    Refused(
        "-no-cnv --no-conversation", ("chat",), "text without turns", "urdir run --raw", takes=0
    ),
    Refused("--no-jinja", _TEXT, "template language but Jinja", "--chat-template TEXT", takes=0),
    Refused("--display-prompt", _TEXT, "repeated prompt", "print it yourself", takes=0),
    Refused("-bf --binary-file", _TEXT, "prompt that is no text", "-f FILE reads UTF-8"),
    Refused("--log-file --log-prompts-dir", _TEXT, "log file", "2> FILE keeps stderr"),
    Refused("--context-shift", _TEXT, "shifted context", "chat drops its oldest turns", takes=0),
    Refused("--keep", _TEXT, "shifted context", "chat keeps the system message", off=0),
    Refused("-gan --grp-attn-n -gaw --grp-attn-w", _TEXT, "self-extension", "-c 0 is the most"),
    Refused("--prompt-cache", _TEXT, "cache on disk", "chat keeps its cache between turns"),
    Refused(
        "--prompt-cache-all --prompt-cache-ro", _TEXT, "cache on disk", "chat keeps its own", 0
    ),
    Refused("--in-prefix --in-suffix", _TEXT, "prefix of turns", "--chat-template TEXT has all"),
    Refused("--in-prefix-bos", _TEXT, "prefix of turns", "--chat-template TEXT has all", takes=0),
    Refused("-sp --special", _TEXT, "control token in answers", "urdir logits shows all", takes=0),
    Refused(
        "-rea --reasoning --reasoning-format --reasoning-effort --reasoning-budget-message",
        _TEXT,
        "setting of reasoning",
        "--system-prompt can ask for it",
    ),
    Refused("--reasoning-budget", _TEXT, "limit of reasoning", "-n N limits all", off=-1),
    Refused("--server-base", _TEXT, "client of a server", "-m FILE runs a model"),
    Refused("-cl --cache-list", _TEXT, "list in this command", "urdir list", takes=0),
    Refused("--completion-bash", _TEXT, "script in this command", "urdir completion bash", takes=0),
    Refused("-o --output --output-file", _TEXT, "output file", "> FILE keeps the answer"),
    Refused("-embd --embeddings", _BENCH, "embeddings", "only text is generated", off=0),
)

_GENERATION: tuple[Flag, ...] = (
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
        _TEXT,
        "Mirostat",
        "use --top-p and --min-p",
        off=0,
    ),
    Refused("--typical --typical-p", _TEXT, "typical sampling", "use --top-p and --min-p", off=1),
    Refused("--top-nsigma --top-n-sigma", _TEXT, "top-n-sigma sampling", "use --min-p", off=-1),
    Refused("--xtc-probability", _TEXT, "XTC sampling", "use --temp", off=0),
    Refused("--xtc-threshold", _TEXT, "XTC sampling", "use --temp", off=1),
    Refused("--dry-multiplier", _TEXT, "DRY sampling", "use --repeat-penalty", off=0),
    Refused(
        "--dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker",
        _TEXT,
        "DRY sampling",
        "use --repeat-penalty",
    ),
    Refused("--dynatemp-range", _TEXT, "dynamic temperature", "use --temp", off=0),
    Refused("--dynatemp-exp", _TEXT, "dynamic temperature", "use --temp", off=1),
    Refused("--adaptive-target --adaptive-decay", _TEXT, "adaptive-p sampling", "use --top-p"),
    Refused(
        "--samplers --sampler-seq --sampling-seq", _TEXT, "order of samplers", "it is llama.cpp's"
    ),
    Accepted("-bs --backend-sampling", _TEXT, "tokens are always chosen on the GPU"),
    Refused(
        "--grammar --grammar-file -j --json-schema -jf --json-schema-file",
        _TEXT,
        "grammar",
        "ask for the form in the prompt",
    ),
)

_MEASURE: tuple[Flag, ...] = (
    *(
        Served(
            names, _BENCH, text, {"type": kind, "default": default, "dest": dest, "metavar": _LIST}
        )
        for dest, names, kind, default, text in (
            (
                "n_prompt",
                "-p --n-prompt",
                values.number_list(0),
                (512,),
                "prompt tokens, 0 for none (512)",
            ),
            (
                "n_gen",
                "-n --n-gen",
                values.number_list(0),
                (128,),
                "tokens decoded, 0 for none (128)",
            ),
            (
                "n_depth",
                "-d --n-depth --depth",
                values.number_list(0),
                (0,),
                "tokens of context before (0)",
            ),
            (
                "sequences",
                "-npl --n-parallel --sequences",
                values.number_list(1),
                (1,),
                "sequences that are decoded together, as in llama-batched-bench (1)",
            ),
        )
    ),
    Served(
        "-pg",
        _BENCH,
        "a prompt and tokens decoded after it, timed together; repeatable",
        {"type": values.number_pair, "action": "append", "default": [], "metavar": "PP,TG"},
    ),
    Served(
        "-r --repetitions",
        _BENCH,
        "runs of each test (5)",
        {"type": values.whole_number(1), "default": 5, "metavar": "N"},
    ),
    Served(
        "-o --output",
        _BENCH,
        "how to print it: md, csv, json, jsonl or sql (md)",
        {"choices": ("md", "csv", "json", "jsonl", "sql"), "default": "md", "metavar": "FORM"},
    ),
    Refused("-npp", _BENCH, "-npp", "-p has prompt tokens, -npl sequences"),
    Refused("-ntg", _BENCH, "-ntg", "-n has tokens decoded, -npl sequences"),
    Refused("-pps --is-pp-shared", _BENCH, "shared prompt", "-d N is context of its own", takes=0),
    Refused("-oe --output-err", _BENCH, "second report", "-o json 2> FILE keeps progress"),
    Accepted("--delay", _BENCH, "tests follow each other", VALUE),
    Accepted("--n-gen-warmup", _BENCH, "every test runs once before it is timed", VALUE),
)

#: All of them.
FLAGS: tuple[Flag, ...] = (*_MODEL, *_PLACE, *_PROMPT, *_GENERATION, *_MEASURE)
