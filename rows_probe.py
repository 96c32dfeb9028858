# ruff: noqa
"""Measure steps with other cuts and without begun norms or overlap. Temporary."""

import os
import sys
import time
from dataclasses import replace

import numpy as np

from urdir.model.engine import runner
from urdir.model.engine.batch import Output
from urdir.model.engine.engine import Engine
from urdir.model.engine.options import EngineOptions
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.lower import packed, requests
from urdir.model.measure.bench import _spread
from urdir.model.measure.timed_answers import fill, time_answer, time_decoding
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention import choice as attention_choice
from urdir.ptxgen.kernels.linear import packed_choice
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import SLICE_REGISTERS, GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.wgmma_choice import RINGS
from urdir.ptxgen.weights.packed import GROUP, TILE_SLICES
from urdir.ptxgen.spec import ceil_div

START = time.monotonic()
LIMIT = float(sys.argv[1])
COUNTS = [int(n) for n in sys.argv[2].split(",") if n]
SEARCH = [int(n) for n in sys.argv[3].split(",") if n] if len(sys.argv) > 3 else []
KIND = sys.argv[4] if len(sys.argv) > 4 else "q4_k_m"
SHAPE = sys.argv[5] if len(sys.argv) > 5 else "llama-3.1-8b"
overrides = {}
usual = packed_choice.choose_packed
SHARED = [False]


def key_of(rows, cols, steps, fields):
    gated = any(type(s).__name__ == "Gated" for s in steps)
    return (rows, cols, gated, len(fields.get("others", ())))


def chosen(limits, fmt, rows, cols, batch, *steps, **fields):
    kernel = usual(limits, fmt, rows, cols, batch, *steps, **fields)
    if SHARED[0] and kernel.cut.x_slices == kernel.cut.cluster == 1:
        try:
            kernel = replace(kernel, cut=replace(kernel.cut, sharers=2))
        except PtxgenError:
            pass
    how = overrides.get(key_of(rows, cols, steps, fields))
    seen.setdefault(key_of(rows, cols, steps, fields), []).append(kernel.cut)
    if how is None:
        return kernel
    cut = deepest(kernel, *how)
    return kernel if cut is None else replace(kernel, cut=cut)


narrowed = attention_choice._narrowed
seen = {}
usual_key = GemmWgmma.key


def key_with_overlap(self, target):
    """Not the same kernel where overlap is switched off."""
    return usual_key(self, target) + ("1" if self.cut.overlaps else "0")


GemmWgmma.key = key_with_overlap


def deepest(product, groups, splits, cluster, vectors, resident, most):
    for weights, activations, slices in RINGS:
        if (vectors <= 64 or splits > 1) != (slices == TILE_SLICES):
            continue
        try:
            cut = WgmmaCut(groups, vectors, splits, cluster, weights, activations, slices, resident)
            made = replace(product, cut=cut)
        except PtxgenError:
            continue
        if made.shared_bytes <= most:
            return cut
    return None


def fresh(session):
    session.stream.synchronize() if hasattr(session.stream, "synchronize") else None
    session.parts.device.synchronize()
    steps = session.steps
    for graph in steps._graphs.values():
        graph.close()
    steps._graphs.clear()
    steps._bound.clear()
    steps._begun.clear()
    steps._waits.clear()
    steps._used_bytes = 0


STEPS = int(os.environ.get("PROBE_STEPS", "24"))


def decode(session, count, steps=STEPS, runs=3 if STEPS > 5 else 1):
    prompts = [[int(t)] for t in np.random.default_rng(count).integers(0, 1000, count)]
    spread = _spread(count, None)
    session.graphs.prepare_all(count, Output.GREEDY, 1, 1 + steps + spread, 1)
    best = []
    for _ in range(runs):
        fill(session, [], count)
        t = time_decoding(session, prompts, steps, spread)
        best.append(1e3 * t.seconds / t.tokens * count)
    return min(best), sorted(best)[len(best) // 2]


def prompt(session, tokens, runs=3):
    ids = [int(t) for t in np.random.default_rng(tokens).integers(0, 1000, tokens)]
    best = []
    for _ in range(runs + 1):
        fill(session, [], 1)
        best.append(1e3 * time_answer(session, ids, 1).seconds)
    return min(best[1:]), sorted(best[1:])[(len(best) - 1) // 2]


def say(*words):
    print(f"{time.monotonic() - START:6.1f}", *words, flush=True)


def toggles(session, counts):
    for name, begun, overlaps in (
        ("both", 512, True), ("no begun", 0, True), ("no overlap", 512, False),
        ("eight warps", 512, True), ("shared", 512, True),
        ("begun all", 4096, True), ("early", 512, True), ("early all", 4096, True),
        ("neither", 0, False),
    ):
        requests.MOST_BEGUN = begun
        FORCED[0] = name.startswith("early")
        SHARED[0] = name == "shared"
        attention_choice._narrowed = (lambda spec, *a: spec) if name == "eight warps" else narrowed
        WgmmaCut.overlaps = property(
            (lambda c: c.used_registers + SLICE_REGISTERS <= c.registers and c.x_stages > 1) if overlaps
            else (lambda c: False)
        )
        fresh(session)
        for count in counts:
            if time.monotonic() - START > LIMIT:
                return
            if (begun == 4096 or FORCED[0]) and count > 0:
                continue
            if name == "eight warps" and count < 33:
                continue
            if name == "shared" and -65 < count < 65:
                continue
            try:
                if count > 0:
                    say(name, "rows", count, "ms %.4f %.4f" % decode(session, count))
                else:
                    say(name, "prompt", -count, "ms %.3f %.3f" % prompt(session, -count))
            except Exception as error:
                say(name, count, "failed", repr(error)[:300])
        fresh(session)
    requests.MOST_BEGUN = 512
    FORCED[0] = SHARED[0] = False
    WgmmaCut.overlaps = property(lambda c: c.used_registers + SLICE_REGISTERS <= c.registers and c.x_stages > 1)


FULL, HALF = 227 << 10, 112 << 10


def ways(count, gated):
    whole = GROUP * ceil_div(abs(count), GROUP)
    shapes = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (3, 1))
    if count < 0:
        shapes = ((3, 1), (2, 1), (4, 1), (1, 1))
    widths = [whole] if whole <= 128 else [128]
    if whole > 64:
        widths.append(GROUP * ceil_div(ceil_div(whole, 2), GROUP) if whole <= 128 else 64)
    if count < 0:
        widths = [128, 192, 96, 80, 64]
    for vectors in widths:
        for groups, splits in shapes:
            if gated and groups % 2:
                continue
            for cluster in (1, 2)[: 1 if count < 0 else 2]:
                for most, resident in ((FULL, 1), (HALF, 1))[: 1 if count < 0 else 2]:
                    yield (groups, splits, cluster, vectors, resident, most)


def search(session, count):
    overrides.clear()
    seen.clear()
    fresh(session)
    timed = (lambda n: prompt(session, -count, n)[0]) if count < 0 else (
        lambda n: decode(session, count, runs=n)[0])
    base = timed(3)
    keys = dict(seen)
    say("search", count, "base %.4f" % base, {k: v[0] for k, v in keys.items()})
    starts = [{}]
    if 0 < count <= 64:
        v = GROUP * ceil_div(count, GROUP)
        for most, c in ((HALF, 1), (72 << 10, 1), (HALF, 2)):
            starts.append({
                (4096, 4096, False, 2): (1, 2, c, v, 1, most),
                (4096, 4096, False, 0): (1, 2, 2, v, 1, most),
                (14336, 4096, True, 0): (2, 1, 1, v, 1, most),
                (4096, 14336, False, 0): (1, 2, 2, v, 1, most),
            })
    for start in starts[1:]:
        overrides.clear()
        overrides.update(start)
        try:
            fresh(session)
            ms = timed(2)
        except Exception as error:
            say("  joint failed", repr(error)[:200])
            continue
        say("  joint", "%.4f" % ms, start)
        if ms < base:
            base, starts[0] = ms, dict(start)
    overrides.clear()
    overrides.update(starts[0])
    for key in sorted(keys, key=lambda k: (k[0] > 100000, -k[0] * k[1] * (1 + k[2]))):
        for how in ways(count, key[2]):
            if time.monotonic() - START > LIMIT:
                say("out of time", overrides)
                return
            before = overrides.get(key)
            overrides[key] = how
            try:
                fresh(session)
                ms = timed(2)
            except Exception as error:
                say("  ", key, how, "failed", repr(error)[:200])
                ms = 1e9
            better = ms < base * 0.998
            say("  ", key, how, "%.4f" % ms, "*" if better else "")
            if better:
                base = ms
            elif before is None:
                overrides.pop(key)
            else:
                overrides[key] = before
    say("best", count, "%.4f" % base, overrides)


packed._choose_packed = chosen
usual_recording = runner.execute.recording
FORCED = [False]


def recording(bound, device, programmatic=True):
    return usual_recording(bound, device, programmatic=programmatic or FORCED[0])


runner.execute.recording = recording
many = [c for c in [*COUNTS, *SEARCH] if c > 0]
model = None if SHAPE == "demo" else SyntheticModel(SHAPE, KIND)
device = "emulator" if SHAPE == "demo" else "auto"
if many:
    with Engine.open(model, context=256, sequences=max(many), device=device) as engine:
        say("open")
        toggles(engine.session, [c for c in COUNTS if c > 0])
        for count in (c for c in SEARCH if c > 0):
            search(engine.session, count)
prompts = [c for c in [*COUNTS, *SEARCH] if c < 0]
if prompts:
    with Engine.open(model, context=64 - min(prompts), device=device) as engine:
        toggles(engine.session, [c for c in COUNTS if c < 0])
        for count in (c for c in SEARCH if c < 0):
            search(engine.session, count)
