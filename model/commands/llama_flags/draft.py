"""Flags of speculative decoding, which is not there."""

from __future__ import annotations

from urdir.model.commands.flags import Flag, Refused
from urdir.model.commands.llama_flags.groups import ANSWERS

_ONE = "urdir runs one model"
_MODEL = (
    "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf --spec-type "
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
    "--draft --draft-n --draft-max --draft-min --draft-n-min --spec-draft-n-max "
    "--spec-draft-n-min --draft-p-min --spec-draft-p-min --draft-p-split --spec-draft-p-split "
    "--spec-synth-len --spec-synth-rates --spec-ngram-size-n --spec-ngram-size-m "
    "--spec-ngram-min-hits --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match "
    "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
    "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
    "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits "
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic"
)

FLAGS: tuple[Flag, ...] = (
    Refused(_MODEL, ANSWERS, "draft model", _ONE),
    Refused(_MODEL_SWITCHES, ANSWERS, "draft model", _ONE, takes=0),
    Refused(_NUMBERS, ANSWERS, "speculative decoding", _ONE, off=0),
    Refused("--spec-default", ANSWERS, "speculative decoding", _ONE, takes=0),
)
