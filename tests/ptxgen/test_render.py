"""From spec to PTX text: the frame, constants, macro files, errors."""

import importlib
import re
import struct
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from urdir.ptxgen import catalog, ptx
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.render import sources
from urdir.ptxgen.render.jinja import consecutive, environment, f32, grid, template_names
from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param
from urdir.ptxgen.target import since

TEMPLATES = {
    "scale.ptx.j2": """
        // scale: y = factor * x
        // x, y: (n) f32
        {% from "urdir_test_templates/_twice.j2" import twice %}
        .reg .f32 %v;
        ld.global.f32 %v, [%x];
        mul.f32 %v, %v, %factor;
        {{ twice("%v") }}
        {% if loud and target.sm >= 90 %}
        griddepcontrol.wait;
        {% endif %}
        st.global.f32 [%y], %v;
        ret;
        """,
    "_twice.j2": "{% macro twice(r) %}add.f32 {{ r }}, {{ r }}, {{ r }};{% endmacro %}",
    "_part.j2": "{% macro part(of, n) %}// part {{ n }} of {{ of.made() }}\n{% endmacro %}",
    "shared.ptx.j2": """
        {% import "urdir_test_templates/_part.j2" as common %}
        {% for i in (1, 2, 1) %}
        {{ once(common.part, spec.source, i) }}
        {%- endfor %}
        ret;
        """,
    "deep/far.ptx.j2": """
        {% import "urdir_test_templates/deep/_near.j2" as near %}
        {% import "urdir.templates/linear/_ends.j2" as of_urdir %}
        {% import "_vector.j2" as vector %}
        {{ near.four_times("%factor") }}
        ret;
        """,
    "deep/_near.j2": """
        {% from "urdir_test_templates/_twice.j2" import twice %}
        {% macro four_times(r) %}{{ twice(r) }} {{ twice(r) }}{% endmacro %}
        """,
    "lines.ptx.j2": """
        {% from "urdir_test_templates/_twice.j2" import twice %}
        {% for i in range(2) %}
            .reg .f32 %v{{ i }};
        {% endfor %}
        {% for i in range(2) %}mov.f32 %v{{ i }}, {{ f32(i) }};{% endfor %}
            {% if loud %}mov.f32 %v0, %v1;{% else %}mov.f32 %v1, %v0;  // {{ n }}{% endif %}
            {% if not loud %}bar.sync 0;{% endif %}
        {% if loud %}{{ twice("%v0") }}{% endif %}
        {%- if loud %}{{ twice("%v1") }}{% endif %}
            ret;
        """,
    "undefined.ptx.j2": "// undefined\n{{ nothing }}",
    "undefined_float.ptx.j2": "// undefined\n{{ f32(nothing) }}",
    "constant.ptx.j2": "// constant\n\nmov.f32 %a, {{ f32(spec) }};",
    "far_constant.ptx.j2": '{% import "urdir_test_templates/_half.j2" as h %}{{ h.half(1) }}',
    "_half.j2": "{% macro half(of) %}\n{{ f32(of + '') }}{% endmacro %}",
    "broken.ptx.j2": "ret;\n{% if %}",
    "vector.ptx.j2": "st.global.v2.f32 [%y], {%a, %b};",
    "importer.ptx.j2": '{% import "urdir_test_templates/broken.ptx.j2" as b %}',
}


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package of templates outside urdir; rendering caches forgotten afterwards."""
    folder = tmp_path / "urdir_test_templates"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, text in TEMPLATES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip("\n"))
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield folder
    sys.modules.pop("urdir_test_templates", None)
    forget()


def forget():
    environment.cache_clear()
    sources.source_digest.cache_clear()


@dataclass(frozen=True)
class Scale(KernelSpec):
    """Twice the product with a factor."""

    n: int
    loud: bool = False
    file: str = "scale.ptx.j2"
    shared_bytes: int = 128

    name = "scale"

    @property
    def template(self):  # a class variable elsewhere; here each test picks its file
        return ("urdir_test_templates", self.file)

    @property
    def params(self):
        return (
            Param("x", "f32", ("n",), Access.IN),
            Param("factor", "f32"),
            Param("count", "u32"),
            Param("y", "f32", ("n", 1), Access.OUT),
        )

    @property
    def launch_shape(self):
        return LaunchShape(grid=(2, 3, 1), block=(64, 2, 1), shared_bytes=self.shared_bytes)


def test_the_frame_is_made_from_the_spec():
    text = Scale(4).ptx("sm_80")
    assert text.startswith("// scale: y = factor * x\n// x, y: (n) f32\n// Scale(n=4, loud=False")
    module = ptx.parse(text)
    assert (module.version, module.target) == ((7, 0), "sm_80")
    entry = module.entries["scale"]
    assert [(p.name, p.type, p.pointer_space, p.pointer_align) for p in entry.parameters] == [
        ("x", "u64", "global", 16),
        ("factor", "f32", None, 0),
        ("count", "u32", None, 0),
        ("y", "u64", "global", 16),
    ]
    assert entry.directives == {"maxntid": (64, 2, 1)}
    assert entry.registers == {
        "%x": "b64", "%factor": "f32", "%count": "b32", "%y": "b64", "%v": "f32"
    }  # fmt: skip
    assert ".reg .b64 %y;  // (n, 1) f32, out" in text
    assert "// grid (2, 3, 1)  block (64, 2, 1)  cluster (1, 1, 1)" in text


def test_dynamic_shared_memory_is_declared_where_the_launch_gives_some():
    declaration = ".extern .shared .align 256 .b8 dynamic_shared[];"
    text = Scale(4).ptx("sm_80")
    assert text.count(declaration) == 1
    assert text.index(declaration) < text.index(".visible .entry")
    assert "dynamic shared 128 bytes" in text
    without = Scale(4, shared_bytes=0).ptx("sm_80")
    assert ".extern" not in without
    assert "dynamic shared 0 bytes" in without


def test_macros_come_from_another_file():
    assert "add.f32 %v, %v, %v;" in Scale(4).ptx("sm_80")


def test_a_text_that_kernels_have_in_common_is_rendered_once():
    """For equal arguments, in this kernel and in others; but not where templates were forgotten."""

    class Source:
        calls = 0

        def made(self):
            self.calls += 1
            return f"call {self.calls}"

    class Sharing(Scale):
        source = Source()

    for n in (4, 5):
        text = Sharing(n, file="shared.ptx.j2").ptx("sm_80")
        assert text.startswith("// part 1 of call 1\n// part 2 of call 2\n// part 1 of call 1\n")
    forget()
    assert Sharing(6, file="shared.ptx.j2").ptx("sm_80").startswith("// part 1 of call 3\n")


def test_the_version_is_the_lowest_that_will_do():
    assert ".version 6.3\n.target sm_75" in Scale(4).ptx("sm_75")
    assert ".version 7.8\n.target sm_90" in Scale(4, loud=True).ptx("sm_90")


def test_a_spec_may_need_a_newer_architecture():
    class Newer(Scale):
        targets = since(90)

    assert ".target sm_90" in Newer(4).ptx("sm_90")
    with pytest.raises(PtxgenError, match=r"kernel scale is for sm_90, sm_100, .*, not sm_89"):
        Newer(4).ptx("sm_89")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("undefined.ptx.j2", r"undefined.ptx.j2 line 2, kernel scale: 'nothing' is undefined"),
        ("undefined_float.ptx.j2", r"_float.ptx.j2 line 2, kernel scale: 'nothing' is undefined"),
        ("constant.ptx.j2", r"constant.ptx.j2 line 3, kernel scale: TypeError: float.. argument"),
        ("far_constant.ptx.j2", r"/_half.j2 line 2, kernel scale: TypeError: unsupported operand"),
        ("broken.ptx.j2", r"broken.ptx.j2 line 2, kernel scale"),
        ("vector.ptx.j2", r"line 1, kernel scale: .* 'a'.*; '{%' begins a tag: a vector is { %a"),
        ("importer.ptx.j2", r"broken.ptx.j2 line 2, kernel scale"),
        ("absent.ptx.j2", r"no template 'absent.ptx.j2' in package 'urdir_test_templates'"),
    ],
)
def test_errors_name_template_and_kernel(file, message):
    with pytest.raises(PtxgenError, match=message):
        Scale(4, file=file).ptx("sm_80")


@pytest.mark.parametrize("decorate", [lambda kind: kind, dataclass])
def test_a_spec_that_is_no_key_is_refused(decorate):
    @decorate
    class Thawed(KernelSpec):
        name = "thawed"
        template = ("urdir_test_templates", "scale.ptx.j2")

    with pytest.raises(PtxgenError, match=r"kernel thawed: Thawed needs @dataclass\(frozen=True\)"):
        Thawed().ptx("sm_80")


def test_an_absent_package_is_named():
    with pytest.raises(PtxgenError, match=r"no template 'x.j2' in package 'no_such_package'"):
        sources.read_template(("no_such_package", "x.j2"))


@pytest.mark.parametrize(
    ("loud", "expected"),
    [
        (True, "    mov.f32 %v0, %v1;\nadd.f32 %v0, %v0, %v0;add.f32 %v1, %v1, %v1;    ret;"),
        (False, "    mov.f32 %v1, %v0;  // 4\n    bar.sync 0;\n    ret;"),
    ],
)
def test_a_block_on_one_line_has_a_line_of_its_own(loud, expected):
    text = Scale(4, loud=loud, file="lines.ptx.j2").ptx("sm_80")
    begins = "mov.f32 %v0, 0f00000000;\nmov.f32 %v1, 0f3F800000;\n"
    assert text.endswith(f"    .reg .f32 %v0;\n    .reg .f32 %v1;\n{begins}{expected}\n}}\n")


def test_templates_lie_in_folders_too():
    """Those of another package name their package; bare names are urdir's."""
    text = Scale(4, file="deep/far.ptx.j2").ptx("sm_80")
    assert text.count("add.f32 %factor, %factor, %factor;") == 2


def test_a_digest_covers_folders_of_macros(monkeypatch):
    """Those of steps, which a product's template finds by their names alone."""
    product = ("urdir.templates", "linear/products/gemv.ptx.j2")
    step = ("urdir.templates", "linear/epilogue/_sigmoid_scaled.j2")
    before, read = sources.source_digest(product), sources.read_template
    monkeypatch.setattr(sources, "read_template", lambda name: read(name) + "\n" * (name == step))
    forget()
    changed = sources.source_digest(product)
    forget()
    assert changed != before


def test_urdirs_own_templates_name_each_other_by_their_paths():
    assert sources.named_in("urdir.templates", "linear/_ends.j2") == (
        "urdir.templates",
        "linear/_ends.j2",
    )
    assert sources.named_in("mine", "linear/_ends.j2") == ("linear", "_ends.j2")


def test_every_template_has_a_kernel_and_every_kernel_a_template():
    """``ptxgen/kernels/linear/pack.py`` goes with ``templates/linear/pack.ptx.j2``."""
    package = "urdir.templates"
    folder = Path(importlib.import_module(package).__file__).parent
    stored = {(package, str(path.relative_to(folder))) for path in folder.rglob("*.ptx.j2")}
    kernels = catalog.kernels().values()
    assert stored == {kernel.template for kernel in kernels if kernel.template[0] == package}
    assert catalog.kernel("pack").template == (package, "linear/pack.ptx.j2")


@pytest.mark.parametrize(
    ("template", "changed"),
    [
        ("scale.ptx.j2", "scale.ptx.j2"),
        ("scale.ptx.j2", "_twice.j2"),
        ("deep/far.ptx.j2", "deep/_near.j2"),
        ("deep/far.ptx.j2", "_twice.j2"),
    ],
)
def test_the_digest_covers_imported_files(package, template, changed):
    """In other folders, too."""
    before = sources.source_digest(("urdir_test_templates", template))
    path = package / changed
    path.write_text(path.read_text() + "\n")
    forget()
    assert sources.source_digest(("urdir_test_templates", template)) != before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "0f3F800000"),
        (-0.0, "0f80000000"),
        (float("-inf"), "0fFF800000"),
        (4096, "0f45800000"),
    ],
)
def test_f32_constants_are_exact(value, text):
    assert f32(value) == text


def test_consecutive_registers():
    assert consecutive("%v", 4, 3) == "%v4, %v5, %v6"


def test_a_grid_is_nested_loops():
    assert list(grid(2, (0, 4))) == [(0, 0), (0, 4), (1, 0), (1, 4)]
    assert list(grid(2, 0)) == []
    assert len(list(grid(range(1, 3), 2, "kv"))) == 8


def test_f32_constants_are_rounded_once():
    bits = int(f32(1e-5)[2:], 16)
    assert struct.unpack(">f", struct.pack(">I", bits))[0] == pytest.approx(1e-5, rel=6e-8)


def test_templates_keep_to_110_columns():
    for name in template_names():
        for number, line in enumerate(sources.read_template(("urdir.templates", name)).split("\n")):
            assert len(line) <= 110, f"{name}:{number + 1}"


def test_templates_use_what_they_import():
    for name in template_names():
        text = sources.read_template(("urdir.templates", name))
        rest = re.sub(r"\{#.*?#\}|//[^\n]*|\{% import[^\n]*", "", text, flags=re.DOTALL)
        for module in re.findall(r"\{% import \S+ as (\w+)", text):
            assert re.search(rf"\b{module}\b", rest), f"{name}: {module}"


def test_macros_begin_with_their_contract_and_see_their_arguments_alone():
    for name in template_names():
        text = sources.read_template(("urdir.templates", name))
        is_macro_file = name.rpartition("/")[2].startswith("_")
        assert text.startswith("{#" if is_macro_file else "//"), name
        assert "with context" not in text, name
