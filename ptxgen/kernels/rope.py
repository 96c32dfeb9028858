"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of a step's queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import (
    MAX_POSITIONS,
    RopeStyle,
    Rotation,
    frequencies,
    turns_table,
)
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: The most values of a head that is normed: as attention takes.
MAX_NORMED = 512


@dataclass(frozen=True)
class Rope(KernelSpec):
    """Rotates the first ``rotary_dim`` values of every row's query and key heads, in place.

    Pair i ("interleaved": values 2i and 2i + 1; "half": i and i + rotary_dim / 2), is turned by
    position[r] * frequency[i] and multiplied by ``magnitude``. Other values stay untouched, and so
    do idle rows (position >= max_len). The frequencies are a ``turns_table`` of `rotation`;
    positions below 2^24 are exact, which is the limit of ``max_len``.

    Heads may also be normed before (``qk_norm``; after with ``rope_first``) and queries multiplied
    after (``temperature``), see `OwnToken`. ``rotary_dim`` 0 rotates nothing. With ``kv_heads`` 0
    there is no k.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    style: RopeStyle
    magnitude: float = 1.0
    rows: int = 1
    max_len: int = MAX_POSITIONS
    qk_norm: Norm | None = None
    temperature: Temperature | None = None
    rope_first: bool = False

    name = "rope"
    template = ("urdir.templates", "rope.ptx.j2")

    def __post_init__(self) -> None:
        _ = self.token  # which checks the rotation and the norm
        if not self.rotary_dim and not self.prepares:
            raise PtxgenError("RoPE without rotation, norm and temperature has nothing to do")
        if self.q_heads < 1 or self.kv_heads < 0:
            raise PtxgenError(f"RoPE of {self.q_heads} query heads and {self.kv_heads} KV heads")
        if self.rotary_dim > self.head_dim or self.head_dim % 2:
            raise PtxgenError(
                f"rotary_dim {self.rotary_dim} of a head_dim of {self.head_dim}: RoPE needs even "
                "numbers, the first up to the second"
            )
        if self.prepares and (self.head_dim % 4 or self.head_dim > MAX_NORMED):
            raise PtxgenError(
                f"norms and temperatures take heads of multiples of 4 up to {MAX_NORMED}: "
                f"{self.head_dim}"
            )
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"RoPE of {self.rows} rows: 1 to 65535")
        if not 1 <= self.max_len <= MAX_POSITIONS:
            raise PtxgenError(f"RoPE positions are exact below 2^24: max_len {self.max_len}")

    @property
    def rotation(self) -> Rotation | None:
        """How every head is rotated."""
        if not self.rotary_dim:
            return None
        return Rotation(self.rotary_dim, self.style, self.magnitude)

    @property
    def token(self) -> OwnToken:
        """What is done to every head."""
        return OwnToken(
            self.rotation,
            self.qk_norm,
            temperature=self.temperature,
            appends=self.kv_heads > 0,
            rope_first=self.rope_first,
        )

    @property
    def prepares(self) -> bool:
        """Whether more is done to a head than a rotation: all of its values may then change."""
        return self.qk_norm is not None or self.temperature is not None

    @property
    def pairs(self) -> int:
        """Rotated pairs of a head."""
        return self.rotary_dim // 2

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("q", "f32", ("rows", "q_heads", "head_dim"), Access.INOUT),
            *(Param(n, "f32", ("rows", "kv_heads", "head_dim"), Access.INOUT) for n in self.keys),
            *self.token.constant_params(self.q_heads, self.kv_heads),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """The parameter that holds keys, if there is one."""
        return ("k",) if self.kv_heads else ()

    @property
    def couples(self) -> int:
        """Two values each, one couple a thread: the pairs, and where more is done the others."""
        return self.head_dim // 2 if self.prepares else self.pairs

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.q_heads + self.kv_heads, self.rows, 1),
            block=(32 * ceil_div(self.couples, 32), 1, 1),
        )

    @property
    def tolerance(self) -> Tolerance:
        # sin.approx and cos.approx: 2^-20.5 absolute (PTX ISA, "sin"); both enter every value.
        # The factors of norm and temperature have smaller errors.
        return Tolerance(rtol=2e-6 * max(1.0, self.magnitude))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        active = np.flatnonzero(inputs["position"] < self.max_len)
        positions = inputs["position"][active]
        rotated = {}
        for name in ("q", *self.keys):
            rotated[name] = y = inputs[name].copy()
            y[active] = self.token.prepared(name, inputs[name][active], positions, inputs)
        return rotated

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = super().make_inputs(rng)
        if self.rotary_dim:
            inputs["frequencies"] = turns_table(frequencies(self.rotary_dim, 10000.0)[0])
        inputs["position"] = rng.integers(0, min(self.max_len, 1 << 20), self.rows, np.uint32)
        if self.rows > 1:  # an idle row
            inputs["position"][rng.integers(self.rows)] = self.max_len + int(rng.integers(2)) * 1000
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, Rope]:
        return {
            "one pair": cls(q_heads=1, kv_heads=1, head_dim=2, rotary_dim=2, style="half"),
            "half, partial": cls(q_heads=3, kv_heads=1, head_dim=80, rotary_dim=32, style="half"),
            "interleaved": cls(
                q_heads=4, kv_heads=2, head_dim=64, rotary_dim=64, style="interleaved"
            ),
            "interleaved, magnitude": cls(
                q_heads=5,
                kv_heads=5,
                head_dim=96,
                rotary_dim=90,
                style="interleaved",
                magnitude=1.2,
            ),
            "half, magnitude": cls(
                q_heads=8, kv_heads=2, head_dim=128, rotary_dim=128, style="half", magnitude=1.13863
            ),
            "head_dim 256": cls(q_heads=4, kv_heads=1, head_dim=256, rotary_dim=256, style="half"),
            "interleaved rows": cls(3, 1, 64, 48, "interleaved", rows=5, max_len=1000),
            "norm": cls(3, 1, 128, 128, "half", rows=3, max_len=1000, qk_norm=QK_NORM),
            "norm, partial": cls(2, 1, 72, 20, "interleaved", rows=2, qk_norm=QK_NORM),
            "norm after rope": cls(2, 1, 80, 48, "half", rows=2, qk_norm=QK_NORM, rope_first=True),
            "norm without weight, of q": cls(
                2, 0, 320, 64, "half", qk_norm=Norm("rms", 1e-5, weight=False)
            ),
            "norm alone": cls(2, 1, 64, 0, "half", rows=2, qk_norm=QK_NORM),
            "temperature": cls(2, 1, 48, 40, "half", rows=3, temperature=Temperature(0.1, 8192, 1)),
            "temperature alone": cls(
                1, 1, 32, 0, "half", rows=3, temperature=Temperature(0.2, 1000)
            ),
            "all of it": cls(
                3, 2, 96, 96, "interleaved", 1.3, 3, 70, QK_NORM, Temperature(0.5, 8, 1)
            ),
            "rows at position 0": cls(2, 2, 128, 128, "half", magnitude=1.1, rows=3, max_len=1),
        }

    def flops(self) -> int:
        heads = self.rows * (self.q_heads + self.kv_heads)
        norm = 4 * self.head_dim if self.qk_norm else 0
        tempered = self.rows * self.q_heads * self.head_dim if self.temperature else 0
        return heads * (6 * self.pairs + norm) + tempered
