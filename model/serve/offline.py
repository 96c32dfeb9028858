"""Requests from a file, answered without a socket: the lines of OpenAI's batches."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Message

from urdir.model.serve.interface import Json
from urdir.model.serve.stream import log


async def answer_lines(
    app: ASGIApp, lines: Iterable[bytes], write: Callable[[Json], None], at_once: int
) -> tuple[int, int]:
    """Have ``app`` answer the requests of ``lines``, ``at_once`` at a time, and write each answer
    as soon as it is there.

    Blank lines are skipped. Returns the numbers of requests and of those that failed. Raises what
    ``lines`` and ``write`` do.
    """
    waiting = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    known = set[str]()
    count = failed = 0

    async def work() -> None:
        nonlocal count, failed
        for number, line in waiting:  # shared by all workers
            count += 1
            answer = await _answer(app, line, number, known)
            response = answer["response"]
            failed += response is None or response["status_code"] != HTTPStatus.OK
            write(answer)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(work())
    except ExceptionGroup as failures:  # of reading or writing, which ends all
        raise failures.exceptions[0] from None
    return count, failed


async def _answer(app: ASGIApp, line: bytes, number: int, known: set[str]) -> Json:
    """The answer to one line, with its custom_id; errors have its number. What a busy server
    refuses is sent again."""
    answer: Json = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None}
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("a line must be an object with custom_id, method, url and body")
        answer["custom_id"] = request.get("custom_id")
        _check(request, known)
        body = json.dumps({**request["body"], "stream": False})  # ollama's default is a stream
    except (ValueError, RecursionError) as error:
        is_json = not isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
        message = f"line {number}: {'' if is_json else 'not JSON: '}{error}"
        failure = {"code": "invalid_request", "message": message, "line": number}
        return answer | {"response": None, "error": failure}
    while True:
        status, headers, found = await _exchange(app, request["url"], body)
        if status != HTTPStatus.TOO_MANY_REQUESTS:
            break
        await asyncio.sleep(float(headers.get(b"retry-after", b"1")))
    response = {
        "status_code": status,
        "request_id": headers[b"x-request-id"].decode(),
        "body": json.loads(found),
    }
    return answer | {"response": response, "error": None}


def _check(request: Json, known: set[str]) -> None:
    """Raise ValueError for a line that is not a request, or has a custom_id that is ``known``."""
    name = request.get("custom_id")
    if not isinstance(name, str) or name in known:
        raise ValueError("'custom_id' must be a text that no line before has")
    known.add(name)
    if request.get("method", "POST") != "POST":
        raise ValueError("'method' must be POST")
    url = request.get("url")
    if not isinstance(url, str) or not url.isascii() or not isinstance(request.get("body"), dict):
        raise ValueError("'url' must be a path, such as /v1/chat/completions, and 'body' an object")
    if request["body"].get("background"):
        raise ValueError("'background' cannot be true: no later request can reach this process")
    if request["body"].get("stream"):
        raise ValueError("'stream' cannot be true: answers of a batch are whole")


async def _exchange(app: ASGIApp, path: str, body: str) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the response to a POST."""
    parts: list[Message] = [{"type": "http.request", "body": body.encode(), "more_body": False}]
    status, headers, found = 0, {}, bytearray()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            found.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
    except Exception as error:  # answered with status 500, and raised for the server's log
        if not status:
            raise
        log.error("%s: %s", path, error, exc_info=error)
    return status, headers, bytes(found)
