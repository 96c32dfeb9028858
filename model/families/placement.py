"""Which matrices lie in host memory, and are copied to the device before they are used."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from urdir.model.errors import SettingsError
from urdir.model.families.stored import StoredMatrix, StoredVector, stored_in
from urdir.model.families.streaming import Streaming

if TYPE_CHECKING:
    from urdir.model.families.description import Description
    from urdir.model.families.feed_forward import Mixture

    D = TypeVar("D", bound=Description)

#: Tensors of experts by llama.cpp's names, as its ``-cmoe`` has them.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True, slots=True)
class Placement:
    """What stays on the device, by the rules of llama.cpp.

    A tensor lies where the first of ``overrides`` says whose pattern its name has a match of (True:
    in host memory). Else the experts of the first ``host_experts`` layers lie in host memory, and
    all matrices of layers but the last ``gpu_layers`` - 1, as the output counts as a layer (None:
    all stay). With ``fit`` as many more as are needed. ``expert_slots`` experts of every layer are
    kept on the device (None: as many as fit).
    """

    gpu_layers: int | None = None
    host_experts: int = 0
    overrides: tuple[tuple[str, bool], ...] = ()
    fit: bool = False
    expert_slots: int | None = None

    def __post_init__(self) -> None:
        for pattern, _ in self.overrides:
            try:
                re.compile(pattern)
            except re.error as error:
                raise SettingsError(f"pattern {pattern!r} of tensors: {error}") from None

    def on_host(self, config: Description) -> frozenset[str]:
        """The names of the tensors that lie in host memory. Raises SettingsError for a pattern
        that no tensor has, or that means others than matrices of layers."""
        first = 0
        if self.gpu_layers is not None:
            first = max(0, config.n_layers + 1 - self.gpu_layers)
        found = set()
        for index, layer in enumerate(config.layers):
            for of in stored_in(layer):
                is_expert = re.search(EXPERTS, of.name) is not None
                usual = index < first or (is_expert and index < self.host_experts)
                if self._overridden(of.name, usual) and isinstance(of, StoredMatrix):
                    found.add(of.name)
        names = {of.name for of in stored_in(config)}
        for pattern, is_host in self.overrides:
            matching = {name for name in names if re.search(pattern, name)}
            if not matching:
                raise SettingsError(f"{pattern!r}: the model has no such tensor")
            if is_host and not matching & streamable(config):
                raise SettingsError(
                    f"{pattern!r}: only matrices of layers can be in host memory, not "
                    f"{min(matching)}"
                )
        return frozenset(found) & streamable(config)

    def _overridden(self, name: str, usual: bool) -> bool:
        found = (is_host for pattern, is_host in self.overrides if re.search(pattern, name))
        return next(found, usual)


def streamable(config: Description) -> frozenset[str]:
    """The names of tensors whose matrices belong to one layer, and to nothing else. Tables are no
    matrices of layers (`NgramMemory`): one would be copied whole for a few of its rows."""
    ends = replace(config, layers=())
    users = Counter(
        name
        for part in (ends, *config.layers)
        for name in dict.fromkeys(of.name for of in stored_in(part))
    )
    matrices = (of for of in stored_in(config.layers) if isinstance(of, StoredMatrix))
    return frozenset(of.name for of in matrices if users[of.name] == 1 and "blk." in of.name)


def with_streaming(config: D, names: frozenset[str], experts: int = 0) -> D:
    """The description with these tensors in host memory; none: as it is. Of a layer ``experts``
    are kept on the device."""
    return replace(config, streaming=Streaming(names, experts=experts)) if names else config


def cached_mixtures(config: Description) -> list[Mixture]:
    """The mixtures whose experts are all in host memory, and some of them cached on the device."""
    streaming = config.streaming
    if streaming is None or not streaming.experts:
        return []
    found = [of for layer in config.layers for of in layer.mixtures]
    return [of for of in found if all(m.name in streaming.names for m in expert_matrices(of))]


def expert_matrices(of: Mixture) -> list[StoredMatrix]:
    """The matrices of a mixture's experts."""
    linears = (of.up, of.down, *(() if of.gate is None else (of.gate,)))
    return [linear.matrix for linear in linears]


def expert_biases(of: Mixture) -> list[StoredVector]:
    """The biases of a mixture's experts."""
    linears = (of.up, of.down, *(() if of.gate is None else (of.gate,)))
    return [linear.bias for linear in linears if linear.bias is not None]


def units(config: Description) -> list[tuple[StoredMatrix, ...]]:
    """The matrices in host memory, those of each layer together, in the order of their use."""
    streaming = config.streaming
    if streaming is None:
        return []
    found = (
        tuple(
            of
            for of in stored_in(layer)
            if isinstance(of, StoredMatrix) and of.name in streaming.names
        )
        for layer in config.layers
    )
    return [unit for unit in found if unit]
