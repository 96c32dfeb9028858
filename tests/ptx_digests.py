"""What every kernel is made of, as digests: a table that shows which kernels a change touches.

`examples.txt` has every example of every kernel, for four targets, and for sm_90a where it has a
text of its own; `plans.txt` the launches of the steps of seven published models on an H200, in
order, with the kernel of each; layers with the same launches stand together. A digest is of the
instructions alone: comments are removed and the entry's name is replaced, so that a rename or a
better comment leaves it as it was.

    python tests/ptx_digests.py        writes both tables anew

`test_ptx_digests.py` compares them with the code, or a part of them without ``--full``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.buckets import chunks_of, row_bucket
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.spec import KernelSpec

FOLDER = Path(__file__).with_name("data") / "ptx_digests"
TARGETS = ("sm_75", "sm_80", "sm_90", "sm_120")
#: One more, for the kernels that have a text of their own for it.
HOPPER = "sm_90a"
#: Stands for a digest that is left out.
LEFT = "*"
#: Published shape, type of its weights, type of the cache.
MODELS = (
    ("llama-3.2-1b", "f16", "f16"),
    ("llama-3.2-3b", "q8_0", "bf16"),
    ("llama-3.1-8b", "q4_k_m", "f16"),
    ("llama-3.1-70b", "q4_k_m", "q8_0"),
    ("qwen2.5-0.5b", "q4_k_m", "f32"),
    ("qwen2.5-1.5b", "q4_k_m", "f16"),
    ("qwen3-8b", "q6_k", "f16"),
)
#: The others have the same launches with other shapes.
SAMPLE = tuple(model for model in MODELS if model[0] not in ("llama-3.2-3b", "qwen2.5-1.5b"))
GPU, SMS, CONTEXT = "sm_90a", 132, 8192
#: Sequences of a decode step, and the lengths that they may have; most steps are of short ones.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
KEYS = (256, CONTEXT)
#: Tokens of a prompt step: some of them.
PROMPTS = (8, 16, 64, 512, 2048)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@functools.cache
def digest(spec: KernelSpec, target: str) -> str:
    """A digest of a kernel's instructions: its PTX without comments, blanks and entry name."""
    lines = (" ".join(line.split()) for line in _COMMENT.sub("", spec.ptx(target)).splitlines())
    text = "\n".join(filter(None, lines))
    text = re.sub(rf"(\.visible \.entry ){spec.name}\b", r"\1entry", text)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def examples_table(is_whole: bool = True) -> Iterator[str]:
    """A line for each example: kernel, name, and a digest for each target ("-": not for it; `LEFT`:
    for `HOPPER` and one of the others by turns only, unless the table is whole)."""
    turn = itertools.count()
    for kind in sorted(kernels().values(), key=lambda kind: kind.name):
        if not kind.__module__.startswith("urdir."):
            continue
        for name, spec in kind.examples().items():
            own = [t for t in TARGETS if t in spec.targets]
            taken = own if is_whole else own[next(turn) % len(own) :][:1] if own else []
            digests = [
                digest(spec, t) if t in taken else LEFT if t in own else "-" for t in TARGETS
            ]
            if HOPPER in spec.targets:
                digests.append(digest(spec, HOPPER))
            yield f"{kind.name} | {name} | " + " ".join(digests)


def plans_table(is_whole: bool = True) -> Iterator[str]:
    """For each model and step its launches; of `SAMPLE` unless the table is whole."""
    for model in MODELS if is_whole else SAMPLE:
        for step, plan in _plans(*model):
            yield f"{' '.join(model)} | {step}"
            yield from ("    " + line for line in _launches(plan))


def _plans(shape: str, kind: str, cache: str) -> Iterator[tuple[str, Plan]]:
    model = SyntheticModel(shape, kind)
    config = Config.of(model)
    exact = cache == "f32"  # activations too, for the model with that cache
    with (
        paper_device(GPU, SMS) as device,
        Weights(model, config, device) as weights,
        Session(
            device, weights, SessionSettings(CONTEXT, cache, exact=exact, sequences=ROWS[-1])
        ) as session,
    ):
        for step in _steps(exact):
            name = f"{step.kind}, {step.rows} rows, {step.keys} keys"
            yield name, build_plan(session.parts, step)


def _steps(exact: bool) -> Iterator[StepShape]:
    for rows in sorted({row_bucket(rows) for rows in ROWS}):
        yield StepShape(rows, KEYS[0], Output.GREEDY)
    for output in (Output.GREEDY, Output.SAMPLE, Output.LOGPROBS, Output.LOGITS):
        yield StepShape(1, KEYS[-1], output)
    chunks = chunks_of(exact)
    for rows in chunks if exact else PROMPTS:
        yield StepShape(rows, KEYS[0], Output.GREEDY, prompt=rows)
    yield StepShape(chunks[-1], KEYS[-1], Output.NONE, prompt=chunks[-1])


def _launches(plan: Plan) -> Iterator[str]:
    """The launches in order, but that layers with the same launches stand together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    launches = (op for op in plan if isinstance(op, Launch))
    for layer, ops in itertools.groupby(launches, key=_layer):
        groups.setdefault(tuple(_line(op) for op in ops), []).append(layer)
    for lines, layers in groups.items():
        if layers != [""]:
            yield f"layers {' '.join(layers)}"
        yield from lines


def _layer(op: Launch) -> str:
    """The number of the layer that a launch is of; empty outside the layers."""
    found = re.match(r"blk\.(\d+)\.", op.label)
    return found[1] if found else ""


def _line(op: Launch) -> str:
    spec = op.kernel
    assert isinstance(spec, KernelSpec)
    label = re.sub(r"^blk\.\d+\.", "  ", op.label)
    return f"{label} | {spec.name} | {digest(spec, GPU)}"


def of_sample(written: Sequence[str], found: Sequence[str]) -> Iterator[str]:
    """The lines of a whole table, less what the table ``found`` leaves out."""
    models = {" ".join(model) for model in MODELS if model not in SAMPLE}
    marks = dict(line.rsplit(" | ", 1) for line in found if LEFT in line.split())
    is_left = False
    for line in written:
        if not line.startswith(" "):
            is_left = line.partition(" | ")[0] in models
        name, _, digests = line.rpartition(" | ")
        if name in marks:
            both = itertools.zip_longest(digests.split(), marks[name].split(), fillvalue="")
            line = f"{name} | " + " ".join(LEFT if m == LEFT else d for d, m in both)
        if not is_left:
            yield line


TABLES = {"examples.txt": examples_table, "plans.txt": plans_table}


def main() -> None:
    """Write the tables."""
    FOLDER.mkdir(exist_ok=True)
    for name, table in TABLES.items():
        (FOLDER / name).write_text("".join(line + "\n" for line in table()))
        print(f"{FOLDER / name} written", file=sys.stderr)


if __name__ == "__main__":
    main()
