"""Time of loading a folder of BF16 whose matrices are quantised on the way.

    PYTHONPATH=.src python tests/quantising_time.py [LAYERS] [TYPE ...]

Writes a folder of an 8B Llama's shapes with so many layers (32) to the temporary folder, so that
the page cache is warm, and loads it with each type (q4_k_m, q6_k, q8_0, fp8; "stored": as it is).
Prints seconds (the second of two, so that kernels are cached), GB of BF16 a second, how much of the
lanes' time passed in reading, and what the kernels alone take.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from urdir.driver.device import Device
from urdir.driver.harness import time_kernel
from urdir.model.families.config import Config
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.memory import upload
from urdir.model.memory.quantising import quantise_spec
from urdir.model.memory.weights import Weights
from urdir.ptxgen.weights.formats import FORMATS

HIDDEN, FFN, KV, VOCAB = 4096, 14336, 1024, 128256
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def write_folder(folder: Path, layers: int) -> int:
    """Write the folder; bytes of its tensors."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        for name, shape in (
            ("self_attn.q_proj", (HIDDEN, HIDDEN)), ("self_attn.k_proj", (KV, HIDDEN)),
            ("self_attn.v_proj", (KV, HIDDEN)), ("self_attn.o_proj", (HIDDEN, HIDDEN)),
            ("mlp.gate_proj", (FFN, HIDDEN)), ("mlp.up_proj", (FFN, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, FFN)), ("input_layernorm", (HIDDEN,)),
            ("post_attention_layernorm", (HIDDEN,)),
        ):  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    values = np.random.default_rng(0).standard_normal(1 << 24).astype(np.float32)
    noise = (values.view(np.uint32) >> 16).astype(np.uint16)
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = int(np.prod(shape))
            while left:
                file.write(noise[:left].data)
                left -= min(left, len(noise))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    return at


def kernel_seconds(device: Device, kind: str) -> float:
    """Seconds that the kernel takes for 4096 x 4096 values."""
    name = {"q4_k_m": "Q4_K", "fp8": "E4M3R256"}.get(kind, kind.upper())
    spec = quantise_spec(FORMATS[name], FORMATS["BF16"], 4096, 4096)
    inputs = spec.make_inputs(np.random.default_rng(0))
    return time_kernel(device, spec, inputs) / 1e3


def load(device: Device, folder: Path, kind: str | None) -> tuple[float, float]:
    """Seconds to load, and seconds of all lanes in reading."""
    reading, lock = [0.0], threading.Lock()
    read = upload._Band.read

    def timed(self: Any, into: Any) -> int:
        begin = time.perf_counter()
        done = read(self, into)
        with lock:
            reading[0] += time.perf_counter() - begin
        return done

    upload._Band.read = timed  # type: ignore[method-assign]
    try:
        with SafetensorsModel(folder, kind) as file:
            start = time.perf_counter()
            with Weights.load(file, Config.of(file), device):
                return time.perf_counter() - start, reading[0]
    finally:
        upload._Band.read = read  # type: ignore[method-assign]


def main() -> None:
    """Print the times."""
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    kinds = sys.argv[2:] or ["stored", "q4_k_m", "q6_k", "q8_0", "fp8"]
    with tempfile.TemporaryDirectory() as name, Device.open("auto") as device:
        start = time.perf_counter()
        nbytes = write_folder(Path(name), layers)
        print(f"{nbytes / 1e9:.2f} GB written in {time.perf_counter() - start:.1f} s", flush=True)
        for kind in kinds:
            wanted = None if kind == "stored" else kind
            first, _ = load(device, Path(name), wanted)
            seconds, reading = load(device, Path(name), wanted)
            share = reading / (seconds * upload._LANES)
            line = f"{kind}: {seconds:.2f} s ({first:.2f} the first time), "
            line += f"{nbytes / seconds / 1e9:.1f} GB/s, {100 * share:.0f} % of lanes' time reads"
            if wanted is not None:
                taken = kernel_seconds(device, kind)
                line += f"; kernel {taken * 1e6:.0f} us, {2 * 4096**2 / taken / 1e9:.0f} GB/s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
