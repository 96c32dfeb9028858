"""Rotary position embedding (RoPE) of a model, read from metadata.

The meaning of the keys is that of llama.cpp (`llama-model.cpp`, `llama-context.cpp`); the formulas
are in ptxgen.kernels.rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.reader import Reader
from urdir.model.families.stored import StoredVector
from urdir.ptxgen.kernels.rotation import RopeScaling, RopeStyle, Rotation, frequencies

_LONGROPE = ("rope_factors_short", "rope_factors_long")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotation of heads; layers that rotate alike have equal ones.

    ``factors`` (dim / 2,) of the file divide the frequencies; sequences that may be longer than
    ``long_above`` use ``long_factors`` instead. The pairs ``still`` do not rotate.
    """

    dim: int  # number of leading values of a head that rotate; even
    style: RopeStyle
    freq_base: float
    scaling: RopeScaling
    factors: StoredVector | None = None
    long_factors: StoredVector | None = None
    long_above: int = 0
    still: tuple[int, ...] = ()

    @property
    def rotation(self) -> Rotation:
        """The rotation as kernels take it."""
        return Rotation(self.dim, self.style, self.scaling.magnitude)

    def at_context(self, context: int) -> RopeConfig:
        """The rotation of sequences of up to ``context`` tokens."""
        if self.long_factors is None:
            return self
        chosen = self.long_factors if context > self.long_above else self.factors
        return replace(self, factors=chosen, long_factors=None, long_above=0)

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        """Radians per position, (dim / 2,) f64, with the values of ``factors``.

        Raises ConfigError for a factor that is not a positive number.
        """
        if factors is not None and not np.all(np.isfinite(factors) & (factors > 0)):
            name = self.factors.name if self.factors else "RoPE factors"
            raise ConfigError(f"tensor '{name}' must hold only positive numbers")
        radians = frequencies(self.dim, self.freq_base, self.scaling, factors)[0]
        radians[list(self.still)] = 0.0
        return radians


def read_rope(
    file: Reader,
    style: RopeStyle,
    head_dim: int,
    *,
    dim: int | None = None,
    base: float | None = None,
    factors: bool = True,
) -> RopeConfig:
    """Read and check ``rope.*``. Raises ConfigError, UnsupportedError naming the key.

    Keys: rope.dimension_count (default ``dim``, or the whole head), rope.freq_base (default
    ``base``, or 10000), rope.scale_linear, rope.scaling.{type, factor, attn_factor,
    original_context_length, yarn_ext_factor, yarn_log_multiplier, yarn_beta_fast, yarn_beta_slow}.
    Tensors, in families with ``factors``: rope_freqs, or rope_factors_short and rope_factors_long.
    """
    if file.of_folder:
        return _of_folder(file, style, head_dim, dim or head_dim, base or 1e4)
    dim = file.optional("rope.dimension_count", int, dim or head_dim)
    check_dim(file, "rope.dimension_count", dim, head_dim)
    rope = RopeConfig(dim, style, read_base(file, "rope.freq_base", base or 1e4), _scaling(file))
    if not factors:
        return rope
    if file.anywhere("rope_freqs.weight"):
        return replace(rope, factors=file.vector("rope_freqs.weight", None, dim // 2))
    if file.anywhere("rope_factors_short.weight"):
        short, long = (
            file.vector(f"rope_factors_{kind}.weight", None, dim // 2) for kind in ("short", "long")
        )
        # If the model's context does not exceed the original one, the short factors would always
        # apply. llama.cpp's contexts, of 512 tokens by default, may be longer.
        original = rope.scaling.original_context
        above = original if original < file.size("context_length") else 0
        return replace(rope, factors=short, long_factors=long, long_above=above)
    return rope


def _of_folder(
    file: Reader, style: RopeStyle, head_dim: int, dim: int, base: float, suffix: str = ""
) -> RopeConfig:
    """The rotation that a folder gives: every context extension is a tensor rope_freqs (or two
    tensors, of LongRoPE) and a magnitude. Its style may differ from a GGUF file's, whose queries
    and keys the converter permutes."""
    name = f"rope.dimension_count{suffix}"
    dim = file.optional(name, int, dim)
    check_dim(file, name, dim, head_dim)
    own_style = file.own("rope_style", str, style)
    scaling = RopeScaling.none(file.own(f"rope_magnitude{suffix}", float, 1.0))
    still = file.own(f"rope_still{suffix}", int, dim // 2)
    rope = RopeConfig(
        dim,
        "interleaved" if own_style == "interleaved" else "half",
        read_base(file, f"rope.freq_base{suffix}", base),
        scaling,
        still=tuple(range(still, dim // 2)),
    )
    tensors = [f"{of}{suffix}.weight" for of in ("rope_freqs", *_LONGROPE)]
    single, short, long = (file.optional_vector(of, None, dim // 2) for of in tensors)
    if single or not short:
        return replace(rope, factors=single)
    original = file.own("rope_original", int, 0)
    return replace(rope, factors=short, long_factors=long, long_above=original)


def windowed_rope(
    file: Reader, rope: RopeConfig, head_dim: int, *, scaled: bool, base: float | None = None
) -> RopeConfig:
    """The rotation of windowed layers: ``rope`` with rope.freq_base_swa (default: ``base``, or that
    of ``rope``) and rope.dimension_count_swa, without context extension unless ``scaled``."""
    if file.of_folder:
        is_own = file.own("local_rope", bool, False)
        if scaled and not is_own:
            return rope
        return _of_folder(file, rope.style, head_dim, rope.dim, base or rope.freq_base, "_swa")
    dim = file.optional("rope.dimension_count_swa", int, rope.dim)
    check_dim(file, "rope.dimension_count_swa", dim, head_dim)
    base = read_base(file, "rope.freq_base_swa", base or rope.freq_base)
    scaling = rope.scaling if scaled else RopeScaling.none(rope.scaling.attn_factor)
    return replace(rope, dim=dim, freq_base=base, scaling=scaling)


def unscaled_rope(file: Reader, rope: RopeConfig, head_dim: int) -> RopeConfig:
    """The rotation of windowed layers without context extension, where GGUF has one base for all
    layers."""
    if file.of_folder:
        return windowed_rope(file, rope, head_dim, scaled=False)
    return replace(rope, scaling=RopeScaling.none())


def with_sections(
    file: Reader, rope: RopeConfig, *, interleaved: bool = False, required: bool = True
) -> RopeConfig:
    """The rotation by multi-axis positions (M-RoPE, arXiv 2409.12191), for text.

    Key: rope.dimension_sections, the number of pairs on each of four axes, axis after axis or
    ``interleaved``. A text token has the same position on three axes and 0 on the fourth
    (llama.cpp: `llm_graph_input_pos`), whose pairs do not rotate. Files whose first two sizes are
    not positive have one axis, unless ``required``.
    """
    if file.of_folder:
        return rope
    name = "rope.dimension_sections"
    sizes = file.integers(name) if file.is_array(name) or not file.has_key(name) else []
    if not required and (len(sizes) < 2 or min(sizes[:2]) <= 0):
        return rope
    if len(sizes) != 4 or min(sizes) < 0 or not sum(sizes):
        raise ConfigError(f"metadata key '{file.key(name)}' is {sizes}, expected four sizes")

    def turns(pair: int) -> bool:
        place = pair % sum(sizes)
        return place < (3 * sizes[place % 3] if interleaved else sum(sizes[:3]))

    still = tuple(pair for pair in range(rope.dim // 2) if not turns(pair))
    return replace(rope, still=still)


def read_rope_by_axes(file: Reader, head_dim: int) -> RopeConfig:
    """The rotation of neighbours; of halves if positions have several axes
    (rope.dimension_sections)."""
    sizes = file.integers("rope.dimension_sections")
    if len(sizes) < 2 or min(sizes[:2]) <= 0:
        return read_rope(file, "interleaved", head_dim, factors=False)
    return with_sections(file, read_rope(file, "half", head_dim, factors=False))


def check_dim(file: Reader, name: str, dim: int, head_dim: int) -> None:
    """Raise ConfigError unless ``dim`` values of a head can rotate in pairs."""
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(f"{file.key(name)} is {dim}, expected an even number up to {head_dim}")


def read_base(file: Reader, name: str, default: float) -> float:
    """A base of frequencies; ConfigError unless it is above 1."""
    base = file.optional(name, float, default)
    if base <= 1.0:
        raise ConfigError(f"{file.key(name)} is {base}, expected more than 1")
    return base


def _scaling(file: Reader) -> RopeScaling:
    # ggml's default is "linear" with a factor of 1; a factor of 0 means unscaled
    kind = file.optional("rope.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedError(
            f"{file.key('rope.scaling.type')} is '{kind}'; none, linear, yarn and longrope are "
            "supported"
        )
    old_factor = file.optional("rope.scale_linear", float, 1.0)
    factor = file.optional("rope.scaling.factor", float, old_factor)
    ext_factor = file.optional("rope.scaling.yarn_ext_factor", float, -1.0)
    if ext_factor < 0.0:
        ext_factor = 1.0 if kind == "yarn" else 0.0
    context = file.optional(
        "rope.scaling.original_context_length", int, file.size("context_length")
    )
    values = {
        "factor": 1.0 if factor == 0.0 else factor,
        "attn_factor": file.optional("rope.scaling.attn_factor", float, 1.0),
        "original_context_length": context,
        "yarn_beta_fast": file.optional("rope.scaling.yarn_beta_fast", float, 32.0),
        "yarn_beta_slow": file.optional("rope.scaling.yarn_beta_slow", float, 1.0),
    }
    for name, value in values.items():
        if not value > 0:
            key = file.key(f"rope.scaling.{name}")
            raise ConfigError(f"metadata key '{key}' is {value}, expected a positive number")
    if kind == "none":
        values["factor"] = 1.0
    if ext_factor and 1.0 + 0.1 * math.log(values["factor"]) <= 0.0:
        key = file.key("rope.scaling.factor")
        raise ConfigError(f"metadata key '{key}' is {factor}: YaRN has no magnitude for it")
    return RopeScaling(
        factor=values["factor"],
        attn_factor=values["attn_factor"] * _log_multiplier(file, ext_factor, values["factor"]),
        ext_factor=ext_factor,
        original_context=context,
        beta_fast=values["yarn_beta_fast"],
        beta_slow=values["yarn_beta_slow"],
    )


def _log_multiplier(file: Reader, ext_factor: float, factor: float) -> float:
    """The divisor of YaRN's magnitude by yarn_log_multiplier (llama-context.cpp)."""
    multiplier = file.optional("rope.scaling.yarn_log_multiplier", float, 0.0)
    if not ext_factor or not multiplier or factor <= 1.0:
        return 1.0
    return 1.0 / (0.1 * multiplier * math.log(factor) + 1.0)
