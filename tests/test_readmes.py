"""Examples in the documents run as they stand, and tables are current."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from urdir.model.environment import VARIABLES
from urdir.ptxgen.tools.assemble import is_available

ROOT = Path(__file__).parent.parent
#: Every document of the project, except those of test data.
DOCUMENTS = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for folder in (
            ".",
            "driver",
            "model",
            "model/measure",
            "model/serve",
            "ptxgen",
            "templates",
        )
        for path in (ROOT / folder).glob("*.md")
    )
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: The first line of a block that is a file: its path, in a comment.
FILE = re.compile(r"(?:# |\{# )([\w/]+\.[\w.]+)(?: #\})?\n")
PACKAGES = ("ptxgen", "driver", "model")


@dataclass(frozen=True)
class Script:
    document: str
    section: str
    text: str
    output: str

    def __str__(self) -> str:
        return f"{self.document} {self.section}"


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def examples(document: str) -> tuple[dict[str, str], list[Script]]:
    """The files in a document, by path; its scripts with their expected output."""
    text = read(document)
    files: dict[str, str] = {}
    scripts: list[Script] = []
    for block in FENCE.finditer(text):
        language, body = block.groups()
        if named := FILE.match(body):
            files[named[1]] = body
        elif language == "python":
            section = re.findall(r"^##+ (.*)$", text[: block.start()], re.MULTILINE)[-1]
            scripts.append(Script(document, section, body, ""))
        elif language == "text":
            scripts[-1] = dataclasses.replace(scripts[-1], output=body)
    return files, scripts


FILES = {path: text for document in DOCUMENTS for path, text in examples(document)[0].items()}
SCRIPTS = [script for document in DOCUMENTS for script in examples(document)[1]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    """Run Python in ``folder`` on the emulator; its stdout. Fails when it does."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "URDIR_DEVICE": "emulator",
        "URDIR_CACHE_DIR": "",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: A row of a walk: what happens, names, and the files that define them.
STEP = re.compile(
    r"^\| [^|]+ \| ((?:`[\w.]+`(?:, )?)+) \| ((?:`[\w/]+\.py`(?:, )?)+) \|$", re.MULTILINE
)


def defined(file: str) -> set[str]:
    """The functions, classes and methods that a file defines, methods with their class."""
    names: set[str] = set()
    for node in ast.parse(read(file)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(
    ("document", "section"),
    [
        ("model/README.md", "From a prompt to a token"),
        ("model/README.md", "From a tensor to a kernel"),
        ("model/lower/README.md", "From a description to launches"),
    ],
)
def test_a_walk_names_what_exists(document: str, section: str) -> None:
    text = read(document).partition(f"# {section}\n")[2].partition("\n## ")[0]
    rows = STEP.findall(text)
    assert len(rows) >= 8
    for names, files in rows:
        known = set().union(*(defined(file) for file in re.findall(r"`(.+?)`", files)))
        assert set(re.findall(r"`(.+?)`", names)) <= known, (names, files)


def test_the_table_of_variables_has_all_of_them() -> None:
    table = read("model/COMMANDS.md").partition("## Environment\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)(?:=1)?` \|", table, re.MULTILINE)
    assert names == list(VARIABLES)


def test_there_are_examples() -> None:
    assert {s.document for s in SCRIPTS} == {
        "README.md",
        "driver/README.md",
        "model/LIBRARY.md",
        "model/OPERATIONS.md",
        "model/README.md",
        "ptxgen/README.md",
    }
    assert {s.section for s in SCRIPTS} >= {
        "As a library",
        "Write a kernel",
        "Multiply with a tensor of a GGUF file",
        "Build a plan, record it, replay it",
        "Generate text",
    }
    assert all(s.output for s in SCRIPTS)
    assert list(FILES) == ["my_kernels/scale.py", "my_kernels/scale.ptx.j2", "test_scale.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_an_example_prints_the_documented_output(
    script: Script, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in this process, where most kernels are compiled; in another one if it needs files."""
    text = script.text.replace('Device.open("auto")', 'Device.open("emulator")')
    text = text.replace("Engine.open()", 'Engine.open(device="emulator")')
    expected = script.output
    if not is_available():
        expected = expected.replace("spills: False\n", "")
    if "my_kernels" in text:
        assert run(folder, "-c", text) == expected
        return
    monkeypatch.chdir(folder)
    monkeypatch.setenv("URDIR_DEVICE", "emulator")
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, script.document, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == expected


@pytest.mark.slow
def test_the_kernel_of_the_readme_passes_its_suite(folder: Path) -> None:
    options = ("-p", "urdir.driver.pytest_plugin", "-p", "no:cacheprovider", "-m", "not urdir_gpu")
    report = run(folder, "-m", "pytest", "-q", *options, "test_scale.py")
    passed = re.search(r"(\d+) passed", report)
    assert passed, report
    assert int(passed[1]) == 20 + 3 * is_available()
    assert "skipped" not in report or not is_available()


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_are_documented(package: str) -> None:
    module = importlib.import_module(f"urdir.{package}")
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if not isinstance(value, dict | list | tuple):
            assert value.__doc__, name
        assert name in dir(module)


def test_public_names_do_without_pytest(tmp_path: Path) -> None:
    stars = "; ".join(f"from urdir.{package} import *" for package in PACKAGES)
    assert run(tmp_path, "-c", f"import sys; {stars}; assert 'pytest' not in sys.modules") == ""


@pytest.mark.parametrize("package", [*PACKAGES, "model.kernel_suite"])
def test_the_readmes_table_of_public_names_is_complete(package: str) -> None:
    text = read(f"{package.partition('.')[0]}/README.md")
    row = re.search(rf"^\| `urdir\.{re.escape(package)}` \| (.*) \|$", text, re.MULTILINE)
    assert row
    module = importlib.import_module(f"urdir.{package}")
    assert re.findall(r"`(\w+)`", row[1]) == module.__all__


def test_unknown_names_are_refused() -> None:
    for package in PACKAGES:
        module = importlib.import_module(f"urdir.{package}")
        with pytest.raises(AttributeError, match=f"urdir.{package} attribute nonsense"):
            _ = module.nonsense


LIGHT = """
import sys
import urdir.{package}
heavy = {{"numpy", "jinja2", "cuda", "gguf", "tokenizers", "pytest"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_nothing(package: str, tmp_path: Path) -> None:
    assert run(tmp_path, "-c", LIGHT.format(package=package)) == ""


def test_the_readme_takes_five_minutes() -> None:
    assert len(read("README.md").splitlines()) < 200


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_have_targets(document: str) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", read(document)):
        path = (ROOT / document).parent.joinpath(link) if link else ROOT / document
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path), (link, anchor)
