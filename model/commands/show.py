"""`urdir show`: whether a model runs here, what it needs, and what is in its file."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options
from urdir.model.commands.report import size_text
from urdir.model.commands.show_drafts import draft_facts, draft_text
from urdir.model.commands.table import aligned
from urdir.model.commands.terminal import printable
from urdir.model.commands.verdict import Verdict, verdict_of
from urdir.model.files.file_type import file_type

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.gguf import Gguf
    from urdir.model.files.pretrained.model import SafetensorsModel

    OpenFile = Gguf | SafetensorsModel

EXAMPLES = """\
  urdir show model.gguf              whether it runs here, memory, layers, tensors, metadata
  urdir show model.gguf -c 500       memory at that context, too
  urdir show model.gguf --gpus 2     the share of each of two GPUs
  urdir show model.gguf --gpu 24G    what would be streamed from host memory with 24 GB
  urdir show model.gguf --template   the chat template as it stands in the file
  urdir show hf:org/repo:Q8_0        a file on the Hugging Face hub

Exit code 1 for a model that cannot run here.
"""

_SHOWN_CHARACTERS = 60
_SHOWN_VALUES = 8  # of an array


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "show", run, "show whether a model runs here, and what it needs", EXAMPLES
    )
    options.add_file(parser)
    options.add_model(parser)
    options.add_device(parser)
    options.add_gpus(parser)
    options.add_placement(parser, "--gpu")
    parser.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    parser.add_argument("--template", action="store_true", help="print the chat template only")


def run(args: argparse.Namespace) -> int:
    """Print; needs no tokeniser."""
    from urdir.model.errors import ModelError
    from urdir.model.files.source import open_model

    name = options.one_model(args)
    if name is None:
        raise options.UsageError("give a MODEL")
    with open_model(name, quantize=args.quantize) as gguf:
        if args.template:
            template = gguf.metadata.optional("tokenizer.chat_template", str, None)
            if template is None:
                raise ModelError(f"{name}: there is no tokenizer.chat_template in this file")
            print(json.dumps({"template": template}) if args.json else _safe_lines(template))
            return 0
        verdict = verdict_of(gguf, args)
        if args.json:
            print(json.dumps(_report(gguf, verdict), indent=2))
        else:
            _print(gguf, verdict)
    return 0 if verdict.runs else 1


def _report(gguf: OpenFile, verdict: Verdict) -> dict[str, Any]:
    """Everything, for programs: metadata whole, every tensor."""
    config = verdict.config
    return {
        "file": str(gguf.path),
        "format": gguf.format,
        "verdict": {"runs": verdict.runs, "text": verdict.text},
        "type": file_type(gguf),
        "parameters": _parameters(gguf),
        "bytes": sum(t.nbytes for t in gguf.tensors.values()),
        "metadata": {key: _whole(value) for key, value in gguf.metadata.items()},
        "types": _types(gguf),
        "tensors": [
            {"name": name, "shape": list(t.shape), "type": t.type_name, "bytes": t.nbytes}
            for name, t in gguf.tensors.items()
        ],
        "model": _facts(config),
        "layers": _layers(config),
        "ignored_keys": list(config.ignored_keys) if config else [],
        "quantisation": getattr(gguf, "quantisation", {}),
        "ignored_fields": _of_folder(gguf, "ignored_fields"),
        "unused_tensors": _of_folder(gguf, "unused_tensors"),
        "roles": _roles(gguf, config) if config else [],
        "memory": verdict.memory,
        "streamed": asdict(verdict.streamed) if verdict.streamed else {},
        "cache": _cache(config) if config and config.is_causal else {},
        "draft": draft_facts(gguf),
    }


def _of_folder(gguf: OpenFile, name: str) -> list[str]:
    """What a folder lists and a GGUF file does not have."""
    return list(getattr(gguf, name, ()))


def _facts(config: Config | None) -> dict[str, Any]:
    from urdir.model.families.facts import model_facts

    return model_facts(config) if config else {}


def _layers(config: Config | None) -> list[dict[str, Any]]:
    from urdir.model.families.facts import layer_groups

    return layer_groups(config) if config else []


def _parameters(gguf: OpenFile) -> int:
    return sum(math.prod(t.shape) for t in gguf.tensors.values())


def _count_text(count: int) -> str:
    size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:,.0f} {unit}"


def _types(gguf: OpenFile) -> dict[str, dict[str, int]]:
    """Tensors and bytes by type, the most bytes first."""
    count = Counter(t.type_name for t in gguf.tensors.values())
    nbytes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        nbytes[tensor.type_name] += tensor.nbytes
    return {name: {"count": count[name], "bytes": size} for name, size in nbytes.most_common()}


def _roles(gguf: OpenFile, config: Config) -> list[dict[str, Any]]:
    """What the tensors are for, as GGUF calls it: those of one role, shape and type together."""
    from urdir.model.families.stored import of_any_layer, stored_in

    names: dict[str, str] = {}
    for stored in stored_in(config):
        names.setdefault(stored.name, of_any_layer(stored).name.removesuffix(".weight"))
    tensors = [(role, gguf.tensors[name]) for name, role in names.items()]
    groups = Counter((role, tensor.shape, tensor.type_name) for role, tensor in tensors)
    first = [role for name, role in names.items() if not name.startswith("blk.")]
    order = list(dict.fromkeys((*first, *names.values())))
    return [
        {"role": role, "shape": list(shape), "type": type_name, "count": groups[group]}
        for group in sorted(groups, key=lambda group: order.index(group[0]))
        for role, shape, type_name in [group]
    ]


def _whole(value: Any) -> Any:
    """A metadata value for JSON, which has no infinite numbers: those are texts."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return [_whole(v) for v in (value.tolist() if hasattr(value, "tolist") else value)]


def _short(value: Any) -> str:
    """A metadata value for reading: long arrays by their length, long texts cut."""
    if isinstance(value, str):
        cut = value[:_SHOWN_CHARACTERS]
        return printable(cut) + ("..." if len(value) > len(cut) else "")
    if isinstance(value, bool | int | float):
        return str(value)
    if len(value) > _SHOWN_VALUES:
        return f"[{len(value)} values]"
    values = value.tolist() if hasattr(value, "tolist") else value
    return f"[{', '.join(map(_short, values))}]"


def _safe_lines(text: str) -> str:
    return printable(text, keep="\n\t")


def _cache(config: Config) -> dict[str, int]:
    """Bytes of a token in the caches of all layers, by the types that its heads allow."""
    from urdir.model.errors import SettingsError
    from urdir.model.memory.cache_shape import CacheShape
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES

    sizes = {}
    for dtype in KV_DTYPES:
        try:
            shape = CacheShape.of(config, SessionSettings(config.context_length, dtype), 1)
        except SettingsError:
            continue
        sizes[dtype] = shape.read_nbytes(1)
    return {dtype: size for dtype, size in sizes.items() if size}


def _print(gguf: OpenFile, verdict: Verdict) -> None:
    """The verdict first, then what it needs, then what it is."""
    print(_safe_lines(f"{gguf.path}: {verdict.text}"))
    nbytes = sum(t.nbytes for t in gguf.tensors.values())
    kind = file_type(gguf)
    parts = [gguf.format, *([kind] if kind else []), f"{_count_text(_parameters(gguf))} parameters"]
    print(f"{', '.join(map(printable, parts))}, {size_text(nbytes)} of tensors")
    if quantised := getattr(gguf, "quantisation", {}):
        print(printable(_quantisation_text(quantised)))
    if verdict.streamed:
        print(verdict.streamed)
    _print_memory(verdict.memory)
    if verdict.config and verdict.config.is_causal and (cache := _cache(verdict.config)):
        _section("cache of a token, by type (-ctk, -ctv)")
        print("  " + ", ".join(f"{dtype} {size_text(size)}" for dtype, size in cache.items()))
    if verdict.config:
        _print_config(gguf, verdict.config)
    if facts := draft_facts(gguf):
        _section("draft")
        print(f"  {printable(draft_text(facts))}")
    _section("tensors by type")
    rows = [(n, str(e["count"]), size_text(e["bytes"])) for n, e in _types(gguf).items()]
    _print_rows(rows, right=(1, 2))
    _section("metadata")
    _print_rows((printable(key), _short(value)) for key, value in gguf.metadata.items())


def _quantisation_text(found: dict[str, Any]) -> str:
    kinds = [f"{of['matrices']:,} matrices of {of['kind']}" for of in found["kinds"]]
    return f"quantised ({found['method']}): {'; '.join(kinds) or 'no matrix'}"


def _print_memory(memory: list[dict[str, int]]) -> None:
    if not memory:
        return
    numbers = [name for name in memory[0] if name in ("context", "rank")]
    _section("memory on each device" if "rank" in numbers else "memory on the device")
    names = [name for name in memory[0] if name not in numbers]
    rows = [(*numbers, *(name.replace("_", " ") for name in names))]
    rows += [
        (*(f"{row[name]:,}" for name in numbers), *(size_text(row[name]) for name in names))
        for row in memory
    ]
    _print_rows(rows, right=range(len(rows[0])))


def _print_config(gguf: OpenFile, config: Config) -> None:
    from urdir.model.families.summary import fact_text, layer_lines

    _section("model")
    print(f"  {printable(fact_text(_facts(config)))}")
    for group in _layers(config):
        for line in layer_lines(group):
            print(f"  {printable(line)}")
    for title, names in (
        ("keys that nothing reads", config.ignored_keys),
        ("fields of config.json without effect", _of_folder(gguf, "ignored_fields")),
        ("tensors of other parts of the model", _of_folder(gguf, "unused_tensors")),
    ):
        if names:
            _section(title)
        for name in names:
            print(f"  {printable(name)}")
    _section("tensors by role")
    _print_rows(
        (
            printable(entry["role"]),
            entry["type"],
            f"{entry['count']} of",
            " x ".join(map(str, entry["shape"])),
        )
        for entry in _roles(gguf, config)
    )


def _section(title: str) -> None:
    print(f"\n{title}:")


def _print_rows(rows: Iterable[tuple[str, ...]], right: Iterable[int] = ()) -> None:
    for line in aligned(list(rows), right=list(right)):
        print(f"  {line}")
