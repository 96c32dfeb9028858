"""GGUF files of other types: the same metadata, quantised matrices; and of a folder's matrices."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ModelError, UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import FOLDER, OWN, TOKENIZER, Metadata, StringArray
from urdir.model.files.opened import Tensor
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.rows import RowBytes
from urdir.model.files.quantised import Recipe, quantizer
from urdir.model.files.tensor_types import OWN_TYPES, tensor_type
from urdir.model.files.written import whole_file
from urdir.model.foreign import foreign, one_line
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.weights.formats import format_of
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from gguf import GGUFWriter

#: What makes blocks of a ggml type of rows as a file has them (bytes,), of a layout: (bytes,) u8.
MakeBlocks = Callable[[NDArray[np.uint8], Layout, int], NDArray[np.uint8]]

#: Tensors that keep their types, as in llama.cpp: norms, routers, convolutions, learned positions,
#: and what has one dimension.
_KEPT = re.compile(
    r"_norm|ffn_gate_inp|ssm_conv1d|shortconv|position_embd|token_types|time_mix_|attn_rel_b"
)
_CHUNK_VALUES = 1 << 22  # quantised at once
_HUGGINGFACE = "huggingface"  # what reads tokenizer.json, of urdir alone


def made_blocks(rows: NDArray[np.uint8], layout: Layout, type_id: int) -> NDArray[np.uint8]:
    """Blocks made by the processor; see `MakeBlocks`."""
    return quantizer(type_id)(layout.unpack(layout.pack(rows))).reshape(-1)


def requantise(
    source: Path,
    out: Path,
    kind: str,
    advance: Callable[[int], None] = lambda nbytes: None,
    make: MakeBlocks = made_blocks,
) -> None:
    """Write the GGUF file or the folder ``source`` as ``out`` with matrices of the type or recipe
    ``kind``. A folder's rows stay in its order, which the key `FOLDER` says.

    ``advance`` gets the bytes of each tensor that was read; ``make`` makes blocks. Raises
    SettingsError for an unknown type, UnsupportedError for a type that GGUF lacks and for split
    files, ModelError for a file that exists, and for metadata that gguf's package does not write;
    nothing is left of ``out`` then.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    with SafetensorsModel(source, kind) if source.is_dir() else Gguf(source) as gguf:
        types = _types(gguf, kind)
        if own := [name for name, of in types.items() if of in OWN_TYPES]:
            raise UnsupportedError(
                f"{out}: GGUF has no type {tensor_type(types[own[0]]).name} (tensor '{own[0]}')"
            )
        if gguf.metadata.optional("split.count", int, 0) > 1:
            raise UnsupportedError(f"{source}: one of several parts; join them with gguf-split")
        if out.exists():
            raise ModelError(f"{out}: exists already: remove it, or give another name")
        with whole_file(out) as part:
            writer = GGUFWriter(part, gguf.architecture)
            with closing(writer):
                with _translated(source):
                    if isinstance(gguf, Gguf):
                        _copy_metadata(source, writer)
                    else:
                        _write_metadata(gguf.metadata, writer)
                for name, tensor in gguf.tensors.items():
                    of = tensor_type(types[name])
                    nbytes = int(np.prod(tensor.shape)) // of.block * of.nbytes
                    stored = (*tensor.shape[:-1], nbytes // int(np.prod(tensor.shape[:-1])))
                    raw_type = GGMLQuantizationType(types[name])
                    writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_type)
                writer.write_header_to_file()
                with _translated(source):
                    writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                for name, tensor in gguf.tensors.items():
                    writer.write_tensor_data(_blocks(tensor, types[name], make))
                    advance(len(_stored(tensor)[1]))


def _types(model: Gguf | SafetensorsModel, kind: str) -> dict[str, int]:
    """The type that each tensor gets: of a folder it has it already."""
    if isinstance(model, SafetensorsModel):
        return {name: tensor.type_id for name, tensor in model.tensors.items()}
    layers = model.metadata.optional(f"{model.architecture}.block_count", int, 0)
    recipe = Recipe(kind, layers, "output.weight" not in model.tensors)
    return {name: _type_of(tensor, recipe) for name, tensor in model.tensors.items()}


def _write_metadata(metadata: Metadata, writer: GGUFWriter) -> None:
    """Those of a folder, with numbers as large as they need."""
    from gguf import GGUFValueType

    writer.add_bool(FOLDER, True)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if key == TOKENIZER and value != _HUGGINGFACE:
            value = f"{OWN}{value}"
        values = value if isinstance(value, np.ndarray | list | StringArray) else [value]
        if not len(values):
            continue
        given = values.tolist() if isinstance(values, np.ndarray) else list(values)
        kind = GGUFValueType.get_type(given[0])
        if isinstance(given[0], int) and not isinstance(given[0], bool):
            kind = GGUFValueType.INT64
        elif isinstance(given[0], float):
            kind = GGUFValueType.FLOAT64
        if values is value:
            writer.add_key_value(key, given, GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(key, value, kind)


def _copy_metadata(source: Path, writer: GGUFWriter) -> None:
    from gguf import GGUFReader, GGUFValueType

    for field in GGUFReader(source).fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        arrays = field.types.count(GGUFValueType.ARRAY)
        if arrays > 1 or (arrays and not len(field.data)):
            kind = "an array of arrays" if arrays > 1 else "an empty array"
            raise UnsupportedError(
                f"{source}: '{field.name}' is {kind}, which cannot be written; take a file without"
            )
        sub_type = field.types[-1] if arrays else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)


@contextmanager
def _translated(source: Path) -> Iterator[None]:
    """ModelError for what gguf's package raises for metadata that it cannot read or write."""
    what = f"{source}: metadata cannot be copied"
    with foreign(what, ModelError):
        try:
            yield
        except UnicodeError:
            raise
        except (ValueError, TypeError, LookupError, struct.error) as cause:
            raise ModelError(f"{what}: {one_line(str(cause))}") from cause


def _type_of(tensor: Tensor, recipe: Recipe) -> int:
    matrix = len(tensor.shape) > 1 and tensor.name.endswith("weight")
    if not matrix or _KEPT.search(tensor.name):
        return tensor.type_id
    try:
        format_of(tensor.type_id)
    except PtxgenError:
        return tensor.type_id
    found = recipe.type_of(tensor.name, tensor.shape[-1])
    return tensor.type_id if found is None else found


def _stored(tensor: Tensor) -> tuple[int, Any]:
    """The type and the bytes of a tensor in its file."""
    if isinstance(tensor.data, RowBytes) and tensor.data.floats is not None:
        return tensor.data.floats
    return tensor.type_id, tensor.data


def _blocks(tensor: Tensor, type_id: int, make: MakeBlocks) -> NDArray[np.uint8]:
    """The tensor's bytes as that type."""
    stored, data = _stored(tensor)
    if type_id == stored:
        return np.asarray(data[: len(data)])
    fmt, width = format_of(stored), tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1]))
    row_nbytes, at_once = len(data) // rows, max(1, _CHUNK_VALUES // width)
    pieces = []
    for first in range(0, rows, at_once):
        last = min(first + at_once, rows)
        layout = Layout(fmt, last - first, width)
        read = data[first * row_nbytes : last * row_nbytes]
        pieces.append(make(read, layout, type_id))
    return np.concatenate(pieces)
