"""The table of each ``model_type`` of config.json."""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.tables import (
    dense,
    encoders,
    ernie,
    gpt,
    latent,
    mixtures,
    qwen4,
    recurrent,
    t5,
)

FAMILIES: Mapping[str, Family] = {
    **dense.FAMILIES,
    **gpt.FAMILIES,
    **mixtures.FAMILIES,
    **ernie.FAMILIES,
    **latent.FAMILIES,
    **recurrent.FAMILIES,
    **qwen4.FAMILIES,
    **encoders.FAMILIES,
    **t5.FAMILIES,
}
