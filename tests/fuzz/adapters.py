"""LoRA adapters of a small model: GGUF files and folders of peft."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

from tests.fuzz import gguf_header, trees
from tests.model.files.adapter_files import made, unpacked, write_gguf, write_peft
from urdir.model.files.adapter import open_adapter
from urdir.model.files.gguf import Gguf


class AdapterTarget:
    """An adapter's fields and headers, with as many (empty) bytes as its tensors had."""

    def __init__(self, folder: Path) -> None:
        self._model = unpacked("llama-dense", folder)
        self._file, self._folder = folder / "mutated.gguf", folder / "mutated"
        self._folder.mkdir()
        matrices = made(self._model, 1, 4, "attn_", "ffn_")
        with Gguf(write_gguf(folder / "good.gguf", matrices)) as good:
            self._base = gguf_header.Base(good, longest=300)
        peft = write_peft(folder / "peft", matrices)
        self._config = json.loads((peft / "adapter_config.json").read_text())
        data = (peft / "adapter_model.safetensors").read_bytes()
        (nbytes,) = struct.unpack_from("<Q", data)
        self._head = json.loads(data[8 : 8 + nbytes])
        self._size = len(data) - 8 - nbytes

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return b"G" + struct.pack("<Q", self._base.nbytes) + self._base.mutated(rng)
        config, head = self._config, self._head
        changes = rng.choice(("config", "head", "both"))
        if changes != "head":
            config = trees.changed(rng, config)
        if changes != "config":
            head = trees.changed(rng, head)
        texts = [json.dumps(tree).encode() for tree in (config, head)]
        if rng.random() < 0.2:
            at = rng.randrange(2)
            texts[at] = trees.raw(rng, texts[at])
        return b"P" + struct.pack("<Q", len(texts[0])) + b"".join(texts)

    def take(self, data: bytes) -> None:
        (size,), rest = struct.unpack_from("<Q", data, 1), data[9:]
        path = self._file if data[:1] == b"G" else self._folder
        if path == self._file:
            path.write_bytes(rest)
            os.truncate(path, max(size, len(rest)))
        else:
            (path / "adapter_config.json").write_bytes(rest[:size])
            tensors = path / "adapter_model.safetensors"
            tensors.write_bytes(struct.pack("<Q", len(rest) - size) + rest[size:])
            os.truncate(tensors, tensors.stat().st_size + self._size)
        with Gguf(self._model) as model:
            open_adapter(path, model)
