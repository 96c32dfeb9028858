"""Flags of chat templates, and of what models think before they answer."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import VALUE, Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ANSWERS, SERVER, TEXT

_TEMPLATE = ("template",)

FLAGS: tuple[Flag, ...] = (
    Served(
        "--chat-template",
        _TEMPLATE,
        "in place of the file's: a name (chatml, llama3, gemma, mistral-v3, ...) or a Jinja text",
        {"metavar": "NAME"},
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
        "--reasoning-effort",
        _TEMPLATE,
        "how long it thinks, where its template asks for reasoning_effort: low, medium, high, ...",
        {"metavar": "LEVEL"},
    ),
    Accepted("--jinja", ANSWERS, "templates are always Jinja"),
    Accepted("--no-skip-chat-parsing", ANSWERS, "answers are always parsed"),
    Accepted(
        "--reasoning-format",
        SERVER,
        "thoughts come apart, as reasoning_content",
        VALUE,
        values=("deepseek", "auto"),
    ),
    Refused("--reasoning-format", TEXT, "form of thoughts", "chat prints them dimmed"),
    Refused("--reasoning-budget", ANSWERS, "limit of reasoning", "-n N limits all", off=-1),
    Refused("--reasoning-budget-message", ANSWERS, "limit of reasoning", "-n N limits all"),
    Refused(
        "--reasoning-preserve --no-reasoning-preserve",
        ANSWERS,
        "choice of which thoughts are kept",
        "the template decides",
        takes=0,
    ),
    Refused("--no-jinja", ANSWERS, "template language but Jinja", "--chat-template NAME", takes=0),
    Refused(
        "--skip-chat-parsing", ANSWERS, "unparsed answer", "urdir run --raw, /v1/completions", 0
    ),
)
