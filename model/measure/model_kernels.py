"""Which kernels a model uses: the specialisations in the plans of its steps, without running any.

The plans are the ones that a session would record, built on a `paper_device` from the file's
metadata, so that nothing is uploaded and no GPU is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.weights import Weights

if TYPE_CHECKING:
    from urdir.model.families.description import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.ptxgen.kernels.attention.kv_layout import KvDtype
    from urdir.ptxgen.spec import KernelSpec


@dataclass(frozen=True)
class ModelKernel:
    """A specialisation, what it does in a layer (``roles``: "attn_qkv", "ffn_down"), and how many
    launches of it every step has that uses it.

    ``missing`` are the other steps of the model.
    """

    spec: KernelSpec
    roles: tuple[str, ...]
    launches: Mapping[StepShape, int]
    missing: tuple[StepShape, ...]

    def per_step(self, prompt: bool) -> int:
        """Launches in one decode (or prompt) step, the most of any; 0 where none has it."""
        counts = (n for shape, n in self.launches.items() if bool(shape.prompt) is prompt)
        return max(counts, default=0)

    def as_dict(self) -> dict[str, Any]:
        """The launches as plain values, for JSON."""
        return {
            "roles": list(self.roles),
            "launches_per_decode_step": self.per_step(prompt=False),
            "launches_per_prompt_step": self.per_step(prompt=True),
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


def step_shapes(shapes: ShapeBuckets, all_prompts: bool = True) -> tuple[StepShape, ...]:
    """The steps of a session with one sequence: decode steps by length bucket and output, prompt
    steps by rows and length bucket, or the largest alone. One output stands for all of a prompt's:
    what follows the layers is as in a decode step.
    """
    buckets, outputs = (
        shapes.lengths,
        (Output.GREEDY, Output.SAMPLE, Output.LOGPROBS, Output.LOGITS),
    )
    decode = (StepShape(1, keys, output) for output in outputs for keys in buckets)
    prompt = (
        StepShape(rows, keys, Output.GREEDY, prompt=rows)
        for rows in (shapes.chunks if all_prompts else shapes.chunks[-1:])
        for keys in (buckets if all_prompts else buckets[-1:])
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
    all_prompts: bool = True,
) -> tuple[ModelKernel, ...]:
    """Every specialisation that the decode and prompt steps of one sequence of up to ``context``
    tokens use on a GPU of ``target`` with ``sm_count`` SMs, in order of first use. Of the prompt
    steps, which differ little, the largest stands for all without ``all_prompts``.

    Only the metadata and the tensors' types and shapes of ``gguf`` are looked at. Raises ModelError
    for an impossible context or target, PtxgenError for shapes that no kernel handles.
    """
    with paper_device(target, sm_count) as device:
        weights = Weights(gguf, config, device)
        with Session(device, weights, context, kv_dtype, exact=exact) as session:
            roles = {
                shape: _roles(session, shape) for shape in step_shapes(session.shapes, all_prompts)
            }
    specs = dict.fromkeys(spec for found in roles.values() for spec in found)
    return tuple(_model_kernel(spec, roles) for spec in specs)


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
            yield text.format("/".join(values))
