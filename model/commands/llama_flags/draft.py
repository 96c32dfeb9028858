"""Flags of speculative decoding."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Flag, Served
from urdir.model.memory.draft_settings import DraftSettings
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM

DRAFTS = DraftSettings()
#: Commands that answer.
ANSWERS = ("text", "server")

SERVED: tuple[Flag, ...] = (
    Served(
        "--spec-type",
        ANSWERS,
        "verify drafts of the next tokens in each step: ngram-simple drafts what followed the last "
        "tokens where they were before (default: none)",
        {"choices": ("none", "ngram", "ngram-simple"), "default": "none", "dest": "spec_type"},
    ),
    Served(
        "--draft --draft-n --draft-max --spec-draft-n-max",
        ANSWERS,
        f"drafts of a sequence in a step, at most (default: {DRAFTS.most})",
        {
            "type": values.whole_number(1, MOST_DRAFTS),
            "default": DRAFTS.most,
            "dest": "draft_max",
            "metavar": "N",
        },
    ),
    Served(
        "--draft-min --draft-n-min --spec-draft-n-min",
        ANSWERS,
        "drafts of a sequence in a step, at least; else as many as pay (default: 0)",
        {
            "type": values.whole_number(0, MOST_DRAFTS),
            "default": DRAFTS.least,
            "dest": "draft_min",
            "metavar": "N",
        },
    ),
    Served(
        "--spec-ngram-size-n --spec-ngram-simple-size-n",
        ANSWERS,
        "last tokens that are looked for, at most; fewer where these are not found (default: "
        f"{DRAFTS.longest})",
        {
            "type": values.whole_number(1, MOST_NGRAM),
            "default": DRAFTS.longest,
            "dest": "spec_ngram",
            "metavar": "N",
        },
    ),
)
