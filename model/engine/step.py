"""The plans of a step: its rows through the whole model."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.driver.parallel import completed
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, Part, StepShape
from urdir.model.engine.prompt_scores import append_scores
from urdir.model.engine.speculation.launches import append_acceptance, append_placed_rows
from urdir.model.engine.speculation.source import DraftSource
from urdir.model.graph.tensor import STREAM
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rows import OutputRows, Rows
from urdir.model.lower.sheet import Sheet
from urdir.model.lower.step import lower, lowering
from urdir.ptxgen.kernels.adjust_logits import AdjustLogits
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.gather import Gather
from urdir.ptxgen.kernels.sample import Sample
from urdir.ptxgen.kernels.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

#: Layers of steps, by their shapes.
KnownLayers = dict[StepShape, Plan]
_MOST_KNOWN = 256


def build_plan(parts: StepParts, shape: StepShape) -> Plan:
    """The plan of ``shape.steps`` steps: embedding, layers, and the step's output."""
    return completed(building(parts, shape))


def building(
    parts: StepParts,
    shape: StepShape,
    source: DraftSource | None = None,
    known: KnownLayers | None = None,
) -> Generator[None, None, Plan]:
    """`build_plan` in small pieces, one a layer: the plan is what the generator returns. Drafts are
    those of ``source``; None: of earlier text. Layers are kept in ``known``, and taken from it."""
    steps = "step" if shape.steps == 1 else f"steps x {shape.steps}"
    half = "" if shape.part is Part.WHOLE else f", {shape.part.value}"
    plan = Plan(f"{shape.kind} {steps}, {shape.rows} rows, {shape.keys} keys{half}")
    has_layers = shape.part is not Part.CHOICE
    if has_layers and not shape.draft_only:
        plan.extend((yield from _layers(parts, shape, source, known)))
    rows, outputs = rows_of(parts, shape)
    if has_layers and source is not None:
        yield from source.append_kept(plan, parts, shape, rows)
    if shape.output is not Output.NONE and shape.part is not Part.LAYERS:
        append_output(plan, parts, outputs.rows if outputs else rows, shape.output)
    # What differs from step to step is in device memory, moved on by "advance".
    plan.extend([*plan] * (shape.steps - 1))
    plan.add_transfers()
    return plan


def _layers(
    parts: StepParts, shape: StepShape, source: DraftSource | None, known: KnownLayers | None
) -> Generator[None, None, Plan]:
    """What comes before the choice of tokens, which is the same for all that choose any."""
    wanted = shape.output if shape.output is Output.NONE else Output.LOGITS
    same = replace(shape, output=wanted, steps=1, part=Part.WHOLE)
    plan = None if known is None else known.pop(same, None)
    if plan is None:
        plan = Plan(f"layers of {shape.rows} rows")
        yield from append_placed_rows(plan, parts, shape, source)
        yield from model_launches(plan, parts, shape)
    if known is not None:
        known[same] = plan  # the last one used comes last
        for oldest in [*known][:-_MOST_KNOWN]:  # a copy: another thread may change it meanwhile
            known.pop(oldest, None)
    return plan


def model_launches(
    plan: Plan | Sheet, parts: StepParts, shape: StepShape
) -> Generator[None, None, None]:
    """Append embedding, layers and head to a plan, or to a sheet, in pieces."""
    rows, outputs = rows_of(parts, shape)
    step = StepOps(parts.config, rows.count)
    if shape.scored:
        sheet = plan if isinstance(plan, Sheet) else Sheet(parts.work)
        x = layers(step, embedding(step))
        assert x is not None
        place = sheet.registers.new(STREAM).part()
        yield from lowering(sheet, parts, rows, step.graph, fixed={x: place})
        append_heads(sheet, parts, shape, place)
        if not isinstance(plan, Sheet):
            yield from sheet.placing(plan)
        return
    wanted = shape.output is not Output.NONE
    count = None if outputs is None else outputs.rows.count
    x = layers(step, embedding(step), count, wanted=wanted)
    if x is not None and wanted:
        head(step, x)
    yield from lowering(plan, parts, rows, step.graph, outputs)


def append_heads(sheet: Sheet, parts: StepParts, shape: StepShape, x: Slice) -> Rows:
    """Append the scores of a step, of the stream x of all its rows, then the logits of those that
    choose a token; returns these."""
    rows, outputs = rows_of(parts, shape)
    assert outputs is not None
    # gathered before there are logits, which take the memory of the stream of all rows
    gathered, row = sheet.registers.new("streams of heads").part(), 4 * parts.config.hidden
    wanted = [(parts.state["scored_row"], shape.scored)]
    if shape.output is not Output.NONE:
        wanted.append((outputs.index, outputs.rows.count))
    streams, first = [], 0
    for index, count in wanted:
        streams.append(gathered.slice(first * row, count * row))
        kernel = Gather(parts.config.hidden, rows.count, count)
        sheet.launch(kernel, "output_rows", x=x, index=index, y=streams[-1])
        first += count
    append_scores(sheet, parts, shape, streams[0])
    for stream in streams[1:]:
        step = StepOps(parts.config, outputs.rows.count)
        y = step.graph.input(step.stream())
        head(step, y)
        lower(sheet, parts, outputs.rows, step.graph, fixed={y: stream})
    return outputs.rows


def rows_of(parts: StepParts, shape: StepShape) -> tuple[Rows, OutputRows | None]:
    """The rows of a step; and those whose results are wanted, where it has prompts."""
    prompts = (shape.prompt, shape.segments, shape.begins, shape.walk)
    rows = Rows.of(parts.state, shape.rows, shape.keys, *prompts, drafts=shape.drafts)
    if not shape.prompt:
        return rows, None
    return rows, OutputRows.of(parts.state, shape.outputs, rows.keys)


def append_output(plan: Plan, parts: StepParts, rows: Rows, output: Output) -> None:
    """Append the choice of tokens by the logits of ``rows``, and what moves the rows on."""
    _append_choice(plan, parts, rows, output)
    _append_advance(plan, parts, rows, output)


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
    more = {"ranks": parts.work["ranks"]} if slices else {}
    if state.turns:
        more |= {"turn": state["turn"], "waiting": state["waiting"]}
    kernel = Advance(
        *(state.max_len, rows.count, state.sequences),
        slots=state.slots,
        slices=slices,
        turns=state.turns,
        places=state.rows if state.turns else 0,
    )
    plan.launch(
        kernel,
        "advance",
        tokens=state["tokens"],
        known=state["known"],
        settings=state["settings"],
        mailbox=state.mailbox,
        sampled=state["sampled"],
        **more,
        **rows.arguments,
    )
