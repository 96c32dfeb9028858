"""Mixtures of experts with attention of usual form."""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.files.pretrained.family import Family

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family("llama"),
    "qwen3_moe": Family(
        "qwen3moe",
        fixed={
            "norm_topk_prob": (True,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
}
