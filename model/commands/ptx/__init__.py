"""`urdir ptx`: list, render, check and measure kernels as text, and begin new ones.

A subcommand is a module with ``add_parser``; it needs no GPU, driver or toolkit.
"""

from __future__ import annotations

from urdir.model.commands import options
from urdir.model.commands.ptx import check, diff, dump, explain, new, stats
from urdir.model.commands.ptx import list as list_kernels

SUBCOMMANDS = (list_kernels, dump, stats, explain, diff, check, new)

EXAMPLES = """\
  urdir ptx list                                 every kernel and its fields
  urdir ptx list --model model.gguf              the specialisations that a model uses
  urdir ptx dump gemv_f32 --set format=Q4_K      PTX to stdout
  urdir ptx stats --model model.gguf --gpu h200  registers, occupancy, roofline bounds
  urdir ptx explain gemm --top 5                 what the emulator sees: sectors, conflicts ...
  urdir ptx diff old/ new/                       two dumps, text and resources
  urdir ptx check edited.ptx                     lint and assemble
  urdir ptx new my_kernel                        the files of a new kernel, and its test

To run edited PTX: dump with -o, copy the file to a folder of its own under the same name, edit it,
and set URDIR_PTX_OVERRIDE to that folder.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command and its subcommands."""
    parser = options.add_group(commands, "ptx", "list, dump, measure and check kernels", EXAMPLES)
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subcommands)
