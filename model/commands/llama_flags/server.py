"""Flags of llama-server."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import VALUE, Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import SERVER

_MEMORY, _ACCESS, _REQUESTS = ("many",), ("access",), ("requests",)
_TEXT_ONLY = "only text is generated"
_ONE = "one model a server: start another on another --port"
_PROXY = "put a proxy before it"
_TOOLS = "clients run their tools, and send what came of it"

FLAGS: tuple[Flag, ...] = (
    Served(
        "-np --parallel",
        _MEMORY,
        "most answers that are written at once; -1: what is usual (256; 8 on the emulator)",
        {"type": values.sequences, "metavar": "N"},
    ),
    Served(
        "-n --predict --n-predict",
        _REQUESTS,
        "tokens of an answer at most; -1: until the end",
        {"type": values.token_limit, "dest": "n_predict", "metavar": "N"},
    ),
    Served(
        "-a --alias",
        ("alias",),
        "name of the model for clients, or several between commas; answers have the first one "
        "(default: the name in its file, and the one given here)",
        {"type": values.names, "metavar": "NAME"},
    ),
    Served(
        "--host",
        _ACCESS,
        "address to listen on (127.0.0.1)",
        {"default": "127.0.0.1", "metavar": "HOST"},
    ),
    Served(
        "--port",
        _ACCESS,
        "0: a free one (8080)",
        {"type": values.whole_number(0, 65535), "default": 8080, "metavar": "PORT"},
    ),
    Served(
        "--api-key",
        _ACCESS,
        "ask for it, or for one of several between commas; repeatable",
        {"action": "append", "default": [], "metavar": "KEY"},
    ),
    Served(
        "--api-key-file",
        _ACCESS,
        "more keys, one a line, beside comments after #: unseen in `ps`",
        {"metavar": "FILE"},
    ),
    Served(
        "--cors --cors-origins",
        _ACCESS,
        "let pages of these origins ask, between commas; repeatable, * for all (default: none)",
        {"action": "append", "default": [], "metavar": "ORIGIN"},
    ),
    Served(
        "-to --timeout",
        _ACCESS,
        "seconds until a client that reads or sends nothing is cut off (30)",
        {"type": values.whole_number(1), "default": 30, "metavar": "N"},
    ),
    Served(
        "--no-webui --no-ui",
        _ACCESS,
        "no chat page for browsers",
        {"action": "store_false", "dest": "page"},
    ),
    Accepted("--webui --ui", SERVER, "the chat page is there unless --no-webui is given"),
    Accepted("-cb --cont-batching", SERVER, "requests always join what is running"),
    Accepted("-kvu --kv-unified", SERVER, "all requests share the pages of one cache"),
    Served(
        "--no-prefix-sharing --no-cache-prompt",
        _ACCESS,
        "compute every prompt whole: neither counts nor times tell what was asked before (default: "
        "prompts of one API key and one 'cache_salt' share their beginnings)",
        {"action": "store_false", "dest": "share_prefixes"},
    ),
    Accepted("--cache-prompt", SERVER, "prompts that begin alike share unless told otherwise"),
    Accepted("--cache-idle-slots", SERVER, "prompts that begin alike share unless told otherwise"),
    Accepted("-cms --checkpoint-min-step", SERVER, "states are kept after each prompt", VALUE),
    Accepted("-sps --slot-prompt-similarity", SERVER, "every known beginning is used", VALUE),
    Accepted("--metrics", SERVER, "/metrics is always there"),
    Accepted("--perf --no-perf", SERVER, "/metrics has times"),
    Accepted("-e --escape --no-escape", SERVER, "requests are JSON, which has escapes"),
    Accepted("--no-cors-credentials", SERVER, "no cookies are read"),
    Accepted("--no-slots", SERVER, "there is no /slots"),
    Accepted("--no-agent -no-ag --no-ui-mcp-proxy --no-webui-mcp-proxy", SERVER, _TOOLS),
    Accepted("--threads-http", SERVER, "one thread serves all connections", VALUE),
    Accepted("--no-prefill-assistant", SERVER, "a last answer is never continued"),
    Refused("-nocb --no-cont-batching", SERVER, "static batch", "-np 1 answers one by one", 0),
    Refused("-no-kvu --no-kv-unified", SERVER, "cache for each slot", "-c N bounds a request", 0),
    Refused("--kv-unified-per-slot", SERVER, "slot", "-c N bounds a request"),
    Refused("--no-cache-idle-slots", SERVER, "prompt without a cache", "--no-prefix-sharing", 0),
    Refused("--cache-reuse", SERVER, "shifted cache", "prompts share their beginnings", off=0),
    Refused("--slots", SERVER, "/slots", "/metrics says what runs and waits", takes=0),
    Refused("--props", SERVER, "/props", "flags say it when the server starts", takes=0),
    Refused("--slot-save-path", SERVER, "cache on disk", "prompts share their beginnings"),
    Refused("--prefill-assistant", SERVER, "continued answer", "/v1/completions does it", takes=0),
    Refused("--rerank --reranking", SERVER, "embedding", _TEXT_ONLY, takes=0),
    Refused("--pooling --embd-normalize", SERVER, "embedding", _TEXT_ONLY),
    Refused("--spm-infill", SERVER, "/infill", "/v1/completions continues texts", takes=0),
    Refused("--path", SERVER, "folder of files", _PROXY),
    Refused("--api-prefix", SERVER, "prefix of paths", _PROXY),
    Refused("--ssl-key-file --ssl-cert-file", SERVER, "TLS", _PROXY),
    Refused("--reuse-port", SERVER, "shared port", _PROXY, takes=0),
    Refused("--cors-methods --cors-headers", SERVER, "choice of these", "--cors-origins ORIGIN"),
    Refused("--cors-credentials", SERVER, "cookie", "--api-key KEY", takes=0),
    Refused("--sse-ping-interval", SERVER, "ping in streams", "-to N cuts off later", off=-1),
    Refused("--sleep-idle-seconds", SERVER, "sleep", "Ctrl-C frees the memory", off=-1),
    Refused("--models-dir --models-preset --models-max", SERVER, "router", _ONE),
    Refused("--models-autoload --no-models-autoload", SERVER, "router", _ONE, takes=0),
    Refused("--tags", SERVER, "tag of models", "--alias NAME is what clients see"),
    Refused("--media-path", SERVER, "picture or sound", _TEXT_ONLY),
    Refused(
        "--tools --tools-runtime --mcp-servers-config --mcp-servers-json",
        SERVER,
        "tool here",
        _TOOLS,
    ),
    Refused("-ag --agent --ui-mcp-proxy --webui-mcp-proxy", SERVER, "tool here", _TOOLS, takes=0),
    Refused(
        "--ui-config --ui-config-file --webui-config --webui-config-file",
        SERVER,
        "setting of the page",
        "--no-webui drops it",
    ),
    Refused("--lora-init-without-apply", SERVER, "LoRA adapter", "merge it into the file", 0),
    Refused("-r --reverse-prompt", SERVER, "stop text for all requests", "clients send 'stop'"),
    Refused("--ignore-eos", SERVER, "flag for that", "clients send 'ignore_eos'", takes=0),
    Refused("-sys --system-prompt", SERVER, "system text for all requests", "clients send it"),
    Refused("--context-shift", SERVER, "shifted context", "-c N gives a longer one", takes=0),
    Refused("--keep", SERVER, "shifted context", "-c N gives a longer one", off=0),
    # vLLM's
    Refused("--max-model-len", SERVER, "--max-model-len", "-c N is the context"),
    Refused("--max-num-seqs", SERVER, "--max-num-seqs", "-np N is the same"),
    Refused("--served-model-name", SERVER, "--served-model-name", "-a NAME is the same"),
    Refused("--gpu-memory-utilization", SERVER, "--gpu-memory-utilization", "--gpu-memory-share X"),
    Refused("--tensor-parallel-size -tp", SERVER, "flag of that name", "--gpus N shares it"),
)
