"""Kernels written in a test, run on the emulator's machine without the driver API."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine.compile import Program, compile_entry
from urdir.driver.emulator.machine.execution import GridExecution, Status
from urdir.driver.emulator.machine.memory import Memory
from urdir.ptxgen import ptx

Array = np.ndarray[Any, Any]

PTX_TYPES = {
    "bool": "u8", "uint8": "u8", "int8": "s8", "uint16": "b16", "int16": "b16", "float16": "b16",
    "uint32": "b32", "int32": "b32", "float32": "f32", "uint64": "b64", "int64": "b64",
    "float64": "f64",
}  # fmt: skip


@dataclass
class Machine:
    """Memory of a device and the kernels that run on it."""

    memory: Memory = field(default_factory=lambda: Memory(1 << 30))
    target: str = "sm_90"
    version: str = "8.0"

    def module(self, body: str, params: Sequence[str] = (), directives: str = "") -> str:
        """PTX of an entry ``k`` with 64-bit parameters; ``body`` declares its registers."""
        declared = ", ".join(f".param .u64 {p}" for p in params)
        return (
            f".version {self.version}\n.target {self.target}\n.address_size 64\n"
            f".visible .entry k({declared})\n{directives}\n{{\n{body}\n}}\n"
        )

    def compile(self, body: str, params: Sequence[str] = (), target: str = "") -> Program:
        return compile_entry(ptx.parse(self.module(body, params)), "k", target or self.target)

    def upload(self, array: Array, kind: str = "device") -> int:
        address = self.memory.allocate(array.nbytes, kind)
        self.memory.write(address, array)
        return address

    def download(self, address: int, dtype: Any, count: int) -> Array:
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer(self.memory.read(address, size), dtype)

    def execution(
        self,
        body: str,
        params: dict[str, int] | None = None,
        ctas: int | tuple[int, int, int] = 1,
        threads: int | tuple[int, int, int] = 32,
        cluster: tuple[int, int, int] = (1, 1, 1),
        **options: Any,
    ) -> GridExecution:
        params = params or {}
        program = self.compile(body, tuple(params))
        grid = (ctas, 1, 1) if isinstance(ctas, int) else ctas
        block = (threads, 1, 1) if isinstance(threads, int) else threads
        shared = options.pop("shared_bytes", 0)
        packed = struct.pack(f"<{len(params)}Q", *params.values())
        return GridExecution(
            program, grid, block, cluster, shared, packed, self.memory,
            options.pop("sm_count", 4), **options,
        )  # fmt: skip

    def run(self, body: str, params: dict[str, int] | None = None, **options: Any) -> None:
        assert self.execution(body, params, **options).run(alone=True) is Status.DONE

    def evaluate(self, code: str, out: str, *inputs: Array, mode: str = "whole") -> Array:
        """Run ``code`` once a lane: %a, %b, %c hold the inputs, %d takes the result.

        ``mode``: "whole" runs all lanes at once, "scattered" odd and even lanes apart, "guarded"
        all under a predicate that holds for two lanes of three (%d starts as zero).
        """
        n = inputs[0].size
        result = np.zeros(n, out)
        params = {f"p{i}": self.upload(x) for i, x in enumerate(inputs)}
        params["out"] = self.upload(result)
        names = "abcefg"
        lines = [".reg .b32 %i, %cta, %size, %x, %y, %z; .reg .b64 %at, %step, %w, %v;",
                 ".reg .pred %p, %q, %use, %active; .reg .b16 %h, %g2;", ".reg .f32 %t;",
                 "mov.u32 %i, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %size, %ntid.x;",
                 "mad.lo.u32 %i, %cta, %size, %i;"]  # fmt: skip
        for i, x in enumerate(inputs):
            kind = PTX_TYPES[str(x.dtype)]
            register = "b16" if kind[1:] == "8" else kind
            lines += [
                f".reg .{register} %{names[i]};",
                f"ld.param.u64 %at, [p{i}]; mul.wide.u32 %step, %i, {x.itemsize};",
                f"add.u64 %at, %at, %step; ld.global.{kind} %{names[i]}, [%at];",
            ]
        kind = PTX_TYPES[str(result.dtype)]
        register = "b16" if kind[1:] == "8" else kind
        zero = "0d0000000000000000" if kind == "f64" else "0f00000000" if kind == "f32" else "0"
        lines.append(f".reg .{register} %d; mov.{register} %d, {zero};")
        if mode == "whole":
            lines.append(code)
        elif mode == "scattered":
            lines += ["and.b32 %x, %i, 1; setp.eq.u32 %active, %x, 1; @%active bra ODD;", code,
                      "bra.uni END;", "ODD:", code, "END:"]  # fmt: skip
        else:
            lines += ["rem.u32 %x, %i, 3; setp.ne.u32 %active, %x, 0;"]
            lines += [f"@%active {s.strip()};" for s in code.split(";") if s.strip()]
        store = "b32" if kind == "b32" else kind
        lines += [f"ld.param.u64 %at, [out]; mul.wide.u32 %step, %i, {result.itemsize};",
                  f"add.u64 %at, %at, %step; st.global.{store} [%at], %d; ret;"]  # fmt: skip
        threads = 64 if n % 64 == 0 else n
        self.run("\n".join(lines), params, ctas=n // threads, threads=threads)
        return self.download(params["out"], out, n)

    def check(self, code: str, out: str, expected: Array, *inputs: Array) -> None:
        """``evaluate`` in every mode equals ``expected``, bit for bit."""
        want = np.ascontiguousarray(np.asarray(expected, out))
        bits = f"u{want.itemsize}"
        for mode in ("whole", "scattered", "guarded"):
            got = self.evaluate(code, out, *inputs, mode=mode)
            there = want.copy()
            if mode == "guarded":
                there[np.arange(want.size) % 3 == 0] = 0
            wrong = np.flatnonzero(got.view(bits) != there.view(bits))
            assert not wrong.size, (
                f"{code} ({mode}) of {[x[wrong[0]] for x in inputs]}: "
                f"{got[wrong[0]]!r}, expected {there[wrong[0]]!r}"
            )


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261120)
