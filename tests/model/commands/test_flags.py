"""The table of llama.cpp's flags against the parsers that are made of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from urdir.model import demo_model
from urdir.model.cli import build_parser
from urdir.model.commands import options
from urdir.model.commands.flags import (
    NOTHING,
    PERHAPS,
    Accepted,
    Flag,
    FlagAction,
    Refused,
    Served,
    add_flags,
)
from urdir.model.commands.llama_flags import FLAGS
from urdir.model.commands.llama_flags.unserved import UNSERVED, read_unserved
from urdir.model.commands.parser import Parser
from urdir.model.commands.prompts import given_variables
from urdir.model.families.streaming import ALL_LAYERS

#: Which groups of flags a command has.
_OPENING = {"model", "context", "memory", "placement", "template"}
_GENERATING = {"prompt", "generation", "sampling", "text"}
GROUPS = {
    "run": {*_OPENING, *_GENERATING, "format", "run", "diffusion"},
    "chat": {*_OPENING, *_GENERATING, "chat", "format"},
    "serve": {
        *_OPENING,
        "sampling",
        "server",
        "alias",
        "many",
        "requests",
        "access",
        "log",
        "embeddings",
        "models",
    },
    "bench": {"model", "memory", "placement", "bench"},
}
#: Those of issue 17, and a value that is served or accepted. None: a switch.
NAMED = {
    "-hf": "org/repo:Q8_0", "-ngl": "99", "-fa": "on", "-t": "8", "-b": "512", "-ub": "512",
    "-np": "1", "-n": "-1", "-c": "0", "-sys": "Be kind.", "-ctk": "q8_0", "-ctv": "f16",
    "--repeat-penalty": "1.1", "--presence-penalty": "0", "--frequency-penalty": "0.0", "-e": None,
    "--no-mmap": None, "--verbose": None, "-co": "off", "--jinja": None, "--mirostat": "0",
    "--chat-template": "{{ x }}",
    "--chat-template-file": "x.jinja", "-cnv": None, "-st": None,
}  # fmt: skip
#: The same of llama-server's.
SERVED = {
    "-np": "4", "--parallel": "-1", "-c": "8192", "-cb": None, "--host": "0.0.0.0", "--port": "80",
    "--api-key": "a,b", "--api-key-file": "keys", "-a": "name", "--alias": "name",
    "--metrics": None, "--no-slots": None, "--timeout": "600", "-to": "600", "--threads-http": "4",
    "--no-webui": None, "--webui": None, "-ngl": "99", "-fa": "on", "-ctk": "q8_0", "-b": "512",
    "--temp": "0.6", "--top-p": "0.95", "-n": "-1", "--jinja": None, "--cache-reuse": "0",
    "--chat-template": "chatml", "--chat-template-kwargs": "{}", "--reasoning-format": "deepseek",
    "-rea": "off", "--reasoning-effort": "low", "-v": None, "--no-mmap": None, "-t": "8",
}  # fmt: skip


@pytest.fixture(scope="module")
def parsers() -> dict[str, Parser]:
    return {command: build_parser(command) for command in GROUPS}


def flags_of(command: str, kind: type) -> Iterator[tuple[str, Flag]]:
    for flag in FLAGS:
        if isinstance(flag, kind) and GROUPS[command] & set(flag.groups):
            for name in flag.names.split():
                yield name, flag


@pytest.mark.parametrize("command", GROUPS)
def test_no_flag_is_in_the_table_twice(command: str) -> None:
    names = [name for name, _ in flags_of(command, object)]
    assert len(names) == len(set(names)) > 60


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ((), ()),
        (("--draft", "3", "--draft-min", "1"), ("--draft-max", "--draft-min")),
        (("--spec-ngram-size-n", "3", "--draft-p-min", "0.5"),
         ("--draft-p-min", "--spec-ngram-size-n")),
        (("--spec-type", "ngram", "--draft", "3"), ()),
        (("--spec-type", "none", "--draft-vocab", "9"), ("--draft-vocab",)),
    ],
)  # fmt: skip
def test_flags_of_drafts_without_drafts_are_named(
    given: tuple[str, ...], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = options.drafts(build_parser("run").parse(["run", *given]))
    assert (found is not None) == ("ngram" in given)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"urdir: {flag} changes nothing without -md or --spec-type" for flag in flags]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("bench", "--shape", "llama-3.2-1b", "--type", "Q4_K_M"), "type"),
        (("bench", "--quantize", "Q4_K_M"), "quantize"),
        (("quantize", "a", "b", "--type", "Q4_K_M"), "type"),
        (("run", "-ctk", "Q8_0"), "cache_type_k"),
    ],
)
def test_types_may_be_in_capitals(given: tuple[str, ...], name: str) -> None:
    args = build_parser(given[0]).parse([*given])
    assert getattr(args, name) == given[-1].lower()


def test_every_flag_is_of_some_command() -> None:
    """Sections of unserved.toml are named after them."""
    others = {"cache"}  # of logits and perplexity
    assert {group for flag in FLAGS for group in flag.groups} == others.union(*GROUPS.values())
    assert tomllib.loads(UNSERVED.read_text()).keys() == {"accepted", "refused"}


@pytest.mark.parametrize(
    ("takes", "values", "off"),
    [("--a -b", [None], None), ("--a N", ["8"], None), ("--a N=-1", ["-1", "-1.0"], -1),
     ("--a x|y", ["x", "y"], None), ("--a [on|off|auto]", [None, "on"], None)],
)  # fmt: skip
def test_what_a_flag_takes_is_said_as_help_says_it(
    takes: str, values: list[str | None], off: float | None, tmp_path: Path
) -> None:
    file = tmp_path / "unserved.toml"
    file.write_text(f'accepted.run."it is so" = "{takes}"\nrefused.chat."x: y" = ["{takes}"]\n')
    accepted, refused = read_unserved(file)
    assert accepted.groups == ("run",)
    assert refused == Refused(accepted.names, ("chat",), "x: y", accepted.takes, off)
    parser = Parser(prog="p")
    add_flags(parser, [accepted], "run")
    for value in values:
        parser.parse([accepted.names.split()[0], *([] if value is None else [value])])


def test_every_flag_of_a_server_is_in_its_guides(parsers: dict[str, Parser]) -> None:
    room = Path(demo_model()).parents[1]
    guides = [*room.glob("*.md"), *(room / "serve").glob("*.md")]
    told = {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "".join(g.read_text() for g in guides))}
    flags = parsers["serve"].subcommands["serve"].flags.values()
    served = [of for of in dict.fromkeys(flags) if not isinstance(of, FlagAction)]
    assert len(served) > 60
    assert [of.option_strings for of in served if not told & {*of.option_strings}] == []


@pytest.mark.parametrize("command", GROUPS)
def test_every_flag_of_the_table_is_known_to_its_command(
    command: str, parsers: dict[str, Parser]
) -> None:
    known = parsers[command].subcommands[command].flags
    assert {name for name, _ in flags_of(command, object)} <= known.keys()


@pytest.mark.parametrize("command", GROUPS)
def test_flags_without_meaning_say_so_and_change_nothing(
    command: str, parsers: dict[str, Parser], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = vars(parsers[command].parse([command]))
    for name, flag in flags_of(command, Accepted):
        value = flag.values[0] if flag.values else "8"
        words = [name] if flag.takes in (NOTHING, PERHAPS) else [name, value]
        assert vars(parsers[command].parse([command, *words])) == plain
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"urdir {command}: {name} changes nothing: {flag.why}"


@pytest.mark.parametrize("command", GROUPS)
def test_flags_that_matter_are_refused_with_what_is_nearest(
    command: str, parsers: dict[str, Parser], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, flag in flags_of(command, Refused):
        words = [name] if flag.takes in (NOTHING, PERHAPS) else [name, "0.25"]
        with pytest.raises(SystemExit) as end:
            parsers[command].parse([command, *words])
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"urdir {command}: {name}: there is no {flag.why}")
        if flag.off is not None:
            parsers[command].parse([command, name, str(flag.off)])
            assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", GROUPS)
def test_served_flags_are_in_the_help_and_no_others(
    command: str, parsers: dict[str, Parser]
) -> None:
    words = set(parsers[command].subcommands[command].format_help().replace(",", " ").split())
    assert {name for name, _ in flags_of(command, Served)} <= words
    assert not {name for name, _ in flags_of(command, Accepted)} & words - {"-p"}


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        *(("chat", flag, value) for flag, value in NAMED.items()),
        *(("serve", flag, value) for flag, value in SERVED.items()),
    ],
)
def test_the_flags_that_people_type_are_taken(
    command: str, flag: str, value: str | None, parsers: dict[str, Parser]
) -> None:
    parsers[command].parse([command, flag, *([] if value is None else [value])])


@pytest.mark.parametrize(
    "flag", ["--slots", "--embd-normalize", "--path", "--reuse-port", "--mmproj"]
)
def test_what_a_server_does_not_do_is_refused(
    flag: str, parsers: dict[str, Parser], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsers["serve"].parse(["serve", flag, "x"])
    assert capsys.readouterr().err.startswith(f"urdir serve: {flag}: there is no ")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["-n", "-1"], "n_predict", None),
        (["-n", "-2"], "n_predict", None),
        (["-n", "5"], "n_predict", 5),
        (["-s", "-1"], "seed", None),
        (["-hf", "a/b:Q8_0"], "model", "hf:a/b:Q8_0"),
        (["-p", "-5 degrees"], "prompt", "-5 degrees"),
        (["-p", "-n"], "prompt", "-n"),
        (["-p", ""], "prompt", ""),
        (["--prompt=--x=y"], "prompt", "--x=y"),
        (["-r", "a", "--stop", "b"], "stop", ["a", "b"]),
        (["-ngl", "all"], "gpu_layers", None),
        (["-ngl", "0"], "gpu_layers", 0),
        (["-ncmoe", "3"], "host_experts", 3),
        (["-cmoe"], "host_experts", ALL_LAYERS),
        (
            ["-ot", "a=CPU,b.*=CUDA0", "-ot", "c=CPU"],
            "overrides",
            [("a", True), ("b.*", False), ("c", True)],
        ),
        (["--fit"], "fit", "on"),
        (["model.gguf", "a prompt", "--fit"], "fit", "on"),
        (["--fit", "off", "model.gguf"], "fit", "off"),
        (["--device-memory", "20G"], "device_memory", 20 << 30),
        (["--host-memory", "40G"], "host_memory", 40 << 30),
        (["--stream-dir", "layers"], "stream_dir", Path("layers")),
        (["--temperature", "0"], "temperature", 0.0),
        (["model.gguf", "-n", "5", "-", "a prompt"], "words", ["model.gguf", "-", "a prompt"]),
        (["-n", "5", "--", "-x", "y"], "words", ["-x", "y"]),
        (["-dev", "CUDA1"], "device", "cuda:1"),
    ],
)
def test_values_are_what_llama_cpp_takes_them_for(
    words: list[str], field: str, value: object, parsers: dict[str, Parser]
) -> None:
    assert getattr(parsers["run"].parse(["run", *words]), field) == value


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["-p", "512,1024"], "n_prompt", (512, 1024)),
        (["-d", "0,4096"], "n_depth", (0, 4096)),
        (["-n", "16-64*2"], "n_gen", (16, 32, 64)),
        (["-pg", "512,128", "-pg", "1,2"], "pg", [(512, 128), (1, 2)]),
        (["-npl", "1,8"], "sequences", (1, 8)),
        (["-b", "256"], "batch_size", 256),
        (["-r", "2"], "repetitions", 2),
        (["-ngl", "10,99"], "gpu_layers", 10),
        (["--routing", "0.9"], "routing", 0.9),
        (["--routing", "locality"], "routing", "locality"),
        *((["-o", form], "output", form) for form in ("sql", "md", "csv", "json", "jsonl")),
    ],
)
def test_flags_of_bench_are_those_of_llama_bench(
    words: list[str], field: str, value: object, parsers: dict[str, Parser]
) -> None:
    assert getattr(parsers["bench"].parse(["bench", *words]), field) == value


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {}),
        (["-rea", "off", "--reasoning-effort", "low"],
         {"enable_thinking": False, "reasoning_effort": "low"}),
        (["--reasoning", "on", "--chat-template-kwargs", '{"enable_thinking": 1, "x": 2}'],
         {"enable_thinking": 1, "x": 2}),
    ],
)  # fmt: skip
def test_flags_of_reasoning_are_variables_of_the_template(
    words: list[str], variables: object, parsers: dict[str, Parser]
) -> None:
    for command in ("run", "chat", "serve"):
        assert given_variables(parsers[command].parse([command, *words])) == variables


@pytest.mark.parametrize(
    "words", [["--temp"], ["--te", "1"], ["-mmodel"], ["--n-pred", "3"], ["-x"]]
)
def test_no_flag_is_guessed(words: list[str], parsers: dict[str, Parser]) -> None:
    with pytest.raises(SystemExit) as end:
        parsers["run"].parse(["run", *words])
    assert end.value.code == 2
