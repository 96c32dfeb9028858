"""The tokens of a DSpark block, chosen one after the other, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    EMBEDDED,
    JOINED,
    DraftChain,
    DraftParts,
    DraftProduct,
    TokenRows,
    append_embedded,
    append_norm,
    append_product,
    append_token,
)
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.join import Join

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.families.dflash import Markov
    from urdir.model.lower.parts import LayerParts
    from urdir.model.lower.rows import Rows

#: The rows of the tokens before, f32, in the draft's workspace.
PREVIOUS = "previous"


def append_markov_tokens(
    plan: Plan, parts: DraftParts, rows: Rows, markov: Markov, chain: DraftChain, slots: range
) -> None:
    """The tokens of the block whose logits are in the workspace, into the columns of ``chain``
    after the first: of one row of a block after the other, from ``slots``."""
    for column, slot in enumerate(slots):
        tokens = chain.tokens(rows.count, column)
        logits = append_markov_sum(plan, parts.own, rows, markov, tokens, slot)
        append_token(plan, parts, rows.count, logits, chain, column + 1)


def append_markov_sum(
    plan: Plan, own: LayerParts, rows: Rows, markov: Markov, previous: TokenRows, slot: int
) -> Slice:
    """Add what the ``previous`` tokens add to the logits of a slot of all ``rows`` sequences;
    returns them."""
    vocab, count, work = own.config.vocab_size, rows.count, own.work
    product = DraftProduct("draft.markov", own.weights, markov.next)
    x = work[PREVIOUS].slice(0, 4 * count * markov.next.cols)
    added = work["raw logits"].slice(0, 4 * count * vocab)
    append_embedded(plan, count, own.weights.matrix(markov.previous), previous, x)
    append_product(plan, own, rows, product, x, added)
    logits = work["logits"].slice(4 * slot * count * vocab, 4 * count * vocab)
    plan.launch(Add(count * vocab), "draft.markov_sum", a=logits, b=added, y=logits)
    return logits


def append_confidence(
    plan: Plan, own: LayerParts, rows: Rows, markov: Markov, state: Slice, y: Slice
) -> None:
    """y (rows,) f32 = how likely the tokens of a slot are, by the last ``state`` (rows, hidden) f32
    of its rows and by the tokens before, which `append_markov_sum` has just read."""
    of, norm = markov.confidence, own.config.output_norm
    assert of is not None
    assert norm is not None
    hidden, rank, work = own.config.hidden, markov.next.cols, own.work
    append_norm(
        plan, rows.count, "draft.state", own.weights.norm(norm), (state, work[EMBEDDED], hidden)
    )
    parts = {"a": work[EMBEDDED], "b": work[PREVIOUS]}
    plan.launch(Join(rows.count, hidden, rank), "draft.join", **parts, y=work[JOINED])
    product = DraftProduct("draft.conf_proj", own.weights, of)
    append_product(plan, own, rows, product, work[JOINED], y)
    sigmoid = Activate(rows.count, Activation("sigmoid"))
    plan.launch(sigmoid, "draft.confidence", x=y, y=y)
