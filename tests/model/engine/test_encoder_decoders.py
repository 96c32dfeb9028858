"""Encoder-decoders, against llama.cpp's logits (`tests/data/encoder_decoders`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from tests.model.stepping import Eager, Numbers
from urdir.model.engine.engine import Engine
from urdir.model.engine.logits import logits_of
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.sources import with_source
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.engine.sources import SourceBudget
from urdir.model.errors import ContextFullError, ModelError, SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.placement import Placement
from urdir.model.families.stored import MOST_DISTANCE, RelativeBias, StoredVector
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.measure.perplexity import Chunk, logits_of_chunks
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms

EXACT_RELATIVE_RMS = 1e-4
#: Positions of the emulator's default run.
FEW = 3


@dataclass(frozen=True)
class Golden:
    """An engine, exact, with ``source`` and ``tokens``, and llama.cpp's ``logits`` after each;
    ``native`` is the error of its own kernels."""

    engine: Engine
    source: list[int]
    tokens: list[int]
    logits: Any
    native: float

    def session(self, **options: Any) -> Session:
        """Another session, by default not exact, with an f16 cache."""
        weights = self.engine.weights
        return Session(self.engine.device, weights, SessionSettings(64, chunk=32, **options))


@pytest.fixture(scope="module")
def golden(
    request: pytest.FixtureRequest,
    device_name: str,
    reference_file: Callable[[str], Path],
    reference_golden: Callable[[str, str], Path],
) -> Iterator[Golden]:
    name, whole = request.param, request.config.getoption("--full") or device_name == "cuda"
    with np.load(reference_golden("encoder_decoders", name)) as file:
        count = len(file["tokens"]) if whole else FEW
        source, tokens = (file[of].tolist() for of in ("encoder_tokens", "tokens"))
        logits, native = file["logits"][:count], float(file["native"])
    with Engine.open(
        reference_file(name), device=device_name, context=64, chunk=32, kv_dtype="f32", exact=True
    ) as engine:
        yield Golden(engine, source, tokens[:count], logits, native)


of_each = pytest.mark.references("encoder_decoders", ["t5"], argument="golden")


@of_each
def test_exact_logits_are_llama_cpp_s(golden: Golden) -> None:
    found = golden.engine.logits(golden.source, decoder=golden.tokens)
    assert relative_rms(found, golden.logits) <= EXACT_RELATIVE_RMS


@of_each
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param({}, marks=pytest.mark.full, id="whole"),
        pytest.param({"page_len": 16}, id="pages"),
    ],
)
def test_default_logits_are_at_least_as_near_as_llama_cpp_s(
    golden: Golden, pages: dict[str, Any]
) -> None:
    with golden.session(**pages) as session:
        found = logits_of(session, golden.tokens, source=golden.source)
    assert relative_rms(found, golden.logits) <= max(2e-3, 1.1 * golden.native)


@of_each
@pytest.mark.parametrize("exact", [True, False])
def test_prompts_of_decoders(golden: Golden, exact: bool) -> None:
    """The decoder's tokens all at once, as a preempted answer's are."""
    options = {"kv_dtype": "f32", "exact": True} if exact else {}
    request = Request(
        prompt=tuple(golden.tokens), source=tuple(golden.source), settings=GREEDY, limit=1
    )
    rows: list[Any] = []

    def note(answer: Any, tokens: Sequence[int], logits: Any) -> int:
        rows.append(logits.copy())
        return 0

    with golden.session(page_len=16, **options) as session:
        answered(session, [request], choose=note)
    bound = EXACT_RELATIVE_RMS if exact else max(2e-3, 1.1 * golden.native)
    assert relative_rms(rows[0], golden.logits[len(golden.tokens) - 1]) <= bound


def answered(
    session: Session,
    requests: Sequence[Request],
    choose: Any = None,
    counts: list[int] | None = None,
    **limits: Any,
) -> list[tuple[list[int], Ending]]:
    """The tokens and endings of requests that are open together; ``counts`` receives how often one
    was preempted."""
    items: list[list[Any]] = [[] for _ in requests]
    chosen = replace(Limits.for_throughput(session.shapes, len(requests)), **limits)
    with AnswerLoop(session, None, chosen, choose=choose) as loop:
        answers = [loop.answer_to(request) for request in requests]
        for answer in answers:
            loop.add(answer)
        while not loop.is_idle:
            loop.turn()
            for answer, some in loop.take_items().items():
                items[answers.index(answer)] += some
        if counts is not None:
            counts.append(loop.metrics().preemptions)
    found = []
    for some in items:
        *pieces, ending = some
        assert isinstance(ending, Ending), ending
        tokens = [c.token for piece in pieces if isinstance(piece, Piece) for c in piece.choices]
        found.append((tokens, ending))
    return found


def sources_of(golden: Golden) -> list[tuple[int, ...]]:
    """Texts for the encoder, of several lengths."""
    source = golden.source
    return [tuple(source), tuple(source[5:6]), tuple(source[3:20]), tuple(source[::-1][:7])]


EXACT: dict[str, Any] = {"kv_dtype": "f32", "exact": True, "page_len": 16}


@of_each
def test_answers_side_by_side_are_those_of_each_alone(golden: Golden) -> None:
    """Sources of several lengths, in exact arithmetic."""
    sources = sources_of(golden)[1:]  # the whole one: test_exact_logits_are_llama_cpp_s
    requests = [Request(prompt=source, settings=GREEDY, limit=2) for source in sources]
    with golden.session(**EXACT) as session:
        alone = [answered(session, [request])[0] for request in requests]
    assert len({tuple(tokens) for tokens, _ in alone}) > 1
    assert [ending.prompt_tokens for _, ending in alone] == [len(r.prompt) for r in requests]
    with golden.session(**EXACT, sequences=3) as session:
        assert answered(session, requests) == alone


@of_each
@pytest.mark.full
def test_a_preempted_answer_is_encoded_again(golden: Golden) -> None:
    requests = [
        Request(prompt=source, settings=GREEDY, limit=20) for source in sources_of(golden)[1::2]
    ]
    with golden.session(**EXACT) as session:
        alone = [answered(session, [request])[0] for request in requests]
    preempted: list[int] = []
    with golden.session(**EXACT, sequences=2, pages=3) as session:
        together = answered(session, requests, ahead=1, counts=preempted)
    assert together == alone
    assert preempted == [1]


@of_each
def test_a_graph_is_its_launches(golden: Golden) -> None:
    requests = [Request(prompt=of, settings=GREEDY, limit=2) for of in sources_of(golden)[1:3]]
    with golden.session(sequences=2) as session:
        recorded = answered(session, requests)
    weights, settings = golden.engine.weights, SessionSettings(64, chunk=32, sequences=2)
    with Session(golden.engine.device, weights, settings, observer=Eager()) as session:
        assert answered(session, requests) == recorded


@of_each
def test_weights_of_the_decoder_in_files(golden: Golden, device_name: str, tmp_path: Path) -> None:
    """Those of cross attention are read for sources."""
    options: dict[str, Any] = {"placement": Placement(gpu_layers=0), "stream_dir": tmp_path}
    with Engine.open(
        golden.engine.file.path, device=device_name, context=64, chunk=32, host_memory=0, **options
    ) as engine:
        found = engine.logits(golden.source, decoder=golden.tokens[:1])
    assert relative_rms(found, golden.logits[:1]) <= max(2e-3, 1.1 * golden.native)


@of_each
def test_requests_have_sources(golden: Golden) -> None:
    session = golden.engine.session
    made = with_source(session, None, Request(prompt=(5, 6)))
    assert (made.prompt, made.source) == ((0,), (5, 6))
    assert with_source(session, None, made) is made
    numbers: Any = Numbers()
    numbers.ends_texts_with = 1
    for prompt in ((5, 6), (5, 6, 1)):
        assert with_source(session, numbers, Request(prompt=prompt)).source == (5, 6, 1)
    with pytest.raises(ModelError, match="token id 128 is outside the vocabulary"):
        with_source(session, None, Request(prompt=(128,)))
    with pytest.raises(ContextFullError, match="65 tokens exceed the context of 64 by 1"):
        with_source(session, None, Request(prompt=(3,) * 65))
    with pytest.raises(ModelError, match="the text is empty"):
        golden.engine.logits([], decoder=[0])


@of_each
def test_the_longest_source_fills_the_context(golden: Golden) -> None:
    request = Request(prompt=tuple(golden.source * 3)[:64], settings=GREEDY, limit=2)
    with golden.session(page_len=16) as session:
        ((tokens, ending),) = answered(session, [request])
    assert len(tokens) == 2
    assert ending.prompt_tokens == 64


@of_each
def test_texts_have_no_probabilities(golden: Golden) -> None:
    with pytest.raises(UnsupportedError, match="predicts its answer, not its text"):
        golden.engine.perplexity(golden.tokens)
    with pytest.raises(UnsupportedError, match="predicts its answer, not its text"):
        next(logits_of_chunks(golden.engine.session, [Chunk((3, 4, 5, 6))]))


@of_each
def test_what_encoder_decoders_do_not_have(golden: Golden, device_name: str) -> None:
    path = golden.engine.file.path
    with pytest.raises(UnsupportedError, match="steps one at a time of an encoder-decoder"):
        EagerSteps(golden.engine.session)
    chunks = [Chunk(tuple(golden.source[:8]))]
    for scored in (
        lambda: golden.engine.perplexity(golden.source),
        lambda: next(logits_of_chunks(golden.engine.session, chunks)),
    ):
        with pytest.raises(UnsupportedError, match="predicts its answer, not its text"):
            scored()
    with pytest.raises(SettingsError, match="an encoder reads up to 61440 at once"):
        SourceBudget.of(golden.engine.session.parts, 61441)
    refused: dict[str, dict[str, Any]] = {
        "drafts": {"drafts": DraftSettings()},
        "LoRA adapters": {"max_adapters": 1},
    }
    with pytest.raises(UnsupportedError, match="drafts are those of decoders, 't5' models are"):
        Engine.open(path, device=device_name, context=64, draft=path)
    for what, options in refused.items():
        with pytest.raises(UnsupportedError, match=f"'t5' models with {what} are not supported"):
            Engine.open(path, device=device_name, context=64, **options)


def test_a_decoder_has_no_source(device_name: str) -> None:
    with (
        Engine.open(device=device_name, context=64) as engine,
        pytest.raises(SettingsError, match="the model has no encoder"),
    ):
        with_source(engine.session, None, Request(prompt=(5,), source=(6,)))


@of_each
def test_embeddings_are_those_of_the_encoder(golden: Golden, device_name: str) -> None:
    """Keys of cross attention are products of them."""
    with Engine.open(
        golden.engine.file.path, device=device_name, embeddings=True, context=64, exact=True
    ) as engine:
        texts = [golden.source, golden.source[:5]]
        states = engine.embed(texts, pooling="none", normalize=False)
        alone = engine.embed(texts[1:], pooling="none", normalize=False)
    assert states.shape == (len(golden.source) + 5, golden.engine.config.hidden)
    np.testing.assert_allclose(states[-5:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets", [8, 32, 64])
def test_buckets_of_distances_are_transformers(buckets: int, causal: bool) -> None:
    """`T5Attention._relative_position_bucket`, in its f32."""
    bias = RelativeBias(StoredVector.whole("b", buckets, 1), buckets, 1, causal)
    (found,) = bias.table(np.arange(buckets, dtype=np.float32))
    distance = np.arange(-MOST_DISTANCE, 1 if causal else MOST_DISTANCE + 1)
    count = buckets if causal else buckets // 2
    near, away = count // 2, np.maximum(np.abs(distance), 1).astype(np.float32)
    scale = np.float32(count - near) / np.float32(np.log(MOST_DISTANCE / near))
    far = near + (np.log(away / np.float32(near)) * scale + np.float32(1e-6)).astype(np.int64)
    wanted = np.where(np.abs(distance) < near, np.abs(distance), np.minimum(far, count - 1))
    wanted += (distance > 0) * count
    np.testing.assert_array_equal(found[: len(wanted)], wanted)


#: Modules of transformers' T5 by their names in GGUF files.
_MODULES = {
    **{f"attn_{of}": f"layer.0.SelfAttention.{of}" for of in "qkvo"},
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm",
    **{f"cross_attn_{of}": f"layer.1.EncDecAttention.{of}" for of in "qkvo"},
    "cross_attn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.FFN.DenseReluDense.wi_0",
    "ffn_up": "layer.FFN.DenseReluDense.wi_1",
    "ffn_down": "layer.FFN.DenseReluDense.wo",
    "ffn_norm": "layer.FFN.layer_norm",
    "token_embd": "shared",
    "output": "lm_head",
    "enc.output_norm": "encoder.final_layer_norm",
    "dec.output_norm": "decoder.final_layer_norm",
}
_CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 128,
    "d_kv": 64,
    "d_ff": 192,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "vocab_size": 128,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": float(np.float32(1e-5)),
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
}


def stored_name(name: str) -> str:
    """A tensor's name in a folder."""
    part, blk, rest = name.removesuffix(".weight").partition(".blk.")
    if not blk:
        return f"{_MODULES[part]}.weight"
    number, _, module = rest.partition(".")
    network = "1" if part == "enc" else "2"
    return f"{part}oder.block.{number}.{_MODULES[module].replace('FFN', network)}.weight"


def values_of(path: Path) -> dict[str, Any]:
    """The weights of a golden as a folder stores them."""
    return {
        stored_name(tensor.name): (
            "F32",
            np.ascontiguousarray(
                reference.quants.dequantize(tensor.data, tensor.tensor_type), np.float32
            ),
        )
        for tensor in reference.GGUFReader(path).tensors
    }


def opened(folder: Path, device_name: str, **options: Any) -> Engine:
    return Engine.open(
        folder, device=device_name, context=32, kv_dtype="f32", exact=True, **options
    )


@of_each
def test_folders_as_transformers_writes_them(
    golden: Golden, make_folder: Callable[..., Path], device_name: str
) -> None:
    """Logits of a tied embedding are divided by the root of the width."""
    weights = values_of(Path(golden.engine.file.path))
    with opened(make_folder(_CONFIG, weights), device_name) as engine:
        assert engine.config.layers == golden.engine.config.layers
        found = engine.logits(golden.source, decoder=golden.tokens[:1])
    assert relative_rms(found, golden.logits[:1]) <= EXACT_RELATIVE_RMS
    del weights["lm_head.weight"]
    tied = make_folder({**_CONFIG, "tie_word_embeddings": True}, weights)
    with Engine.open(tied, device=device_name, embeddings=True, context=32) as engine:
        assert engine.config.n_layers == 2
    with SafetensorsModel(tied) as model:
        config = Config.of(model)
    assert config.tied
    assert config.logit_scale == 128**-0.5


@of_each
def test_a_folder_of_an_encoder_alone(golden: Golden, make_folder: Callable[..., Path]) -> None:
    weights = values_of(Path(golden.engine.file.path))
    alone = {name: of for name, of in weights.items() if name.startswith(("enc", "shared"))}
    with SafetensorsModel(
        make_folder({**_CONFIG, "architectures": ["T5EncoderModel"]}, alone)
    ) as model:
        config = Config.of(model)
    assert (config.architecture, config.is_causal) == ("t5encoder", False)
    source = golden.engine.config.source
    assert source is not None
    assert config.layers == source.encoder.layers


@of_each
@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("feed_forward_proj", "gated-silu", "'relu' and 'gated-gelu' are supported"),
        ("relative_attention_max_distance", 256, "128 is supported"),
        ("num_decoder_layers", 10**6, "num_decoder_layers|decoder_block_count"),
        ("d_kv", 0, "d_kv"),
        ("decoder_start_token_id", 128, "decoder_start_token_id' is 128"),
        ("relative_attention_num_buckets", 7, "expected an even number"),
    ],
)
def test_folders_that_are_refused(
    golden: Golden, make_folder: Callable[..., Path], field: str, value: Any, what: str
) -> None:
    weights = values_of(Path(golden.engine.file.path))
    folder = make_folder({**_CONFIG, field: value}, weights)
    with pytest.raises(ModelError, match=what), SafetensorsModel(folder) as model:
        Config.of(model)
