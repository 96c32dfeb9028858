"""Writes the table of architectures in model/MODELS.md: what the descriptions of the goldens say.

    python tests/family_table.py

An architecture with several goldens has what any of them has. `tests/test_family_table.py`
compares.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory

from tests.model.files.class_goldens import NAMES, ClassGolden
from urdir.model.families import architectures
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Block, Network, StreamJoin
from urdir.model.families.ngrams import NgramMemory
from urdir.model.families.recurrent import (
    KimiDelta,
    Lightning,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.families.rwkv import ChannelMix, TimeMix
from urdir.model.files.gguf import Gguf
from urdir.model.files.pretrained.model import SafetensorsModel

FOLDER = Path(__file__).parent / "data" / "families"
OTHERS = tuple(FOLDER.parent / kind for kind in ("encoders", "encoder_decoders"))
README = Path(__file__).parents[1] / "model" / "MODELS.md"
BEGIN, END = "<!-- by tests/family_table.py -->\n", "<!-- end -->\n"

Features = Iterator[tuple[bool, str]]


def table() -> str:
    """The lines between the marks."""
    written = json.loads((FOLDER / "errors.json").read_text(encoding="utf-8"))
    goldens = goldens_by_family()
    lines = [
        "| architecture | file | layers | attention | positions | network | more | "
        f"error: {written['by']} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, file in sorted(_files().items()):
        configs = goldens.get(name, {})
        error = max((written["errors"].get(golden, 0.0) for golden in configs), default=0.0)
        columns = [
            _of_all(configs.values(), of)
            for of in (_layers, _attention, _positions, _networks, _more)
        ]
        kind = "of a class" if configs.keys() & {*NAMES} else "embeddings"
        shown = f"{error:.0e}" if error else kind if configs else "no golden"
        by = {written["others"][golden] for golden in configs if golden in written["others"]}
        shown += f" ({', '.join(sorted(by))})" if by else ""
        lines.append(f"| `{name}` | `{file}` | {' | '.join(columns)} | {shown} |")
    return "\n".join(lines) + "\n"


def _files() -> dict[str, str]:
    """The file of every architecture."""
    found = {}
    for module in iter_modules(architectures.__path__, f"{architectures.__name__}."):
        file = f"{module.name.rpartition('.')[2]}.py"
        found |= dict.fromkeys(import_module(module.name).ARCHITECTURES, file)
    return found


@cache
def goldens_by_family() -> dict[str, dict[str, Config]]:
    """The descriptions of goldens by architecture and name."""
    found: dict[str, dict[str, Config]] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        folders = (FOLDER, *OTHERS)
        for packed in [path for of in folders for path in sorted(of.glob("*.gguf.xz"))]:
            path.write_bytes(lzma.decompress(packed.read_bytes()))
            with Gguf(path) as file:
                config = Config.of(file)
            name = packed.name.removesuffix(".gguf.xz")
            found.setdefault(config.architecture, {})[name] = config
        for name in NAMES:
            with SafetensorsModel(ClassGolden.read(name).write_folder(Path(folder))) as model:
                config = Config.of(model)
            if not found.get(config.architecture, {}).keys() - {*NAMES}:
                found.setdefault(config.architecture, {})[name] = config
    return found


def _of_all(configs: Iterable[Config], of: Callable[[Config], Features]) -> str:
    parts = dict.fromkeys(text for config in configs for has, text in of(config) if has)
    return ", ".join(parts) or "-"


# ---- columns: whether a model has something, and what it is called ----


def _blocks(config: Config) -> list[Block]:
    return [block for layer in config.layers for block in layer.blocks]


def _all(config: Config) -> list[Network]:
    return [network for layer in config.layers for network in layer.networks]


def _layers(config: Config) -> Features:
    blocks = _blocks(config)
    branches = [branch for block in blocks for branch in block.branches]
    before = [branch.norm for branch in branches if branch.norm]
    after = [n for n in (*(b.post_norm for b in blocks), *(b.post_norm for b in branches)) if n]
    stream = [block.stream_norm for block in blocks if block.stream_norm]
    kinds = {norm.norm.kind for norm in (*before, *after, *stream)}
    yield "rms" in kinds, "RMSNorm"
    yield "layer" in kinds, "LayerNorm"
    yield bool(after and before), "before and after"
    yield any(block.stream_norm for block in blocks), "on the stream"
    yield bool(after and not before), "after"
    yield any(n.weight is None for n in (*before, *after)), "without weights"
    yield any(n.bias is not None for n in (*before, *after)), "biases"
    kinds_of = [{type(branch.network) for branch in block.branches} for block in blocks]
    yield any(Attention in kinds and len(kinds) > 1 for kinds in kinds_of), "parallel"


def _attention(config: Config) -> Features:
    mixers, others = config.attentions, config.recurrents
    yield any(isinstance(m, ShortConv) for m in others), "short convolutions"
    longs = [m for m in others if isinstance(m, Recurrence)]
    yield any(m.beta for m in longs), "gated delta rule"
    yield any(m.beta is None for m in longs), "state space (SSD)"
    scans = [m for m in others if isinstance(m, Selective)]
    yield bool(scans), "selective scan"
    yield any(m.heads for m in scans), "per head"
    yield any(isinstance(m, KimiDelta) for m in others), "delta rule per channel"
    yield any(isinstance(m, Lightning) for m in others), "lightning"
    yield any(isinstance(m, TimeMix) for m in others), "time mixing"
    yield any(isinstance(m, NgramMemory) for m in others), "memory of n-grams"
    yield any(m.latent for m in mixers), "MLA"
    windows = [m.compression for m in mixers if m.compression]
    yield any(of.blocks for of in windows), "window and compressed blocks of tokens"
    yield any(m.indexer for m in mixers) or any(of.index for of in windows), "indexer"
    yield any(m.follows_indexer for m in mixers), "shared indexers"
    yield any(m.indexer and m.indexer.pool > 1 for m in mixers), "pools of keys"
    yield bool(others) and 0 < len(mixers) < config.n_layers, "attention in some layers"
    yield len(mixers) == len(others) == config.n_layers, "parallel attention"
    yield any(m.q.bias for m in mixers), "QKV biases"
    yield any(m.o.bias for m in mixers), "output bias"
    norms = [m.qk_norm for m in mixers if m.qk_norm]
    yield any(n.over == "head" for n in norms), "QK norms"
    yield any(n.over == "row" for n in norms), "QK norms over all heads"
    yield any(n.after_rope for n in norms), "after RoPE"
    yield any(m.v_norm for m in mixers), "value norm"
    yield not config.is_causal, "to both sides"
    yield config.source is not None, "cross attention"
    yield any(m.window for m in mixers), "window"
    yield any(m.chunk for m in mixers), "chunked attention"
    yield any(m.softcap for m in mixers), "soft-cap"
    yield any(m.sinks for m in mixers), "sinks"
    yield any(m.clamp for m in mixers), "clamp"
    yield any(m.temperature for m in mixers), "temperature"
    yield any(m.gate for m in mixers), "gate"
    yield any(m.norm for m in mixers), "norm of the result"
    yield any(m.v is None and m.k is not None for m in mixers), "K is V"
    yield any(m.shares_cache_of is not None for m in mixers), "shared caches"
    yield len({(m.heads, m.kv_heads, m.key_dim) for m in mixers}) > 1, "heads differ by layer"


def _positions(config: Config) -> Features:
    ropes, mixers = config.ropes, config.attentions
    yield any(rope.style == "interleaved" for rope in ropes), "interleaved RoPE"
    yield any(rope.style == "half" for rope in ropes), "NeoX RoPE"
    yield any(m.rope and m.rope.dim < m.key_dim for m in mixers), "partial"
    yield len(ropes) > 1, "differs by kind of layer"
    yield bool(ropes) and any(m.rope is None for m in mixers), "in some layers"
    yield any(rope.factors for rope in ropes), "factors"
    yield any(rope.long_factors for rope in ropes), "LongRoPE"
    yield any(rope.still for rope in ropes), "axes"
    yield any(m.max_bias for m in mixers), "ALiBi"
    yield config.positions is not None, "learned"
    yield bool(config.biases), "bias by distance"


def _networks(config: Config) -> Features:
    networks = _all(config)
    for network in networks:
        if isinstance(network, Dense):
            yield True, _named(network)
            yield network.divisors is not None, "divisors"
            yield network.norm is not None, "norm of inner values"
            yield network.deviations is not None, "sparse gates in some layers"
        elif isinstance(network, Mixture):
            yield from _mixture(network)
        elif isinstance(network, ChannelMix):
            yield True, "channel mixing"
        elif not isinstance(network, Attention | Recurrent):
            yield True, f"{type(network).__name__.lower()} alone"
    yield any(isinstance(n, Dense) and n.up.bias for n in networks), "biases"


def _named(network: Dense | Mixture) -> str:
    kind = network.activation.kind.replace("swiglu_oai", "SwiGLU+1")
    return f"{kind} gate" if network.gate else kind


def _mixture(network: Mixture) -> Features:
    route = network.router
    yield True, f"experts ({_named(network)})"
    yield True, route.scoring.replace("_", " ")
    yield route.choice_bias is not None, "selection bias"
    yield route.by_token is not None, "experts by token"
    yield route.groups > 1, "groups"
    yield route.normalize, "normalised weights"
    yield route.scale != 1.0, "scale"
    yield route.reads != "input", f"router reads {route.reads}"
    yield route.expert_scale is not None, "expert scales"
    yield network.weigh_input, "weighted input"
    yield network.latent is not None, "latent experts"
    yield network.chunks is not None, "experts of groups of experts"
    yield network.up.bias is not None, "expert biases"
    yield network.shared is not None, "shared expert"
    yield network.shared_gate is not None, "shared expert gate"
    yield network.activation.limit > 0.0, "limit"


def _more(config: Config) -> Features:
    yield config.output.bias is not None, "output bias"
    yield config.embedding_norm is not None, "embedding norm"
    yield config.embedding_scale != 1.0, "embedding scale"
    yield any(block.scale != 1.0 for block in _blocks(config)), "residual scale"
    yield config.logit_scale != 1.0, "logit scale"
    yield config.softcap > 0.0, "logit soft-cap"
    yield config.hides is not None, "hidden logits"
    yield config.layer_embeddings is not None, "per-layer embeddings"
    yield any(layer.output_scale for layer in config.layers), "layer scale"
    yield bool(config.streams), "several streams (AltUp, LAuReL)"
    yield bool(config.saved_streams), "saved streams"
    yield config.banked(config.n_layers) > 0, "banked streams"
    yield config.has_streams, "hyper-connections"
    yield isinstance(config.join, StreamJoin), "weighted sum of streams"
    sources = [m.q.matrix.name for m in config.attentions]
    yield len(set(sources)) < len(sources), "looped layers"
    yield config.switch is not None, "adapters that tokens switch on"
    yield bool(config.unused_tensors), "unused tensors"
    of = config.embedding_of_texts
    yield of is not None and of.pooling is not None, "embeddings"
    yield of is not None and of.scorer is not None, "scores"
    yield of is not None and bool(of.dense), "matrices after pooling"


def main() -> None:
    """Write the table."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(before + BEGIN + "\n" + table() + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
