"""HTTP against the engine alone, on a GPU, with a synthetic model whose tokens have four letters.

    python tests/gpu/http_load.py --shape llama-3.1-8b --workers 4

One user from the first request on, then 256 users of four client processes, 128 tokens in and out:
what the clients saw, and the time that each process of the server ran. `urdir bench --load` with
the same users and lengths is the engine alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gguf

from urdir.model.commands.opening import begin_warm_up, go_on_beside_answers, load
from urdir.model.engine.engine import Engine
from urdir.model.engine.options import EngineOptions
from urdir.model.engine.requests.limits import Limits as EngineLimits
from urdir.model.engine.requests.service import Service
from urdir.model.engine.texts import open_texts
from urdir.model.families.shapes import Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.serve.access import Access
from urdir.model.serve.apart.settings import Front, Settings
from urdir.model.serve.apart.supervisor import serve_apart
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.listening import listen

WARM_UP_SECONDS = 2.0
TINY = Shape("llama", 2, 256, 4, 2, 64, 512, 4096, True)
LENGTHS = ("--input", "128", "--answer", "128")


def write_words(path: str, size: int) -> None:
    """A file with a vocabulary of so many words, of four letters but for the first."""
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    alphabet = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 324))]
    words = [*alphabet, *("".join(each) for each in itertools.islice(letters, size))][:size]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("words")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(words)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def model_of(args: argparse.Namespace) -> SyntheticModel:
    return SyntheticModel(args.shape, shape=TINY if args.shape == "tiny" else None)


def open_engine(args: argparse.Namespace, post: Any) -> tuple[Engine, Service]:
    model = model_of(args)
    sizes = {"memory_share": 0.9, "sequences": args.sequences}
    wanted = EngineOptions(model, device=args.device, cache_folder=args.cache, **sizes)
    with load(wanted) as loading:
        warm_up = begin_warm_up(loading, WARM_UP_SECONDS)
        engine = Engine(loading)
    go_on_beside_answers(warm_up)
    limits = EngineLimits.for_latency(engine.session.shapes)
    return engine, Service(engine, None, limits, post, warm_up)


def names(name: str) -> list[str]:
    return ["words"]


def greet(port: int, name: str, context: int) -> None:
    print(f"http://127.0.0.1:{port}", flush=True)


def defaults(metadata: object) -> Defaults:
    return Defaults()


def serve(args: argparse.Namespace) -> None:
    size = model_of(args).tensors["token_embd.weight"].shape[0]
    with tempfile.TemporaryDirectory() as folder, listen("127.0.0.1", 0) as listener:
        path = f"{folder}/words.gguf"
        write_words(path, size)
        front = Front(partial(open_texts, path), names, defaults, Access(), Limits())
        port = listener.getsockname()[1]
        opens = partial(open_engine, args)
        serve_apart(Settings(opens, front, args.workers, partial(greet, port)), listener)


def bench(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "urdir.model", "bench", *words, "-o", "json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    return json.loads(out)


def processes(root: int) -> dict[int, tuple[str, float]]:
    """Seconds that the process and its descendants ran, by pid."""
    parents, found = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            line = (folder / "cmdline").read_text().replace("\0", " ")
            found[int(folder.name)] = (line[:90], (int(fields[11]) + int(fields[12])) / 100)
    kept = {root}
    while len(more := kept | {pid for pid, parent in parents.items() if parent in kept}) > len(
        kept
    ):
        kept = more
    return {pid: found[pid] for pid in sorted(kept) if pid in found}


def one_user(url: str, requests: str, seed: int) -> str:
    words = ("--users", "1", "--requests", requests, "-s", str(seed), *LENGTHS)
    return figures(results(bench("--load", url, *words)))


def figures(found: Any) -> str:
    """Milliseconds of first tokens and between tokens."""
    rows = {row["name"]: row for row in found["latency"]}
    parts = []
    for name in ("first token", "a token after the first", "whole answer"):
        times = " ".join(f"{key} {rows[name][key]:.2f}" for key in ("p50", "p90", "p99"))
        parts.append(f"{name} {times}")
    return "; ".join(parts)


def graphs_of(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/health") as reply:
        return json.load(reply).get("graphs", {"recorded": 0, "of": 0})


def measure(args: argparse.Namespace) -> None:
    start = time.monotonic()
    words = [sys.executable, __file__, "--serve", "--shape", args.shape, "--device", args.device]
    words += ["--workers", str(args.workers), "--sequences", str(args.sequences)]
    words += ["--cache", str(args.cache)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        print(f"{url} after {time.monotonic() - start:.1f} s", flush=True)
        if not args.graphs:
            print("one user, from the first request on:", one_user(url, args.one, 1), flush=True)
        end = time.monotonic() + args.wait
        while (graphs := graphs_of(url))["recorded"] < graphs["of"] and time.monotonic() < end:
            time.sleep(0.05)
        print(f"graphs after {time.monotonic() - start:.1f} s: {graphs}", flush=True)
        print("one user, later:", one_user(url, args.one, 2), flush=True)
        if args.graphs:
            return
        for turn in ("the same, before:", "measured:"):
            before, began = processes(server.pid), time.monotonic()
            share = args.clients if turn == "measured:" else 4 * args.clients
            words = ("--users", str(args.sequences // args.clients))
            words += ("--requests", str(args.requests // share), *LENGTHS)
            clients = [
                bench("--load", url, *words, "-s", str(seed + 10 * len(turn)))
                for seed in range(args.clients)
            ]
            found = [results(client) for client in clients]
            rates = [each["load"][0]["output_tokens_per_second"] for each in found]
            print(turn, f"{sum(rates):,.0f} tokens/s, {figures(found[0])}", flush=True)
        seconds = time.monotonic() - began
        for pid, (line, used) in processes(server.pid).items():
            share = (used - before.get(pid, (line, 0.0))[1]) / seconds
            print(f"{100 * share:5.1f} % of a core  {pid} {line}", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--one", default="40", help="requests of the one user")
    parser.add_argument("--wait", type=float, default=45.0, help="seconds for graphs")
    parser.add_argument("--graphs", action="store_true", help="first, and no crowd")
    parser.add_argument("--cache", type=Path, help="of kernels (default: an empty one)")
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.cache is None:
            args.cache = Path(folder)
            os.environ["CUDA_CACHE_PATH"] = str(args.cache / "driver")
        serve(args) if args.serve else measure(args)


if __name__ == "__main__":
    main()
