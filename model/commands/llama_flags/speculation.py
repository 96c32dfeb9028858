"""Served flags of llama.cpp: speculative decoding with drafts from earlier text."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Served
from urdir.model.memory.draft_settings import DraftSettings
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM

_DEFAULTS = DraftSettings()
#: Commands that answer: run, chat and serve.
_ANSWERS = ("text", "server")

SERVED: tuple[Served, ...] = (
    Served(
        "--spec-type",
        _ANSWERS,
        "verify drafts of the next tokens in each step: ngram-simple drafts what followed the last "
        "tokens where they were before (default: none)",
        {"choices": ("none", "ngram", "ngram-simple"), "default": "none", "dest": "spec_type"},
    ),
    Served(
        "--draft --draft-n --draft-max --spec-draft-n-max",
        _ANSWERS,
        f"drafts of a sequence in a step, at most (default: {_DEFAULTS.most})",
        {
            "type": values.whole_number(1, MOST_DRAFTS),
            "default": _DEFAULTS.most,
            "dest": "draft_max",
            "metavar": "N",
        },
    ),
    Served(
        "--draft-min --draft-n-min --spec-draft-n-min",
        _ANSWERS,
        "drafts of a sequence in a step, at least; else as many as pay (default: 0)",
        {
            "type": values.whole_number(0, MOST_DRAFTS),
            "default": _DEFAULTS.least,
            "dest": "draft_min",
            "metavar": "N",
        },
    ),
    Served(
        "--spec-ngram-size-n --spec-ngram-simple-size-n",
        _ANSWERS,
        "last tokens that are looked for, at most; fewer where these are not found (default: "
        f"{_DEFAULTS.longest})",
        {
            "type": values.whole_number(1, MOST_NGRAM),
            "default": _DEFAULTS.longest,
            "dest": "spec_ngram",
            "metavar": "N",
        },
    ),
)
