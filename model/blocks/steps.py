"""Steps of models whose mixers have no operations yet: the layers as appended launches."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.embedding import append_embedding
from urdir.model.blocks.exchange import append_parts_of_ranks
from urdir.model.blocks.layer import append_layer, append_layer_keys, begins_with_attention
from urdir.model.blocks.parts import LayerStep, linear_layers
from urdir.model.blocks.recall import append_output_recall
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rows import OutputRows, Rows

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan


def appending_layers(
    plan: Plan,
    parts: StepParts,
    rows: Rows,
    outputs: OutputRows | None,
    wanted: bool,
    received: Slice | None = None,
    passed: Slice | None = None,
) -> Generator[None, None, Activations | None]:
    """The stream after all layers, as `layers.model.layers` has it; it begins as ``received``,
    where that is given, and ends in ``passed``."""
    config = parts.config
    x = Activations(received) if received else append_embedding(plan, parts, rows)
    *others, final = range(config.n_layers)
    for index in others:
        x = append_layer(plan, parts, rows, index, x)
        yield
    if outputs is None:
        x = append_layer(plan, parts, rows, final, x, passed)
        return x if passed else append_output_recall(plan, parts, rows, x)
    narrows = begins_with_attention(config.layers[final])
    if narrows and not wanted:
        append_layer_keys(plan, parts, rows, final, x)
        return None
    if narrows:
        return append_layer(plan, parts, rows, final, x, passed, outputs=outputs)
    x = linear_layers(parts, plan, rows).complete(append_layer(plan, parts, rows, final, x))
    if not wanted:
        return None
    if passed is None:
        x = append_output_recall(plan, parts, rows, x)
    step = LayerStep(plan, parts, rows, final, outputs=outputs)
    y = passed or step.free(x.x)
    step.gather_outputs("output_rows", x.x, config.hidden, y)
    return Activations(y)


def append_head(plan: Plan, parts: StepParts, rows: Rows, x: Activations) -> None:
    """The logits of the stream x."""
    config, weights = parts.config, parts.weights
    own = parts.work["logits" if parts.exchange is None else "own logits"]
    logits = [(weights.matrix(config.output), own)]
    norm = None if config.output_norm is None else weights.norm(config.output_norm)
    linear_layers(parts, plan, rows).append(
        "output", logits, x, norm, scale=config.logit_scale, softcap=config.softcap
    )
    if parts.exchange is not None:
        append_parts_of_ranks(
            plan, parts.exchange, "logits_of_ranks", rows.count, own, parts.work["logits"]
        )
