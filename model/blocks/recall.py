"""Streams that blocks have banked, and sums with them (`families.layers.Block`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.stored import Normalization
from urdir.model.lower.parts import LayerParts
from urdir.ptxgen.kernels.recall import Recall

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.lower.rows import Rows


def append_bank(at: LayerStep, banked: int, x: Slice) -> None:
    """Keep the stream x after the ``banked`` others."""
    nbytes = 4 * at.rows.count * at.parts.config.hidden
    at.scale("bank", x, at.work["banked"].slice(banked * nbytes, nbytes), 1.0)


def append_recall(at: LayerStep, label: str, of: Normalization, banked: int, x: Slice) -> Slice:
    """The sum of the stream x and of the first ``banked`` ones; x itself where there are none."""
    if not banked:
        return x
    rows, hidden, y = at.rows.count, at.parts.config.hidden, at.work["recalled"]
    assert of.weight is not None
    kernel = Recall(rows, hidden, banked, of.norm.eps)
    bank = at.work["banked"].slice(0, 4 * banked * rows * hidden)
    at.plan.launch(kernel, at.name(label), x=x, bank=bank, weight=at.vector(of.weight), y=y)
    return y


def append_output_recall(plan: Plan, parts: LayerParts, rows: Rows, x: Activations) -> Activations:
    """The stream that the output's norm is of."""
    config = parts.config
    if config.recalls is None:
        return x
    at = LayerStep(plan, parts, rows, config.n_layers - 1)
    stream, banked = at.linear.complete(x).x, config.banked(config.n_layers)
    return Activations(append_recall(at, "output_recall", config.recalls, banked, stream))
