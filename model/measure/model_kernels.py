"""Which kernels a model uses: the specialisations in the plans of its steps, without running any.

The plans are the ones that a session would record, built on a `paper_device` from the file's
metadata, so that nothing is uploaded and no GPU is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.walk import NO_BLOCKS
from urdir.model.memory.weights import Weights

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.ptxgen.kernels.attention.kv_types import KvDtype
    from urdir.ptxgen.spec import KernelSpec


@dataclass(frozen=True)
class ModelKernel:
    """A specialisation, what it does in a layer (``roles``: "attn_qkv", "ffn_down"), and how many
    launches of it every step has that uses it.

    ``missing`` are the other steps of the model. ``alike`` are those that `folded` left out for it.
    """

    spec: KernelSpec
    roles: tuple[str, ...]
    launches: Mapping[StepShape, int]
    missing: tuple[StepShape, ...]
    alike: tuple[KernelSpec, ...] = ()

    def per_step(self, prompt: bool) -> int:
        """Launches in one decode (or prompt) step, the most of any; 0 where none has it."""
        counts = (n for shape, n in self.launches.items() if bool(shape.prompt) is prompt)
        return max(counts, default=0)

    @property
    def most_launches(self) -> int:
        """Launches in a step, the most of any."""
        return max(self.launches.values())

    def as_dict(self) -> dict[str, Any]:
        """The launches as plain values, for JSON."""
        return {
            "roles": list(self.roles),
            "launches_per_decode_step": self.per_step(prompt=False),
            "launches_per_prompt_step": self.per_step(prompt=True),
            "alike": len(self.alike),
            "steps": [
                {"kind": s.kind, "rows": s.rows, "keys": s.keys, "launches": count}
                for s, count in self.launches.items()
            ],
        }

    def used_in(self) -> str:
        """Which steps it is in, as far as it is not in all decode or all prompt steps."""
        parts = []
        for prompt, kind in ((False, "decode"), (True, "prompt")):
            used = [shape for shape in self.launches if bool(shape.prompt) is prompt]
            others = [shape for shape in self.missing if bool(shape.prompt) is prompt]
            if used:
                parts.append(kind + _restriction(used, others))
        return ", ".join(parts)


def step_shapes(shapes: ShapeBuckets) -> tuple[StepShape, ...]:
    """The steps of a session with one sequence: decode steps by length bucket and output, prompt
    steps by rows and length bucket, and whether they begin the sequence. One output stands for all
    of a prompt's: what follows the layers is as in a decode step. The longest walk stands for all
    of as many rows: they have the same kernels.
    """
    buckets = shapes.lengths
    outputs = (Output.GREEDY, Output.SAMPLE, Output.LOGPROBS, Output.LOGITS)
    decode = (StepShape(1, keys, output) for output in outputs for keys in buckets)
    prompt = (
        StepShape(rows, keys, Output.GREEDY, prompt=rows, begins=begins, walk=walk)
        for rows in shapes.chunks
        for keys in (buckets[-1:] if shapes.walked(rows, [1]).count else buckets)
        for begins in sorted({False, shapes.begin_apart})
        for walk in [NO_BLOCKS if begins else shapes.walked(rows, [keys])]
    )
    return (*decode, *prompt)


def model_kernels(
    gguf: ModelFile,
    config: Config,
    context: int,
    target: str,
    sm_count: int,
    kv_dtype: KvDtype = "f16",
    exact: bool = False,
) -> tuple[ModelKernel, ...]:
    """Every specialisation that the decode and prompt steps of one sequence of up to ``context``
    tokens use on a GPU of ``target`` with ``sm_count`` SMs, in order of first use.

    Only the metadata and the tensors' types and shapes of ``gguf`` are looked at. Raises ModelError
    for an impossible context or target, PtxgenError for shapes that no kernel handles.
    """
    with paper_device(target, sm_count) as device:
        weights = Weights(gguf, config, device)
        with Session(device, weights, SessionSettings(context, kv_dtype, exact=exact)) as session:
            roles = {shape: _roles(session, shape) for shape in step_shapes(session.shapes)}
    specs = dict.fromkeys(spec for found in roles.values() for spec in found)
    return tuple(_model_kernel(spec, roles) for spec in specs)


def folded(kernels: Sequence[ModelKernel]) -> tuple[ModelKernel, ...]:
    """The same with one kernel for those that do the same in prompt steps of several sizes: that of
    the most rows, which then has the launches of all. Kernels of decode steps stay."""
    of_prompts = [kernel for kernel in kernels if not kernel.per_step(prompt=False)]
    groups: dict[tuple[Any, ...], list[ModelKernel]] = {}
    known: set[KernelSpec] = set()
    for shape in dict.fromkeys(shape for kernel in of_prompts for shape in kernel.launches):
        count: Counter[tuple[Any, ...]] = Counter()
        for kernel in of_prompts:
            if shape not in kernel.launches:
                continue
            does = (kernel.spec.name, kernel.roles)
            if kernel.spec not in known:
                groups.setdefault((*does, count[does]), []).append(kernel)
            known.add(kernel.spec)
            count[does] += 1
    stands = {kernels[-1].spec: kernels for kernels in map(_by_rows, groups.values())}
    return tuple(
        _joined(stands[kernel.spec]) if kernel.spec in stands else kernel
        for kernel in kernels
        if kernel.spec in stands or kernel.spec not in known
    )


def _by_rows(kernels: Sequence[ModelKernel]) -> list[ModelKernel]:
    return sorted(kernels, key=lambda kernel: max((s.rows, s.keys) for s in kernel.launches))


def _joined(kernels: Sequence[ModelKernel]) -> ModelKernel:
    """The last one with the launches of all."""
    *others, last = kernels
    launches = {shape: n for kernel in kernels for shape, n in kernel.launches.items()}
    missing = tuple(shape for shape in last.missing if shape not in launches)
    return replace(
        last, launches=launches, missing=missing, alike=tuple(kernel.spec for kernel in others)
    )


#: The role of each launch of a step, by its kernel.
_Roles = Mapping["KernelSpec", list[str]]


def _roles(session: Session, shape: StepShape) -> _Roles:
    found: dict[KernelSpec, list[str]] = {}
    for op in build_plan(session.parts, shape):
        if isinstance(op, Launch):
            role = re.sub(r"^blk[.]\d+[.]", "", op.label)
            found.setdefault(cast("KernelSpec", op.kernel), []).append(role)
    return found


def _model_kernel(spec: KernelSpec, found: Mapping[StepShape, _Roles]) -> ModelKernel:
    used = {shape: roles[spec] for shape, roles in found.items() if spec in roles}
    return ModelKernel(
        spec,
        tuple(dict.fromkeys(role for roles in used.values() for role in roles)),
        {shape: len(roles) for shape, roles in used.items()},
        tuple(shape for shape in found if shape not in used),
    )


def _restriction(used: list[StepShape], others: list[StepShape]) -> str:
    """ " (greedy, 512 keys)": what tells the used shapes from the others; "" without others."""
    return "".join(f" ({', '.join(parts)})" for parts in [list(_parts(used, others))] if parts)


def _parts(used: list[StepShape], others: list[StepShape]) -> Iterator[str]:
    everything = used + others
    for name, text in (("kind", "{}"), ("rows", "{} rows"), ("keys", "{} keys")):
        values = list(dict.fromkeys(str(getattr(shape, name)) for shape in used))
        if len(values) < len({str(getattr(shape, name)) for shape in everything}):
            shown = "/".join(values) if len(values) < 3 else f"{values[0]} to {values[-1]}"
            yield text.format(shown if name != "kind" else "/".join(values))
