"""Templates as a wheel carries them: run when they are good, compiled anew when they are not."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pytest

from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.kernels.rms_norm import RmsNorm
from urdir.ptxgen.render import jinja as template_environment
from urdir.ptxgen.render import sources

SPEC = RmsNorm(rows=2, cols=70, eps=1e-5)
TEMPLATE = "urdir.templates/rms_norm.ptx.j2"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "compiled"
    template_environment.write_modules(folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a wheel would have, for one test, and no cache."""
    monkeypatch.setattr(template_environment, "SHIPPED", tmp_path / "compiled")
    former = sources.compiled_folder()
    sources.keep_compiled(None)
    template_environment.environment.cache_clear()
    yield shutil.copytree(built, tmp_path / "compiled")
    sources.keep_compiled(former)
    template_environment.environment.cache_clear()


def templates() -> list[str]:
    return [path.name for path in files("urdir.templates").iterdir() if path.name.endswith(".j2")]


def text_of_a_new_process(spec: Any = SPEC) -> str:
    template_environment.environment.cache_clear()
    text: str = spec.ptx("sm_90")
    return text


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> str:
    """The text without any modules."""
    with monkeypatch.context() as patch:
        patch.setattr(template_environment, "SHIPPED", Path("absent"))
        return text_of_a_new_process()


def test_every_template_is_there_once(built: Path) -> None:
    modules = {path.name.partition(".")[0] for path in built.iterdir()} - {"__init__"}
    assert modules == {name.removesuffix(".j2").replace(".", "_") for name in templates()}
    for path in built.iterdir():  # as those do who import all modules of a package
        exec(path.read_text(), {})


def test_nothing_is_compiled_and_the_texts_are_the_same(
    folder: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the last examples: together they take every template
    specs = [list(kind.examples().values())[-1] for kind in kernels().values()]
    targets = [f"sm_{max(90, spec.minimum_sm)}" for spec in specs]
    template_environment.environment.cache_clear()
    texts = [spec.ptx(target) for spec, target in zip(specs, targets, strict=True)]
    assert compiled == []
    monkeypatch.setattr(template_environment, "SHIPPED", folder / "absent")
    template_environment.environment.cache_clear()
    assert texts == [spec.ptx(target) for spec, target in zip(specs, targets, strict=True)]
    assert len(compiled) == len(templates()) > 40


@pytest.mark.parametrize("damage", ["", "too short", "raise SystemExit\n{}", "{}\n", "{}0"])
def test_a_changed_module_is_never_run(
    folder: Path, expected: str, compiled: list[Any], damage: str
) -> None:
    text_of_a_new_process()  # so that there is bytecode
    assert compiled == []
    path = folder / "rms_norm_ptx.py"
    path.write_text(damage.format(path.read_text()))
    assert text_of_a_new_process() == expected
    assert compiled == [TEMPLATE]


def test_a_module_of_another_template_is_never_run(
    folder: Path, expected: str, compiled: list[Any]
) -> None:
    shutil.copy(folder / "swiglu_ptx.py", folder / "rms_norm_ptx.py")
    assert text_of_a_new_process() == expected
    assert compiled == [TEMPLATE]


def test_an_edited_template_is_compiled(
    folder: Path, compiled: list[Any], edited: Callable[[], None]
) -> None:
    edited()
    assert "exit;" in text_of_a_new_process()
    assert compiled == [TEMPLATE]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (jinja2, "__version__", "another"),
        (template_environment, "identity", lambda: "other options"),
    ],
)
def test_modules_of_another_jinja_or_other_options_are_not_run(
    folder: Path,
    expected: str,
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    value: Any,
) -> None:
    monkeypatch.setattr(owner, name, value)
    assert text_of_a_new_process() == expected
    assert TEMPLATE in compiled
    assert len(compiled) > 1


def test_what_the_wheel_lacks_is_kept_in_the_cache(
    folder: Path, expected: str, compiled: list[Any], tmp_path: Path
) -> None:
    (folder / "rms_norm_ptx.py").unlink()
    (cache := tmp_path / "cache").mkdir()
    sources.keep_compiled(cache)
    for _ in range(2):
        assert text_of_a_new_process() == expected
        assert compiled == [TEMPLATE]
        assert len(list(cache.iterdir())) == 1


def test_a_template_of_another_package_is_not_taken_from_urdir(
    folder: Path, compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "urdir_same_names").mkdir()
    (package / "__init__.py").write_text("")
    (package / "rms_norm.ptx.j2").write_text(sources.read_template(tuple(TEMPLATE.split("/"))))
    monkeypatch.syspath_prepend(tmp_path)
    template = template_environment.environment().get_template("urdir_same_names/rms_norm.ptx.j2")
    assert template.name == "urdir_same_names/rms_norm.ptx.j2"
    assert compiled == [template.name]


def test_a_traceback_has_the_lines_of_the_template(
    folder: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> tuple[int, list[int | None]]:
        template_environment.environment.cache_clear()
        template = template_environment.environment().get_template(TEMPLATE)
        with pytest.raises(jinja2.UndefinedError) as failure:
            template.render()
        frames = traceback.extract_tb(failure.value.__traceback__)
        where_it_fails = [frame.lineno for frame in frames if frame.filename == "<template>"]
        assert where_it_fails
        # Jinja finds a template's lines by those of the source that it generated.
        return template.root_render_func.__code__.co_firstlineno, where_it_fails

    with_modules = lines()
    assert compiled == []
    monkeypatch.setattr(template_environment, "SHIPPED", folder / "absent")
    assert lines() == with_modules
    assert compiled == [TEMPLATE]
