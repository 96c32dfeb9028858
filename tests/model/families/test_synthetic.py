"""Models made up from a shape: sizes as published, weights as their type means them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.model.errors import SettingsError
from urdir.model.families import synthetic as shapes
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.stored import StoredMatrix
from urdir.model.families.synthetic import TYPES, RepeatedBlocks, SyntheticModel
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout

Tiny = Callable[[str], SyntheticModel]
#: Models by their names, as three tests look at them.
of_shape = cache(SyntheticModel)

#: Parameters of the text decoder, by the safetensors counts of the models' pages on Hugging Face.
#: Gemma 3: table 1 of arXiv 2503.19786. Gemma 4: general.size_label of its GGUF files, which have
#: keys and values for layers that use those of others (0.6 %). Falcon: with its output matrix.
#: GPT-2: counted by transformers.
_HEADS = {f"attention.{name}" for name in ("head_count_kv", "key_length", "value_length")}
#: Keys of attention in files of families that have none, or another kind.
_NO_ATTENTION = {"feed_forward_length", "attention.head_count", "rope.dimension_count", *_HEADS}
UNUSED = {
    "mamba": _NO_ATTENTION,
    "mamba2": _NO_ATTENTION,
    "rwkv7": {"attention.head_count", "rope.dimension_count", *_HEADS},
    "bert": {"rope.dimension_count"},
    "nemotron_h": {"rope.dimension_count"},
    "deepseek2": _HEADS,
    "deepseek32": _HEADS,
    "deepseek4": {"feed_forward_length"},
    "kimi-linear": _HEADS - {"attention.head_count_kv"},
}
#: As published; of qwen3.5-4b only the sum with its vision tower is.
PARAMETERS = {
    "lfm2-8b-a1b": 8.34e9,
    "mamba-2.8b": 2.77e9,
    "rwkv7-1.5b": 1_527_404_544,
    "mamba2-2.7b": 2.70e9,
    "falcon-h1-7b": 7.59e9,
    "granite-4.0-h-small": 32.2e9,
    "nemotron-h-8b": 8.1e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3.2-share": 10_602_490_624,
    "deepseek-v4-flash-share": 7_540_675_893,
    "kimi-linear-48b-a3b": 49.1e9,
    "qwen3-next-80b-a3b": 80e9,
    "qwen3.5-35b-a3b": 35e9,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "bert-base": 108_890_880,
    "bge-large": 334_091_264,
    "modernbert-large": 394_781_696,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116.83e9,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-4b": 675e6 + 3209e6,
    "gemma-3-27b": 1416e6 + 25600e6,
    "gemma-4-e4b": 7.5e9,
    "phi-4": 14_659_507_200,
    "granite-3.3-8b": 8_170_864_640,
    "olmo-2-7b": 7_298_617_344,
    "glm-4-9b": 9_399_951_360,
    "command-r7b": 8_028_033_024,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-7b": 7_173_923_840,
    "falcon-7b": 7_217_189_760,
    "gpt2-xl": 1_557_611_200,
    "glm-4.5-air": 106e9,
}
#: GB of files on Hugging Face, Q4_K_M where the shape has no other kind (bartowski's, Qwen's,
#: unsloth's and ggml-org's); with a vocabulary of some MB, which synthetic models do not have.
FILE_GB = {
    "llama-3.2-1b": 0.808,
    "llama-3.2-3b": 2.019,
    "llama-3.1-8b": 4.921,
    "llama-3.1-70b": 42.520,
    "mistral-small-24b": 14.33,
    "mixtral-8x7b": 28.45,
    "qwen2.5-0.5b": 0.398,
    "qwen2.5-1.5b": 0.986,
    "qwen2.5-7b": 4.683,
    "qwen2.5-32b": 19.85,
    "qwen3-0.6b": 0.397,
    "qwen3-8b": 5.03,
    "qwen3-30b-a3b": 18.56,
    "gpt-oss-20b": 12.11,
    "gemma-2-9b": 5.76,
    "gemma-3-4b": 2.49,
    "gemma-3-27b": 16.55,
    "phi-4": 9.05,
    "granite-3.3-8b": 4.94,
    "olmo-2-7b": 4.47,
    "glm-4-9b": 6.25,
    "command-r7b": 5.06,
    "smollm3-3b": 1.92,
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_config_accepts(name: str) -> None:
    """All of whose keys are read, but those that files of a family have and do not need."""
    config = Config.of(of_shape(name))
    assert (config.n_layers, config.hidden) == (SHAPES[name].layers, SHAPES[name].hidden)
    arch = SHAPES[name].arch
    unused = {"feed_forward_length"} if SHAPES[name].experts else set()
    unused |= UNUSED.get(arch, set())
    assert {key.removeprefix(f"{arch}.") for key in config.ignored_keys} <= unused


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-35b-a3b", "glm-4.5-air"])
def test_heads_for_predicting_several_tokens_are_read_on_demand(name: str) -> None:
    model = SyntheticModel(name)
    (head,) = Config.of(model, nextn=True).nextn
    assert head.layer.attention is not None
    assert Config.of(model).nextn == ()


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "qwen3.5-4b"])
def test_every_shape_has_the_published_number_of_parameters(name: str) -> None:
    """Without heads for predicting several tokens."""
    tensors, heads = of_shape(name).tensors, f"blk.{SHAPES[name].layers}."
    found = sum(math.prod(tensors[t].shape) for t in tensors if not t.startswith(heads))
    assert found == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", FILE_GB)
def test_the_recipe_makes_files_of_the_known_size(name: str) -> None:
    nbytes = sum(tensor.nbytes for tensor in of_shape(name).tensors.values())
    assert nbytes == pytest.approx(FILE_GB[name] * 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("shape", "kind", "types"),
    [
        (
            "mixtral-8x7b",
            "q4_k_m",
            {
                "attn_q": "Q4_K",
                "attn_k": "Q8_0",
                "attn_v": "Q8_0",
                "attn_output": "Q5_K",
                "ffn_gate_inp": "F32",
                "ffn_gate_exps": "Q4_K",
                "ffn_down_exps": "Q6_K",
            },
        ),
        (
            "qwen3-30b-a3b",
            "q4_k_m",
            {
                "attn_k": "Q4_K",
                "attn_v": "Q6_K",
                "attn_output": "Q4_K",
                "ffn_down_exps": "Q6_K",
            },
        ),
        ("gpt-oss-20b", None, {"attn_q": "Q8_0", "ffn_gate_inp": "F32", "ffn_up_exps": "MXFP4"}),
        (
            "gpt-oss-20b",
            "q4_k_m",
            {"attn_q": "Q5_0", "attn_v": "Q8_0", "ffn_up_exps": "Q5_0", "ffn_down_exps": "Q8_0"},
        ),
        ("phi-4", "q4_k_m", {"attn_qkv": "Q5_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K"}),
        ("falcon-7b", "q4_k_m", {"attn_qkv": "Q5_1", "attn_output": "Q5_0", "ffn_down": "Q6_K"}),
        ("glm-4-9b", "q4_k_m", {"attn_qkv": "Q5_K", "ffn_down": "Q8_0"}),
        ("qwen3-30b-a3b", "q8_0", {"attn_q": "Q8_0", "ffn_gate_inp": "F32"}),
    ],
)
def test_types_are_those_of_llama_cpp_s_quantiser(
    shape: str, kind: str | None, types: dict[str, str]
) -> None:
    """In the first layer; read off `llama_tensor_get_type_impl` and `tensor_type_fallback`."""
    tensors = SyntheticModel(shape, kind).tensors
    assert {name: tensors[f"blk.0.{name}.weight"].type_name for name in types} == types


@pytest.mark.parametrize(
    ("shape", "types"),
    [
        ("gpt2-xl", {"token_embd": "Q8_0", "position_embd": "F32"}),
        ("falcon-7b", {"token_embd": "Q5_0", "output": "Q8_0"}),
        ("phi-4", {"token_embd": "Q4_K", "output": "Q6_K"}),
        ("smollm3-3b", {"token_embd": "Q6_K"}),
        (
            "gemma-4-e4b",
            {
                "token_embd": "Q6_K",
                "per_layer_token_embd": "Q6_K",
                "per_layer_model_proj": "BF16",
            },
        ),
    ],
)
def test_types_of_tables(shape: str, types: dict[str, str]) -> None:
    tensors = SyntheticModel(shape, "q4_k_m").tensors
    assert {name: tensors[f"{name}.weight"].type_name for name in types} == types


def test_values_of_70b_models_have_more_bits() -> None:
    tensors = SyntheticModel("llama-3.1-70b", "q4_k_m").tensors
    found = [tensors[f"blk.{layer}.attn_v.weight"].type_name for layer in (9, 10, 12, 69, 70)]
    assert found == ["Q6_K", "Q5_K", "Q6_K", "Q6_K", "Q6_K"]


def test_tokens_choose_different_experts() -> None:
    """Whatever the vector: every expert's row is its own."""
    tensor = SyntheticModel("qwen3-30b-a3b").tensors["blk.7.ffn_gate_inp.weight"]
    router = np.frombuffer(bytes(tensor.data[:]), np.float32).reshape(tensor.shape)
    x = np.random.default_rng(1).standard_normal((500, router.shape[1]))
    chosen = np.argsort(x @ router.T, axis=1)[:, -8:]
    used = np.bincount(chosen.ravel(), minlength=128)
    assert used.min() > 0
    assert used.max() < 4 * used.mean()


def test_an_8b_model_has_the_bytes_of_a_quantised_file() -> None:
    """As counted by type in a file that the gguf package wrote for this shape and recipe."""
    tensors = SyntheticModel("llama-3.1-8b", "q4_k_m").tensors.values()
    by_type = {
        kind: sum(t.nbytes for t in tensors if t.type_name == kind)
        for kind in ("F32", "Q4_K", "Q6_K")
    }
    assert by_type == {"F32": 1_064_960, "Q4_K": 3_655_139_328, "Q6_K": 1_256_693_760}


def test_rows_that_no_block_fits_fall_back() -> None:
    tensors = SyntheticModel("qwen2.5-0.5b", "q4_k_m").tensors  # 896 columns
    assert tensors["blk.0.attn_q.weight"].type_name == "Q5_0"
    assert tensors["blk.0.ffn_down.weight"].type_name == "Q6_K"
    assert tensors["token_embd.weight"].type_name == "Q8_0"


def test_repeated_blocks_are_cut_anywhere() -> None:
    pool = np.arange(210, dtype=np.uint8)
    data = RepeatedBlocks(pool, 1000)
    whole = np.tile(pool, 5)[:1000]
    for begin, end in ((0, 1000), (3, 7), (209, 211), (420, 999), (990, 2000)):
        np.testing.assert_array_equal(data[begin:end], whole[begin:end])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SyntheticModel]:
    """A model of one small layer, of a type."""
    norms = ("ffn_gate.weight", "attn_q_norm.weight", "attn_k_norm.weight")
    shape = Shape("qwen3", 1, 256, 4, 2, 64, 256, 77, tied=False, layer=norms)
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setattr(shapes, "_POOL_BLOCKS", 64)
    return lambda kind: SyntheticModel("tiny", kind)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", TYPES)
def test_a_small_one_is_loaded(kind: str, device_name: str, tiny: Tiny) -> None:
    model = tiny(kind)
    with (
        Device.open(device_name) as device,
        Weights.load(model, Config.of(model), device) as weights,
    ):
        q = weights.matrix(StoredMatrix.whole("blk.0.attn_q.weight", 256, 256))
        layout = Layout(FORMATS[model.tensors["blk.0.attn_q.weight"].type_name], 256, 256)
        expected = layout.unpack(layout.pack(model.tensors["blk.0.attn_q.weight"].data[:]))
        np.testing.assert_array_equal(layout.unpack(q.data.download(np.uint8)), expected)
        assert expected.std() == pytest.approx(0.7 / 16, rel=0.3)


def check_decodes(model: SyntheticModel, device_name: str) -> None:
    """A prompt and a token."""
    with (
        Device.open(device_name) as device,
        Weights.load(model, Config.of(model), device) as weights,
        stepping(device, weights, SessionSettings(16)) as eager,
    ):
        eager.feed([1, 2, 3])
        assert np.isfinite(eager.logits()).all()
        eager.feed([4])
        assert 0 <= eager.step()[0] < 77


@pytest.mark.turns(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_a_small_one_decodes(kind: str, device_name: str, tiny: Tiny) -> None:
    check_decodes(tiny(kind), device_name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_k_m", "mxfp4_moe"])
def test_a_small_mixture_decodes(
    kind: str, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "rope.freq_base": 1e6,
    }
    norms = ("attn_q_norm.weight", "attn_k_norm.weight")
    tiny = Shape("qwen3moe", 1, 256, 4, 2, 64, 256, 77, tied=False, keys=keys, layer=norms)
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    monkeypatch.setattr(shapes, "_POOL_BLOCKS", 64)
    check_decodes(SyntheticModel("tiny", kind), device_name)


def test_unknown_shapes_and_types_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"no shape 'gpt-5': one of llama-3\.2-1b"):
        SyntheticModel("gpt-5", "q4_k_m")
    with pytest.raises(SettingsError, match="no weight type 'q9': one of"):
        SyntheticModel("llama-3.1-8b", "q9")
