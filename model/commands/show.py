"""`urdir show`: what is in a model file, and what running it needs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options

if TYPE_CHECKING:
    from urdir.model.families.description import Config
    from urdir.model.files.gguf import Gguf
    from urdir.model.files.pretrained.model import SafetensorsModel

    OpenFile = Gguf | SafetensorsModel

EXAMPLES = """\
  urdir show model.gguf              metadata, layers, tensors by type and role, memory plan
  urdir show model.gguf --template   the chat template as it stands in the file
  urdir show hf:org/repo:Q8_0        a file on the Hugging Face hub
"""

_SHOWN_CHARACTERS = 60
_SHOWN_VALUES = 8  # of an array


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "show", run, "show a model file and the memory it needs", EXAMPLES
    )
    parser.add_argument("model", metavar="FILE", help=options.MODEL_HELP)
    options.add_quantize(parser)
    parser.add_argument("-c", "--ctx-size", type=options.whole_number(1), metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--template", action="store_true", help="print the chat template only")


def run(args: argparse.Namespace) -> int:
    """Print; needs no device and no tokeniser."""
    from urdir.model.errors import ModelError
    from urdir.model.files.source import open_model

    with open_model(args.model, quantize=args.quantize) as gguf:
        if args.template:
            template = gguf.metadata.optional("tokenizer.chat_template", str, None)
            if template is None:
                raise ModelError(f"{args.model}: there is no tokenizer.chat_template in this file")
            print(json.dumps({"template": template}) if args.json else template)
            return 0
        report = _report(gguf, args.ctx_size)
        if args.json:
            print(json.dumps(report, indent=2))
        else:
            _print(report)
    return 0


def _report(gguf: OpenFile, context: int | None) -> dict[str, Any]:
    from urdir.model.commands.description import layer_groups, model_facts
    from urdir.model.errors import ConfigError, UnsupportedError
    from urdir.model.families.description import Config

    types = Counter(t.type_name for t in gguf.tensors.values())
    nbytes = {
        name: sum(t.nbytes for t in gguf.tensors.values() if t.type_name == name) for name in types
    }
    report = {
        "file": str(gguf.path),
        "format": gguf.format,
        "metadata": {key: _plain(value) for key, value in gguf.metadata.items()},
        "tensors": {name: {"count": types[name], "bytes": nbytes[name]} for name in sorted(types)},
    }
    try:
        config = Config.from_gguf(gguf)
    except (ConfigError, UnsupportedError) as exc:  # such a file can still be shown
        none: dict[str, Any] = {"model": {}, "layers": [], "roles": [], "ignored_keys": []}
        return {**report, **none, "memory": {"unsupported": str(exc)}}
    return {
        **report,
        "model": model_facts(config),
        "layers": layer_groups(config),
        "ignored_keys": list(config.ignored_keys),
        "roles": _roles(gguf, config),
        "memory": _memory(gguf, config, context),
    }


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


def _memory(gguf: OpenFile, config: Config, context: int | None) -> dict[str, Any]:
    """The memory plan."""
    from urdir.model.engine.engine import default_context
    from urdir.model.memory.budget import MemoryPlan, SessionBudget
    from urdir.ptxgen.tools.gpus import DEFAULT_GPU, GPUS

    tokens = context or default_context(config)
    budget = SessionBudget.of(config, tokens, GPUS[DEFAULT_GPU].sm_count)
    return {"context": tokens, **MemoryPlan.of(gguf, config, budget).as_dict()}


def _plain(value: Any) -> Any:
    """A metadata value for printing: long arrays by their length, long texts cut."""
    if isinstance(value, str):
        flat = value.replace("\n", "\\n")
        return flat if len(flat) <= _SHOWN_CHARACTERS else flat[:_SHOWN_CHARACTERS] + "..."
    if isinstance(value, int | float | bool):
        return value
    if len(value) > _SHOWN_VALUES:
        return f"[{len(value)} values]"
    return [_plain(v) for v in (value.tolist() if hasattr(value, "tolist") else value)]


def _print(report: dict[str, Any]) -> None:
    print(f"{report['file']}: {report['format']}")
    print("\nmetadata:")
    for key, value in report["metadata"].items():
        print(f"  {key:<42} {value}")
    print("\ntensors:")
    for name, entry in report["tensors"].items():
        print(f"  {name:<8} {entry['count']:>5}  {entry['bytes']:>16,} bytes")
    if report["model"]:
        from urdir.model.commands.description import fact_text, layer_lines

        print(f"\nmodel:\n  {fact_text(report['model'])}")
        for group in report["layers"]:
            for line in layer_lines(group):
                print(f"  {line}")
    if report["ignored_keys"]:
        print("\nkeys that nothing reads:")
        for key in report["ignored_keys"]:
            print(f"  {key}")
    if report["roles"]:
        print("\nroles:")
    for entry in report["roles"]:
        shape = " x ".join(map(str, entry["shape"]))
        print(f"  {entry['role']:<20} {entry['type']:<6} {entry['count']:>4} of {shape}")
    print("\nmemory:")
    for name, value in report["memory"].items():
        print(f"  {name:<12} {value:>16,}" if isinstance(value, int) else f"  {name}: {value}")
