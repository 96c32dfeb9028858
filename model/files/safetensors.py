"""Safetensors reader; treats all bytes as untrusted.

Format: https://github.com/huggingface/safetensors#format. Little endian:

    u64 n   n bytes of JSON   data
    JSON: {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
           "__metadata__": {string: string}}             offsets count from the start of the data

Data must be covered without gaps or overlaps. Tensors without values are left out. (The package of
that name is not used: its numpy interface lacks BF16.)
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import SafetensorsError
from urdir.model.files import limits
from urdir.model.files.json_text import parse_json
from urdir.model.files.open_file import ByteSource, FileBytes, OpenFile, read_whole

#: Bytes per element. No supported model uses the other types, which are less than a byte.
ITEM_NBYTES = {
    "C64": 8, "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor, rows first."""

    name: str
    dtype: str  # the format's spelling
    shape: tuple[int, ...]
    data: ByteSource  # (nbytes,) u8; a slice reads the file
    file: str  # name of the file, for messages
    order: NDArray[np.intp] | None = None  # of a matrix whose columns were brought into an order
    is_decoded: bool = False  # floats of a quantised matrix, whose rows are outputs in any family
    quants: str = ""  # of a quantised matrix: how the folder stores it, in words


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of ``path`` by name, in order of their data. Raises SafetensorsError."""
    return _with_values(_read_all(path))


def _with_values(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in tensors.items() if len(tensor.data)}


def _read_all(path: Path) -> dict[str, StoredTensor]:
    """Also tensors without values, which an index lists."""
    file = OpenFile(path, "a safetensors file", SafetensorsError)
    header, start = _read_header(file, path)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise SafetensorsError(f"{path}: __metadata__ is not an object: corrupt file")
    spans = sorted(
        (_span(name, entry, path), name, entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    )
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for (begin, end), name, dtype, shape in spans:
        if begin != position:
            what = "overlaps the one before" if begin < position else "leaves a gap before"
            raise SafetensorsError(f"{path}: the data of tensor '{name}' {what} it: corrupt file")
        position = end
        if start + end > len(file):
            raise SafetensorsError(
                f"{path}: tensor '{name}' ends at byte {start + end:,}, the file at "
                f"{len(file):,}: truncated or corrupt"
            )
        data = FileBytes(file, start + begin, start + end)
        tensors[name] = StoredTensor(name, dtype, shape, data, path.name)
    if start + position != len(file):
        raise SafetensorsError(
            f"{path}: {len(file) - start - position:,} bytes belong to no tensor: corrupt file"
        )
    return tensors


def _read_header(file: OpenFile, path: Path) -> tuple[dict[str, Any], int]:
    """The JSON object, and the start of the data."""
    if len(file) < 8:
        raise SafetensorsError(f"{path}: {len(file)} bytes are not a safetensors file")
    (nbytes,) = struct.unpack("<Q", file.read(0, 8).tobytes())
    if nbytes > len(file) - 8:
        raise SafetensorsError(
            f"{path}: claims a header of {nbytes:,} bytes, the file has {len(file):,}: "
            "not a safetensors file, or truncated"
        )
    limits.SAFETENSORS_HEADER_NBYTES.check(nbytes, str(path), SafetensorsError)
    header = parse_json(file.read(8, 8 + nbytes).tobytes(), f"{path}: the header", SafetensorsError)
    limits.SAFETENSORS_TENSORS.check(len(header), str(path), SafetensorsError)
    return header, 8 + nbytes


def _span(name: str, entry: object, path: Path) -> tuple[int, int]:
    """Check a tensor's entry; (begin, end) of its data."""

    def fail(why: str) -> SafetensorsError:
        return SafetensorsError(f"{path}: tensor {name[:80]!r} {why}: corrupt file")

    if not name or not name.isprintable():  # it is printed in error messages
        raise fail("has no printable name")
    limits.NAME_LENGTH.check(len(name), f"{path}: tensor {name[:80]!r}", SafetensorsError)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail("has other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_NBYTES:
        raise fail(f"has the unknown dtype {str(dtype)[:20]!r}")
    if not _are_sizes(shape) or len(shape) > limits.SAFETENSORS_DIMS.most:
        raise fail(f"has the shape {repr(shape)[:60]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise fail(f"has the offsets {repr(offsets)[:60]}")
    nbytes = math.prod(shape) * ITEM_NBYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise fail(
            f"has {offsets[1] - offsets[0]:,} bytes; {dtype} of shape {repr(shape)[:60]} has "
            f"{nbytes:,}"
        )
    return offsets[0], offsets[1]


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


#: The end of the name of one of several files.
_SHARD = re.compile(r"-\d+-of-(\d{1,9})\.safetensors$")


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a transformers folder.

    Reads ``model.safetensors``, or the files listed in ``model.safetensors.index.json``, or the
    only *.safetensors file. Raises SafetensorsError for a missing file or tensor, an unlisted
    tensor, and a file name that leads out of the folder.
    """
    single, index = folder / "model.safetensors", folder / INDEX_NAME
    if single.exists():
        return read_safetensors(single)
    if index.exists():
        return _read_indexed(folder, index)
    found = sorted(folder.glob("*.safetensors"))
    shard = _SHARD.search(found[0].name) if len(found) == 1 else None
    if shard is not None and int(shard[1]) > 1:
        raise SafetensorsError(
            f"{found[0]} is one of {int(shard[1])} files: download the others and {index.name}"
        )
    if len(found) != 1:
        torch = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
        some = f"neither model.safetensors nor {index.name}, but {len(found)} others"
        raise SafetensorsError(
            f"{folder}: "
            + (some if found else "no file ends in .safetensors")
            + ("" if torch is None else f"; {torch.name} is a file of PyTorch, which is not read: "
               "save it with transformers' save_pretrained()")
        )  # fmt: skip
    return read_safetensors(found[0])


def _read_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    text = read_whole(index, "an index", limits.JSON_NBYTES, SafetensorsError)
    weight_map = parse_json(text, f"{index}: the file", SafetensorsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SafetensorsError(f"{index}: no weight_map")
    names: dict[str, None] = {}
    for name in weight_map.values():
        if not _is_plain_name(name):
            raise SafetensorsError(
                f"{index}: {str(name)[:80]!r} is not the name of a file in {folder}"
            )
        names[name] = None
    if absent := sorted(name for name in names if not (folder / name).exists()):
        raise SafetensorsError(
            f"{index}: {len(absent)} of the {len(names)} files that it lists are missing: "
            f"{', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}; download them"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for tensor in _read_all(folder / name).values():
            if tensor.name in tensors:
                raise SafetensorsError(
                    f"{folder / name}: tensor '{tensor.name}' also occurs in "
                    f"{tensors[tensor.name].file}"
                )
            if weight_map.get(tensor.name) != name:
                raise SafetensorsError(f"{index}: tensor '{tensor.name}' of {name} is not listed")
            tensors[tensor.name] = tensor
    if missing := sorted(set(weight_map) - set(tensors)):
        raise SafetensorsError(
            f"{folder / weight_map[missing[0]]}: tensor '{missing[0][:80]}' is missing"
        )
    return _with_values(tensors)


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not any(char in name for char in "/\\:\0")
        and not name.startswith(".")
    )
