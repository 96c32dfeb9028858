"""Sizes that a file claims: none makes anything large before a tensor is compared with it."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.sizes import SIZES

FILES = sorted((Path(__file__).parents[2] / "data" / "families").glob("*.gguf.xz"))
NAMES = [path.name.removesuffix(".gguf.xz") for path in FILES]
#: Even, as a head's width must be.
LARGE = 2**31 - 2
#: Integers that count tokens, choose or repeat, and of which nothing is made: an error, or a model.
NO_SIZES = {
    *("attention.indexer.block_size", "attention.indexer.top_k", "attention.shared_kv_layers"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attn_res.block_size"),
    *("attention.temperature_length", "context_length", "expert_gating_func"),
    *("full_attention_interval", "hrm.h_cycles", "hrm.l_cycles", "hrm.layers_per_stack"),
    *("interleave_moe_layer_step", "leading_dense_block_count", "num_loops"),
    *("rope.scaling.original_context_length", "attention.rope_pattern"),
    *("adapters.token_ids_activate", "adapters.token_ids_substitute"),
    *("token_shift_count", "rescale_every_n_layers", "attention.compress_ratios"),
    *("ple.layers", "ple.eos_token_id", "ple.image_token_id", "ple.layer_multipliers"),
    *("ple.head_offsets", "ple.head_vocab_sizes"),
}
Golden = Callable[[str], Any]
Changed = Callable[..., Any]


class Watching(Reader):
    """Remembers the integers that a family asks for."""

    integers_asked: set[str]

    def _bounded(self, key: str, value: Any) -> Any:
        if type(value) is int:
            self.__dict__.setdefault("integers_asked", set()).add(key)
        return super()._bounded(key, value)


def integers_of(file: Any) -> set[str]:
    """The integers that a family asks for, without the architecture's name."""
    reader = Watching.of(file)
    describe(reader)
    prefix = f"{file.architecture}."
    return {key.removeprefix(prefix) for key in reader.integers_asked if key.startswith(prefix)}


def like(file: Any, key: str, value: int) -> Any:
    """A number, or an array of it where the file has an array."""
    stored = file.metadata.get(f"{file.architecture}.{key}")
    return np.full(len(stored), value, np.int64) if isinstance(stored, np.ndarray) else value


def refused(file: Any) -> str:
    """Why a file is refused: at once, and with no more memory than a good one."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises((ConfigError, UnsupportedError)) as caught:
            Config.of(file)
        assert time.process_time() - begin < 2.0
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_all_sizes_at_once(name: str, golden: Golden, changed: Changed) -> None:
    """Each alone, those of heads, and all: a check of one with another does not help."""
    asked = integers_of(golden(name))
    assert asked <= SIZES.keys() | NO_SIZES
    sizes = asked & SIZES.keys()
    heads = {key for key in sizes if "_length" in key or "rope.dimension" in key}
    for claimed in (sizes, heads, *({key} for key in sizes)):
        text = refused(changed(name, {key: like(golden(name), key, LARGE) for key in claimed}))
        assert any(f"at most {SIZES[key].most:,} are supported" in text for key in claimed), text


@pytest.mark.parametrize("name", ["glm4-dense", "gemma3-dense", "qwen2vl-dense", "llama-dense"])
def test_the_most_is_read(name: str, golden: Golden, changed: Changed) -> None:
    """Numbers at their limits are compared with the tensors, or with each other."""
    sizes = integers_of(golden(name)) & SIZES.keys() - {"block_count", "nextn_predict_layers"}
    for key in sizes - {"rope.dimension_sections"}:  # shares of a head, in proportion
        text = refused(changed(name, {key: SIZES[key].most}))
        assert "are supported" not in text, text
