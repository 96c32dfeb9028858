"""The table of sampling settings in `model/LIBRARY.md`, from `sampling_settings.SETTINGS`.

    .venv/bin/python tests/sampling_table.py

writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from urdir.model.engine.sampling_settings import DEFAULTS, SETTINGS, Setting

GUIDE = Path(__file__).parents[1] / "model" / "LIBRARY.md"
_BEGIN, _END = "<!-- sampling -->\n", "<!-- end -->"
_HEAD = ("setting", "default", "values", "what it does", "flags", "field of")


def guide_with_table(text: str) -> str:
    """The guide with the table as it must be."""
    found = re.search(re.escape(_BEGIN) + ".*?(?=" + re.escape(_END) + ")", text, re.DOTALL)
    assert found is not None
    rows = [_HEAD, ("---",) * len(_HEAD), *(_row(name, of) for name, of in SETTINGS.items())]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return text[: found.start()] + _BEGIN + table + text[found.end() :]


def _row(name: str, setting: Setting) -> tuple[str, ...]:
    values = setting.bounds.words if setting.bounds is not None else "pairs of id and number"
    flags = ", ".join(f"`{flag}`" for flag in setting.flags.split())
    default = f"`{getattr(DEFAULTS, name)}`"
    return f"`{name}`", default, values, setting.does, flags, setting.field_of


if __name__ == "__main__":
    GUIDE.write_text(guide_with_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
