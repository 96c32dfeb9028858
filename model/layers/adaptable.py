"""Which tensors of a model take adapters: those of its products, routers and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from urdir.model.errors import ConfigError, SettingsError, UnsupportedError
from urdir.model.families.adapters import AdapterRoom, can_adapt, experts_of
from urdir.model.families.config import Config
from urdir.model.families.stored import Linear, StoredMatrix, stored_in
from urdir.model.files.low_rank import MOST_RANK, Adapter, rank_together
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Product
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.ptxgen.kernels.linear.epilogue.adapted import RANKS, Element


def adaptable(config: Config) -> Mapping[str, StoredMatrix]:
    """A matrix of each tensor that takes adapters, by name, of a whole model."""
    step = StepOps(replace(config, adapters=None), 1)
    x = layers(step, embedding(step))
    assert x is not None
    head(step, x)
    matrices = [of.matrix for op in step.graph.ops for of in _matrices(op)]
    # the embedding looks its rows up, even where it is the output as well
    takes = [of for of in matrices if can_adapt(of) and len(of.shape) > 1]
    return {of.name: of for of in takes if of.name != config.embedding.name}


def _matrices(op: Op) -> Iterator[Linear]:
    """The matrices of an operation that take adapters: not those of experts whose input is
    weighted, nor of a router whose products are scaled, nor one of several in a tensor, which the
    adapter has one after the other."""
    if isinstance(op, Product):
        yield from () if len(op.of.matrix.shape) > 2 else (op.of,)
    elif isinstance(op, Route) and op.router.norm_scale == 1.0:
        yield op.router.linear
    elif isinstance(op, Experts) and not op.weigh_input:
        yield from (of for of in op.matrices if of is not None)


def is_interleaved(config: Config) -> bool:
    """Whether heads are rotated by neighbouring pairs."""
    ropes = [rope for rope in config.ropes if rope.style == "interleaved"]
    return bool(ropes)


def room_for(
    config: Config,
    adapters: Sequence[tuple[Adapter, float]],
    element: Element,
    slots: int | None = None,
    rank: int | None = None,
) -> AdapterRoom:
    """Room for adapters of a whole model, and for others: ``slots`` of them (None: as many as are
    given), up to a ``rank`` (None: theirs, and that of those with a scale, which are applied
    together), of the same tensors; of all that take adapters where none are given. Raises
    ModelError for an adapter that is none of the model, SettingsError for too high a rank."""
    takes = adaptable(config)
    given = [adapter for adapter, _ in adapters]
    for adapter in given:
        check_adapter(adapter, config, takes)
    names = {name for adapter in given for name in adapter.matrices} or set(takes)
    least = max((adapter.rank for adapter in given), default=1)
    if rank is not None and rank < least:
        raise SettingsError(f"room for adapters of rank {rank}: those given have rank {least}")
    if rank is None:
        rank = max(least, rank_together(adapter for adapter, scale in adapters if scale))
    if rank > MOST_RANK:
        raise SettingsError(f"adapters of rank {rank:,} together, at most {MOST_RANK:,}")
    rounded = -(-rank // RANKS) * RANKS
    return AdapterRoom(slots or max(1, len(adapters)), rounded, frozenset(names), element)


def check_adapter(adapter: Adapter, config: Config, takes: Mapping[str, StoredMatrix]) -> None:
    """Raise ModelError for tensors that the model does not have, or not in these shapes."""
    known = {of.name for of in stored_in(config)}
    for name, matrices in adapter.matrices.items():
        where = f"{adapter.path}: tensor '{name}'"
        if name not in known:
            raise ConfigError(f"{where}: the model has no such tensor")
        if (of := takes.get(name)) is None:
            raise UnsupportedError(f"{where}: adapters of it are not supported")
        experts = experts_of(of)
        rows = of.shape[-2]
        expected = (experts, matrices.rank, of.shape[-1]), (experts, rows, matrices.rank)
        if (matrices.a.shape, matrices.b.shape) != expected:
            raise ConfigError(
                f"{where}: lora_a {matrices.a.shape[1:]} and lora_b {matrices.b.shape[1:]}, "
                f"the model's tensor is {of.shape}"
            )
