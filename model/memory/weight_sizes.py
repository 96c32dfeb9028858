"""What a model's weights take: layouts, names and bytes of what lies on the device, and of matrices
in host memory; the shares of several devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from urdir.model.families.config import Config
from urdir.model.families.placement import cached_mixtures, expert_matrices, units
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import (
    MOST_DISTANCE,
    RelativeBias,
    Run,
    Slopes,
    Stored,
    StoredMatrix,
    StoredVector,
    stored_in,
)
from urdir.model.memory.cache_shape import rounded_capacity
from urdir.model.memory.expert_cache import cache_sizes
from urdir.model.memory.local_choices import choice_sizes
from urdir.model.memory.matrix_rows import format_in
from urdir.model.memory.streamed import slot_sizes
from urdir.ptxgen.weights.eights import row_scales_nbytes
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import Split

#: The table of learned positions in the arena, and those of tokens that switch adapters on.
POSITIONS = "learned positions"
SWITCHED, EMBEDDED = "adapters that tokens switch on", "tokens that tokens are embedded as"


def shares_of(
    config: Config, gguf: ModelFile, ranks: int, split: Split = "tensors"
) -> list[Config]:
    """The description for each rank: the whole model, its shares (`share.shared`), or its runs of
    layers (`stages.staged`). Raises UnsupportedError for a model that cannot be ``split`` in this
    way."""
    if ranks == 1:
        return [config]
    from urdir.model.families.share import shared
    from urdir.model.families.stages import staged

    matrices = [of for of in stored_in(config) if isinstance(of, StoredMatrix)]
    if split == "layers":
        nbytes: dict[Stored, int] = {of: layout_of(of, gguf).nbytes for of in matrices}
        layers = [sum(nbytes.get(of, 0) for of in stored_in(layer)) for layer in config.layers]
        return staged(config, layers, sum(nbytes.values()) - sum(layers), ranks)
    blocks = {of.name: format_in(of, gguf.tensors[of.name]).block for of in matrices}
    return [shared(config, blocks, rank, ranks) for rank in range(ranks)]


def weight_sizes(gguf: ModelFile, config: Config) -> dict[str, int]:
    """Bytes of everything ``Weights`` keeps on the device, by name."""
    groups = units(config)
    streamed = {of for unit in groups for of in unit}
    sizes = {
        arena_name(of): layout_of(of, gguf).nbytes if isinstance(of, StoredMatrix) else 4 * of.size
        for of in kept_tensors(config)
        if of not in streamed
    }
    layouts = {of: layout_of(of, gguf) for of in streamed}
    sizes |= slot_sizes(groups, layouts, config.streaming)
    for mixture in cached_mixtures(config):
        assert config.streaming is not None
        sizes |= cache_sizes(mixture, layouts, config.streaming.experts, arena_name)
    for of in adapted_in(config):
        assert config.adapters is not None
        sizes[lora_name("A", of)] = config.adapters.a_nbytes(of)
        sizes[lora_name("B", of)] = config.adapters.b_nbytes(of)
    sizes |= {
        scales_name(of): row_scales_nbytes(layout_of(of, gguf))
        for of in kept_tensors(config)
        if isinstance(of, StoredMatrix) and of.name in config.as_bytes
    }
    if config.positions is not None:
        rows = max(config.positions.rows, rounded_capacity(config.context_length))
        sizes[POSITIONS] = 4 * rows * config.hidden
    if config.switch is not None:
        sizes |= dict.fromkeys((SWITCHED, EMBEDDED), 4 * config.vocab_size)
    sizes |= {table_name(slopes): 4 * slopes.heads for slopes in config.slopes}
    sizes |= {table_name(of): 4 * of.heads * (2 * MOST_DISTANCE + 1) for of in config.biases}
    sizes |= choice_sizes(config)
    return sizes | {table_name(rope): 4 * rope.dim for rope in config.ropes}


def streamed_nbytes(gguf: ModelFile, config: Config, *, in_files: bool = True) -> int:
    """Bytes of the matrices that are streamed, with or without those that stay ``in_files``."""
    streamed = (of for unit in units(config) for of in unit)
    some = (of for of in streamed if in_files or not is_in_file(config, of))
    return sum(layout_of(of, gguf).nbytes for of in some)


def is_in_file(config: Config, of: Stored) -> bool:
    """Whether a matrix is read from a file before each use."""
    return config.streaming is not None and of.name in config.streaming.in_files


def expert_nbytes(gguf: ModelFile, config: Config) -> tuple[int, int]:
    """Bytes in host memory of the experts that are cached, and of those that a token uses."""
    every = used = 0
    for mixture in cached_mixtures(config):
        nbytes = sum(layout_of(of, gguf).nbytes for of in expert_matrices(mixture))
        every += nbytes
        used += nbytes * mixture.router.used // mixture.router.experts
    return every, used


def kept_tensors(config: Config) -> Iterator[Stored]:
    """Tensors stored on the device: without factors that go into RoPE tables, learned positions,
    adapters, and tensors of another model. Later stages have only their layers."""
    others = {stored for rope in config.ropes for stored in stored_in(rope)} | {config.positions}
    others |= set(stored_in(config.switch)) | config.lent | {of.weight for of in config.biases}
    has_ends = config.stage is None or config.stage.rank == 0
    return (of for of in stored_in(config if has_ends else config.layers) if of not in others)


def adapted_in(config: Config) -> Iterator[StoredMatrix]:
    """The matrices that have room for adapters."""
    room = config.adapters
    for of in kept_tensors(config) if room is not None else ():
        if isinstance(of, StoredMatrix) and room is not None and room.has(of):
            yield of


def layout_of(of: StoredMatrix, gguf: ModelFile) -> Layout:
    """How a matrix of a file is stored on the device."""
    return Layout(format_in(of, gguf.tensors[of.name]), of.rows, of.cols)


def arena_name(of: Stored) -> str:
    """The name of a reference in the arena: its tensor's, and its part if it is not the whole."""
    some = "" if of.runs is None else f" runs {_runs_text(of.runs)}"
    if isinstance(of, StoredMatrix):
        rows = "" if of.each == of.period else f"[{of.first}:{of.first + of.each}]"
        columns = "" if of.columns is None else f" columns {_runs_text(of.columns)}"
        return of.name + rows + some + columns + " transposed" * of.transposed + " half" * of.half
    whole = StoredVector.whole(of.name, *of.shape)
    if of == whole:
        return of.name
    times = f" x {of.repeat}" if of.repeat > 1 else ""
    times += f" of {of.period}" if of.period else ""
    return f"{of.name}[{of.first}:{of.first + (of.each or of.size // of.repeat)}]{times}{some}"


def scales_name(of: Stored) -> str:
    """The name of a matrix' row scales in the arena."""
    return f"row scales of {arena_name(of)}"


def lora_name(which: str, of: Stored) -> str:
    """The name of the adapters' matrices A or B of a matrix in the arena."""
    return f"LoRA {which} of {arena_name(of)}"


def _runs_text(runs: tuple[Run, ...]) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in runs)


def table_name(of: RopeConfig | Slopes | RelativeBias) -> str:
    """The name of a table in the arena."""
    return f"table of {of}"
