"""/v1/completions by the official client."""

from __future__ import annotations

from typing import Any

import pytest


def ask(server: Any, **body: Any) -> Any:
    return server.openai().completions.create(**{"model": "toy", "prompt": "Hi", **body})


def test_a_text_goes_on(server: Any) -> None:
    answer = ask(server)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, answer.object) == (
        "2 plus 3 is 5.",
        "stop",
        "text_completion",
    )
    [request] = server.service.requests
    assert request.prompt == tuple(server.service.model.tokenizer.encode("Hi", add_bos=True))
    assert request.limit == 16


def test_prompts_of_every_kind(server: Any) -> None:
    for prompt in ("Hi", ["Hi", "Ho"], [5, 6, 7], [[5, 6], [7]]):
        answer = ask(server, prompt=prompt, n=2, max_tokens=3)
        count = 4 if isinstance(prompt[0], list) or prompt == ["Hi", "Ho"] else 2
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert {choice.text for choice in answer.choices} == {"2 plus "}
    tokens = {request.prompt for request in server.service.requests}
    assert {(5, 6, 7), (5, 6), (7,)} < tokens
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 12


def test_a_streamed_text(server: Any) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "2 plus 3 is 5."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 8


def test_drafts_are_counted_and_can_be_switched_off(server: Any) -> None:
    server.service.drafts = (9, 5)
    details = ask(server, n=2).usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 8)
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens == 5
    for most in (0, 3):
        usage = ask(server, extra_body={"speculative.n_max": most}).usage
        assert (usage.completion_tokens_details is None) == (most == 0)
        assert server.service.requests[-1].drafts == (most > 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt(server: Any, stream: bool) -> None:
    for prompt in ("Hello there. ", server.service.model.tokenizer.encode("Hello there. ")):
        answer = ask(server, prompt=prompt, echo=True, stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(p.choices[0].text for p in parts) == "Hello there. 2 plus 3 is 5."


def test_log_probabilities(server: Any) -> None:
    whole = ask(server, logprobs=2).choices[0].logprobs
    tokens = ["2", " plus", " ", "3", " is", " ", "5", "."]
    assert whole.tokens == tokens
    assert whole.token_logprobs == [-0.5] * 8
    assert whole.text_offset == [sum(map(len, tokens[:i])) for i in range(8)]
    assert all(top[token] == -0.5 for token, top in zip(tokens, whole.top_logprobs, strict=True))
    chunks = [c.choices[0].logprobs for c in ask(server, logprobs=2, stream=True)]
    parts = [part for part in chunks if part]
    assert all(part.tokens for part in parts)
    assert [token for part in parts for token in part.tokens] == tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    assert [top for part in parts for top in part.top_logprobs] == whole.top_logprobs


PROMPTS = ([5], [5, 300, 7], [9, 8, 5, 301, 6, 4])


def test_an_echoed_prompt_has_log_probabilities(server: Any) -> None:
    """As lm-eval requests them; its first token has none. Streams have them as they come."""
    tokenizer = server.service.model.tokenizer

    def name(token: int) -> str:
        return str(tokenizer.token_bytes(token).decode("utf-8", "replace"))

    for more in (0, 1):
        asked = {"prompt": PROMPTS, "echo": True, "logprobs": 2, "max_tokens": more}
        whole = ask(server, **asked).choices
        # an end token, which would have no log-probability, is one more token
        assert [of.ignore_end for of in server.service.requests[-3:]] == [more == 1] * 3
        for prompt, choice in zip(PROMPTS, whole, strict=True):
            found, count = choice.logprobs, len(prompt)
            assert choice.text == tokenizer.decode(prompt) + "2" * more
            assert found.tokens == [*map(name, prompt), *["2"] * more]
            own = [None, *(-token / 10 for token in prompt[1:]), *[-0.5] * more]
            assert found.token_logprobs == [of and pytest.approx(of) for of in own]
            starts = [len(tokenizer.decode(prompt[:at])) for at in range(count + 1)]
            assert found.text_offset == starts[: count + more]
            assert found.top_logprobs[0] is None
            for token, top in zip(prompt[1:], found.top_logprobs[1:count], strict=True):
                likely = {token: -token / 10, token + 1: -token / 10 - 0.5}
                assert top == {name(of): pytest.approx(value) for of, value in likely.items()}
        parts: dict[int, list[Any]] = {index: [] for index in range(len(PROMPTS))}
        for chunk in ask(server, stream=True, **asked):
            parts[chunk.choices[0].index].append(chunk.choices[0])
        for index, choice in enumerate(whole):
            assert "".join(part.text for part in parts[index]) == choice.text
            known = [part.logprobs for part in parts[index] if part.logprobs]
            for of in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [value for part in known for value in getattr(part, of)]
                assert joined == getattr(choice.logprobs, of)


def test_log_probabilities_of_prompts_as_vllm_has_them(server: Any) -> None:
    body = {"prompt": [5, 300, 7], "prompt_logprobs": 1, "max_tokens": 1}
    (choice,) = server.http().post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("2", None)
    none, *others = choice["prompt_logprobs"]
    assert none is None
    for token, entries in zip((300, 7), others, strict=True):
        text = server.service.model.tokenizer.token_bytes(token).decode("utf-8", "replace")
        value = pytest.approx(-token / 10)
        assert entries == {str(token): {"logprob": value, "rank": 1, "decoded_token": text}}


def test_offsets_of_tokens_within_a_character(server: Any) -> None:
    """They are where the character begins, and count what of the text has come."""
    server.service.answer = answer = "é 🦆 and ü."
    tokenizer = server.service.model.tokenizer
    ids = tokenizer.encode(answer)
    known = [b"".join(map(tokenizer.token_bytes, ids[:count])) for count in range(len(ids))]
    wanted = [len(before.decode(errors="ignore")) for before in known]
    assert len(set(wanted)) < len(wanted)  # there are such tokens
    whole = ask(server, logprobs=0).choices[0]
    assert (whole.text, whole.logprobs.text_offset) == (answer, wanted)
    chunks = [c.choices[0].logprobs for c in ask(server, logprobs=0, stream=True)]
    assert [offset for part in chunks if part for offset in part.text_offset] == wanted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": [5] * 511, "n": 128, "echo": True, "logprobs": 8}, "prompt"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_is_refused(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.http().post("/v1/completions", json={"prompt": "Hi", **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert server.service.requests == []


def test_best_of_as_many_as_are_returned(server: Any) -> None:
    assert len(ask(server, best_of=2, n=2).choices) == 2


def test_text_that_is_no_unicode(server: Any) -> None:
    reply = server.http().post(
        "/v1/completions",
        content=b'{"prompt": "\\ud800"}',
        headers={"Content-Type": "application/json"},
    )
    assert reply.status_code == 400
    assert "surrogate" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "prompt"


def test_a_limit_by_any_name_and_answers_by_any(server: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        ask(server, max_tokens=None, extra_body={name: 3})
        assert server.service.requests[-1].limit == 3
    assert len(ask(server, extra_body={"n_cmpl": 3}).choices) == 3
    assert len(ask(server, n=2, extra_body={"best_of": 2}).choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_an_answer(server: Any, stream: bool) -> None:
    for more, text in (({}, ""), ({"echo": True}, "2 plus"), ({"logprobs": 1}, "")):
        asked = ask(server, prompt="2 plus", max_tokens=0, stream=stream, **more)
        parts = list(asked) if stream else [asked]
        assert "".join(part.choices[0].text for part in parts) == text
        assert parts[-1].choices[0].finish_reason == "length"
        assert server.service.requests[-1].limit == 0
    usage = ask(server, max_tokens=0).usage
    assert (usage.completion_tokens, usage.prompt_tokens > 0) == (0, True)


def test_bos_is_left_out_where_asked(server: Any) -> None:
    tokenizer = server.service.model.tokenizer
    encode, seen = tokenizer.encode, []

    def noted(text: str, **more: Any) -> list[int]:
        seen.append(more.get("add_bos", False))
        return encode(text, **more)  # type: ignore[no-any-return]

    tokenizer.encode = noted
    try:
        ask(server)
        ask(server, extra_body={"add_special_tokens": False})
    finally:
        del tokenizer.encode
    assert [flag for flag in seen if flag] == [True]
