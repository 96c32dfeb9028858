"""The table of architectures in model/MODELS.md says what the descriptions say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from urdir.model.families.facts import layer_groups, model_facts
from urdir.model.families.registry import families
from urdir.model.families.summary import fact_text, layer_lines


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("family_table")


@pytest.mark.slow
def test_the_table_is_current(script: ModuleType) -> None:
    """``python tests/family_table.py`` writes it anew."""
    text = script.README.read_text(encoding="utf-8")
    written = text.partition(script.BEGIN)[2].partition(script.END)[0].strip()
    assert written.splitlines() == script.table().strip().splitlines()
    assert all(f"| `{name}` |" in written for name in families())


@pytest.mark.slow
def test_every_layer_has_facts(script: ModuleType) -> None:
    """`urdir show` prints them."""
    for configs in script.goldens_by_family().values():
        for name, config in configs.items():
            groups = layer_groups(config)
            numbers = sorted(number for group in groups for number in group["layers"])
            assert numbers == list(range(config.n_layers)), name
            assert all(layer_lines(group) for group in groups), name
            assert fact_text(model_facts(config)), name


def test_errors_are_those_of_the_goldens() -> None:
    """Of all of them, each small; a sample is what the file says."""
    script = load("family_errors")
    found = script.json.loads(script.FILE.read_text(encoding="utf-8"))
    assert set(found) == {"by", "errors", "others"}
    assert found["others"].keys() <= found["errors"].keys()
    assert set(found["errors"]) == set(script.names())
    assert min(found["errors"].values()) > 0.0
    assert max(found["errors"].values()) < 1e-4
    if found["by"] == "numpy reference":
        error = script.error_of("llama-dense", script.by_reference)
        assert error == pytest.approx(found["errors"]["llama-dense"], rel=0.1)
