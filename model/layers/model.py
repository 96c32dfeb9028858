"""The layers of a model, one after the other, as operations."""

from __future__ import annotations

from urdir.model.graph.ops import Gather
from urdir.model.graph.streams import Widen
from urdir.model.graph.tensor import STREAM, Tensor
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.ends import output_stream
from urdir.model.layers.layer import begins_with_attention, layer, layer_keys
from urdir.ptxgen.kernels.streams import STREAMS


def layers(
    step: StepOps, x: Tensor, outputs: int | None = None, *, wanted: bool = True
) -> Tensor | None:
    """The stream after all layers, of the stream x before them; None where nothing of it is
    ``wanted`` but what later tokens read.

    In a step with prompts the results of this many rows (``outputs``) are wanted; None: of all.
    """
    config = step.config
    if config.has_streams:
        wide = Tensor(STREAM, x.rows, STREAMS * x.width)
        x = step.graph.add(Widen("streams", wide, x))
    *others, final = range(config.n_layers)
    for index in others:
        x = layer(step, index, x)
    if outputs is None:
        return output_stream(step, layer(step, final, x))
    narrows = begins_with_attention(config.layers[final])
    if narrows and not wanted:
        layer_keys(step, final, x)
        return None
    if narrows:
        return layer(step, final, x, outputs)
    x = layer(step, final, x)
    if not wanted:
        return None
    x = output_stream(step, x)
    label = LayerOps(step, final).name("output_rows")
    return step.graph.add(Gather(label, Tensor(STREAM, outputs, config.hidden), x))
