"""The plans of a step: its rows through the whole model."""

from __future__ import annotations

from collections.abc import Generator

from urdir.driver.parallel import completed
from urdir.driver.plan import Plan
from urdir.model.blocks.activations import Activations
from urdir.model.blocks.embedding import append_embedding
from urdir.model.blocks.exchange import append_parts_of_ranks
from urdir.model.blocks.layer import append_layer, append_layer_keys, begins_with_attention
from urdir.model.blocks.parts import LayerStep, StepParts
from urdir.model.blocks.recall import append_output_recall
from urdir.model.blocks.rows import OutputRows, Rows
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.speculation.launches import append_acceptance, append_placed_rows
from urdir.model.engine.speculation.source import DraftSource
from urdir.ptxgen.kernels.adjust_logits import AdjustLogits
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.sample import Sample
from urdir.ptxgen.kernels.token_logprobs import TokenLogprobs


def build_plan(parts: StepParts, shape: StepShape) -> Plan:
    """The plan of ``shape.steps`` steps: embedding, layers, and the step's output."""
    return completed(building(parts, shape))


def building(
    parts: StepParts, shape: StepShape, source: DraftSource | None = None
) -> Generator[None, None, Plan]:
    """`build_plan` in small pieces, one a layer: the plan is what the generator returns. Drafts are
    those of ``source``; None: of earlier text."""
    steps = "step" if shape.steps == 1 else f"steps x {shape.steps}"
    plan = Plan(f"{shape.kind} {steps}, {shape.rows} rows, {shape.keys} keys")
    prompts = (shape.prompt, shape.segments, shape.begins, shape.walk)
    append_placed_rows(plan, parts, shape, source)
    rows = Rows.of(parts.state, shape.rows, shape.keys, *prompts, drafts=shape.drafts > 0)
    x = append_embedding(plan, parts, rows)
    *others, final = range(parts.config.n_layers)
    for index in others:
        x = append_layer(plan, parts, rows, index, x)
        yield
    if shape.prompt:
        outputs = OutputRows.of(parts.state, shape.outputs, rows.keys)
        x = _append_last_layer(plan, parts, rows, x, outputs, shape.output)
        rows = outputs.rows
    else:
        x = append_output_recall(plan, parts, rows, append_layer(plan, parts, rows, final, x))
    yield
    if shape.output is Output.NONE:
        return plan
    append_output(plan, parts, rows, x, shape.output)
    # What differs from step to step is in device memory, moved on by "advance".
    plan.extend([*plan] * (shape.steps - 1))
    return plan


def _append_last_layer(
    plan: Plan, parts: StepParts, rows: Rows, x: Activations, outputs: OutputRows, output: Output
) -> Activations:
    """The last layer of a step with prompts, for the rows whose results are wanted as far as that
    goes; nothing but keys and values where there are none."""
    index = parts.config.n_layers - 1
    narrows = begins_with_attention(parts.config.layers[index])
    if narrows and output is Output.NONE:
        append_layer_keys(plan, parts, rows, index, x)
        return x
    if narrows:
        return append_layer(plan, parts, rows, index, x, outputs=outputs)
    x = parts.linear(plan, rows).complete(append_layer(plan, parts, rows, index, x))
    if output is Output.NONE:
        return x
    x = append_output_recall(plan, parts, rows, x)
    step = LayerStep(plan, parts, rows, index, outputs=outputs)
    y = step.free(x.x)
    step.gather_outputs("output_rows", x.x, parts.config.hidden, y)
    return Activations(y)


def append_output(plan: Plan, parts: StepParts, rows: Rows, x: Activations, output: Output) -> None:
    """Append what comes of the stream x of rows after the layers."""
    _append_head(plan, parts, rows, x)
    _append_choice(plan, parts, rows, output)
    _append_advance(plan, parts, rows, output)


def _append_head(plan: Plan, parts: StepParts, rows: Rows, x: Activations) -> None:
    config, weights = parts.config, parts.weights
    own = parts.work["logits" if parts.exchange is None else "own logits"]
    logits = [(weights.matrix(config.output), own)]
    norm = None if config.output_norm is None else weights.norm(config.output_norm)
    parts.linear(plan, rows).append(
        "output", logits, x, norm, scale=config.logit_scale, softcap=config.softcap
    )
    if parts.exchange is not None:
        append_parts_of_ranks(
            plan, parts.exchange, "logits_of_ranks", rows.count, own, parts.work["logits"]
        )


def _append_choice(plan: Plan, parts: StepParts, rows: Rows, output: Output) -> None:
    state, work, vocab = parts.state, parts.work, parts.config.vocab_size
    if output is Output.GREEDY:
        kernel = Argmax(n=vocab, rows=rows.count)
        plan.launch(kernel, "argmax", logits=work["logits"], ranks=work["ranks"])
    elif output is not Output.LOGITS:
        shape = (vocab, state.max_len, rows.count, state.sequences)
        chosen = {"settings": state["settings"], **rows.arguments}
        plan.launch(
            AdjustLogits(*shape),
            "adjust",
            logits=work["logits"],
            raw=work["raw logits"],
            tokens=state["tokens"],
            masks=state["masks"],
            masked=state["masked"],
            **chosen,
        )
        chosen["sampled"] = state["sampled"]
        plan.launch(Sample(*shape), "sample", logits=work["logits"], **chosen)
        if output is Output.LOGPROBS:
            plan.launch(
                TokenLogprobs(*shape, slots=state.slots),
                "logprobs",
                logits=work["raw logits"],
                logprobs=state.logprobs,
                likely=state.likely,
                **chosen,
            )


def _append_advance(plan: Plan, parts: StepParts, rows: Rows, output: Output) -> None:
    state = parts.state
    if rows.drafts:
        append_acceptance(plan, parts, rows.count, output)
        return
    if output is Output.LOGITS:
        kernel = Advance(state.max_len, rows.count, state.sequences, sampling=False)
        plan.launch(kernel, "advance", position=rows.position)
        return
    slices = Argmax(n=parts.config.vocab_size).slices if output is Output.GREEDY else 0
    ranks = {"ranks": parts.work["ranks"]} if slices else {}
    plan.launch(
        Advance(state.max_len, rows.count, state.sequences, slots=state.slots, slices=slices),
        "advance",
        tokens=state["tokens"],
        known=state["known"],
        settings=state["settings"],
        mailbox=state.mailbox,
        sampled=state["sampled"],
        **ranks,
        **rows.arguments,
    )
