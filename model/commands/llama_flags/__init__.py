"""The flags of llama.cpp (llama-cli, llama-completion, llama-server, llama-bench and
llama-batched-bench): one table of what is served, what changes nothing here, and what is refused.
Parsers and tests read it.

Groups: "model", "context", "memory", "prompt", "template", "chat", "generation" and "sampling" are
added by the commands that have them; "text" is what run and chat accept or refuse beside them,
"server" what serve does, "bench" all that bench has.
"""

from __future__ import annotations

from urdir.model.commands.flags import Flag
from urdir.model.commands.llama_flags import (
    draft,
    generation,
    measure,
    model,
    place,
    prompt,
    server,
    template,
)
from urdir.model.commands.llama_flags.model import MODEL_HELP

__all__ = ["FLAGS", "MODEL_HELP"]

#: All of them.
FLAGS: tuple[Flag, ...] = (
    *model.FLAGS,
    *draft.FLAGS,
    *place.FLAGS,
    *prompt.FLAGS,
    *template.FLAGS,
    *generation.FLAGS,
    *server.FLAGS,
    *measure.FLAGS,
)
