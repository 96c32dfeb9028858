"""What tests of rules lower: a graph with its tensors, of one step's rows, on made weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.memory import Slice
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.realizar import describe
from urdir.model.families.stored import Linear, Normalization, StoredMatrix, StoredVector
from urdir.model.graph.graph import Graph
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.rows import Rows
from urdir.model.lower.step import lower
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.model.memory.workspace import Workspace, WorkspaceShape
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, random_blocks
from urdir.ptxgen.weights.layout import Layout

Floats = npt.NDArray[np.float64]


class MadeWeights:
    """Weights by their references, in the place of a model's."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        self.rope_tables: dict[Any, Slice] = {}
        self.expert_caches: dict[Any, Any] = {}

    def matrix(self, of: Linear) -> Matrix:
        bias, order = (None if of is None else self.known[of] for of in (of.bias, of.order))
        return Matrix(*self.known[of.matrix], bias, order=order)

    def vector(self, of: StoredVector) -> Slice:
        found: Slice = self.known[of]
        return found

    def norm(self, of: Normalization) -> NormLayer:
        weight, bias = (None if v is None else self.vector(v) for v in (of.weight, of.bias))
        return NormLayer(of.norm, weight, bias)


class Workbench:
    """A graph, the weights and places of what it reads and makes, and the plan that it is lowered
    to. Values have ``room`` bytes; those of the registers ``kept`` can be read afterwards."""

    def __init__(
        self,
        device: Device,
        rows: int,
        exact: bool,
        seed: int,
        kept: Mapping[str, int] | None = None,
        zeroed: Mapping[str, int] | None = None,
        room: int = 1 << 20,
    ) -> None:
        self.device, self.rows = device, rows
        self.random = np.random.default_rng(seed)
        self.work = Workspace(device, WorkspaceShape(kept or {}, {}, zeroed or {}, room), "work")
        self.owned: list[Any] = [self.work]
        self.graph, self.plan = Graph(), Plan("layers")
        self.weights = MadeWeights()
        self.fixed: dict[Tensor, Slice] = {}
        self.position = self.place(np.zeros(rows, np.uint32))
        self.parts = LayerParts(
            device=device,
            config=describe(layers=2, hidden=64, heads=2, ffn=64, vocab=64),  # type: ignore[arg-type]
            weights=self.weights,  # type: ignore[arg-type]
            cache=SimpleNamespace(),  # type: ignore[arg-type]
            work=self.work,
            exact=exact,
        )

    def place(self, values: npt.NDArray[Any]) -> Slice:
        """The values in device memory."""
        arena = self.device.arena({"a": values.nbytes}, "given")
        self.owned.append(arena)
        arena["a"].upload(values)
        return arena["a"]

    def random_values(self, *shape: int) -> npt.NDArray[np.float32]:
        return self.random.standard_normal(shape).astype(np.float32)

    # ---- what operations read ----

    def input(self, cols: int, name: str = "stream") -> tuple[Tensor, Floats]:
        """A tensor of random values that the graph reads."""
        values = self.random_values(self.rows, cols)
        tensor = self.graph.input(Tensor(name, self.rows, cols))
        self.fixed[tensor] = self.place(values)
        return tensor, values.astype(np.float64)

    def vector(self, *shape: int) -> tuple[StoredVector, Floats]:
        """A vector of random weights."""
        values = self.random_values(*shape)
        stored = StoredVector.whole(f"vector {len(self.weights.known)}", *shape)
        self.weights.known[stored] = self.place(values)
        return stored, values.astype(np.float64)

    def linear(
        self, rows: int, cols: int, bias: bool = False, fmt: str = "Q8_0"
    ) -> tuple[Linear, Floats, Floats]:
        """A random matrix, its values, and those of its bias (zeros if it has none)."""
        layout = Layout(FORMATS[fmt], rows, cols)
        blocks = rows * cols // layout.format.block
        packed = layout.pack(random_blocks(layout.format, blocks, self.random, cols**-0.5))
        stored = StoredMatrix.whole(f"matrix {len(self.weights.known)}", rows, cols)
        self.weights.known[stored] = layout, self.place(packed)
        vector, values = self.vector(rows) if bias else (None, np.zeros(rows))
        return Linear(stored, vector), layout.unpack(packed).astype(np.float64), values

    def orders(self, of: Linear, count: int = 1) -> tuple[Linear, npt.NDArray[np.intp]]:
        """A matrix with columns in random orders, of each of ``count`` experts (count, cols)."""
        columns = np.array([self.random.permutation(of.cols) for _ in range(count)])
        stored = StoredVector.whole(f"vector {len(self.weights.known)}", count, of.cols)
        self.weights.known[stored] = self.place(columns.astype(np.float32))
        return replace(of, order=stored), columns

    def norm(self, norm: Norm, cols: int) -> tuple[Normalization, dict[str, Floats]]:
        """A norm with random weights, and these."""
        wanted = (("weight", norm.weight), ("bias", norm.bias))
        found = {name: self.vector(cols) for name, present in wanted if present}
        made = Normalization(norm, **{name: at for name, (at, _) in found.items()})
        return made, {name: values for name, (_, values) in found.items()}

    # ---- what they make ----

    def out(self, cols: int, name: str = "out") -> Tensor:
        """A tensor in a place of its own."""
        tensor = Tensor(name, self.rows, cols)
        self.fixed[tensor] = self.place(np.zeros((self.rows, cols), np.float32))
        return tensor

    def add(self, kind: type[Op], label: str, y: Tensor, *given: Any, **more: Any) -> Tensor:
        """Append an operation."""
        return self.graph.add(kind(label, y, *given, **more))

    def lower(self) -> list[str]:
        """Append the launches of the graph to the plan; the kernels of all."""
        rows = Rows(self.rows, 64, 0, self.place(np.zeros(self.rows, np.uint32)), self.position)
        lower(self.plan, self.parts, rows, self.graph, fixed=self.fixed)
        self.graph.ops.clear()
        self.graph.reads.clear()
        return self.kernels()

    def run(self) -> list[str]:
        """Lower the graph and run the plan; the kernels of all launches."""
        names = self.lower() if self.graph.ops else self.kernels()
        with self.device.create_stream() as stream:
            execute.run(self.plan, self.device, stream)
            stream.synchronize()
        return names

    def values(self, of: Tensor) -> npt.NDArray[np.float32]:
        """What lies in a tensor's own place."""
        return self.fixed[of].download(np.float32, (of.rows, of.width))

    def compare(self, y: Tensor, expected: Floats, allowed: float) -> None:
        """The RMS deviation, relative to that of what is expected."""
        error = np.sqrt(np.mean((self.values(y) - expected) ** 2) / np.mean(expected**2))
        assert error < allowed, f"{error} of {allowed}"

    def kernels(self) -> list[str]:
        """Of each launch of the plan."""
        return [op.kernel.name for op in self.plan if isinstance(op, Launch)]

    def close(self) -> None:
        """Free everything."""
        for arena in self.owned:
            arena.close()
