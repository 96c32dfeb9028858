"""Reader of a model file for families: the architecture's metadata and references to tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, Self, TypeVar

import numpy as np

from urdir.model.errors import ConfigError
from urdir.model.families.sizes import SIZES
from urdir.model.families.stored import Linear, Normalization, Shape, StoredMatrix, StoredVector
from urdir.model.files.metadata import FOLDER, Metadata, StringArray
from urdir.model.files.model_file import SHARED_ORDERS, ModelFile
from urdir.ptxgen.kernels.norm import Norm

_T = TypeVar("_T")
_D = TypeVar("_D")
_Number = TypeVar("_Number", int, float)

#: Whether a tensor is required, or optional.
Presence = Literal["required", "optional", "absent"]
#: Bounds of 32-bit integers and floats, and the smallest normal float.
_MOST = (2**31, 2.0**128)
_LEAST = 2.0**-126
_LAYER = re.compile(r"^((?:enc|dec)\.)?blk\.\d+\.")


class Reader:
    """Metadata of ``architecture`` by key without its prefix; references to stored tensors by name.

    At most ``max_layers`` layers are described, whatever the metadata claims. Every error names
    the whole key. The reader records every key that is read: ``ignored_keys`` are the rest. With
    ``nextn`` the MTP layers are described, too. A folder (``of_folder``) can say more than GGUF:
    such keys begin with "own." and are read by `own` and `own_at`.
    """

    def __init__(
        self,
        metadata: Metadata,
        architecture: str,
        stored: Mapping[str, Shape],
        max_layers: int,
        *,
        nextn: bool = False,
        of_folder: bool = False,
    ) -> None:
        self.architecture = architecture
        self.of_folder = of_folder
        self.stored = stored
        self.reads_nextn = nextn
        self._metadata = metadata
        self._max_layers = max_layers
        self._asked: set[str] = set()
        #: What the names of tensors of layers begin with, "enc." of the encoder of T5; and the key
        #: of the number of these layers.
        self.part, self.blocks_key = "", "block_count"
        self._kinds = {_LAYER.sub(r"\1", name) for name in stored}

    @classmethod
    def of(cls, file: ModelFile, *, nextn: bool = False) -> Self:
        """The reader of a file. Raises ConfigError if the file names no architecture.

        Every layer has tensors, so a file with more claimed layers than tensors is read with one
        layer more than tensors, and then refused. A claim of billions of layers costs nothing.
        """
        stored = {name: tensor.shape for name, tensor in file.tensors.items()}
        is_folder = getattr(file, "format", "") == "safetensors"
        of_folder = is_folder or file.metadata.optional(FOLDER, bool, False)
        return cls(
            file.metadata,
            file.architecture,
            stored,
            len(stored) + 1,
            nextn=nextn,
            of_folder=of_folder,
        )

    # ---- metadata ----

    def key(self, name: str) -> str:
        """The whole metadata key."""
        return f"{self.architecture}.{name}"

    def has_key(self, name: str) -> bool:
        """Whether the file has that key."""
        self._asked.add(self.key(name))
        return self.key(name) in self._metadata

    def is_array(self, name: str) -> bool:
        """Whether a key holds an array."""
        self._asked.add(self.key(name))
        return isinstance(self._metadata.get(self.key(name), None), np.ndarray)

    def optional(self, name: str, kind: type[_T], default: _D) -> _T | _D:
        """The value of a key, or ``default`` if absent; ConfigError for another type."""
        self._asked.add(self.key(name))
        value = self._metadata.optional(self.key(name), kind, default)
        return self._bounded(self.key(name), value)

    def required(self, name: str, kind: type[_T]) -> _T:
        """The value of a key; ConfigError if absent or of another type."""
        self._asked.add(self.key(name))
        return self._bounded(self.key(name), self._metadata.require(self.key(name), kind))

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; ConfigError if absent without a default."""
        return self._positive(name, int, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; ConfigError if absent without a default."""
        return self._positive(name, float, default)

    def count(self, name: str, default: int = 0) -> int:
        """A non-negative integer."""
        return self._not_negative(name, int, default)

    def amount(self, name: str, default: float = 0.0) -> float:
        """A non-negative number; 0 often means none."""
        return self._not_negative(name, float, default)

    def _not_negative(self, name: str, kind: type[_Number], default: _Number) -> _Number:
        value = self.optional(name, kind, default)
        if value < 0:
            raise ConfigError(f"metadata key '{self.key(name)}' is {value}, expected 0 or more")
        return value

    def by_layer(self, name: str, kind: type[_T], default: _T | None = None) -> list[_T]:
        """A value for every layer, from a scalar for all or an array with one value per layer.

        ConfigError if absent without a default, or of another length or type.
        """
        return self._by_layer(self.key(name), kind, default)

    def global_by_layer(self, key: str, kind: type[_T]) -> list[_T]:
        """As `by_layer`, for a key without the architecture's prefix."""
        return self._by_layer(key, kind, None)

    def _by_layer(self, key: str, kind: type[_T], default: _T | None) -> list[_T]:
        layers = len(self.described_layers)
        self._asked.add(key)
        value = self._metadata.get(key, default)
        if not isinstance(value, np.ndarray):
            if default is None or key in self._metadata:
                return [self._bounded(key, self._metadata.require(key, kind))] * layers
            return [default] * layers
        if len(value) not in (layers, self.size(self.blocks_key)):
            raise ConfigError(f"metadata key '{key}' has {len(value)} values for {layers} layers")
        return [self._element(key, item, kind) for item in value[:layers].tolist()]

    def size_at(self, name: str, layer: int, default: int | None = None) -> int:
        """A positive integer for one layer."""
        value = self.by_layer(name, int, default)[layer]
        if value <= 0:
            raise ConfigError(
                f"metadata key '{self.key(name)}' is {value} for layer {layer}, "
                "expected a positive number"
            )
        return value

    def integers(self, name: str, *, wide: bool = False) -> list[int]:
        """The integers of an array; empty if the key is absent, ConfigError for another type.
        ``wide`` ones have 64 bits."""
        key = self.key(name)
        self._asked.add(key)
        value = self._metadata.get(key, ())
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(items, (list, tuple)):
            raise ConfigError(f"metadata key '{key}' must be an array")
        if wide:
            return [Metadata({key: item}).require(key, int) for item in items]
        return [self._element(key, item, int) for item in items]

    def unless(self, name: str, absent: int) -> int | None:
        """An integer; None if the key is absent, or has the value ``absent`` or -1."""
        self._asked.add(self.key(name))
        value = self._metadata.optional(self.key(name), int, None)
        return None if value in (None, absent, -1) else self._bounded(self.key(name), value)

    def strings(self, name: str) -> tuple[str, ...]:
        """The strings of an array; empty if the key is absent, ConfigError for another type."""
        found = self.optional(name, StringArray, None)
        return () if found is None else tuple(found)

    @property
    def asked_keys(self) -> frozenset[str]:
        """Whole keys that were read, present or not."""
        return frozenset(self._asked)

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """Keys of the architecture that were never read."""
        prefix = f"{self.architecture}."
        return tuple(k for k in self._metadata if k.startswith(prefix) and k not in self._asked)

    # ---- what folders alone say ----

    def own(self, name: str, kind: type[_T], default: _D) -> _T | _D:
        """The value of a key that only folders have, or ``default``."""
        return self.optional(f"own.{name}", kind, default) if self.of_folder else default

    def own_at(self, name: str, layer: int, kind: type[_T], default: _D) -> _T | _D:
        """As `own`, for a key with a value for each layer."""
        if not self.of_folder or not self.has_key(f"own.{name}"):
            return default
        return self.by_layer(f"own.{name}", kind)[layer]

    # ---- sizes of every architecture ----

    def layer_count(self) -> int:
        """``block_count`` without the layers for multi-token prediction, at most ``max_layers``."""
        blocks, extra = self.size(self.blocks_key), self.count("nextn_predict_layers")
        if extra >= blocks:
            raise ConfigError(
                f"metadata key '{self.key('nextn_predict_layers')}' is {extra} of {blocks} layers"
            )
        return min(blocks - extra, self._max_layers)

    @property
    def nextn_layers(self) -> range:
        """The layers for predicting several tokens, which follow the others; none unless they are
        read."""
        first = self.layer_count()
        extra = self.count("nextn_predict_layers") if self.reads_nextn else 0
        return range(first, first + min(extra, self._max_layers))

    @property
    def described_layers(self) -> range:
        """All layers that are described."""
        return range(self.nextn_layers.stop)

    @property
    def hidden(self) -> int:
        """Hidden size: values of the residual stream."""
        return self.size("embedding_length")

    def rms(self, default: float | None = None) -> float:
        """The epsilon of RMS norms."""
        return self.number("attention.layer_norm_rms_epsilon", default)

    # ---- tensors ----

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether a tensor is stored; ``name`` includes ".weight" or ".bias"."""
        return self._full(name, layer) in self.stored

    def anywhere(self, name: str) -> bool:
        """Whether any layer has a tensor of that name: then every layer of its kind must."""
        return self.part + name in self._kinds

    def of_kinds(self, kinds: Collection[str]) -> tuple[str, ...]:
        """All tensors of those names, in any layer."""
        return tuple(name for name in self.stored if _LAYER.sub(r"\1", name) in kinds)

    def of_layer(self, layer: int) -> tuple[str, ...]:
        """All tensors of a layer."""
        return tuple(name for name in self.stored if name.startswith(f"blk.{layer}."))

    def matrix(self, name: str, layer: int | None, *shape: int) -> StoredMatrix:
        """The whole matrix ``name``.weight of that shape, rows first."""
        return StoredMatrix.whole(self._full(f"{name}.weight", layer), *shape)

    def vector(self, name: str, layer: int | None, *shape: int) -> StoredVector:
        """The tensor ``name`` (including ".weight" or ".bias", if it has one)."""
        return StoredVector.whole(self._full(name, layer), *shape)

    def optional_vector(self, name: str, layer: int | None, *shape: int) -> StoredVector | None:
        """As `vector`, or None if no layer has it."""
        return self.vector(name, layer, *shape) if self.anywhere(name) else None

    def linear(
        self, name: str, layer: int | None, *shape: int, bias: Presence = "absent"
    ) -> Linear:
        """The matrix ``name``.weight of that shape, rows first, and by ``bias`` ``name``.bias
        (rows,)."""
        has_bias = self._has_bias(name, bias)
        orders = [f"{of}.order" for of in (name, SHARED_ORDERS.get(name)) if of is not None]
        order = (*shape[:-2], shape[-1]) if name.endswith("exps") else shape[-1:]
        return Linear(
            self.matrix(name, layer, *shape),
            self.vector(f"{name}.bias", layer, *shape[:-1]) if has_bias else None,
            next((self.vector(of, layer, *order) for of in orders if self.has(of, layer)), None),
        )

    def _has_bias(self, name: str, bias: Presence) -> bool:
        return bias == "required" or (bias == "optional" and self.anywhere(f"{name}.bias"))

    def norm(
        self, name: str, layer: int | None, norm: Norm, *shape: int, bias: Presence = "absent"
    ) -> Normalization:
        """``norm`` with the weights ``name``.weight of that shape (default: the hidden size)."""
        shape = shape or (self.hidden,)
        has_bias = self._has_bias(name, bias)
        return Normalization(
            Norm(norm.kind, norm.eps, weight=True, bias=has_bias),
            self.vector(f"{name}.weight", layer, *shape),
            self.vector(f"{name}.bias", layer, *shape) if has_bias else None,
        )

    def optional_norm(
        self, name: str, layer: int | None, norm: Norm, *shape: int, bias: Presence = "absent"
    ) -> Normalization | None:
        """As `norm`, or None if no layer has its weights."""
        if not self.anywhere(f"{name}.weight"):
            return None
        return self.norm(name, layer, norm, *shape, bias=bias)

    # ---- helpers ----

    def _positive(self, name: str, kind: type[_Number], default: _Number | None) -> _Number:
        value = self.required(name, kind) if default is None else self.optional(name, kind, default)
        if value <= 0:
            raise ConfigError(
                f"metadata key '{self.key(name)}' is {value}, expected a positive number"
            )
        return value

    def _element(self, key: str, item: Any, kind: type[_T]) -> _T:
        # Booleans of a pattern may be stored as integers, and sizes never as fractions.
        if kind is bool and item in (0, 1):
            item = bool(item)
        return self._bounded(key, Metadata({key: item}).require(key, kind))

    def _full(self, name: str, layer: int | None) -> str:
        return name if layer is None else f"{self.part}blk.{layer}.{name}"

    def _bounded(self, key: str, value: _T) -> _T:
        """Check that kernels can hold a value: 32 bits, no float that would be 0 there, no size
        above its limit."""
        size = abs(value) if isinstance(value, int | float) else 0
        if size >= _MOST[type(value) is float] or 0 < size < _LEAST:
            raise ConfigError(f"metadata key '{key}' is {value}, beyond what 32 bits hold")
        limit = SIZES.get(key.removeprefix(f"{self.architecture}."))
        if limit is not None and isinstance(value, int):
            limit.check(value, f"metadata key '{key}'", ConfigError)
        return value
