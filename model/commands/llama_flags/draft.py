"""Flags of speculative decoding: drafts from earlier text; there are none of a second model."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import VALUE, Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ANSWERS
from urdir.model.memory.draft_settings import DraftSettings
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM

DRAFTS = DraftSettings()
_ONE = "urdir runs one model"
_MODEL = (
    "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf "
    "-devd --device-draft --spec-draft-device -ngld --gpu-layers-draft --n-gpu-layers-draft "
    "--spec-draft-ngl -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
    "--spec-draft-threads-batch -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd "
    "--cache-type-v-draft --spec-draft-type-v -Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd "
    "--cpu-range-draft --spec-draft-cpu-range --cpu-strict-draft --spec-draft-cpu-strict "
    "--prio-draft --spec-draft-prio --poll-draft --spec-draft-poll -Cbd --cpu-mask-batch-draft "
    "--spec-draft-cpu-mask-batch --cpu-strict-batch-draft --spec-draft-cpu-strict-batch "
    "--prio-batch-draft --spec-draft-prio-batch --poll-batch-draft --spec-draft-poll-batch -otd "
    "--override-tensor-draft --spec-draft-override-tensor -ncmoed --n-cpu-moe-draft "
    "--spec-draft-ncmoe --spec-draft-n-cpu-moe"
)
_MODEL_SWITCHES = (
    "-cmoed --cpu-moe-draft --spec-draft-cpu-moe --spec-draft-backend-sampling "
    "--no-spec-draft-backend-sampling"
)
_NUMBERS = (
    "--draft-p-min --spec-draft-p-min --draft-p-split --spec-draft-p-split "
    "--spec-synth-len --spec-synth-rates "
    "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match "
    "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
    "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits "
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic"
)

FLAGS: tuple[Flag, ...] = (
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
    Accepted(
        "--spec-ngram-size-m --spec-ngram-simple-size-m",
        ANSWERS,
        "--draft-max says how many tokens are drafted",
        VALUE,
    ),
    Accepted(
        "--spec-ngram-min-hits --spec-ngram-simple-min-hits",
        ANSWERS,
        "the latest occurrence is drafted from",
        VALUE,
    ),
    Refused(_MODEL, ANSWERS, "draft model", _ONE),
    Refused(_MODEL_SWITCHES, ANSWERS, "draft model", _ONE, takes=0),
    Refused(_NUMBERS, ANSWERS, "speculative decoding", _ONE, off=0),
    Refused("--spec-default", ANSWERS, "speculative decoding", _ONE, takes=0),
)
