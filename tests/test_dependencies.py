"""Versions of other packages that an installation may have."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


def _requirements(where: str) -> list[Requirement]:
    project = PROJECT["project"]
    lists = {
        "build": PROJECT["build-system"]["requires"],
        "always": project["dependencies"],
        **project["optional-dependencies"],
    }
    return [Requirement(line) for line in lists[where]]


@pytest.mark.parametrize(
    ("where", "package", "hole"),
    [
        ("build", "setuptools", "78.1.0"),  # CVE-2025-47273
        ("always", "jinja2", "3.1.5"),  # CVE-2025-27516
        ("always", "requests", "2.32.3"),  # CVE-2024-47081
        ("always", "tqdm", "4.66.2"),  # CVE-2024-34062
        ("always", "urllib3", "2.6.2"),  # CVE-2026-21441
        ("serve", "h11", "0.15.0"),  # CVE-2025-43859
    ],
)
def test_versions_with_known_holes_are_left_out(where: str, package: str, hole: str) -> None:
    """The last version that has one; packages that others bring have their bounds here."""
    [found] = [each for each in _requirements(where) if each.name == package]
    assert not found.specifier.contains(hole)
