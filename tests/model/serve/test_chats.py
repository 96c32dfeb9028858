"""/v1/chat/completions by the official client: answers, errors of the service."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import openai
import pytest

from tests.model.serve.chats import HI, ask
from tests.model.serve.conftest import Gate
from urdir.driver.errors import DriverError
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.errors import BusyError, ContextFullError, ModelError


def test_an_answer(server: Any) -> None:
    answer = ask(server)
    [choice] = answer.choices
    assert choice.message.content == "2 plus 3 is 5."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    [request] = server.service.requests
    model = server.service.model
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(model.tokenizer.encode("2 plus 3 is 5."))
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert model.tokenizer.decode(request.prompt, keep_control=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.limit is None


def test_a_streamed_answer_is_the_same(server: Any) -> None:
    chunks = list(ask(server, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(texts) == "2 plus 3 is 5."
    assert len([text for text in texts if text]) == 8
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in chunks)


def test_streamed_usage_comes_last(server: Any) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(server).usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client(server: Any) -> None:
    async def talk() -> tuple[str, str]:
        async with server.async_openai() as client:
            whole = await client.chat.completions.create(model="toy", messages=HI)
            parts = await client.chat.completions.create(model="toy", messages=HI, stream=True)
            streamed = [chunk.choices[0].delta.content or "" async for chunk in parts]
            return whole.choices[0].message.content, "".join(streamed)

    assert asyncio.run(talk()) == ("2 plus 3 is 5.",) * 2


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(server: Any, stream: bool) -> None:
    answer = ask(server, n=3, seed=-1, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in answer:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
        requests = server.service.requests
        assert answer.usage.prompt_tokens == len(requests[0].prompt)
        assert answer.usage.completion_tokens == 24
    assert texts == ["2 plus 3 is 5."] * 3
    settings = [request.settings for request in server.service.requests]
    assert {s.seed for s in settings} == {2**64 - 1}
    assert sorted(s.nonce for s in settings) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server: Any, stream: bool) -> None:
    answer = ask(server, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        content = [t for c in answer if (p := c.choices[0].logprobs) for t in p.content]
    else:
        content = answer.choices[0].logprobs.content
    tokenizer = server.service.model.tokenizer
    assert "".join(token.token for token in content) == "2 plus 3 is 5."
    assert [bytes(token.bytes) for token in content] == [
        tokenizer.token_bytes(i) for i in tokenizer.encode("2 plus 3 is 5.")
    ]
    assert all(token.logprob == -0.5 for token in content)
    assert all([top.logprob for top in token.top_logprobs] == [-0.5, -1.5] for token in content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429(server: Any, stream: bool) -> None:
    server.service.error = BusyError("64 requests wait, no more are taken", retry_after=2.5)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(server, stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.body["message"] == "64 requests wait, no more are taken"


def test_a_prompt_that_does_not_fit(server: Any) -> None:
    for times in (500, 100_000):  # more than a template is given
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, messages=[{"role": "user", "content": "one two three " * times}])
        assert caught.value.code == "context_length_exceeded"
        is_of_context = "this model's maximum context length is 512 tokens: " in str(caught.value)
        assert is_of_context == (times == 500)
    server.service.error = ContextFullError("600 tokens exceed the context of 512 by 88")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("kind", [ModelError, DriverError])
def test_a_failure_after_some_tokens_ends_the_stream(server: Any, kind: type[Exception]) -> None:
    server.service.error = kind("the device is lost")
    server.service.good = 3
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match="the device is lost"):
        chunks.extend(ask(server, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2 plus "
    with pytest.raises(openai.InternalServerError, match="the device is lost"):
        ask(server)


def test_a_lost_device_is_one_line_of_the_log(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All open answers end by it: a traceback of each would say nothing more."""
    server.service.error, server.service.good = DeviceLostError("the device is gone"), 1
    with pytest.raises(openai.APIError, match="the device is gone"):
        list(ask(server, stream=True))
    [record] = [each for each in caplog.records if "the device is gone" in each.getMessage()]
    assert record.exc_info is None


def test_refusals_of_streams_are_no_errors_of_the_log(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a request that waited too long, whose stream has begun with comments."""
    server.service.error, server.service.good = BusyError("it waited", 1.0), 1
    with caplog.at_level(logging.INFO), pytest.raises(openai.APIError, match="it waited"):
        list(ask(server, stream=True))
    [record] = [each for each in caplog.records if "it waited" in each.getMessage()]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)


def test_what_nobody_expected_is_told_to_the_log_only(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.service.error = ValueError("secret")
    with pytest.raises(openai.InternalServerError) as caught:
        ask(server)
    assert "secret" not in str(caught.value)
    server.wait_for(lambda: "secret" in caplog.text)


def test_one_of_several_answers_fails_and_the_others_are_cancelled(server: Any) -> None:
    service = server.service
    service.gate = Gate()
    original = service.generate

    def generate(request: Any) -> Any:
        if service.requests:
            return fails()
        return original(request)

    async def fails() -> Any:
        raise BusyError("full", 1.0)
        yield

    service.generate = generate
    with pytest.raises(openai.RateLimitError):
        ask(server, n=2)
    server.wait_for(lambda: service.running == 0)
    assert service.cancelled == 1
