"""RoPE of config.json: the frequencies' divisors and the magnitude, by transformers' formulas.

Source: transformers, `modeling_rope_utils.py`. Every kind of context extension becomes a divisor of
each pair's frequency and a factor of sine and cosine, so that a description holds what was
published, whatever its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files.limits import HEAD_WIDTH
from urdir.model.files.pretrained.family import Family, Found
from urdir.model.files.pretrained.fields import Fields, shown

#: Names of the objects for each kind of layer; the second ones' keys end in "_swa".
_FULL, _LOCAL = "full_attention", "sliding_attention"
#: Fields that other parts of a configuration repeat.
_REPEATED = (
    "max_position_embeddings",
    "mrope_section",
    "mrope_interleaved",
    "finetuned",
    "attn_factor",
    "type",
    "rope_type",
)


def read_rope(fields: Fields, found: Found, family: Family, head_dim: int) -> None:
    """Add the keys rope.* and the tensors rope_* of full and of windowed layers."""
    both = _both(fields.given("rope_parameters", dict, {}), fields.given("rope_scaling", dict, {}))
    theta, old = (fields.take(name, float) for name in ("rope_theta", "rotary_emb_base"))
    theta = theta or old
    local = fields.take("rope_local_base_freq", float)
    share = fields.take("partial_rotary_factor", float)
    for name in ("rotary_pct", "rope_pct"):
        share = fields.take(name, float) or share
    context = fields.take("original_max_position_embeddings", int)
    if family.rope is None:
        return
    found.setdefault("own.rope_style", family.rope)
    kinds = {name: both.pop(name) for name in (_FULL, _LOCAL) if isinstance(both.get(name), dict)}
    full = both | kinds.get(_FULL, {})
    _Rope(fields, found, "", head_dim, theta, share, context).read(full)
    if _LOCAL in kinds or local is not None:
        dim = _integer(found.get("attention.key_length_swa"), head_dim)
        found["own.local_rope"] = True
        _Rope(fields, found, "_swa", dim, local, share, context).read(kinds.get(_LOCAL, {}))
    found.pop("own.short_factors", None)


def _both(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """One object of the fields ``rope_parameters`` and ``rope_scaling``. A kind that the latter
    names, which users add by hand, replaces the former's with all of its numbers but the base and
    the share."""
    if old.get("rope_type") or old.get("type"):
        kept = ("rope_theta", "partial_rotary_factor", _FULL, _LOCAL)
        new = {name: value for name, value in new.items() if name in kept}
    return new | {name: value for name, value in old.items() if value is not None}


def read_two_ropes(fields: Fields, found: Found, dim: int) -> None:
    """The rotation of layers with compressed blocks, which has the context extension, and that of
    other layers (DeepSeek V4), of ``dim`` values each. Magnitudes are 1 in spite of YaRN."""
    given = fields.given("rope_parameters", dict, {}) | fields.given("rope_scaling", dict, {})
    bases = fields.given("rope_theta", float, 1e4), fields.given("compress_rope_theta", float, 16e4)
    full = dict(given["compress"]) if isinstance(given.get("compress"), dict) else given
    plain = dict(given["main"]) if isinstance(given.get("main"), dict) else {}
    full = {name: of for name, of in full.items() if name != "partial_rotary_factor"}
    plain = {name: of for name, of in plain.items() if name != "partial_rotary_factor"}
    if full.get("rope_type", full.get("type")) == "yarn":
        full.setdefault("attention_factor", 1.0)
    found |= {"rope.dimension_count": dim, "rope.dimension_count_swa": dim}
    found |= {"own.rope_style": "interleaved", "own.local_rope": True}
    _Rope(fields, found, "", dim, bases[1], None, None).read(full)
    _Rope(fields, found, "_swa", dim, bases[0], None, None).read(plain)


class _Rope:
    """One rotation of a configuration."""

    def __init__(
        self,
        fields: Fields,
        found: Found,
        suffix: str,
        head_dim: int,
        theta: float | None,
        share: float | None,
        original: int | None,
    ) -> None:
        self.fields, self.found, self.suffix = fields, found, suffix
        self.head_dim, self.theta, self.share = head_dim, theta, share
        self.original = original

    def read(self, values: dict[str, Any]) -> None:
        """Take the fields of a RoPE object."""
        rope = Fields(values, self.fields.path)
        theta = rope.take("rope_theta", float) or self.theta
        share = rope.take("partial_rotary_factor", float) or self.share
        kind = rope.take("rope_type", str) or rope.take("type", str) or "default"
        if theta is not None:
            self.found[f"rope.freq_base{self.suffix}"] = theta
        usual = self.found.get("rope.freq_base", 10000.0)
        self.base = theta or (float(usual) if isinstance(usual, int | float) else 0.0)
        given = self.found.get(f"rope.dimension_count{self.suffix}")
        self.dim = _integer(given, self.head_dim)
        if share is not None and not 0 < share <= 1:
            raise rope.wrong("partial_rotary_factor", share)
        if share is not None and kind != "proportional" and given is None:
            self.dim = int(share * self.head_dim)
        HEAD_WIDTH.check(self.dim, f"{rope.path}: RoPE", ConfigError)
        if self.dim % 2:
            raise ConfigError(f"{rope.path}: RoPE of {self.dim} values, expected an even number")
        if self.dim < 2 or not 1.001 < self.base < 1e30:
            raise rope.wrong("rope_theta", f"{self.base} for {self.dim} values")
        self.found[f"rope.dimension_count{self.suffix}"] = self.dim
        self.share = share
        scaling = _KINDS.get(kind)
        if scaling is None:
            raise UnsupportedError(f"{rope.path}: RoPE '{shown(kind)}' is not supported")
        scaling(self, rope)
        rope.ignore(_REPEATED)
        rope.finish()

    @property
    def periods(self) -> NDArray[np.float64]:
        """Positions per radian of each pair."""
        return np.asarray(self.base ** (np.arange(0, self.dim, 2) / self.dim))

    def divide(self, divisors: Any, name: str = "rope_freqs") -> None:
        """Set the divisors of frequencies."""
        values = np.broadcast_to(np.asarray(divisors, np.float32), (self.dim // 2,))
        self.found[f"{name}{self.suffix}.weight"] = values

    def scale(self, magnitude: float) -> None:
        """Set the factor of sine and cosine."""
        if magnitude != 1.0:
            self.found[f"own.rope_magnitude{self.suffix}"] = magnitude


def _default(of: _Rope, rope: Fields) -> None:
    rope.fix("factor", (1, 1.0))


def _linear(of: _Rope, rope: Fields) -> None:
    of.divide(_positive(rope, "factor"))


def _dynamic(of: _Rope, rope: Fields) -> None:
    """NTK scaling: without effect up to the context length. Hunyuan's ``alpha`` is a factor of the
    base."""
    rope.ignore(("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    rope.ignore(("original_max_position_embeddings",))
    if alpha := rope.take("alpha", float):
        if not is_usual(alpha) or of.dim < 4:
            raise rope.wrong("alpha", alpha)
        base = of.base * alpha ** (of.dim / (of.dim - 2))
        of.found[f"rope.freq_base{of.suffix}"] = base


def _llama3(of: _Rope, rope: Fields) -> None:
    factor, low, high = (
        _positive(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = rope.size("original_max_position_embeddings")
    turns = context / (2 * math.pi * of.periods)
    with np.errstate(divide="ignore", invalid="ignore"):
        smooth = (turns - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
    of.divide(np.where(turns < low, factor, np.where(turns > high, 1.0, between)))


def _yarn(of: _Rope, rope: Fields) -> None:
    """YaRN (arXiv 2309.00071)."""
    context = rope.take("original_max_position_embeddings", int) or of.original
    context = context or of.fields.size("max_position_embeddings")
    factor = rope.take("factor", float) or of.fields.size("max_position_embeddings") / context
    fast, slow = (rope.take(name, float) or usual
                  for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)))  # fmt: skip
    if not (all(is_usual(value) for value in (factor, fast, slow)) and 0 < context < 1 << 31):
        raise rope.wrong("rope_scaling", f"no scaling: {factor}, {fast}, {slow}, {context}")
    ends = [of.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(of.base))
            for turns in (fast, slow)]  # fmt: skip
    if rope.given("truncate", bool, True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], of.dim - 1)
    ramp = np.clip((np.arange(of.dim // 2) - low) / (high - low or 0.001), 0, 1)
    of.divide(1 / (ramp / factor + 1 - ramp))
    given = rope.take("attention_factor", float)
    each, every = rope.take("mscale", float), rope.take("mscale_all_dim", float)
    for name, value in (("mscale", each), ("mscale_all_dim", every)):
        if value and not is_usual(value):
            raise rope.wrong(name, value)
    usual = magnitude(factor, each) / magnitude(factor, every) if each and every else None
    of.scale(given or usual or magnitude(factor, 1.0))
    if beta := rope.take("llama_4_scaling_beta", float):
        of.found["attention.temperature_scale"] = beta
        of.found["own.temperature_length"] = context


def magnitude(factor: float, multiplier: float) -> float:
    """The factor of sine and cosine that YaRN recommends."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(of: _Rope, rope: Fields) -> None:
    """LongRoPE (arXiv 2402.13753): divisors for sequences within the original context, and for
    longer ones."""
    context = of.fields.size("max_position_embeddings")
    original = rope.take("original_max_position_embeddings", int) or of.original or context
    if not 2 <= original < 1 << 31:
        raise rope.wrong("original_max_position_embeddings", original)
    factor = rope.take("factor", float)
    if factor is None or of.original is not None:
        factor = context / original
    if not is_usual(factor):
        raise rope.wrong("factor", factor)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (rope.take(f"{name}_mscale", float) for name in ("short", "long"))
    if short != long:
        raise UnsupportedError(f"{rope.path}: 'short_mscale' differs from 'long_mscale'")
    of.scale(rope.take("attention_factor", float) or short or usual)
    short_only = of.found.get("own.short_factors", False)
    for name in ("long", "short"):
        factors = rope.items(f"{name}_factor", float)
        if factors is None or len(factors) != of.dim // 2:
            raise rope.wrong(f"{name}_factor", f"not {of.dim // 2} numbers: {factors}")
        if not short_only:
            of.divide(factors, f"rope_factors_{name}")
            of.found["own.rope_original"] = original
        elif name == "short":
            of.divide(factors)


def _proportional(of: _Rope, rope: Fields) -> None:
    """Of all pairs of a head the first ``partial_rotary_factor`` rotate."""
    of.divide(_positive(rope, "factor") if rope.has("factor") else 1.0)
    turning = int((of.share or 1.0) * of.head_dim // 2)
    if turning < of.dim // 2:
        of.found[f"own.rope_still{of.suffix}"] = turning


def is_usual(value: float) -> bool:
    """Whether formulas can be computed with a factor."""
    return 2.0**-20 < value < 2.0**20


def _integer(value: object, default: int) -> int:
    return value if type(value) is int else default


def _positive(rope: Fields, name: str) -> float:
    value = rope.require(name, float)
    if not is_usual(value):
        raise rope.wrong(name, value)
    return value


_KINDS: dict[str, Callable[[_Rope, Fields], None]] = {
    **dict.fromkeys(("default", "mrope"), _default),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    **dict.fromkeys(("longrope", "su"), _longrope),
    "proportional": _proportional,
}
