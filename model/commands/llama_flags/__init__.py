"""The flags of llama.cpp (llama-cli, llama-completion, llama-server, llama-bench and
llama-batched-bench): what is served, a row of Python each, what changes nothing here, and what is
refused, both rows of unserved.toml. Parsers and tests read all of it.

Groups: "model", "context", "memory", "prompt", "template", "chat", "generation" and "sampling" are
added by the commands that have them; "text" is what run and chat accept or refuse beside them,
"server" what serve does, "bench" all that bench has.
"""

from __future__ import annotations

from urdir.model.commands.flags import Flag
from urdir.model.commands.llama_flags import draft, generation, measure, served, server
from urdir.model.commands.llama_flags.served import MODEL_HELP
from urdir.model.commands.llama_flags.unserved import read_unserved

__all__ = ["FLAGS", "MODEL_HELP"]

#: All of them.
FLAGS: tuple[Flag, ...] = (
    *served.SERVED,
    *generation.SERVED,
    *server.SERVED,
    *draft.SERVED,
    *measure.SERVED,
    *read_unserved(),
)
