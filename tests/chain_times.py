"""Times of a chain of products on a GPU, beside those of a launch each.

    PYTHONPATH=.src python tests/chain_times.py [variant ...]
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from urdir.driver import Device, execute
from urdir.driver.emulator.api import Api
from urdir.driver.plan import Plan
from urdir.model.lower.parts import device_limits
from urdir.ptxgen.kernels.linear import wgmma_choice
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.linear.products.gemm_chain import GemmChain
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.prologue.norm import begun
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, random_blocks
from urdir.ptxgen.weights.layout import Layout

Q4, Q6 = FORMATS["Q4_K"], FORMATS["Q6_K"]
PACKED, RMS = PackedVectors(), begun(Norm("rms", 1e-5))
ADDS = (Residual(), BeginNorm(), PACKED)
SMALL = bool(os.environ.get('SMALL'))
LAYERS, COPIES, RUNS, BATCH = 2 if SMALL else 32, 3, 1 if SMALL else 5, 16
N, F, KV = (1024, 1792, 256) if SMALL else (4096, 14336, 1024)
WIDE = WgmmaCut(4, BATCH, 1, 1, 1, 6, 4)
FAR = WgmmaCut(1, BATCH, 4, 2, 1, 3, 2)
NEAR = WgmmaCut(1, BATCH, 4, 1, 1, 3, 2)
PAIRS = WgmmaCut(2, BATCH, 2, 2, 1, 6, 2)
OTHERS = ((Q4, KV), (Q6, KV))


def o(cut=FAR):
    return GemmWgmma.of(Q4, N, N, BATCH, cut, *ADDS)


def up(*begins):
    return GemmWgmma.of(Q4, F, N, BATCH, WIDE, *begins, Gated(), PACKED)


def down(fmt=Q6, steps=ADDS, cut=FAR):
    return GemmWgmma.of(fmt, N, F, BATCH, cut, *steps)


def qkv(cut=NEAR):
    return GemmWgmma.of(Q4, N, N, BATCH, cut, RMS, others=OTHERS)


QKV4 = GemmWgmma.of(Q4, N, N, BATCH, NEAR, RMS, others=((Q4, KV), (Q4, KV)))
LAYER = (o(), up(RMS), down(), qkv())
PAIR = (up(), down(steps=(Residual(),)))
VARIANTS = {
    "pair": GemmChain(PAIR, 3),
    "pair sevens": GemmChain(PAIR, 3, True),
    "layer": GemmChain(LAYER, 3),
    "layer sevens": GemmChain(LAYER, 3, True),
    "layer sevens, not warmed": GemmChain(LAYER, 3, True, warms=False),
    "layer sevens, two stages": GemmChain(LAYER, 2, True),
    "layer sevens, pairs of qkv": GemmChain((*LAYER[:3], qkv(PAIRS)), 3, True),
    "layer of Q4_K down sevens": GemmChain((o(), up(RMS), down(Q4), QKV4), 3, True),
    "layer of Q4_K down sevens, four": GemmChain((o(), up(RMS), down(Q4), QKV4), 4, True),
    "layer without qkv sevens": GemmChain(LAYER[:3], 3, True),
}


def weights(part: Any, rng: np.random.Generator) -> Any:
    layout = part.layout
    few = Layout(layout.format, 64, layout.cols)
    count = 64 * few.cols // layout.format.block
    packed = few.pack(random_blocks(layout.format, count, rng, layout.cols**-0.5))
    tiles, rest = packed[: few.tiles_nbytes], packed[few.tiles_nbytes :]
    made = np.empty(layout.nbytes, np.uint8)
    for to, of in ((made[: layout.tiles_nbytes], tiles), (made[layout.tiles_nbytes :], rest)):
        if len(to):
            to[:] = np.resize(of, len(to))
    return made


class Memory:
    """What both plans of a chain have in common."""

    def __init__(self, device: Device, chain: GemmChain) -> None:
        rng = np.random.default_rng(0)
        self.slices, self.owners, self.outputs = {}, [], []
        products = dict(enumerate(chain.products))
        for param in chain.params:
            name, _, place = param.name.rpartition("_")
            nbytes = chain.nbytes(param)
            is_weights = name.startswith(("weights", "up"))
            copies = COPIES if is_weights else 1
            buffer = device.allocate(copies * (-(-nbytes // 512) * 512), param.name)
            self.owners.append(buffer)
            if is_weights:
                product = products[int(place)]
                number = int(name.removeprefix("weights") or 0) if name != "up" else 0
                value = weights(product.parts[number], rng)
            elif param.name == "counts" or param.access.name == "OUT":
                value = np.zeros(nbytes, np.uint8)
            else:
                value = rng.standard_normal(nbytes // param.numpy_dtype.itemsize)
                value = value.astype(param.numpy_dtype).view(np.uint8)
            self.slices[param.name] = []
            for copy in range(copies):
                of = buffer.slice(copy * (-(-nbytes // 512) * 512), nbytes)
                of.upload(value)
                self.slices[param.name].append(of)
            if param.access.name == "OUT" and param.name != "stamps":
                self.outputs.append(param)

    def of(self, name: str, layer: int):
        slices = self.slices[name]
        return slices[layer % len(slices)]

    def read(self) -> dict[str, Any]:
        return {
            p.name: np.frombuffer(bytes(self.of(p.name, 0).download(np.uint8)), p.numpy_dtype).copy()
            for p in self.outputs
        }


def plans(chain: GemmChain, memory: Memory, sms: int) -> Iterator[tuple[str, Any]]:
    """Appends a layer: launch by launch, and as one."""
    ways = [wgmma_choice.choose_wgmma(product, sms) for product in chain.products]

    def apart(plan: Plan, layer: int) -> None:
        for place, way in enumerate(ways):
            args = {n: memory.of(of, layer) for n, of in chain.registers_of(place)}
            plan.launch(way, f"{layer} {place}", **args)

    def together(plan: Plan, layer: int) -> None:
        plan.launch(chain, f"{layer}", **{p.name: memory.of(p.name, layer) for p in chain.params})

    yield "launches", apart
    yield "chain", together


def time_of(device, stream, memory, chain, append) -> float:
    plan = Plan("chain")
    pack = Pack(BATCH, N)
    last = next((n for n in ("y_3", "y_2", "y_1") if n in memory.slices), None)
    for layer in range(LAYERS):
        if chain.products[0].cols == N and len(chain.products) > 2:
            plan.launch(pack, f"{layer} pack", x=memory.of(last, 0), y=memory.of("x_0", 0))
        append(plan, layer)
    device.load_all([*{id(k): k for k in plan.kernels()}.values()])
    with execute.record(plan, device) as graph:
        times = []
        for _ in range(RUNS + 1):
            begin = stream.record()
            graph.launch(stream)
            times.append(1e3 * stream.record().elapsed_ms_since(begin) / LAYERS)
    return min(times[1:])


def print_stamps(chain: GemmChain, memory: Memory) -> None:
    size = chain.launch_shape.grid[0], len(chain.products), 8
    stamps = np.frombuffer(bytes(memory.of("stamps", 0).download(np.uint8)), np.uint64).reshape(size)
    used = stamps[stamps > 0]
    begin = int(used.min())
    names = ("x asked", "tiles", "sums", "ended", "told", "copied")
    for place, product in enumerate(chain.chained):
        of = stamps[: product.ctas, place].astype(np.int64) - begin
        cells = []
        for n, name in enumerate(names):
            if (stamps[: product.ctas, place, n] > 0).any():
                us = np.quantile(of[:, n], (0, 0.5, 1)) / 1e3
                cells.append(f"{name} {us[0]:.2f} {us[1]:.2f} {us[2]:.2f}")
        print(f"    {place}: " + "; ".join(cells), flush=True)


def main() -> None:
    names = sys.argv[1:] or list(VARIANTS)
    api = Api(target="sm_90a", sm_count=32) if SMALL else None
    with Device.open("emulator:sm_90a" if SMALL else "cuda", api=api) as device, device.create_stream() as stream:
        sms = device_limits(device).sms
        for name in names:
            chain = VARIANTS[name]
            stamped = dataclasses.replace(chain, stamps=True)
            memory = Memory(device, stamped)
            us, made = {}, {}
            for kind, append in plans(chain, memory, sms):
                plan = Plan(kind)
                append(plan, 0)
                execute.run(plan, device, stream)
                made[kind] = memory.read()
            for kind, append in plans(chain, memory, sms):
                us[kind] = time_of(device, stream, memory, chain, append)
            worst = 0.0
            for of, a in made["launches"].items():
                a, b = a.astype(np.float64), made["chain"][of].astype(np.float64)
                worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
            print(f"{name}: " + ", ".join(f"{k} {v:.2f} us" for k, v in us.items()), end="")
            print(f", apart by {worst:.5f} of the largest", flush=True)
            if SMALL:
                continue
            _, (_, append) = plans(stamped, memory, sms)
            print(f"  with stamps {time_of(device, stream, memory, stamped, append):.2f} us")
            print_stamps(stamped, memory)


if __name__ == "__main__":
    main()
