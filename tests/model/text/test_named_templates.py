"""The chat templates that come with urdir, against what llama.cpp makes of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from urdir.model.commands import prompts
from urdir.model.engine.engine import Engine
from urdir.model.errors import SettingsError, TemplateError
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata
from urdir.model.text.chat import ChatTemplate, Message
from urdir.model.text.named_templates import fitting_template, named_template, template_names
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.vocabulary import Defaults, TokenType, read_vocabulary

Cli = Callable[..., tuple[int, str, str]]

SYSTEM = {"role": "system", "content": " Be kind. "}
TURNS = [
    {"role": "user", "content": " One? "},
    {"role": "assistant", "content": " Two. "},
    {"role": "user", "content": "Three?"},
]
#: `llm_chat_apply_template` of llama.cpp 0.5.0 by name, with the system text and without. It has
#: another form of gpt-oss, and drops the system text of yandex.
FILE = Path(__file__).parents[2] / "data" / "chat_templates.json"
EXPECTED: dict[str, tuple[str | None, str]] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    with TemplateProcess() as opened:
        yield opened


def rendered(process: TemplateProcess, name: str, turns: list[dict[str, str]]) -> str:
    eos = "<|endoftext|>" if name == "zephyr" else "</s>"
    variables = {"bos_token": "<s>", "eos_token": eos, "add_generation_prompt": True}
    return process.render(named_template(name), {"messages": turns, **variables})


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_makes_what_llama_cpp_makes(name: str, process: TemplateProcess) -> None:
    """BOS at the beginning excepted: it comes from the vocabulary."""
    for turns, text in zip(([SYSTEM, *TURNS], TURNS), EXPECTED[name], strict=True):
        if text is None:
            with pytest.raises(TemplateError, match="no role system"):
                rendered(process, name, turns)
        else:
            assert rendered(process, name, turns).removeprefix("<s>") == text.removeprefix("<s>")


def test_every_name_is_compared() -> None:
    assert set(template_names()) - set(EXPECTED) == {"dots1", "gpt-oss"}


def test_the_others(process: TemplateProcess) -> None:
    """dots1 has no name there; gpt-oss as OpenAI's cookbook writes the harmony format."""
    assert rendered(process, "dots1", [SYSTEM, *TURNS]) == (
        "<|system|> Be kind. <|endofsystem|><|userprompt|> One? <|endofuserprompt|>"
        "<|response|> Two. <|endofresponse|><|userprompt|>Three?<|endofuserprompt|><|response|>"
    )
    text = rendered(process, "gpt-oss", [SYSTEM, *TURNS])
    assert text.startswith("<|start|>system<|message|>You are ChatGPT")
    assert "\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final." in text
    assert text.endswith(
        "<|start|>developer<|message|># Instructions\n\n Be kind. \n\n<|end|>"
        "<|start|>user<|message|> One? <|end|>"
        "<|start|>assistant<|channel|>final<|message|> Two. <|end|>"
        "<|start|>user<|message|>Three?<|end|><|start|>assistant"
    )


def test_a_system_text_that_a_format_has_not_goes_to_the_user(demo_file: Path) -> None:
    gguf = Gguf(demo_file)
    tokenizer = Tokenizer.of(gguf)
    messages = [Message(turn["role"], turn["content"]) for turn in [SYSTEM, *TURNS]]
    with (
        ChatTemplate.of(gguf, tokenizer, "yandex") as template,
        pytest.warns(UserWarning, match="goes into the first user turn"),
    ):
        text = template.render(messages).text
    assert text.startswith(" Пользователь:  Be kind. \n One? \n\n")


@pytest.mark.parametrize(
    ("tokens", "kind", "name"),
    [
        ("<|im_start|> <|im_end|> <s>", "gpt2", "chatml"),
        ("<|im_start|> <|im_sep|> <|im_end|>", "gpt2", "phi4"),
        ("<|im_start|> <|im_end|> <end_of_utterance>", "gpt2", None),  # SmolVLM
        ("<|start_header_id|> <|end_header_id|> <|eot_id|>", "gpt2", "llama3"),
        ("<start_of_turn> <end_of_turn> <bos>", "llama", "gemma"),
        ("[INST] [/INST] [TOOL_CALLS]", "llama", "mistral-v3"),
        ("[INST] [/INST] [TOOL_CALLS]", "gpt2", "mistral-v3-tekken"),
        ("[INST] [/INST] [SYSTEM_PROMPT]", "llama", "mistral-v7"),
        ("[INST] [/INST] [SYSTEM_PROMPT]", "gpt2", "mistral-v7-tekken"),
        ("[INST] [/INST] [SYSTEM_PROMPT] [THINK]", "gpt2", None),
        ("<|user|> <|assistant|> <|end|>", "llama", "phi3"),
        ("<|user|> <|assistant|> <|end|>", "gpt2", None),  # Phi-4-mini writes no line breaks
        ("[gMASK] <sop> <|user|> <|assistant|>", "gpt2", "chatglm4"),
        ("[gMASK] <sop> <|user|> <|assistant|> /nothink", "gpt2", None),  # GLM-4.5
        (
            "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|>",
            "gpt2",
            "command-r",
        ),
        ("<s> </s>", "llama", None),
        ("", "no_vocab", None),
    ],
)
def test_special_tokens_tell_the_format(
    tokens: str, kind: str, name: str | None, make_gguf: Callable[..., Path]
) -> None:
    path = make_gguf({"general.architecture": "llama", "tokenizer.ggml.model": kind})
    with Gguf(path) as gguf:
        assert fitting_template(gguf.metadata, tokens.split()) == name


@pytest.mark.parametrize(
    ("vocabulary", "name"),
    [
        ("llama-bpe", "llama3"),
        ("llama-spm", None),
        ("qwen2", "chatml"),
    ],
)
def test_real_vocabularies(
    vocabulary: str, name: str | None, vocab_file: Callable[[str], Path]
) -> None:
    with Gguf(vocab_file(vocabulary)) as gguf:
        read = read_vocabulary(gguf.metadata, Defaults())
        special = [read.tokens[i] for i in read.ids(TokenType.CONTROL, TokenType.USER_DEFINED)]
        assert fitting_template(gguf.metadata, special) == name


@pytest.mark.parametrize("empty", [None, "", " \n"])
def test_a_file_without_a_template(vocab_file: Callable[[str], Path], empty: str | None) -> None:
    """An empty one is none, as in llama.cpp."""
    known, unknown = Gguf(vocab_file("llama-bpe")), Gguf(vocab_file("llama-spm"))
    if empty is not None:
        for file in (known, unknown):
            file.metadata = Metadata({**file.metadata, "tokenizer.chat_template": empty})
    with (
        pytest.warns(UserWarning, match="no chat template: llama3 is used"),
        ChatTemplate.of(known, Tokenizer.of(known)) as template,
    ):
        assert template.source == named_template("llama3")
    with pytest.raises(TemplateError, match=r"no chat template.*plain prompts"):
        ChatTemplate.of(unknown, Tokenizer.of(unknown))


def test_names_that_are_none(demo_file: Path, cli: Cli) -> None:
    with pytest.raises(SettingsError, match=r"'mistral'; near it: .*mistral-v3"):
        named_template("mistral")
    with pytest.raises(SettingsError, match=r"; there are: bailing, .*zephyr"):
        named_template("../../demo-q4_k_m")
    with pytest.raises(SettingsError, match=r"'chatm'; near it: chatml"):
        Engine.open(device="emulator", chat_template="chatm")
    for command in ("run", "chat", "serve"):
        code, out, err = cli(command, "-m", "demo", "--chat-template", "lama3")
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert "'lama3'; near it: llama3" in line
        assert "--chat-template-file FILE" in line
        assert f"(see urdir {command} --help)" in line


def test_a_file_without_jinja_is_no_template(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("What is 2 plus 3?")
    code, out, err = cli("run", "-m", "demo", "--chat-template-file", file, "-p", "x")
    assert (code, out) == (2, "")
    assert f"--chat-template-file {file}: no Jinja template" in err


def test_a_name_on_the_command_line() -> None:
    from urdir.model.cli import build_parser

    args = build_parser("run").parse(["run", "--chat-template", "llama2-sys", "-p", "x"])
    assert prompts.given_template(args) == named_template("llama2-sys")


@pytest.mark.slow
def test_a_template_of_an_engine() -> None:
    with Engine.open(device="emulator", context=64, chat_template="phi3") as engine:
        assert engine.template.source == named_template("phi3")
