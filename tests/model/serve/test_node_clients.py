"""Clients of Node as they are: openai, and Vercel's AI SDK with both of its providers.

Needs `node` 18 or newer, and `npm install` in the folder `node`, or a copy of its package.json in
another folder that ``URDIR_NODE_CLIENTS`` names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.model.serve.test_clients import CITIES, SAYS, server
from tests.model.serve.test_tool_calls import CALL

__all__ = ["server"]  # a fixture
pytestmark = pytest.mark.full
HERE = Path(__file__).with_name("node")
OLDEST = 18
CLIENTS = {"openai", "responses", "ai chat", "ai responses", "ai compatible"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script beside its packages, which Node looks for from there on."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing")
    version = subprocess.check_output([node, "--version"], text=True)
    if int(re.findall(r"\d+", version)[0]) < OLDEST:
        pytest.skip(f"node {version.strip()} is older than {OLDEST}")
    packages = Path(os.environ.get("URDIR_NODE_CLIENTS", HERE)) / "node_modules"
    if not packages.is_dir():
        pytest.skip(f"no {packages}: npm install in {HERE}, or set URDIR_NODE_CLIENTS")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "clients.js"):
        shutil.copy(HERE / name, folder)
    (folder / "node_modules").symlink_to(packages.resolve())
    return folder / "clients.js"


@pytest.mark.parametrize("what", ["plain", "turns", "tools", "required", "structured"])
def test_clients_of_node(server: Any, script: Path, what: str) -> None:
    server.service.answer = CALL if what == "tools" else SAYS
    ran = subprocess.run(
        ["node", str(script), server.url, "toy", what], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[Any]] = json.loads(ran.stdout)
    assert set(found) == {name for name in CLIENTS if what != "turns" or name.startswith("ai ")}
    wanted: dict[str, Any] = {
        "plain": [SAYS],
        "turns": [SAYS],
        "tools": [[["weather", {"city": "Ur"}]]],
        "required": [[["weather", city]] for city in CITIES],
        "structured": CITIES,
    }
    for client, both in found.items():
        assert len(both) == len(("whole", "streamed")), client
        for came in both:
            assert came in wanted[what], (client, ran.stderr)
