"""How a model rotates queries and keys, and the metadata that says so.

The meaning of the keys is that of llama.cpp (`llama-model.cpp`, `llama-context.cpp`); the formulas
are in ptxgen.kernels.rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.reader import Reader
from urdir.ptxgen.kernels.rotation import RopeScaling, RopeStyle, Rotation, frequencies


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One way to rotate heads; layers that rotate alike have equal ones."""

    dim: int  # leading elements of a head that turn; even
    style: RopeStyle
    freq_base: float
    scaling: RopeScaling
    has_factors: bool = False  # the file's factors (dim / 2,) divide the frequencies

    @property
    def rotation(self) -> Rotation:
        """What is done to a head of queries or keys."""
        return Rotation(self.dim, self.style, self.scaling.magnitude)

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        """Radians per position, (dim / 2,) f64.

        ``factors`` is the file's rope_freqs.weight, (dim / 2,): each frequency is divided by its
        own. Raises ConfigError for a factor that is not a positive number.
        """
        if factors is not None and not np.all(np.isfinite(factors) & (factors > 0)):
            raise ConfigError("rope_freqs.weight must hold positive numbers only")
        return frequencies(self.dim, self.freq_base, self.scaling, factors)[0]


def read_rope(
    file: Reader, style: RopeStyle, head_dim: int, context_length: int, *, has_factors: bool
) -> RopeConfig:
    """Read and check ``rope.*``. Raises ConfigError, UnsupportedError naming the key.

    Keys: rope.dimension_count, rope.freq_base, rope.scale_linear, rope.scaling.{type, factor,
    attn_factor, original_context_length, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast,
    yarn_beta_slow}.
    """
    dim = file.optional("rope.dimension_count", int, head_dim)
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(
            f"{file.key('rope.dimension_count')} is {dim}, expected an even number up to {head_dim}"
        )
    base = file.optional("rope.freq_base", float, 10000.0)
    if base <= 1.0:
        raise ConfigError(f"{file.key('rope.freq_base')} is {base}, expected more than 1")
    return RopeConfig(dim, style, base, _read_scaling(file, context_length), has_factors)


def _read_scaling(file: Reader, context_length: int) -> RopeScaling:
    # ggml's default is "linear", with a factor that defaults to 1; a factor of 0 means unscaled
    kind = file.optional("rope.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{file.key('rope.scaling.type')} is '{kind}'; none, linear and yarn are supported"
        )
    old_factor = file.optional("rope.scale_linear", float, 1.0)
    factor = file.optional("rope.scaling.factor", float, old_factor)
    attn_factor = file.optional("rope.scaling.attn_factor", float, 1.0)
    ext_factor = file.optional("rope.scaling.yarn_ext_factor", float, -1.0)
    if ext_factor < 0.0:
        ext_factor = 1.0 if kind == "yarn" else 0.0
    scaling = {
        "factor": 1.0 if kind == "none" or factor == 0.0 else factor,
        "attn_factor": attn_factor * file.optional("rope.scaling.yarn_attn_factor", float, 1.0),
        "original_context": file.optional(
            "rope.scaling.original_context_length", int, context_length
        ),
        "beta_fast": file.optional("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": file.optional("rope.scaling.yarn_beta_slow", float, 1.0),
    }
    for name, value in scaling.items():
        if not value > 0:
            raise ConfigError(
                f"{file.key('rope.scaling')}: {name} is {value}, expected a positive number"
            )
    return RopeScaling(
        factor=scaling["factor"],
        attn_factor=scaling["attn_factor"],
        ext_factor=ext_factor,
        original_context=int(scaling["original_context"]),
        beta_fast=scaling["beta_fast"],
        beta_slow=scaling["beta_slow"],
    )
