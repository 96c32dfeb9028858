"""Decoders that run their layers more than once: HRM-Text and Nanbeige.

HRM-Text follows the Hierarchical Reasoning Model (arXiv 2506.21734). Each run has its own KV cache.
Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; each family lists its own.
llama.cpp: `src/models/` hrm-text.cpp, nanbeige.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from urdir.model.errors import ConfigError
from urdir.model.families.attention import OutputGate
from urdir.model.families.dense import shared_rope, weightless
from urdir.model.families.description import Description
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import (
    attention,
    dense,
    head_dims,
    heads,
    model,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.files.limits import LAYERS


def hrm_text(file: Reader) -> Description:
    """HRM-Text: two stacks of layers, L and H, each with its own residual stream.

        l = norm(L(h + l))      hrm.l_cycles times; l starts as hrm.z_l_init, h as the embedding
        h = norm(H(h + l))      the two lines repeat hrm.h_cycles times; logits are made of h

    No norm has weights; attention has elementwise gates. Keys: hrm.layers_per_stack,
    hrm.h_cycles, hrm.l_cycles, embedding_scale (0: none).
    """
    norm, value_dim = weightless(rms_norm(file)), head_dims(file)[1]
    rope = shared_rope(file, "half")
    per_stack = file.size("hrm.layers_per_stack")
    high, low = file.size("hrm.h_cycles"), file.size("hrm.l_cycles")
    runs = per_stack * high * (low + 1)
    if runs != file.size("block_count") - file.count("nextn_predict_layers") or runs > LAYERS.most:
        raise ConfigError(
            f"{file.key('block_count')} is {file.size('block_count')}, "
            f"the cycles of {file.key('hrm')} run {runs} layers (at most {LAYERS.most})"
        )

    def layer(index: int) -> LayerConfig:
        width = heads(file, 0)[0] * value_dim
        gate = OutputGate(file.linear("attn_gate", index, width, file.hidden), "sigmoid")
        mixer = attention(file, index, rope, gate=gate, output_bias="absent")
        return sequential(mixer, dense(file, index, bias="absent"), (norm, norm))

    def stack(first: int, name: str, adds: str | None) -> Iterator[LayerConfig]:
        layers = [layer(first + index) for index in range(per_stack)]
        yield from layers[:-1]
        yield replace(layers[-1], output_norm=norm, saves=name, adds=adds)

    def all_runs() -> Iterator[LayerConfig]:
        for cycle in range(high):
            for _ in range(low):
                yield from stack(0, "l", "h")
            yield from stack(per_stack, "h", "l" if cycle < high - 1 else None)

    return model(
        file,
        all_runs(),
        None,
        embedding_scale=file.optional("embedding_scale", float, 0.0) or 1.0,
        saves="h",
        adds=file.vector("hrm.z_l_init", None, file.hidden),
    )


def nanbeige(file: Reader) -> Description:
    """Nanbeige 4: LLaMA's layers run num_loops times, with the final norm between runs unless
    skip_loop_final_norm is set."""
    norm = rms_norm(file)
    rope = shared_rope(file, "interleaved", factors=True)
    loops, count = file.size("num_loops", 1), file.layer_count()
    if loops * count > LAYERS.most:
        raise ConfigError(
            f"{file.key('num_loops')} is {loops}: more than {LAYERS.most} layers in all"
        )
    output_norm = file.norm("output_norm", None, norm)
    between = None if file.optional("skip_loop_final_norm", bool, False) else output_norm

    def layer(index: int) -> LayerConfig:
        return sequential(
            attention(file, index, rope, output_bias="absent"),
            dense(file, index, bias="absent"),
            (file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)),
        )

    once = [layer(index) for index in range(count)]
    inner = [*once[:-1], replace(once[-1], output_norm=between)]
    return model(file, [*inner * (loops - 1), *once], output_norm)


ARCHITECTURES = {"hrm_text": hrm_text, "nanbeige": nanbeige}
