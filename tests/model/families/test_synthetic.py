"""Models made up from a shape: sizes as published, weights as their type means them."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.model.engine.batch import Output
from urdir.model.engine.session import Session
from urdir.model.errors import SettingsError
from urdir.model.families import synthetic as shapes
from urdir.model.families.description import Config
from urdir.model.families.stored import StoredMatrix
from urdir.model.families.synthetic import SHAPES, TYPES, RepeatedBlocks, Shape, SyntheticModel
from urdir.model.memory.weights import Weights
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_config_accepts(name: str) -> None:
    model = SyntheticModel(name, "q4_k_m")
    config = Config.from_gguf(model)
    assert (config.n_layers, config.hidden) == (SHAPES[name].layers, SHAPES[name].hidden)


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


def test_repeated_blocks_are_cut_anywhere() -> None:
    pool = np.arange(210, dtype=np.uint8)
    data = RepeatedBlocks(pool, 1000)
    whole = np.tile(pool, 5)[:1000]
    for begin, end in ((0, 1000), (3, 7), (209, 211), (420, 999), (990, 2000)):
        np.testing.assert_array_equal(data[begin:end], whole[begin:end])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_a_small_one_decodes(kind: str, device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape("qwen3", 1, 256, 4, 2, 64, 256, 77, 1e6, False))
    monkeypatch.setattr(shapes, "_POOL_BLOCKS", 64)
    model = SyntheticModel("tiny", kind)
    with (
        Device.open(device_name) as device,
        Weights.load(model, Config.from_gguf(model), device) as weights,
        Session(device, weights, 16) as session,
    ):
        q = weights.matrix(StoredMatrix.whole("blk.0.attn_q.weight", 256, 256))
        layout = Layout(FORMATS[model.tensors["blk.0.attn_q.weight"].type_name], 256, 256)
        expected = layout.unpack(layout.pack(model.tensors["blk.0.attn_q.weight"].data[:]))
        np.testing.assert_array_equal(layout.unpack(q.data.download(np.uint8)), expected)
        assert expected.std() == pytest.approx(0.7 / 16, rel=0.3)
        session.feed([1, 2, 3])
        assert np.isfinite(session.logits_step()).all()
        session.feed([4])
        assert 0 <= session.forward_gpu_resident_to_token_id((0,), Output.GREEDY)[0] < 77


def test_unknown_shapes_and_types_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"--shape gpt-5: one of llama-3\.2-1b"):
        SyntheticModel("gpt-5", "q4_k_m")
    with pytest.raises(SettingsError, match="--type q9"):
        SyntheticModel("llama-3.1-8b", "q9")
