"""Groups that rows of several files share."""

from __future__ import annotations

TEXT, SERVER, BENCH = ("text",), ("server",), ("bench",)
#: Commands that answer: run, chat and serve.
ANSWERS = (*TEXT, *SERVER)
ALL = (*ANSWERS, *BENCH)
