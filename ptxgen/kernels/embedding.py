"""Token embedding: lookup in a repacked table of any weight type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import Layout, random_weights


@dataclass(frozen=True)
class Embedding(KernelSpec):
    """Rows tokens[sequence[r], position[r]] of an embedding table, as f32, exact.

    They are multiplied by ``scale``. With ``positions`` row position[r] of ``position_table``
    (positions, cols), a learned position embedding, is added.

    Tokens of ``texts`` are those of the rows, tokens[r]. They may have ``types``: row types[r] of a
    table of as many rows, of the same format, is added.

    A row whose position is ``max_len`` or more is a padding row: zeros. A token or sequence out of
    range reads nothing and gives NaNs: the host checks tokens when it accepts them.
    """

    format: Format
    vocab: int
    cols: int
    max_len: int
    rows: int = 1
    sequences: int = 1
    scale: float = 1.0
    positions: int = 0
    texts: bool = False
    types: int = 0

    name = "embedding"
    limits = limited(rows=GRID_ROWS, sequences=POSITIVE, max_len=POSITIVE)
    launch_fields = frozenset({"rows"})
    #: This kernel begins a step. Later kernels of the step read positions before they wait. In a
    #: graph with several steps, the plain edge to this kernel ensures that the previous step is
    #: complete.
    waits_for_dependencies = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions and self.positions < self.max_len:
            raise PtxgenError(
                f"embedding: {self.positions} learned positions, sequences of up to {self.max_len}"
            )
        if self.types and not self.texts:
            raise PtxgenError("embedding: tokens of sequences have no types")

    @cached_property
    def layout(self) -> Layout:
        """The table's layout: that of a weight matrix, so that it can be tied."""
        return Layout(self.format, self.vocab, self.cols)

    @cached_property
    def type_layout(self) -> Layout | None:
        """The layout of the table of types, if there is one."""
        return Layout(self.format, self.types, self.cols) if self.types else None

    @property
    def params(self) -> tuple[Param, ...]:
        types = self.type_layout
        return Param.given(
            Param("weights", "u8", ("weight_nbytes",), Access.IN),
            types and Param("type_weights", "u8", (types.nbytes,), Access.IN),
            types and Param("types", "u32", ("rows",), Access.IN),
            *self._token_params,
            Param("position", "u32", ("rows",), Access.IN),
            self.positions and Param("position_table", "f32", ("positions", "cols"), Access.IN),
            Param("y", "f32", ("rows", "cols"), Access.OUT),
        )

    @property
    def _token_params(self) -> tuple[Param, ...]:
        """The tokens, and where the rows find theirs."""
        if self.texts:
            return (Param("tokens", "u32", ("rows",), Access.IN),)
        tokens = Param("tokens", "u32", ("sequences", "max_len"), Access.IN)
        return tokens, Param("sequence", "u32", ("rows",), Access.IN)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the repacked table."""
        return self.layout.nbytes

    @property
    def launch_shape(self) -> LaunchShape:
        grid = ceil_div(self.layout.row_units, 32)
        return LaunchShape(grid=(grid, self.rows, 1), block=(32, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        table, types = self.layout.unpack(inputs["weights"]), None
        if self.type_layout is not None:
            types = self.type_layout.unpack(inputs["type_weights"])
        y = np.full((self.rows, self.cols), np.nan, np.float32)
        sequences = [0] * self.rows if self.texts else inputs["sequence"].tolist()
        places = zip(sequences, inputs["position"].tolist(), strict=True)
        for row, (sequence, position) in enumerate(places):
            if position >= self.max_len:
                y[row] = 0.0
            elif sequence < self.sequences:
                token = inputs["tokens"][row if self.texts else (sequence, position)]
                if token < self.vocab:
                    y[row] = table[token]
                    if self.scale != 1:
                        y[row] *= np.float32(self.scale)
                    if types is not None:
                        y[row] += types[inputs["types"][row]]
                    if self.positions:
                        y[row] += inputs["position_table"][position]
        return {"y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        weights = random_weights(self.layout, rng)
        tokens = self._token_params[0]
        inputs = {
            "weights": weights,
            "tokens": rng.integers(0, self.vocab, self.shape_of(tokens), np.uint32),
            "position": self._positions(rng),
        }
        if self.type_layout is not None:
            inputs["type_weights"] = random_weights(self.type_layout, rng)
            inputs["types"] = rng.integers(0, self.types, self.rows, np.uint32)
        if not self.texts:
            inputs["sequence"] = rng.integers(0, self.sequences, self.rows, np.uint32)
        if self.positions:
            table = rng.standard_normal((self.positions, self.cols))
            inputs["position_table"] = table.astype(np.float32)
        return inputs

    def _positions(self, rng: np.random.Generator) -> Array:
        """A position for every row, the last of several a padding position; (rows,) u32."""
        positions = rng.integers(0, self.max_len, self.rows, np.uint32)
        if self.rows > 1:
            positions[-1] = self.max_len
        return positions

    @classmethod
    def examples(cls) -> dict[str, Embedding]:
        cols = {f: 37 if f.is_float else f.block * 9 % 1536 for f in FORMATS.values()}
        each = {f.name: cls(f, vocab=5, cols=n, max_len=7) for f, n in cols.items()}
        return {
            **each,
            "long rows": cls(FORMATS["Q8_0"], vocab=3, cols=4896, max_len=2),
            "rows of sequences": cls(
                FORMATS["Q6_K"], vocab=9, cols=512, max_len=4, rows=6, sequences=3
            ),
            "F16 rows": cls(FORMATS["F16"], vocab=9, cols=37, max_len=4, rows=5, sequences=2),
            "scaled": cls(FORMATS["Q8_0"], vocab=5, cols=96, max_len=3, rows=2, scale=96**0.5),
            "learned positions": cls(
                FORMATS["Q4_0"], vocab=5, cols=64, max_len=3, rows=3, sequences=2, positions=4
            ),
            "texts": cls(FORMATS["Q8_0"], vocab=9, cols=96, max_len=5, rows=7, texts=True),
            "texts with types": cls(
                FORMATS["F16"],
                vocab=9,
                cols=1088,
                max_len=5,
                rows=7,
                positions=6,
                texts=True,
                types=2,
            ),
            "texts with types, odd": cls(
                FORMATS["BF16"], vocab=9, cols=45, max_len=5, rows=4, texts=True, types=3, scale=0.5
            ),
            "texts, learned positions": cls(
                FORMATS["F16"], vocab=9, cols=45, max_len=5, rows=6, positions=7, texts=True
            ),
            "odd learned positions": cls(
                FORMATS["F32"], vocab=5, cols=37, max_len=3, rows=3, scale=0.3, positions=3
            ),
        }

    def flops(self) -> int:
        return 2 * self.rows * self.cols

    def bytes_moved(self) -> int:
        row = self.cols // self.format.block * self.format.nbytes
        return self.rows * (row + 12 + (8 if self.positions else 4) * self.cols)
