"""llama-server's native endpoints, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from urdir.model.text.fill import FillTokens

HI = [{"role": "user", "content": "Hi"}]


def post(server: Any, path: str = "/completion", **body: Any) -> Any:
    return server.http().post(path, json={"prompt": "2 plus", **body})


def events(server: Any, path: str = "/completion", **body: Any) -> list[dict[str, Any]]:
    reply = post(server, path, stream=True, **body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return [json.loads(event[6:]) for event in reply.text.strip().split("\n\n")]


def test_a_completion(server: Any) -> None:
    answer = post(server, temperature=0.5, n_predict=99, return_tokens=True).json()
    tokenizer = server.service.model.tokenizer
    [request] = server.service.requests
    assert request.prompt == tuple(tokenizer.encode("2 plus", add_bos=True))
    assert answer["content"] == "2 plus 3 is 5."
    assert answer["tokens"] == tokenizer.encode("2 plus 3 is 5.")
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (8, len(request.prompt))
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["n_predict"]) == (0.5, 99)
    assert answer["timings"]["predicted_n"] == 8
    assert post(server, "/completions").json()["content"] == answer["content"]


def test_a_streamed_completion(server: Any) -> None:
    found = events(server)
    assert [event["stop"] for event in found] == [False] * 8 + [True]
    assert "".join(event["content"] for event in found) == "2 plus 3 is 5."
    assert [event["tokens_predicted"] for event in found] == [*range(1, 9), 8]
    assert found[-1].keys() == post(server).json().keys()
    tokens = [token for event in found for token in event["tokens"]]
    assert tokens == server.model.tokenizer.encode("2 plus 3 is 5.")
    assert found[-1]["tokens"] == []


@pytest.mark.parametrize(
    ("body", "end"),
    [({"n_predict": 3}, ("limit", "")), ({"stop": ["is"]}, ("word", "is"))],
)
def test_why_a_completion_ends(server: Any, body: Any, end: tuple[str, str]) -> None:
    for last in (post(server, **body).json(), events(server, **body)[-1]):
        assert (last["stop_type"], last["stopping_word"]) == end


@pytest.mark.parametrize(("path", "more"), [("/completion", {}), ("/infill", {"samplers": []})])
def test_a_prompt_alone(server: Any, path: str, more: dict[str, Any]) -> None:
    """As llama.vim and llama.vscode fill the cache ahead."""
    server.model.fill = FillTokens(10, 11, 12)
    body = {
        **{"input_prefix": "", "input_suffix": "", "n_predict": 0, "t_max_prompt_ms": 1},
        **{"input_extra": [{"text": "f = 1", "filename": "f.py", "time": [1, 2]}]},
        **{"temperature": 0.0, "cache_prompt": True, "response_fields": [""], **more},
    }
    (last,) = events(server, path, **body)
    for answer in (post(server, path, **body, n_probs=2).json(), last):
        assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
        assert (answer["stop"], answer["stop_type"]) == (True, "limit")
        assert answer["generation_settings"]["n_predict"] == 0
        assert answer["tokens_evaluated"] == len(server.service.requests[-1].prompt)
    assert [request.limit for request in server.service.requests] == [0, 0]
    assert post(server, path, **body | {"n_predict": -1}).json()["tokens_predicted"] == 8
    assert server.service.requests[-1].limit is None
    refused = post(server, path, **body, min_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_several_prompts_and_probabilities(server: Any) -> None:
    first, second = post(server, prompt=["Hi", [5, 6]], n_probs=2).json()
    assert (first["index"], second["index"], second["prompt"]) == (
        *(0, 1),
        server.service.model.tokenizer.decode([5, 6], keep_control=True),
    )
    tokens = second["completion_probabilities"]
    assert "".join(token["token"] for token in tokens) == "2 plus 3 is 5."
    ids = server.service.model.tokenizer.encode("2 plus 3 is 5.")
    assert [token["id"] for token in tokens] == ids
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    assert all(token["top_logprobs"][0]["id"] == token["id"] for token in tokens)


def test_what_sillytavern_sends(server: Any) -> None:
    """Its defaults, with biases and tokens that never come."""
    words = dict.fromkeys(server.model.tokenizer.encode("2 plus"))
    chain = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]
    given = {
        **{"n_predict": 99, "max_tokens": 99, "temperature": 0.7, "top_k": 40, "top_p": 0.5},
        **{"repetition_penalty": 1.2, "repeat_penalty": 1.2, "repeat_last_n": 0, "min_p": 0},
        **{"dry_multiplier": 0, "xtc_probability": 0, "top_n_sigma": 0, "adaptive_target": -0.01},
        **{"typical_p": 1, "mirostat": 0, "min_keep": 0, "skip_special_tokens": True, "n": 1},
        **{"samplers": [*chain, "temperature", "adaptive_p"], "grammar": "", "cache_prompt": True},
    }
    for biases, wanted in (
        ([[5, 1.5], [7, False], [5, -2]], ((5, -2.0), (7, -100.0))),
        ([], ()),
        ([[5, 1.5], ["2 plus", -3]], ((5, 1.5), *((token, -3.0) for token in words))),
    ):
        assert post(server, **given, logit_bias=biases).status_code == 200
        assert server.service.requests[-1].settings.logit_bias == wanted


@pytest.mark.parametrize(
    "biases",
    [
        [5],
        [[5]],
        [["", 1]],
        [["a" * 257, 1]],
        [[[5], 1]],
        [[n, 1] for n in range(301)],
        [[True, 1]],
        [[5, True]],
        [[-1, 1]],
        [[5, 101]],
        [[1e9, 1]],
    ],
)
def test_biases_that_are_none(server: Any, biases: Any) -> None:
    refused = post(server, logit_bias=biases)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("logit_bias")


def test_forms_and_refusals(server: Any) -> None:
    post(server, json_schema={"type": "object"})
    assert server.service.requests[0].constraint == ("json_schema", {"type": "object"}, False)
    for body, named in (({"mirostat": 1}, "mirostat"), ({"prompt": 5}, "prompt")):
        refused = post(server, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)


def test_infill(server: Any) -> None:
    body = {"input_prefix": "def f(", "input_suffix": "):", "prompt": "a, "}
    refused = post(server, "/infill", **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_infill")
    tokenizer, model = server.service.model.tokenizer, server.model
    encode = tokenizer.encode
    model.fill = FillTokens(10, 11, 12)
    answer = post(server, "/infill", **body, n_predict=3).json()
    assert answer["content"] == "2 plus "
    bos = tuple(encode("", add_bos=True))
    assert server.service.requests[-1].prompt == (
        *(*bos, 10, *encode("def f(a, "), 11, *encode("):"), 12),
    )
    model.fill = FillTokens(10, 11, 12, file=13)
    extra = [{"filename": "g.py", "text": "<|im_end|>"}]
    assert events(server, "/infill", **body, input_extra=extra)[-1]["stop"]
    prompt = server.service.requests[-1].prompt
    text = encode("<|im_end|>")
    assert len(text) > 1  # a file's text cannot spell a control token
    assert prompt[: len(bos) + 1] == (*bos, 13)
    assert tuple(prompt[len(bos) + 1 :][: len(encode("g.py\n")) + len(text)]) == (
        *(*encode("g.py\n"), *text),
    )


def test_fill_tokens_are_found() -> None:
    names = {"<PRE>": 1, "<SUF>": 2, "<MID>": 3}
    assert FillTokens.find({}, names.get, 9) == FillTokens(1, 2, 3)
    given = {"tokenizer.ggml.fim_pre_token_id": 7, "tokenizer.ggml.fim_sep_token_id": 99}
    assert FillTokens.find(given, names.get, 9) == FillTokens(7, 2, 3)
    assert FillTokens.find({}, {"<PRE>": 1}.get, 9) is None


def test_the_model(server: Any) -> None:
    http = server.http()
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/v1/health").json() == {"status": "ok"}
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["chat_template"] == server.model.template.source
    assert (props["eos_token"], props["is_sleeping"]) == ("<|im_end|>", False)
    assert (props["total_slots"], props["model_path"]) == (2, "toy.gguf")
    idle = http.get("/slots?fail_on_no_slot=1").json()
    assert [(slot["id"], slot["is_processing"]) for slot in idle] == [(0, False), (1, False)]
    server.service.running = 2
    assert all(slot["is_processing"] for slot in http.get("/slots").json())
    reply = http.get("/slots?fail_on_no_slot=1")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_slot")
    server.service.running = 0
    (model,) = [of for of in http.get("/v1/models").json()["data"] if of["id"] == "toy"]
    assert model["architecture"]["output_modalities"] == ["text"]
    assert (model["meta"]["n_ctx_train"], model["meta"]["n_embd"]) == (2048, 64)
    rendered = http.post("/apply-template", json={"messages": HI}).json()["prompt"]
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_streamed_tokens_are_all_there(server: Any) -> None:
    """Those within a character, too, which have no text."""
    server.service.answer = "é 🦆"
    found = events(server, return_tokens=True)
    tokens = [token for event in found for token in event["tokens"]]
    assert tokens == server.service.model.tokenizer.encode("é 🦆")
    assert "".join(event["content"] for event in found) == "é 🦆"
