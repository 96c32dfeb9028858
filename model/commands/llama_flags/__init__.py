"""Table of the flags of llama.cpp (llama-cli, llama-completion, llama-server, llama-bench and
llama-batched-bench), which parsers and tests read.

A served flag is a row of Python. Flags without effect and refused flags are rows of unserved.toml.
The groups "model", "context", "memory", "cache", "prompt", "template", "chat", "generation" and
"sampling" are added by the commands that need them. "text" has further flags that run and chat
accept or refuse. "diffusion" belongs to run, "server" and "embeddings" belong to serve, and "bench"
has all flags of bench.
"""

from __future__ import annotations

from urdir.model.commands.flags import Flag
from urdir.model.commands.llama_flags import (
    adapters,
    diffusion,
    draft,
    generation,
    measure,
    served,
    server,
)
from urdir.model.commands.llama_flags.served import MODEL_HELP
from urdir.model.commands.llama_flags.unserved import read_unserved

__all__ = ["FLAGS", "MODEL_HELP"]

#: All of them.
FLAGS: tuple[Flag, ...] = (
    *served.SERVED,
    *generation.SERVED,
    *server.SERVED,
    *draft.SERVED,
    *adapters.SERVED,
    *measure.SERVED,
    *diffusion.SERVED,
    *read_unserved(),
)
