"""How a model rotates queries and keys, as its metadata says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files.metadata import Metadata
from urdir.ptxgen.kernels.rotation import RopeScaling, RopeStyle, Rotation, frequencies


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``{arch}.rope.*`` of a file."""

    dim: int  # leading elements of a head that turn; even
    style: RopeStyle
    freq_base: float
    scaling: RopeScaling

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
    metadata: Metadata, arch: str, style: RopeStyle, head_dim: int, context_length: int
) -> RopeConfig:
    """Read and check ``{arch}.rope.*``. Raises ConfigError, UnsupportedError naming the key."""
    key = f"{arch}.rope."
    dim = metadata.optional(key + "dimension_count", int, head_dim)
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(
            f"{key}dimension_count is {dim}, expected an even number up to {head_dim}"
        )
    base = metadata.optional(key + "freq_base", float, 10000.0)
    if base <= 1.0:
        raise ConfigError(f"{key}freq_base is {base}, expected more than 1")
    return RopeConfig(dim, style, base, _read_scaling(metadata, key, context_length))


def _read_scaling(metadata: Metadata, key: str, context_length: int) -> RopeScaling:
    # ggml's default is "linear", with a factor that defaults to 1; a factor of 0 means unscaled
    kind = metadata.optional(key + "scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{key}scaling.type is '{kind}'; none, linear and yarn are supported"
        )
    old_factor = metadata.optional(key + "scale_linear", float, 1.0)
    factor = metadata.optional(key + "scaling.factor", float, old_factor)
    attn_factor = metadata.optional(key + "scaling.attn_factor", float, 1.0)
    ext_factor = metadata.optional(key + "scaling.yarn_ext_factor", float, -1.0)
    if ext_factor < 0.0:
        ext_factor = 1.0 if kind == "yarn" else 0.0
    scaling = {
        "factor": 1.0 if kind == "none" or factor == 0.0 else factor,
        "attn_factor": attn_factor
        * metadata.optional(key + "scaling.yarn_attn_factor", float, 1.0),
        "original_context": metadata.optional(
            key + "scaling.original_context_length", int, context_length
        ),
        "beta_fast": metadata.optional(key + "scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": metadata.optional(key + "scaling.yarn_beta_slow", float, 1.0),
    }
    for name, value in scaling.items():
        if not value > 0:
            raise ConfigError(f"{key}scaling: {name} is {value}, expected a positive number")
    return RopeScaling(
        factor=scaling["factor"],
        attn_factor=scaling["attn_factor"],
        ext_factor=ext_factor,
        original_context=int(scaling["original_context"]),
        beta_fast=scaling["beta_fast"],
        beta_slow=scaling["beta_slow"],
    )
