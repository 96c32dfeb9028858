"""Limits on the counts and lengths in model files.

Files are untrusted: without limits a small one can demand much memory or time. The limits are far
above published models (`known` is their maximum); limits documented by a format or used by
llama.cpp are taken from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Limit:
    """The maximum of a quantity."""

    what: str  # name in messages and in the table of MODELS.md
    most: int
    known: str  # maximum among published models

    def check(self, found: int, where: str, error: type[ModelError]) -> None:
        """Raise ``error``, prefixed by ``where``, if ``found`` exceeds the limit."""
        if found > self.most:
            raise error(f"{where}: {found:,} {self.what}, at most {self.most:,} are supported")


#: Quantities in a GGUF header, which is held in memory as a whole, unlike tensor data.
HEADER_NBYTES = Limit("bytes of a GGUF header", 256 << 20, "21 million")
METADATA_KEYS = Limit("metadata keys", 4096, "some 150")
KEY_NBYTES = Limit("bytes of a metadata key", 1024, "53")
STRING_NBYTES = Limit("bytes of a string", 64 << 20, "34 million, a tokenizer.json")
NAME_LENGTH = Limit("characters of a name in a value or a folder", 1024, "some 100")
ARRAY_ITEMS = Limit("items of an array", 4 << 20, "1,029,812")
NESTED_ARRAYS = Limit("arrays within arrays", 4096, "none")
NESTING = Limit("levels of arrays", 4, "1")
TENSORS = Limit("tensors", 32_768, "some 3,000")
TENSOR_NAME_NBYTES = Limit("bytes of a tensor name", 63, "some 40; llama.cpp takes 63")
TENSOR_DIMS = Limit("dimensions of a tensor", 4, "4; ggml has no more")
TENSOR_PADDING = Limit("bytes of alignment", 1 << 20, "32")
TOKENS = Limit("tokens of a vocabulary", 1 << 20, "262,144")
CONTROL_TOKENS = Limit("control tokens", 65_536, "some 6,500")
TOKEN_NBYTES = Limit("bytes of a token", 4096, "1,024: 512 spaces")
CHARSMAP_NBYTES = Limit("bytes of a table of replacements", 4 << 20, "240,007")
MERGE_NBYTES = Limit("bytes of a merge", 2 * 4096 + 1, "two tokens")

#: Sizes claimed by metadata, before tensors are compared with them.
LAYERS = Limit("layers", 512, "126; llama.cpp takes 512")
HEADS = Limit("heads of a layer", 16_384, "256")
HEAD_WIDTH = Limit("values of a head", 16_384, "576")
WIDTH = Limit("values of a vector", 1 << 22, "53,248")
DRAFT_STREAMS = Limit("streams of the model that a draft reads", 16, "5")
DRAFT_BLOCK = Limit("rows of a block of drafts", 64, "16")
EXPERTS = Limit("experts of a layer", 65_536, "512")
INDEX_POOL = Limit("tokens of a pool of index keys", 64, "4")
RESIDUAL_STREAMS = Limit("streams of a residual", 16, "4")
BALANCES = Limit("iterations that balance streams", 256, "20")
SWITCHED = Limit("adapters within a model", 4096, "unknown; llama.cpp takes 4,096")

#: Quantities in a transformers folder.
JSON_NBYTES = Limit("bytes of a text file", 256 << 20, "34 million, a tokenizer.json")
JSON_VALUES = Limit("keys and values of a JSON text", 4 << 20, "2.1 million, a tokenizer.json")
SAFETENSORS_HEADER_NBYTES = Limit(
    "bytes of a safetensors header", 100_000_000, "the format's own limit"
)
SAFETENSORS_TENSORS = Limit("tensors of a folder", 262_144, "some 140,000")
SAFETENSORS_DIMS = Limit("dimensions", 8, "5")

LIMITS = tuple(value for value in list(globals().values()) if isinstance(value, Limit))
