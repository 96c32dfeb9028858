"""Flags of prompts, of what is printed, and of logs."""

from __future__ import annotations

from urdir.model.commands.flags import PERHAPS, VALUE, Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ANSWERS, BENCH, TEXT

_LOG = "nothing is logged but what stderr has"

FLAGS: tuple[Flag, ...] = (
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
    Accepted("--no-perf", TEXT, "--no-show-timings drops the line of statistics"),
    Accepted("--simple-io -mli --multiline-input", TEXT, "chat finds out by itself"),
    Accepted("-cnv --conversation -i --interactive -if --interactive-first", ("chat",), "it is so"),
    Accepted("--no-display-prompt", TEXT, "the prompt is never repeated"),
    Accepted("--no-context-shift", ANSWERS, "a context is never shifted"),
    Accepted(
        "--log-disable --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
        "--no-log-jsonl",
        ANSWERS,
        _LOG,
    ),
    Accepted("--log-colors", ANSWERS, _LOG, PERHAPS),
    Accepted("-lv --verbosity --log-verbosity", ANSWERS, "-v says what is used", VALUE),
    Accepted("-ptc --print-token-count", TEXT, "statistics follow the answer", VALUE),
    Accepted("--verbose-prompt", TEXT, "-v says what is used"),
    Accepted("-st --single-turn -no-cnv --no-conversation", ("run",), "run is a single turn"),
    Accepted("-co --color", ("run",), "run has no colours", PERHAPS),
    Accepted("-v --verbose", BENCH, "progress is on stderr"),
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
    Refused("--display-prompt", TEXT, "repeated prompt", "print it yourself", takes=0),
    Refused("-bf --binary-file", TEXT, "prompt that is no text", "-f FILE reads UTF-8"),
    Refused("--log-jsonl", ANSWERS, "log", "2> FILE keeps stderr", takes=0),
    Refused("--log-file --log-prompts-dir", ANSWERS, "log file", "2> FILE keeps stderr"),
    Refused("--context-shift", TEXT, "shifted context", "chat drops its oldest turns", takes=0),
    Refused("--keep", TEXT, "shifted context", "chat keeps the system message", off=0),
    Refused("-gan --grp-attn-n -gaw --grp-attn-w", TEXT, "self-extension", "-c 0 is the most"),
    Refused("--prompt-cache", TEXT, "cache on disk", "chat keeps its cache between turns"),
    Refused("--prompt-cache-all --prompt-cache-ro", TEXT, "cache on disk", "chat keeps its own", 0),
    Refused("--in-prefix --in-suffix", TEXT, "prefix of turns", "--chat-template NAME has all"),
    Refused("--in-prefix-bos", TEXT, "prefix of turns", "--chat-template NAME has all", takes=0),
    Refused(
        "-sp --special", ANSWERS, "control token in answers", "urdir logits shows all", takes=0
    ),
    Refused("--server-base", TEXT, "client of a server", "-m FILE runs a model"),
    Refused("-cl --cache-list", ANSWERS, "list in this command", "urdir list", takes=0),
    Refused(
        "--completion-bash", ANSWERS, "script in this command", "urdir completion bash", takes=0
    ),
    Refused("-o --output --output-file", TEXT, "output file", "> FILE keeps the answer"),
    Refused("-embd --embeddings", BENCH, "embedding", "only text is generated", off=0),
    Refused("--embedding --embeddings", ANSWERS, "embedding", "only text is generated", takes=0),
)
