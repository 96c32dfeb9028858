"""New tokens: processing of a row's query, key and value before it attends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.spec import Access, Array, Param

Float64s = npt.NDArray[np.float64]

#: Norms in examples.
QK_NORM, V_NORM = Norm("rms", 1e-6), Norm("rms", 1e-5, weight=False)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Query scaling by position: 1 + scale * ln(floor((p + offset) / floor) + 1), with which Llama
    4 and Mistral 3 keep attention sharp over long contexts."""

    scale: float
    floor: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.floor < 1 or self.offset < 0:
            raise PtxgenError(
                f"temperature of floor {self.floor} (1 or more), offset {self.offset} (0 or more)"
            )

    def __call__(self, positions: npt.ArrayLike) -> Float64s:
        """The factor of queries at ``positions``."""
        steps = (np.asarray(positions, np.int64) + self.offset) // self.floor
        factors: Float64s = 1.0 + self.scale * np.log(steps + 1.0)
        return factors


@dataclass(frozen=True, slots=True)
class OwnToken:
    """The processing of a row's new heads, in this order.

    - ``latent_norm``: q and k come in two parts, as MLA's products leave them: ``q_rotated`` (rows,
      heads, n) and ``q_absorbed`` (rows, heads, value_dim), ``k_rotated`` (rows, n) and ``latent``
      (rows, value_dim). RMSNorm of the latter, with weights ``latent_norm`` (value_dim,) f32, is
      the end of k, and the value. A token that is not appended has q in parts alone;
    - ``qk_norm``: RMSNorm of each head of q and k, with weights ``q_norm`` and ``k_norm``
      (head_dim,) f32 if it has any; with ``qk_norm_over`` "row" over all heads of q, and all heads
      of k, with weights (heads, head_dim) (OLMo 2);
    - ``rope``: q and k are rotated, with ``frequencies``, a ``turns_table``; with ``rope_first``
      before the norm of heads, whose factor a rotation of magnitude 1 does not change (Hunyuan,
      Llama 4);
    - ``temperature``: q is scaled;
    - ``v_norm``: RMSNorm of each head of v, without a weight (Gemma 4);
    - ``appends``: k and v are then stored in the cache. Otherwise the row has no k and v: it
      attends to a cache that another layer has written (Gemma 3n).

    Raises PtxgenError for unsupported norms.
    """

    rope: Rotation | None = None
    qk_norm: Norm | None = None
    v_norm: Norm | None = None
    temperature: Temperature | None = None
    appends: bool = True
    rope_first: bool = False
    qk_norm_over: Literal["head", "row"] = "head"
    latent_norm: Norm | None = None

    def __post_init__(self) -> None:
        norms = {"qk_norm": self.qk_norm, "v_norm": self.v_norm, "latent_norm": self.latent_norm}
        for name, norm in norms.items():
            if norm and (norm.kind != "rms" or norm.bias or (norm.weight and name == "v_norm")):
                raise PtxgenError(f"{name} is an RMS norm without bias, v_norm without weight")
        if self.latent_norm and (self.qk_norm or self.v_norm):
            raise PtxgenError("heads of a latent vector have no other norms")
        if self.latent_norm and not self.latent_norm.weight:
            raise PtxgenError("latent_norm has weights")
        if self.v_norm and not self.appends:
            raise PtxgenError("v_norm of a token that is not appended: it has no value")
        if self.rope_first and (not self.rope or not self.qk_norm or self.rope.magnitude != 1):
            raise PtxgenError("rope_first is for a rotation of magnitude 1 and a qk_norm")
        if self.norms_rows and (not self.qk_norm or self.rope_first):
            raise PtxgenError("a norm over rows is a qk_norm before the rotation")

    @property
    def norms_rows(self) -> bool:
        """Whether norms span all heads of a row."""
        return self.qk_norm_over == "row"

    def norms(self, heads: int) -> int:
        """Of a row's ``heads`` of q, key and value, those whose norms warps find, one by one."""
        if not (self.v_norm or (self.qk_norm and not self.norms_rows)):
            return 0
        return heads + self.appends + (self.v_norm is not None)

    @property
    def weights(self) -> tuple[str, ...]:
        """The norm weights that are parameters."""
        if not self.latent_norm:
            return self.head_weights
        return ("latent_norm",) if self.appends else ()

    @property
    def head_weights(self) -> tuple[str, ...]:
        """The weights of the norm of queries and keys."""
        if not (self.qk_norm and self.qk_norm.weight):
            return ()
        return ("q_norm", "k_norm") if self.appends else ("q_norm",)

    def head_params(self, layout: KvLayout) -> tuple[Param, ...]:
        """The rows' own queries and, where they are appended to a cache, keys and values."""
        if self.latent_norm is None:
            q = Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN)
            return (q, *(layout.token_params if self.appends else ()))
        rotated = layout.value_start
        queries = (
            Param("q_rotated", "f32", ("rows", "heads", rotated), Access.IN),
            Param("q_absorbed", "f32", ("rows", "heads", "value_dim"), Access.IN),
        )
        key = (
            Param("k_rotated", "f32", ("rows", rotated), Access.IN),
            Param("latent", "f32", ("rows", "value_dim"), Access.IN),
        )
        return (*queries, *key) if self.appends else queries

    def constant_params(self, heads: int, kv_heads: int) -> tuple[Param, ...]:
        """Parameters besides the token: ``frequencies`` and norm weights."""
        rope = () if self.rope is None else (self.rope.param,)
        shapes: dict[str, tuple[int | str, ...]] = {"latent_norm": ("value_dim",)}
        if self.norms_rows:
            shapes |= {"q_norm": (heads, "head_dim"), "k_norm": (kv_heads, "head_dim")}
        weights = (
            Param(name, "f32", shapes.get(name, ("head_dim",)), Access.IN) for name in self.weights
        )
        return (*rope, *weights)

    def prepared(
        self, name: str, x: Array, positions: npt.ArrayLike, inputs: Mapping[str, Any]
    ) -> Float64s:
        """Heads x (rows, heads, dim) of "q", "k" or "v" at ``positions`` (rows,), in float64."""
        y = np.asarray(x, np.float64)
        if name == "v":
            return y if self.v_norm is None else self.v_norm(y)
        if self.norms_rows and self.qk_norm is not None:
            rows, weight = y.reshape(len(y), -1), inputs.get(f"{name}_norm")
            weight = None if weight is None else weight.reshape(-1)
            y = self.qk_norm(rows, weight).reshape(y.shape)
        elif self.qk_norm is not None and not self.rope_first:
            y = self.qk_norm(y, inputs.get(f"{name}_norm"))
        if self.rope is not None:
            y = self.rope.turn(y, positions, inputs["frequencies"])
        if self.qk_norm is not None and self.rope_first:
            y = self.qk_norm(y, inputs.get(f"{name}_norm"))
        if self.temperature is not None and name == "q":
            y = y * self.temperature(positions)[:, None, None]
        return y

    def origin_of(self, name: str, y: Array, position: int, inputs: Mapping[str, Any]) -> Float64s:
        """A key or value (heads, dim) that `prepared` maps to y at ``position``; with a norm to y /
        2^i for the smallest i that gives it a mean square below 1.

        For inputs whose result a cache holds exactly. The norm's eps determines the magnitude: |x|
        is chosen so that mean(x^2) + eps is the divisor's square.
        """
        y = np.asarray(y, np.float64)
        if name == "k" and self.latent_norm is not None:
            return self._origin_of_parts(y, position, inputs)
        norm = self.v_norm if name == "v" else self.qk_norm
        axes = (-2, -1) if self.norms_rows and name != "v" else (-1,)

        def mean_squares(origin: Float64s) -> Float64s:
            means: Float64s = np.mean(origin * origin, axis=axes, keepdims=True)
            return means

        while (
            norm is not None and mean_squares(self._unturned(name, y, position, inputs)).max() > 0.9
        ):
            y = y / 2
        y = self._unturned(name, y, position, inputs)
        if norm is None:
            return y
        origin: Float64s = y * np.sqrt(norm.eps / (1.0 - mean_squares(y)))
        return origin

    def _origin_of_parts(self, y: Float64s, position: int, inputs: Mapping[str, Any]) -> Float64s:
        """As `origin_of`, for a key (1, dim) whose end is a normed latent vector."""
        weight, norm = inputs["latent_norm"].astype(np.float64), self.latent_norm
        assert norm is not None
        start = y.shape[-1] - len(weight)
        while (mean := np.mean((y[0, start:] / weight) ** 2)) > 0.9:
            y = y / 2
        origin = self._unturned("k", y, position, inputs)
        origin[:, start:] *= np.sqrt(norm.eps / (1.0 - mean)) / weight
        return origin

    def _unturned(
        self, name: str, y: Float64s, position: int, inputs: Mapping[str, Any]
    ) -> Float64s:
        """The inverse of rotation and weights."""
        if name == "v":
            return y
        weight = inputs.get(f"{name}_norm", np.float64(1))
        y = y / weight if self.rope_first else y
        if self.rope is not None:
            y = self.rope.turn(y[None], [position], inputs["frequencies"], sign=-1)[0]
        return y if self.rope_first else y / weight


#: A token that is appended without processing.
PLAIN_TOKEN = OwnToken()
