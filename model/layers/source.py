"""The encoder of an encoder-decoder, and what its decoder keeps of a source, as operations."""

from __future__ import annotations

from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import cross_keys
from urdir.model.layers.builder import LayerOps, StepOps

#: The states of sources, all rows of a step (rows, hidden).
STATES = "source states"


def source_states(step: StepOps) -> Tensor:
    """An input: what `pooled.encoded` makes of sources, unpooled."""
    return step.graph.input(Tensor(STATES, step.rows, step.config.hidden))


def source_keys(step: StepOps, states: Tensor) -> None:
    """The keys and values of all cross attention of a decoder to these states."""
    for index, layer in enumerate(step.config.layers):
        mixer = layer.attention
        if mixer is not None and mixer.cross is not None:
            cross_keys(LayerOps(step, index), mixer, mixer.cross, states)
