"""Moving the decode state on by one token, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param


@dataclass(frozen=True)
class Advance(KernelSpec):
    """The end of a step: position += 1, and the sampled token is appended where none is known.

    ``tokens`` is the whole sequence, of which ``known`` entries are valid, ``position`` the index
    of the token being processed. During a prompt the next token is known and is kept; at
    ``max_len`` nothing is appended. Without ``sampling`` (a prompt step without logits) only the
    position is a parameter, and moves.
    """

    max_len: int
    sampling: bool = True

    name = "advance"
    template = ("urdir.templates", "advance.ptx.j2")

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise PtxgenError(f"advance: max_len must be at least 1, not {self.max_len}")

    @property
    def params(self) -> tuple[Param, ...]:
        position = Param("position", "u32", (1,), Access.INOUT)
        if not self.sampling:
            return (position,)
        return (
            Param("tokens", "u32", ("max_len",), Access.INOUT),
            position,
            Param("known", "u32", (1,), Access.INOUT),
            Param("sampled", "u32", (1,), Access.IN),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(1, 1, 1), block=(1, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        state = {name: inputs[name].copy() for name in inputs if name != "sampled"}
        state["position"] += 1
        if self.sampling:
            at = int(state["position"][0])
            if at == state["known"][0] and at < self.max_len:
                state["tokens"][at] = inputs["sampled"][0]
                state["known"] += 1
        return state

    @classmethod
    def examples(cls) -> Sequence[Advance]:
        return (cls(max_len=1), cls(max_len=7, sampling=False), cls(max_len=50), cls(max_len=4096))

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """The scalars read and written, and one token."""
        return 8 + (4 + 4 + 8 if self.sampling else 0)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """The last token of a random sequence: its successor is about to be appended."""
        known = int(rng.integers(1, self.max_len, endpoint=True))
        state = {
            "tokens": rng.integers(0, 1000, self.max_len).astype(np.uint32),
            "position": np.array([known - 1], np.uint32),
            "known": np.array([known], np.uint32),
            "sampled": rng.integers(1000, 2000, 1).astype(np.uint32),
        }
        return {p.name: state[p.name] for p in self.params}
