"""Texts by diffusion: masked tokens are filled in steps, those first of which the model is surest.

Dream (arXiv 2508.15487) and LLaDA (2502.09992); llama.cpp: `examples/diffusion`. A step computes
the logits of all masked tokens, chooses a token for each, and keeps some of them.

Keys: tokenizer.ggml.mask_token_id, diffusion.shift_logits (default: true, as in llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ModelError, SettingsError
from urdir.model.files.metadata import Metadata

if TYPE_CHECKING:
    from urdir.model.engine.encoding.encoder import Encoder

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
#: Logits (rows, vocabulary) of some rows of a text.
Forward = Callable[[Sequence[int], Sequence[int]], Floats]

#: Which tokens a step keeps, in the order of llama.cpp's numbers: any ("origin"); those with the
#: least entropy, the largest margin between the two likeliest, or at random; the likeliest.
Algorithm = Literal["origin", "entropy", "margin", "random", "confidence"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_MASK, _SHIFT = "tokenizer.ggml.mask_token_id", "diffusion.shift_logits"
#: The schedule of a text that names none.
_EPS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSettings:
    """How masks are filled, in ``steps`` steps for a whole text.

    By time, if ``eps`` is given or nothing is: a step keeps a share 1 - s / t of what is masked, t
    falling from 1 to ``eps``. By ``block_length``: one block after the other, with equal numbers of
    tokens a step. ``algorithm`` says which; with ``alg_temp`` above 0 they are drawn, by what it
    would order them by, divided by this. With ``cfg_scale`` c > 0 logits are u + (1 + c) (l - u),
    where u are those without the prompt. ``gumbel_noise`` draws tokens from all logits by Gumbel
    noise times the temperature, without top-k and top-p. Raises SettingsError.
    """

    steps: int = 128
    algorithm: Algorithm = "confidence"
    eps: float | None = None
    block_length: int | None = None
    alg_temp: float = 0.0
    cfg_scale: float = 0.0
    gumbel_noise: bool = False

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise SettingsError(
                f"algorithm is {self.algorithm!r}: expected one of {', '.join(ALGORITHMS)}"
            )
        if self.eps is not None and self.block_length is not None:
            raise SettingsError("eps and block_length are two schedules: give one of them")
        bounds = {
            "steps": 1 <= self.steps <= 1 << 20,
            "eps": self.eps is None or 0 < self.eps < 1,
            "block_length": self.block_length is None or self.block_length >= 1,
            "alg_temp": 0 <= self.alg_temp <= 100,
            "cfg_scale": 0 <= self.cfg_scale <= 100,
        }
        for name, is_within in bounds.items():
            if not is_within:
                raise SettingsError(f"{name} is {getattr(self, name)}: out of range")

    def blocks(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The start, the end and the steps of each block of a text whose answer is from ``begin``
        to ``end``. By time the whole text is one, masks in its prompt too."""
        if self.block_length is None:
            return [(0, end, self.steps)]
        starts = range(begin, end, self.block_length)
        steps = max(1, self.steps // len(starts))
        return [(start, min(start + self.block_length, end), steps) for start in starts]

    def kept(self, step: int, steps: int, masked: int, at_first: int) -> int:
        """How many tokens a step of a block keeps, with this many masked now and ``at_first``; the
        last one all."""
        if step == steps - 1:
            return masked
        if self.block_length is not None:
            return at_first // steps + (step < at_first % steps)
        eps = self.eps or _EPS
        t, s = (1 - (step + more) / steps * (1 - eps) for more in (0, 1))
        return int(masked * (1 - s / t))


@dataclass(frozen=True, slots=True)
class Masks:
    """The token that stands for a masked one, and whether logits are ``shifted``: those of a token
    are at the one before."""

    token: int
    shifted: bool

    @classmethod
    def of(cls, metadata: Metadata, vocabulary: int) -> Self:
        """What a file says. Raises ModelError for one without a mask token."""
        token = metadata.optional(_MASK, int, None)
        if token is None or not 0 <= token < vocabulary:
            raise ModelError(f"{_MASK} is {token}: expected one of {vocabulary} tokens")
        return cls(token, metadata.optional(_SHIFT, bool, True))


def diffuse(
    encoder: Encoder,
    metadata: Metadata,
    prompt: Sequence[int],
    length: int,
    settings: SamplingSettings,
    diffusion: DiffusionSettings,
) -> Iterator[list[int]]:
    """`denoise` by a model that fills masks; a seed is drawn where ``settings`` have none. Raises
    SettingsError, ModelError for a file without a mask token, ContextFullError."""
    if length < 1:
        raise SettingsError(f"a text of {length} tokens: expected 1 or more")
    masks = Masks.of(metadata, encoder.config.vocab_size)
    encoder.check_texts([[*prompt, *[masks.token] * length]])
    return denoise(encoder.logits, prompt, length, masks, settings.with_seed(), diffusion)


def denoise(
    forward: Forward,
    prompt: Sequence[int],
    length: int,
    masks: Masks,
    settings: SamplingSettings,
    diffusion: DiffusionSettings,
) -> Iterator[list[int]]:
    """The tokens of prompt and answer after each step, of ``length`` tokens more than the prompt.

    The mask is never chosen. A temperature of 0 takes the likeliest tokens; ``settings`` has the
    seed, too, and of its other fields top-k and top-p count.
    """
    mask = masks.token
    tokens = np.array([*prompt, *[mask] * length], np.int64)
    rng = np.random.default_rng(settings.seed)
    for start, end, steps in diffusion.blocks(len(prompt), len(tokens)):
        at_first = int((tokens[start:end] == mask).sum())
        for step in range(steps):
            masked = start + np.flatnonzero(tokens[start:end] == mask)
            if not len(masked):
                break
            rows = np.maximum(masked - 1, 0) if masks.shifted else masked
            logits = _guided(forward, tokens, rows, len(prompt), mask, diffusion.cfg_scale)
            logits[:, mask] = -np.inf
            chosen, certainty = _chosen(logits, settings, diffusion, rng)
            count = diffusion.kept(step, steps, len(masked), at_first)
            kept = _kept(certainty, count, diffusion, rng)
            tokens[masked[kept]] = chosen[kept]
            yield tokens.tolist()


def _guided(
    forward: Forward, tokens: Any, rows: Any, prompt: int, mask: int, scale: float
) -> Doubles:
    """Logits in float64, away from those of a text without the prompt."""
    logits = np.asarray(forward(tokens.tolist(), rows.tolist()), np.float64)
    if not scale:
        return logits
    without = tokens.copy()
    without[:prompt] = mask
    others = np.asarray(forward(without.tolist(), rows.tolist()), np.float64)
    found: Doubles = others + (1 + scale) * (logits - others)
    return found


def _chosen(
    logits: Doubles, settings: SamplingSettings, diffusion: DiffusionSettings, rng: Any
) -> tuple[Any, Doubles]:
    """A token for each row (rows,), and how certain it is by the algorithm."""
    drawn, rows = settings.temperature > 0, np.arange(len(logits))
    if diffusion.gumbel_noise and drawn:
        noise = rng.gumbel(size=logits.shape)
        best = chosen = (logits + settings.temperature * noise).argmax(axis=1)
        likely = _softmax(logits)
    else:
        ids, kept = _likeliest(logits, settings)
        likely = _softmax(kept / settings.temperature if drawn else kept)
        noise = rng.gumbel(size=likely.shape) if drawn else 0.0
        with np.errstate(divide="ignore"):
            best = (np.log(likely) + noise).argmax(axis=1)
        chosen = ids[rows, best]
    match diffusion.algorithm:
        case "entropy":
            return chosen, (likely * np.log(likely + 1e-10)).sum(axis=1)
        case "margin":
            padded = np.pad(likely, ((0, 0), (1, 0)))  # one may be left
            second, first = np.partition(padded, -2, axis=1)[:, -2:].T
            return chosen, first - second
        case "random" | "origin":
            return chosen, rng.random(len(chosen))
    return chosen, likely[rows, best]


def _kept(certainty: Doubles, count: int, diffusion: DiffusionSettings, rng: Any) -> Any:
    """The numbers of the tokens that a step keeps: ``count``, of equal ones the first; each by
    itself with such a chance if the algorithm is "origin"."""
    if diffusion.algorithm == "origin":
        return np.flatnonzero(certainty < count / len(certainty))
    if diffusion.alg_temp:  # drawn without being put back
        certainty = certainty / diffusion.alg_temp + rng.gumbel(size=len(certainty))
    return np.argsort(-certainty, kind="stable")[:count]


def _likeliest(logits: Doubles, settings: SamplingSettings) -> tuple[Any, Doubles]:
    """Token ids and logits (rows, count) of what top-k leaves; those that top-p drops are minus
    infinity."""
    most = min(settings.top_k or logits.shape[1], logits.shape[1])
    if most < logits.shape[1]:
        ids = np.sort(np.argpartition(-logits, most - 1, axis=1)[:, :most], axis=1)
        logits = np.take_along_axis(logits, ids, axis=1)
    else:
        ids = np.broadcast_to(np.arange(most), logits.shape)
    if settings.top_p < 1:
        order = np.argsort(-logits, axis=1, kind="stable")
        likely = np.take_along_axis(_softmax(logits), order, axis=1)
        drops = np.cumsum(likely, axis=1) - likely >= settings.top_p
        drops[:, 0] = False
        dropped = np.empty_like(drops)
        np.put_along_axis(dropped, order, drops, axis=1)
        logits = np.where(dropped, -np.inf, logits)
    return ids, logits


def _softmax(logits: Doubles) -> Doubles:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    likely: Doubles = weights / weights.sum(axis=1, keepdims=True)
    return likely
