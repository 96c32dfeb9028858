"""Served flags of llama-server."""

from __future__ import annotations

from pathlib import Path

from urdir.model.commands import values
from urdir.model.commands.flags import Served

_MEMORY, _ACCESS, _REQUESTS, _LOG = ("many",), ("access",), ("requests",), ("log",)
_EMBEDDINGS, _MODELS = ("embeddings",), ("models",)

SERVED: tuple[Served, ...] = (
    Served(
        "-np --parallel",
        _MEMORY,
        "most answers written at once, up to 1024; -1: the default (256; 8 on the emulator)",
        {"type": values.sequences, "metavar": "N"},
    ),
    Served(
        "-n --predict --n-predict",
        _REQUESTS,
        "tokens of an answer at most; -1: until the end",
        {"type": values.token_limit, "dest": "n_predict", "metavar": "N"},
    ),
    Served(
        "--embedding --embeddings",
        _EMBEDDINGS,
        "serve /v1/embeddings and no answers (default: where the file is for that)",
        {"action": "store_true", "dest": "embeddings"},
    ),
    Served(
        "--rerank --reranking",
        _EMBEDDINGS,
        "serve /v1/rerank and /v1/score, and no answers (default: likewise)",
        {"action": "store_true", "dest": "reranking"},
    ),
    Served(
        "--pooling",
        _EMBEDDINGS,
        "what is made of the states of a text: mean, cls, last or rank (default: the file's)",
        {"choices": ("mean", "cls", "last", "rank")},
    ),
    Served(
        "-a --alias",
        ("alias",),
        "name of the model for clients, or several between commas; answers have the first one "
        "(default: the name in its file, and the one given here)",
        {"type": values.names, "metavar": "NAME"},
    ),
    Served(
        "--models-dir",
        _MODELS,
        "serve the GGUF files and safetensors folders in it, each loaded when a request names it "
        "as its model",
        {"type": Path, "metavar": "DIR"},
    ),
    Served(
        "--models-preset",
        _MODELS,
        "TOML: flags of all models, and a table of flags for each, also for models elsewhere "
        '(["name"], model = "/path/model.gguf", ctx-size = 8192, load-on-startup = true)',
        {"metavar": "FILE"},
    ),
    Served(
        "--models-max",
        _MODELS,
        "most models that are loaded at once; of those without open requests the one used longest "
        "ago makes room; 0: as many as the GPU takes (4)",
        {"type": values.whole_number(0, 1024), "default": 4, "metavar": "N"},
    ),
    Served(
        "--no-models-autoload",
        _MODELS,
        "load models on POST /models/load alone (default: also for a request)",
        {"action": "store_false", "dest": "models_autoload"},
    ),
    Served(
        "--sleep-idle-seconds",
        _MODELS,
        "free the GPU after so long without a request; the next one loads the model again; also "
        "with a single model (-1: never)",
        {"type": values.whole_number(-1), "default": -1, "metavar": "N"},
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
        "let pages of these origins ask, between commas; repeatable, * for all, localhost for "
        "those of this machine (default: none)",
        {"type": values.origins, "action": "extend", "default": [], "metavar": "ORIGIN"},
    ),
    Served(
        "--ssl-cert-file",
        _ACCESS,
        "speak HTTPS: the certificate with its chain (PEM)",
        {"type": Path, "metavar": "FILE"},
    ),
    Served(
        "--ssl-key-file",
        _ACCESS,
        "its private key",
        {"type": Path, "metavar": "FILE"},
    ),
    Served(
        "--log-file",
        _LOG,
        "append the log to a file in place of stderr",
        {"type": Path, "metavar": "FILE"},
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
    Served(
        "--no-prefix-sharing --no-cache-prompt",
        _ACCESS,
        "compute every prompt whole, so that neither counts nor times reveal earlier prompts "
        "(default: prompts of one API key and one 'cache_salt' share cached prefixes)",
        {"action": "store_false", "dest": "share_prefixes"},
    ),
)
