"""Models that fill masked tokens: Dream, LLaDA, its mixture and RND1.

Their layers are those of models that llama.cpp's logits verify, with attention to both sides:
the goldens of these, under other names, are compared with the numpy reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.model.tiny_encoder import write_encoder
from urdir.model.engine.diffusion import ALGORITHMS, DiffusionSettings, Masks, denoise
from urdir.model.engine.encoding.budget import EncoderSettings
from urdir.model.engine.encoding.encoder import Encoder
from urdir.model.engine.engine import Engine
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.errors import ContextFullError, ModelError, SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata
from urdir.model.verify.conformance import relative_rms

#: The golden that each is made of.
SOURCES = {
    "dream": "qwen2-dense",
    "llada": "llama-dense",
    "llada-moe": "qwen3moe-moe",
    "rnd1": "qwen3moe-moe",
}
MASK = 7
TOKENS = [3, 1, MASK, 1, 5, 9, 2, MASK, MASK, 11, 4]
ROWS = [1, 2, 8, 10]


def write_as(architecture: str, source: Path, path: Path, **more: Any) -> Path:
    """Write a golden under another architecture's name, with a mask token and ``more`` keys."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, architecture)
    old = str(reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            inner = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
            renamed = name.replace(f"{old}.", f"{architecture}.", 1)
            writer.add_key_value(renamed, field.contents(), kind, inner)
    writer.add_mask_token_id(MASK)
    for key, value in more.items():
        writer.add_bool(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass(frozen=True)
class Filler:
    """An engine, by default arithmetic, and the numpy reference of its model."""

    engine: Engine
    reference: Any

    def exact(self) -> Encoder:
        return Encoder(self.engine.device, self.engine.weights, EncoderSettings(64, 64, True))


@pytest.fixture(scope="module", params=SOURCES)
def filler(
    request: pytest.FixtureRequest,
    device_name: str,
    reference_file: Callable[[str], Path],
    reference_model: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Filler]:
    source = reference_file(SOURCES[request.param])
    path = write_as(request.param, source, tmp_path_factory.mktemp("masks") / "model.gguf")
    with Engine.open(path, device=device_name, context=64) as engine:
        yield Filler(engine, reference_model(engine.file, engine.config, 64))


@pytest.mark.turns(2)
def test_logits_are_those_of_the_reference(filler: Filler) -> None:
    wanted = filler.reference.logits(TOKENS)[ROWS]
    with filler.exact() as exact:
        assert relative_rms(exact.logits(TOKENS, ROWS), wanted) <= 1e-4
        assert relative_rms(exact.logits(TOKENS[:5], [4]), wanted[:1]) > 1e-2
    found = filler.engine.encoder.logits(TOKENS, ROWS)
    assert relative_rms(found, wanted) <= 2e-2
    np.testing.assert_array_equal(filler.engine.encoder.logits(TOKENS, ROWS), found)


def test_layers_are_those_of_a_decoder(
    filler: Filler, reference_file: Callable[[str], Path]
) -> None:
    """Except for attention, and that the weights of LLaDA's experts do not sum to 1."""
    config = filler.engine.config
    with Gguf(reference_file(SOURCES[config.architecture])) as file:
        decoder = Config.of(file)
    assert config.diffuses
    assert not config.is_causal
    assert config.output == decoder.output
    for layer, of in zip(config.layers, decoder.layers, strict=True):
        assert layer.attention == replace(of.attention, causal=False)  # type: ignore[type-var]
        if config.architecture != "llada-moe":
            assert layer.networks[1] == of.networks[1]
            continue
        (mixture,), (other,) = layer.mixtures, of.mixtures
        assert mixture.router.normalize is False
        assert replace(mixture, router=other.router) == other


@pytest.mark.turns(4)
def test_a_text_is_that_of_the_reference(filler: Filler) -> None:
    """The likeliest tokens, in exact arithmetic."""
    how = DiffusionSettings(steps=3, block_length=4)

    def reference(tokens: Sequence[int], rows: Sequence[int]) -> Any:
        return filler.reference.logits(tokens)[rows]

    with filler.exact() as exact:
        made = [
            [*denoise(of, [3, 1, 4], 6, Masks(MASK, shifted), GREEDY, how)]
            for of in (exact.logits, reference)
            for shifted in (True, False)
        ]
    assert made[:2] == made[2:]
    assert made[0][-1] != made[1][-1]
    assert MASK not in made[0][-1]


@pytest.mark.parametrize("shifted", [True, False])
def test_files_say_how_logits_are_shifted(shifted: bool) -> None:
    keys = {"tokenizer.ggml.mask_token_id": 3, "diffusion.shift_logits": shifted}
    assert Masks.of(Metadata(keys), 8) == Masks(3, shifted)
    del keys["diffusion.shift_logits"]
    assert Masks.of(Metadata(keys), 8).shifted
    for vocabulary, given in ((3, keys), (8, {})):
        with pytest.raises(ModelError, match="mask_token_id is"):
            Masks.of(Metadata(given), vocabulary)


def test_an_engine_fills_masks(
    device_name: str, reference_file: Callable[[str], Path], tmp_path: Path
) -> None:
    more = {"diffusion.shift_logits": False}
    path = write_as("llada", reference_file("llama-dense"), tmp_path / "model.gguf", **more)
    how = DiffusionSettings(steps=2)
    with Engine.open(path, device=device_name, context=16) as engine:
        steps = [*engine.diffusion([3, 1], length=4, settings=GREEDY, diffusion=how)]
        assert [tokens.count(MASK) for tokens in steps] == [3, 0]
        for prompt, length, error in (
            ([3], 0, SettingsError),
            ([3], 16, ContextFullError),
            ([10**6], 2, SettingsError),
        ):
            with pytest.raises(error):
                engine.diffusion(prompt, length=length)
        with pytest.raises(UnsupportedError, match="give no answers"):
            _ = engine.session
    with pytest.raises(UnsupportedError, match="filled masks with LoRA adapters are not supported"):
        Engine.open(path, device=device_name, max_adapters=1)


def test_an_encoder_makes_no_logits(device_name: str, tmp_path: Path) -> None:
    with (
        Engine.open(write_encoder(tmp_path / "model.gguf"), device=device_name) as engine,
        pytest.raises(UnsupportedError, match="'bert' models make no logits"),
    ):
        engine.encoder.logits([1], [0])


def test_a_decoder_fills_no_masks(device_name: str) -> None:
    with (
        Engine.open(device=device_name, context=64) as engine,
        pytest.raises(UnsupportedError, match="'llama' models do not fill masked tokens"),
    ):
        engine.diffuse("What is")


# ---- the loop -----------------------------------------------------------------------------------

VOCABULARY = 13


def model(tokens: Sequence[int], rows: Sequence[int]) -> Any:
    """Logits that depend on all tokens and on the row."""
    seed = sum((place + 1) * (token + 3) for place, token in enumerate(tokens))
    rng = np.random.default_rng(seed)
    return (3 * rng.standard_normal((len(tokens), VOCABULARY))).astype(np.float32)[rows]


def by_definition(prompt: list[int], length: int, shifted: bool, how: DiffusionSettings) -> Any:
    """llama.cpp's loop without chance, in plain Python."""
    tokens = [*prompt, *[MASK] * length]
    made = []
    if how.block_length is None:
        blocks = [(0, len(tokens), how.steps)]
    else:
        begins = [*range(len(prompt), len(tokens), how.block_length)]
        blocks = [
            (of, min(of + how.block_length, len(tokens)), how.steps // len(begins)) for of in begins
        ]
    for begin, end, steps in blocks:
        first = sum(tokens[place] == MASK for place in range(begin, end))
        for step in range(steps):
            masked = [place for place in range(begin, end) if tokens[place] == MASK]
            if not masked:
                break
            logits = model(tokens, range(len(tokens))).tolist()
            found = []
            for place in masked:
                row = list(logits[max(0, place - 1) if shifted else place])
                row[MASK] = -math.inf
                top = max(row)
                weights = [math.exp(value - top) for value in row]
                likely = [weight / sum(weights) for weight in weights]
                ranked = sorted(likely, reverse=True)
                certainty = {
                    "confidence": ranked[0],
                    "margin": ranked[0] - ranked[1],
                    "entropy": sum(p * math.log(p + 1e-10) for p in likely),
                }[how.algorithm]
                found.append((-certainty, place, row.index(top)))
            if how.block_length is not None:
                count = first // steps + (1 if step < first % steps else 0)
            elif step == steps - 1:
                count = len(masked)
            else:
                eps = how.eps if how.eps is not None else 1e-3
                t, s = 1 - step / steps * (1 - eps), 1 - (step + 1) / steps * (1 - eps)
                count = int(len(masked) * (1 - s / t))
            for _, place, token in sorted(found)[:count]:
                tokens[place] = token
            made.append([*tokens])
    return made


ALL = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0)


@pytest.mark.parametrize("algorithm", ["confidence", "margin", "entropy"])
@pytest.mark.parametrize("schedule", [{"eps": 0.1}, {"block_length": 4}, {"block_length": 5}, {}])
@pytest.mark.parametrize("shifted", [True, False])
def test_texts_are_those_of_the_definition(
    algorithm: Any, schedule: dict[str, Any], shifted: bool
) -> None:
    how = DiffusionSettings(steps=9, algorithm=algorithm, **schedule)
    for prompt in ([1, 2], [4, MASK, 3, 2, 12]):
        found = [*denoise(model, prompt, 13, Masks(MASK, shifted), ALL, how)]
        assert found == by_definition(prompt, 13, shifted, how)
        assert MASK not in found[-1][len(prompt) :]


def filled(how: DiffusionSettings, settings: SamplingSettings = ALL, of: Any = model) -> Any:
    *_, tokens = denoise(of, [1, 2], 13, Masks(MASK, False), settings, how)
    return tokens


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_drawn_texts_have_seeds(algorithm: Any) -> None:
    for schedule in ({}, {"block_length": 4}):
        how = DiffusionSettings(steps=6, algorithm=algorithm, alg_temp=0.5, **schedule)
        drawn = [filled(how, replace(ALL, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert all(MASK not in tokens for tokens in drawn)


def test_the_likeliest_tokens_alone_are_drawn() -> None:
    how = DiffusionSettings(steps=6)
    for only in ({"top_k": 1}, {"top_p": 0.0}, {"top_k": 5, "top_p": 0.0}):
        drawn = replace(ALL, temperature=1.0, seed=3, **only)
        assert filled(how, drawn) == filled(how, replace(drawn, temperature=0.0))
    one = DiffusionSettings(steps=6, algorithm="margin")
    assert MASK not in filled(one, replace(ALL, top_k=1))


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.7), (4, 0.7), (50, 0.9)])
def test_top_k_comes_before_top_p(top_k: int, top_p: float) -> None:
    """Each token as often as by its share of what is left, and no other one."""
    logits = np.log(np.random.default_rng(4).dirichlet(np.ones(VOCABULARY)))
    logits[MASK] = -np.inf
    order = np.argsort(-logits)[: top_k or VOCABULARY]
    likely = np.exp(logits[order]) / np.exp(logits[order]).sum()
    count = 1 + int((np.cumsum(likely) < top_p).sum()) if top_p < 1 else len(order)
    wanted = np.zeros(VOCABULARY)
    wanted[order[:count]] = likely[:count] / likely[:count].sum()

    def constant(tokens: Sequence[int], rows: Sequence[int]) -> Any:
        return np.tile(logits, (len(rows), 1))

    settings = SamplingSettings(temperature=1.0, top_k=top_k, top_p=top_p, seed=0)
    how = DiffusionSettings(steps=1)
    *_, tokens = denoise(constant, [9], 4000, Masks(MASK, True), settings, how)
    share = np.bincount(tokens[1:], minlength=VOCABULARY) / 4000
    assert not share[wanted == 0].any()
    assert np.abs(share - wanted).max() < 0.03


@pytest.mark.parametrize("gumbel_noise", [False, True])
def test_tokens_are_drawn_by_their_probabilities(gumbel_noise: bool) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2] + [1e-30] * (VOCABULARY - 3), np.float32))

    def constant(tokens: Sequence[int], rows: Sequence[int]) -> Any:
        return np.tile(logits, (len(rows), 1))

    how = DiffusionSettings(steps=1, gumbel_noise=gumbel_noise)
    settings = replace(ALL, temperature=2.0, seed=0)
    *_, tokens = denoise(constant, [9], 4000, Masks(MASK, True), settings, how)
    share = np.bincount(tokens[1:], minlength=VOCABULARY) / 4000
    wanted = np.sqrt([0.5, 0.3, 0.2])
    assert np.abs(share[:3] - wanted / wanted.sum()).max() < 0.03


def test_guidance_leads_away_from_texts_without_the_prompt() -> None:
    seen = []

    def noted(tokens: Sequence[int], rows: Sequence[int]) -> Any:
        seen.append(tokens[:2])
        return model(tokens, rows)

    scale = 2.0
    how = DiffusionSettings(steps=1, cfg_scale=scale)
    tokens = filled(how, of=noted)
    assert seen == [[1, 2], [MASK, MASK]]
    masked = [MASK] * 13
    with_prompt, without = (model([*of, *masked], range(2, 15)) for of in ([1, 2], [MASK, MASK]))
    logits = without + (1 + scale) * (with_prompt - without)
    logits[:, MASK] = -np.inf
    assert tokens[2:] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("eps", 0.0), ("eps", 1.0), ("block_length", 0), ("alg_temp", -1.0),
        ("cfg_scale", -0.5), ("algorithm", "best"),
    ],
)  # fmt: skip
def test_settings_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field):
        DiffusionSettings(**{field: value})
    with pytest.raises(SettingsError, match="two schedules"):
        DiffusionSettings(eps=0.1, block_length=4)
