"""Compiled templates beside their sources: used while they are valid, else compiled anew.
A wheel keeps to what it was built with, a checkout adds what it lacks; nothing else is ever run.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.render import jinja as template_environment
from urdir.ptxgen.render import sources
from urdir.ptxgen.render.compiled import TemplateModules

SPEC = Normalise(rows=2, cols=70, norm=Norm("rms", 1e-5))
TEMPLATE = "urdir.templates/normalise.ptx.j2"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "compiled"
    template_environment.write_modules(folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a wheel would have, for one test."""
    monkeypatch.setattr(template_environment, "COMPILED", tmp_path / "compiled")
    template_environment.environment.cache_clear()
    yield shutil.copytree(built, tmp_path / "compiled")
    template_environment.environment.cache_clear()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a checkout's compiled templates, for one test; it is not there yet."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "templates").mkdir()
    monkeypatch.setattr(template_environment, "COMPILED", tmp_path / "templates" / "compiled")
    template_environment.environment.cache_clear()
    yield tmp_path / "templates" / "compiled"
    template_environment.environment.cache_clear()


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def text_of_a_new_process(spec: Any = SPEC) -> str:
    template_environment.environment.cache_clear()
    text: str = spec.ptx("sm_90a")
    return text


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text without any modules."""
    with monkeypatch.context() as patch:
        patch.setattr(template_environment, "COMPILED", tmp_path / "no/such/folder")
        return text_of_a_new_process()


def test_every_template_is_there_once(built: Path, pytestconfig: pytest.Config) -> None:
    paths = files_below(built)
    modules = {path.relative_to(built).as_posix() for path in paths} - {"__init__.py"}
    names = template_environment.template_names()
    assert {"normalise.ptx.j2", "linear/products/gemv.ptx.j2", "linear/_ends.j2"} < set(names)
    assert modules == {name.removesuffix(".j2").replace(".", "_") + ".py" for name in names}
    for path in paths[:: 1 if pytestconfig.getoption("--full") else 6]:
        exec(path.read_text(), {})  # as those do who import all modules of a package


@pytest.mark.slow
def test_nothing_is_compiled_and_the_texts_are_the_same(
    folder: Path,
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    # the last examples: those of all kernels together take every template
    every = 1 if pytestconfig.getoption("--full") else 6
    specs = [list(kind.examples().values())[-1] for kind in [*kernels().values()][::every]]
    template_environment.environment.cache_clear()
    texts = [spec.ptx("sm_90a") for spec in specs]
    assert compiled == []
    monkeypatch.setattr(template_environment, "COMPILED", folder / "absent")
    template_environment.environment.cache_clear()
    assert texts == [spec.ptx("sm_90a") for spec in specs]
    assert len(compiled) > 40
    assert every > 1 or len(compiled) == len(template_environment.template_names())


@pytest.mark.parametrize("damage", ["", "too short", "raise SystemExit\n{}", "{}\n", "{}0"])
def test_a_changed_module_is_never_run(
    folder: Path, expected: str, compiled: list[Any], damage: str
) -> None:
    text_of_a_new_process()  # so that there is bytecode
    assert compiled == []
    path = folder / "normalise_ptx.py"
    path.write_text(damage.format(path.read_text()))
    assert text_of_a_new_process() == expected
    assert compiled == [TEMPLATE]


def test_a_module_of_another_template_is_never_run(
    folder: Path, expected: str, compiled: list[Any]
) -> None:
    shutil.copy(folder / "activate_ptx.py", folder / "normalise_ptx.py")
    assert text_of_a_new_process() == expected
    assert compiled == [TEMPLATE]


def test_an_edited_template_is_compiled(
    folder: Path, compiled: list[Any], edited: Callable[[], None]
) -> None:
    edited()
    assert "exit;" in text_of_a_new_process()
    assert compiled == [TEMPLATE]


@pytest.mark.slow
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


def test_a_wheel_stays_as_it_is(folder: Path, expected: str, compiled: list[Any]) -> None:
    (folder / "normalise_ptx.py").unlink()
    text_of_a_new_process()  # Python makes bytecode of the others
    before = sorted(folder.rglob("*"))
    for count in (2, 3):
        assert text_of_a_new_process() == expected
        assert compiled == count * [TEMPLATE]
    assert sorted(folder.rglob("*")) == before


def test_a_template_of_another_package_is_not_taken_from_urdir(
    folder: Path, compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "urdir_same_names").mkdir()
    (package / "__init__.py").write_text("")
    (package / "normalise.ptx.j2").write_text(sources.read_template(tuple(TEMPLATE.split("/"))))
    monkeypatch.syspath_prepend(tmp_path)
    template = template_environment.environment().get_template("urdir_same_names/normalise.ptx.j2")
    assert template.name == "urdir_same_names/normalise.ptx.j2"
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
    monkeypatch.setattr(template_environment, "COMPILED", folder / "absent")
    assert lines() == with_modules
    assert compiled == [TEMPLATE]


# ---- a checkout ----


def test_the_next_process_of_a_checkout_compiles_nothing(
    checkout: Path, expected: str, compiled: list[Any]
) -> None:
    assert text_of_a_new_process() == expected
    assert TEMPLATE in compiled
    assert len(files_below(checkout)) == len(compiled)
    assert {path.suffix for path in files_below(checkout)} == {".py"}  # no remains, no bytecode
    compiled.clear()
    assert text_of_a_new_process() == expected
    assert compiled == []
    assert {path.suffix for path in files_below(checkout)} == {".py"}


def test_the_first_module_of_a_checkout_may_lie_two_folders_deep(checkout: Path) -> None:
    TemplateModules(checkout, "options").write("linear/products/x.ptx.j2", "text", "code")
    assert (checkout / "linear/products/x_ptx.py").read_text().startswith("code\n#")


@pytest.mark.parametrize("damage", ["", "too short", "raise SystemExit\n{}", "{}\n", "{}0"])
def test_a_changed_module_of_a_checkout_is_made_again(
    checkout: Path, expected: str, compiled: list[Any], damage: str
) -> None:
    text_of_a_new_process()
    path = checkout / "normalise_ptx.py"
    good = path.read_text()
    path.write_text(damage.format(good))
    compiled.clear()
    assert text_of_a_new_process() == expected
    assert compiled == [TEMPLATE]
    assert path.read_text() == good


def test_an_edited_template_of_a_checkout_is_compiled_again(
    checkout: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times a second, and as long as it was: bytecode would be taken for that of another."""
    really = sources.read_template
    word = ""

    def read(name: tuple[str, str]) -> str:
        return really(name).replace("ret;", f"{word};")

    monkeypatch.setattr(template_environment, "read_template", read)
    for word in ("one", "two", "one", "six"):
        compiled.clear()
        for _ in range(2):
            assert f"{word};" in text_of_a_new_process()
        assert compiled == [TEMPLATE] or word == "one"


def test_what_a_checkout_cannot_keep_costs_nothing(
    checkout: Path, expected: str, compiled: list[Any]
) -> None:
    checkout.write_text("a file in its place")
    for _ in range(2):
        compiled.clear()
        assert text_of_a_new_process() == expected
        assert TEMPLATE in compiled
    assert checkout.read_text() == "a file in its place"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX users")
def test_a_checkout_of_another_user_stays_as_it_is(
    checkout: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could write there, and leave files that their owner cannot replace."""
    monkeypatch.setattr("os.geteuid", lambda: checkout.parent.stat().st_uid + 1)
    assert text_of_a_new_process() == expected
    assert not checkout.exists()


_RENDER = """
import sys
from pathlib import Path
from urdir.ptxgen.render import jinja as template_environment
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise

template_environment.COMPILED = Path(sys.argv[1])
print(Normalise(rows=2, cols=70, norm=Norm("rms", 1e-5)).ptx("sm_90"), end="")
"""


@pytest.mark.slow
def test_processes_share_a_checkout(checkout: Path, expected: str) -> None:
    command = [sys.executable, "-c", _RENDER, str(checkout)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [worker.communicate()[0] for worker in workers] == [expected] * 4
    assert {path.suffix for path in files_below(checkout)} == {".py"}


# ---- planted code ----


@pytest.mark.slow
def test_no_code_is_run_from_the_cache_folder(tmp_path: Path) -> None:
    """Whatever lies there by whatever name that Python or an earlier version looked for: modules,
    bytecode, the marshalled templates of version 0.1 with their unkeyed digest.
    """
    cache, mark = tmp_path / "cache", tmp_path / "has run"
    attack = f"open({str(mark)!r}, 'w')"
    for name in ("templates", "compiled", "emulator", "emulator/specs"):
        (place := cache / name).mkdir(parents=True, mode=0o700)
        for stem in ("__init__", "normalise_ptx", "sitecustomize", "jinja2"):
            (place / f"{stem}.py").write_text(attack)
        _plant_marshalled(place, attack)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "URDIR_CACHE_DIR": str(cache),
        "XDG_CACHE_HOME": str(cache),
    }
    command = [sys.executable, "-m", "urdir.model", "check", "--device", "emulator"]
    subprocess.run([*command, "--kernel", SPEC.name], env=environment, check=True, cwd=tmp_path)
    assert list((cache / "emulator/cubins").iterdir())
    assert not mark.exists()


def _plant_marshalled(folder: Path, attack: str) -> None:
    """Good files of the cache of compiled templates that there was, but for what they do."""
    code = marshal.dumps(compile(attack, "<template>", "exec"))
    identity = f"{jinja2.__version__} {sys.version} {template_environment.identity()}"
    for file in template_environment.template_names():
        for name in (file, f"urdir.templates/{file}"):
            key = jinja2.BytecodeCache.get_cache_key(None, name)  # type: ignore[arg-type]
            text = sources.read_template(("urdir.templates", file))
            checksum = hashlib.sha1(text.encode()).hexdigest()
            digest = hashlib.sha256(f"{identity} {checksum}\n".encode() + code).digest()
            (folder / f"{key}.{sys.implementation.cache_tag}").write_bytes(digest + code)
