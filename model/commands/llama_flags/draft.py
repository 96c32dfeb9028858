"""Flags of speculative decoding."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Flag, Served
from urdir.model.engine.options import MODEL_DRAFTS
from urdir.model.memory.draft_settings import FIRST_TOKENS, DraftSettings
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM

DRAFTS = DraftSettings()
#: Values of --spec-type: of earlier text, of the model's heads, of a file.
NGRAMS, HEADS = ("ngram", "ngram-simple"), ("draft-mtp", "mtp")
FILES = ("draft-simple", "draft-eagle3", "draft-dflash")
#: Commands that answer.
ANSWERS = ("text", "server")

SERVED: tuple[Flag, ...] = (
    Served(
        "--spec-type",
        ANSWERS,
        "verify drafts of the next tokens in each step: ngram-simple drafts what followed the last "
        "tokens where they were before, draft-mtp are the model's own heads, the others need -md, "
        "whose file says which it is (default: none, or that of -md)",
        {"choices": ("none", *NGRAMS, *HEADS, *FILES), "dest": "spec_type"},
    ),
    Served(
        "-md --model-draft --spec-draft-model",
        ANSWERS,
        "a draft model: EAGLE-3, DFlash, Gemma 4's assistant, or a small model with the same "
        "vocabulary; named as -m",
        {"metavar": "FILE", "dest": "model_draft"},
        one_of="model_draft",
    ),
    Served(
        "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
        ANSWERS,
        "the same as -md hf:ORG/REPO[:TYPE]",
        {
            "dest": "model_draft",
            "type": lambda text: f"hf:{text}",
            "metavar": "ORG/REPO[:TYPE]",
        },
        one_of="model_draft",
    ),
    Served(
        "--draft --draft-n --draft-max --spec-draft-n-max",
        ANSWERS,
        f"drafts of a sequence in a step, at most (default: {DRAFTS.most}; of a draft model "
        f"{MODEL_DRAFTS})",
        {
            "type": values.whole_number(1, MOST_DRAFTS),
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
        "--draft-vocab",
        ANSWERS,
        "the model's own heads (draft-mtp) draft its first N tokens alone, 0: all (default: "
        f"{FIRST_TOKENS} of twice as many, while texts have few others)",
        {"type": values.whole_number(0), "default": DRAFTS.tokens, "metavar": "N"},
    ),
    Served(
        "--draft-p-min --spec-draft-p-min",
        ANSWERS,
        "a draft model's drafts end before a token whose probability, by the draft, is less "
        f"(default: {DRAFTS.p_min:g}: they do not)",
        {
            "type": values.real_number(0, 1),
            "default": DRAFTS.p_min,
            "dest": "draft_p_min",
            "metavar": "P",
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
