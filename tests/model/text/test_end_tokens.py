"""Which tokens end an answer: cases that llama.cpp (llama_vocab_is_eog) was asked about."""

from __future__ import annotations

import pytest

from urdir.model.text.end_tokens import find_end_ids, find_markup, find_shown_ids


def ends(names: str, given: str = "", fill: dict[str, str] | None = None) -> set[str]:
    tokens = names.split()
    id_of = {token: i for i, token in enumerate(tokens)}
    roles = {role: id_of[token] for role, token in (fill or {}).items()}
    return {tokens[i] for i in find_end_ids(id_of, [id_of[t] for t in given.split()], roles)}


@pytest.mark.parametrize(
    ("tokens", "given", "expected"),
    [
        ("a b", "", ""),
        ("a b", "b", "b"),  # whatever its text
        ("<|eot_id|> <|end_of_text|> a", "<|eot_id|>", "<|eot_id|> <|end_of_text|>"),
        ("<|eom_id|> a", "", "<|eom_id|>"),
        ("<s> </s> <|im_end|> <|im_start|>", "</s>", "</s> <|im_end|>"),
        ("<eos> <end_of_turn> <start_of_turn>", "<eos>", "<eos> <end_of_turn>"),
        ("<EOT> _<EOT> [EOT] [EOS] <EOS>", "", "<EOT> _<EOT> [EOT] [EOS]"),
        ("[e~[ <end_of_utterance> b", "", "[e~[ <end_of_utterance>"),
        ("<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜>", "", "<｜end▁of▁sentence｜>"),
        ("<|end|> <|user|> <|endoftext|>", "<|endoftext|>", "<|end|> <|endoftext|>"),  # Phi-3
        # gpt-oss: <|end|> closes one of the messages of an answer, even if it is the end of turn
        ("<|end|> <|return|> <|call|> <|start|>", "<|end|> <|return|>", "<|return|> <|call|>"),
        ("<|end|> <|flush|> <|calls|>", "", "<|flush|> <|calls|>"),  # Solar Open
        ("<|end|> <|return|>", "", "<|end|> <|return|>"),
        # Gemma 4 and PLaMo have </s> as an ordinary word
        ("<eos> <turn|> <|tool_response> </s>", "<eos>", "<eos> <turn|> <|tool_response>"),
        ("<|plamo:eos|> </s>", "<|plamo:eos|>", "<|plamo:eos|>"),
        ("<|plamo:eos|> </s>", "", "</s>"),
        # code models
        ("<fim_pad> <reponame> <|file_sep|> <fim_prefix>", "", "<fim_pad> <reponame> <|file_sep|>"),
    ],
)  # fmt: skip
def test_end_tokens(tokens: str, given: str, expected: str) -> None:
    assert ends(tokens, given) == set(expected.split())


def test_a_role_that_the_file_gives_goes_before_names() -> None:
    assert ends("<PAD> x <REPO>", fill={"fim_pad": "x"}) == {"x", "<REPO>"}


def test_markup_and_what_is_printed_of_it() -> None:
    names = ["<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|call|>", "a"]
    oss = {name: i for i, name in enumerate(names)}
    assert find_shown_ids(oss) == {0, 1, 2}
    assert set(find_markup(oss, find_end_ids(oss, [], {}))) == set(oss) - {"a"}
    phi = {"<|end|>": 0, "<|user|>": 1}
    assert find_shown_ids(phi) == set()
    gemma = {"</s>": 0, "<|tool_response>": 1}
    assert find_markup(gemma, {1}) == {"<|tool_response>": 1}
