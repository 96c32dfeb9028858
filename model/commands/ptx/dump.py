"""`urdir ptx dump`: a kernel, or all kernels of a model, as PTX, cubin, SASS or JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options
from urdir.model.commands.ptx import arguments
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.ptxgen.tools.dump import Dump

EXAMPLES = """\
  urdir ptx dump normalise                                the first example, PTX to stdout
  urdir ptx dump gemv_f32 --set format=Q4_K --set rows=4096 --set cols=4096
  urdir ptx dump prepare_tokens --set head_dim=128 --target sm_80 -o out --emit ptx,json
  urdir ptx dump gemv_f32 --emit sass --life-ranges        machine code (pip install 'urdir[sass]')
  urdir ptx dump urdir.ptxgen.kernels.add:Add             a class of any package
  urdir ptx dump --model model.gguf -o out               every kernel that the model uses
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "dump", run, "write kernels as PTX, cubin, SASS or JSON", EXAMPLES
    )
    arguments.add_kernel(parser)
    arguments.add_model(parser)
    arguments.add_target(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="folder for files (default: stdout)")
    parser.add_argument(
        "--emit",
        default="ptx",
        metavar="FORM,...",
        help="ptx, cubin, sass, json; several with commas (default: ptx)",
    )
    parser.add_argument(
        "--life-ranges", action="store_true", help="show in SASS where registers hold a value"
    )
    parser.add_argument(
        "--from-device",
        metavar="cuda[:i]",
        help="cubin and SASS of this device's driver, which are what runs there, not nvJitLink's",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files, or print one text."""
    from urdir.ptxgen.tools.dump import EMITTERS, parse_emit, write

    arguments.check_kernel(args, "dump")
    emit = parse_emit(args.emit)
    if args.output is None:
        if args.model is not None:
            raise options.UsageError("dump: --model needs -o DIR")
        if len(emit) > 1 or emit == ("cubin",):
            raise options.UsageError(f"dump: --emit {args.emit} needs -o DIR")
    dumps = _dumps(args)
    if args.output is None:
        sys.stdout.write(str(EMITTERS[emit[0]](dumps[0])))
        return 0
    with Progress("rendering", len(dumps)) as progress:
        files = write(progress.over(dumps), Path(args.output), emit)
    for file in files if args.model is None else ():
        print(file)
    if args.model is not None:
        print(f"{len(files)} files in {args.output}")
    return 0


def _dumps(args: argparse.Namespace) -> list[Dump]:
    from urdir.ptxgen.tools.dump import Dump

    if args.from_device is not None:
        return _from_device(args)
    if args.model is not None:
        gpu = arguments.gpu(args)
        found = arguments.of_model(args, gpu)
        origin = f"as used by {args.model}"
        return [Dump(k.spec, gpu.native_target, origin, args.life_ranges) for k in found]
    target = args.target or arguments.gpu(args).native_target
    return [Dump(arguments.one_kernel(args), target, _origin(args), args.life_ranges)]


def _from_device(args: argparse.Namespace) -> list[Dump]:
    """The kernel with the machine code that the driver of a GPU makes of it."""
    from urdir.driver.device import Device
    from urdir.ptxgen.tools.dump import Dump

    if args.model is not None or args.target or args.gpu:
        raise options.UsageError("dump: --from-device takes a KERNEL, and its own target")
    if args.from_device.startswith(("emulator", "auto")):
        raise options.UsageError("dump: --from-device takes cuda or cuda:i: others make no SASS")
    spec = arguments.one_kernel(args)
    with Device.open(args.from_device) as device:
        cubin = device.compile(spec.ptx(device.native_target), spec.name)
        major, minor = device.properties.driver_version
        maker = f"the driver of {device.properties.name} (CUDA {major}.{minor})"
        return [Dump(spec, device.native_target, _origin(args), args.life_ranges, cubin, maker)]


def _origin(args: argparse.Namespace) -> str:
    if not args.settings:
        return "those of the kernel's first example"
    shown = ", ".join(args.settings)
    return f"{shown} as asked for; the others are those of the first example that can have them"
