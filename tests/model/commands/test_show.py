"""`urdir show`: whether a model runs here, its memory, layers, tensors and metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from tests.model.files.quantised_folders import KINDS, quantised, write_safetensors
from tests.model.tiny_encoder import write_encoder
from urdir.model.commands.show import _count_text
from urdir.model.figures import rounded
from urdir.model.files.demo import demo_model
from urdir.model.files.safetensors import read_folder

Cli = Callable[..., tuple[int, str, str]]


def test_show_says_first_whether_it_runs(
    cli: Cli, make_gguf: Callable[..., Path], write_llama: Callable[..., Path], tmp_path: Path
) -> None:
    code, out, _ = cli("show", "demo", "-c", "100")
    first, second, *rest = out.splitlines()
    assert code == 0
    assert "runs on the emulator" in first
    assert "a GPU needs" in first
    assert first.count("emulator") == 1
    assert "((" not in first
    assert "))" not in first
    assert "Q4_K_M, 5.25 M parameters" in second
    at = rest.index("memory on the device:")
    assert rest[at + 1].split()[0] == "context"
    assert [row.split()[0] for row in rest[at + 2 : at + 4]] == ["100", "512"]
    for name, message in (
        ("pockettts", "architecture 'pockettts'"),
        ("clip", "multi-modal projector"),
    ):
        code, out, err = cli("show", write_llama(f"{name}.gguf", arch=name))
        assert (code, err) == (1, "")
        assert f"cannot run: architecture '{name}' is not supported" in out.splitlines()[0]
        assert message in out.splitlines()[0]
    for kind, message in {
        "adapter": "a LoRA adapter: open its model",
        "mmproj": "a multi-modal projector",
        "imatrix": "an importance matrix",
    }.items():
        path = make_gguf({"general.architecture": "llama", "general.type": kind})
        assert message in cli("show", path)[1].splitlines()[0]
        code, out, err = cli("run", path, "x")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err
    path = write_encoder(tmp_path / "encoder.gguf")
    assert "'bert' models are encoders" in cli("run", path, "x")[2]
    message = cli("run", write_llama("pockettts.gguf", arch="pockettts"), "x")[2]
    assert len(message) < 250  # no list of all architectures


def test_show_lists_what_of_a_folder_is_skipped(cli: Cli, data: Path, tmp_path: Path) -> None:
    """Of a wrapper: tensors of other parts, and fields without effect, by their names."""
    folder = Path(shutil.copytree(data / "safetensors" / "llama-bf16", tmp_path / "wrapper"))
    text = json.loads((folder / "config.json").read_text()) | {"initializer_range": 0.1}
    wrapper = {"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(wrapper))
    stored = {}
    for name, of in read_folder(folder).items():
        stored[f"language_model.{name}"] = of.data[:].view(bfloat16).reshape(of.shape)
    others = ["multi_modal_projector.linear_1.bias", "vision_tower.a.weight"]
    stored |= {name: np.zeros(3, np.float32) for name in others}
    write_safetensors(folder / "model.safetensors", stored)
    code, out, _ = cli("show", folder)
    assert code == 0
    title = "tensors of other parts of the model:\n"
    assert f"{title}  {others[0]}\n  {others[1]}\n\n" in out
    assert "fields of config.json without effect:\n" in out
    assert "\n  initializer_range\n" in out
    found = json.loads(cli("show", folder, "--json")[1])
    assert found["unused_tensors"] == others
    assert "initializer_range" in found["ignored_fields"]
    read = {"model_type", "vocab_size", "eos_token_id", "bos_token_id", "architectures"}
    assert read & text.keys()
    assert not read & {*found["ignored_fields"]}
    plain = cli("show", data / "safetensors" / "llama-bf16")[1]
    assert title not in plain


def test_show_says_how_a_folder_is_quantised(cli: Cli, data: Path, tmp_path: Path) -> None:
    plain = data / "safetensors" / "llama-bf16"
    path = quantised(plain, KINDS["gptq-order"], tmp_path)[0]
    kind = "integers of 4 bits, groups of 32, columns in order of activations"
    assert f"\nquantised (gptq): 14 matrices of {kind}\n" in cli("show", path)[1]
    found = json.loads(cli("show", path, "--json")[1])["quantisation"]
    assert found == {"method": "gptq", "kinds": [{"kind": kind, "matrices": 14}]}
    assert "quantised" not in cli("show", plain)[1]
    assert json.loads(cli("show", plain, "--json")[1])["quantisation"] == {}


def test_what_would_be_streamed(cli: Cli) -> None:
    code, out, _ = cli("show", "demo", "--gpu", "1G", "-ngl", "3", "--json")
    report = json.loads(out)
    names = [f"blk.{layer}." for layer in range(4)]
    tensors = [t for t in report["tensors"] if t["name"].startswith(tuple(names))]
    nbytes = sum(tensor["bytes"] for tensor in tensors if len(tensor["shape"]) == 2)
    assert code == 0
    assert nbytes <= report["streamed"]["nbytes"] < 1.1 * nbytes
    assert not report["streamed"]["measured"]
    for split, on in (("tensors", "each GPU"), ("layers", "all GPUs")):
        wanted = ("show", "demo", "--gpus", "2", "--split", split, "-ngl", "3", "--json")
        found = json.loads(cli(*wanted)[1])
        assert found["streamed"]["on"] == on
        assert len(found["memory"]) % 2 == 0  # a row of each GPU
        times = 1 if split == "layers" else 2
        assert nbytes <= times * found["streamed"]["nbytes"] < 1.6 * nbytes
    assert not json.loads(cli("show", "demo", "--json")[1])["streamed"]
    wanted = ("-ngl", "0", "--host-memory", "1M", "--stream-dir", "layers")
    found = json.loads(cli("show", "demo", "--json", *wanted)[1])["streamed"]
    assert found["nbytes"] - 1_000_000 <= found["in_files"] <= found["nbytes"]
    assert "not enough host memory" in cli("show", "demo", *wanted[:4])[1]
    code, out, _ = cli("show", "demo", "--gpu", "100M", "-c", "100")
    assert code == 1
    assert "are streamed from host memory beside" in out
    assert "cannot run here: needs" in out


def test_show_needs_no_tokeniser(cli: Cli, nano: Path) -> None:
    code, out, _ = cli("show", nano, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["types"]["Q8_0"]["count"] == 16
    assert report["verdict"]["runs"]
    (memory,) = report["memory"]
    assert memory["context"] == report["model"]["context"]
    assert memory["total"] > memory["weights"] > 900_000
    others = {"context", "total"}
    assert memory["total"] == sum(memory[name] for name in memory.keys() - others)
    assert sum(tensor["bytes"] for tensor in report["tensors"]) == report["bytes"]
    values = 2 * 2 * 2 * 64  # layers, keys and values, KV heads, dimensions
    assert report["cache"] == {
        "f32": 4 * values,
        "f16": 2 * values,
        "bf16": 2 * values,
        "q8_0": values * 34 // 32,
        "fp8": values + 4 * values // 64,
        "q4_0": values * 18 // 32,
    }
    assert report["roles"][0] == {
        "role": "token_embd",
        "shape": [320, 256],
        "type": "Q8_0",
        "count": 1,
    }
    assert {"role": "ffn_norm", "shape": [256], "type": "F32", "count": 2} in report["roles"]
    assert sum(entry["count"] for entry in report["roles"]) == len(report["tensors"])
    assert "im_start" in cli("show", demo_model(), "--template")[1]
    assert cli("show", nano, "--template")[0] == 1


def test_show_has_the_memory_of_each_rank(cli: Cli) -> None:
    alone = json.loads(cli("show", "demo", "--json")[1])["memory"]
    memory = json.loads(cli("show", "demo", "--gpus", "2", "--json")[1])["memory"]
    assert [(row["context"], row["rank"]) for row in memory] == [(512, 0), (512, 1)]
    assert all(row["exchange"] > 0 for row in memory)
    assert alone[0]["weights"] < sum(row["weights"] for row in memory) < 2 * alone[0]["weights"]
    first, *rest = cli("show", "demo", "--gpus", "0,3")[1].splitlines()
    assert "each of 2 GPUs needs up to" in first
    at = rest.index("memory on each device:")
    assert rest[at + 1].split()[:2] == ["context", "rank"]
    assert [row.split()[:2] for row in rest[at + 2 : at + 4]] == [["512", "0"], ["512", "1"]]
    code, out, _ = cli("show", "demo", "--gpus", "5000")
    assert (code, "cannot be split between 5000 GPUs" in out) == (1, True)


def test_show_describes_layers_that_differ(cli: Cli, reference_file: Callable[[str], Path]) -> None:
    """Windows, experts, sinks; and the keys of other architectures that the file has, too."""
    path = reference_file("gpt-oss-moe")
    code, out, _ = cli("show", path, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["model"]["hidden"] == 128
    windowed, whole = report["layers"]
    assert (windowed["layers"], whole["layers"]) == ([0], [1])
    (attention,), (experts,) = windowed["blocks"]
    assert attention["rope"] == {"kind": "half", "dim": 64, "base": 10000.0}
    assert (attention["heads"], attention["kv_heads"], attention["window"]) == (2, 1, 20)
    assert attention["sinks"] is attention["bias"] is True
    assert (experts["experts"], experts["used"], experts["width"]) == (4, 2, 192)
    assert whole["blocks"] == [[{k: v for k, v in attention.items() if k != "window"}], [experts]]
    assert "gpt-oss.wkv.head_size" in report["ignored_keys"]
    assert "gpt-oss.expert_count" not in report["ignored_keys"]
    lines = cli("show", path)[1].splitlines()
    at = lines.index("  layer 0:")
    assert lines[at + 1].startswith(
        "    attention, heads 2, kv heads 1, dim 64, window 20, rope (half,"
    )
    assert lines[at + 2].startswith(
        "    experts, experts 4, used 2, width 192, activation swiglu_oai"
    )
    assert "  gpt-oss.wkv.head_size" in lines


def test_show_puts_equal_layers_together(cli: Cli, reference_file: Callable[[str], Path]) -> None:
    """Attention beside a feed-forward network in both layers."""
    path = reference_file("falcon-dense")
    (group,) = json.loads(cli("show", path, "--json")[1])["layers"]
    assert group["layers"] == [0, 1]
    ((attention, network),) = group["blocks"]
    assert (attention["kind"], network["kind"]) == ("attention", "feed-forward")
    assert attention["norm"] == network["norm"] == "layer 1e-05 with bias"
    lines = cli("show", path)[1].splitlines()
    at = lines.index("  layers 0-1:")
    assert lines[at + 2].startswith("    beside it feed-forward, width 192, activation gelu")


def test_show_prints_short_arrays_whole(cli: Cli, make_gguf: Callable[..., Path]) -> None:
    sections = np.array([16, 24, 24, 0], np.int32)
    path = make_gguf(
        {
            "general.architecture": "qwen2vl",
            "qwen2vl.rope.dimension_sections": sections,
            "floats": np.array([0.5, -1.0], np.float32),
            "names": ["one", "two"],
            "nothing": np.array([], np.uint8),
            "eight": np.arange(8, dtype=np.uint64),
            "nine": np.arange(9, dtype=np.uint64),
        }
    )
    code, out, _ = cli("show", path, "--json")
    assert code == 1  # it cannot run: there are no tensors
    found = json.loads(out)["metadata"]
    assert found["qwen2vl.rope.dimension_sections"] == [16, 24, 24, 0]
    assert found["floats"] == [0.5, -1.0]
    assert found["names"] == ["one", "two"]
    assert found["nothing"] == []
    assert (found["eight"], found["nine"]) == (list(range(8)), list(range(9)))
    report = json.loads(out)
    assert report["roles"] == report["layers"] == []
    assert not report["verdict"]["runs"]
    text = cli("show", path)[1]
    assert "cannot run: " in text.splitlines()[0]
    assert "[16, 24, 24, 0]" in text
    assert "[9 values]" in text


def test_show_says_what_a_draft_is_and_what_heads_cost(
    cli: Cli, reference_file: Callable[[str], Path]
) -> None:
    heads = reference_file("mtp-mimo2")
    code, out, _ = cli("show", heads)
    assert code == 0
    assert "2 heads for predicting several tokens (--draft mtp):" in out
    facts = json.loads(cli("show", heads, "--json")[1])["draft"]
    # of each head keys of 64 values and values of 32 in f16, for one head of keys
    assert facts == {"kind": "mtp", "heads": 2, "weights": facts["weights"], "cache": 2 * 2 * 96}
    assert 100_000 < facts["weights"] < 1_000_000

    code, out, _ = cli("show", reference_file("eagle3-d2t.draft"))
    assert code == 1
    assert "this is an EAGLE-3 draft, give it to its model" in out.splitlines()[0]
    assert "EAGLE-3 of 128 values for a model of 128, reads the streams before" in out
    assert "its layers 1, 2, 3, 72 tokens of its own; token_embd of the model" in out
    out = cli("show", reference_file("gemma4assistant-e.draft"))[1]
    assert "Gemma 4 assistant of 64 values for a model of 128, reads the keys and values of" in out
    assert json.loads(cli("show", "demo", "--json")[1])["draft"] == {}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (5_250_000, "5.25 M"), (999_600_000, "1,000 M"), (8_030_261_312, "8.03 B"),
        (671_026_419_200, "671 B"), (1_026_408_232_448, "1,026 B"),
    ],
)  # fmt: skip
def test_counts_have_no_exponents(count: int, text: str) -> None:
    assert _count_text(count) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (7.76, 2, "7.8"), (260.4, 2, "260"), (2604.0, 2, "2,600"), (0.025, 2, "0.025"),
        (1049.4, 3, "1,050"), (99.96, 3, "100"), (63000.0, 3, "63,000"), (0.0, 2, "0"),
    ],
)  # fmt: skip
def test_rates_have_no_exponents(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text
