"""POST /slots/N: what is asked of the engine, and what clients of llama-server read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.model.serve.test_prefix_scope import bearer
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.serve.access import Access
from urdir.model.serve.apart import wire
from urdir.model.serve.prefix_scope import digest


def test_actions_and_their_replies(server: Any) -> None:
    def post(path: str, **body: Any) -> Any:
        reply = server.http().post(f"/slots/{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    file = {"id_slot": 3, "filename": "a.bin"}
    assert post("3?action=save", filename="a.bin") == {
        **file,
        "n_saved": 17,
        "n_written": 4096,
        "timings": {"save_ms": 250.0},
    }
    assert post("3?action=restore", filename="a.bin") == {
        **file,
        "n_restored": 17,
        "n_read": 4096,
        "timings": {"restore_ms": 250.0},
    }
    assert post("0?action=erase") == {"id_slot": 0, "n_erased": 17}
    assert server.service.actions == [
        SlotAction("save", 3, "a.bin"),
        SlotAction("restore", 3, "a.bin"),
        SlotAction("erase", 0),
    ]


def test_a_caller_acts_on_what_is_his(start: Any) -> None:
    server = start(Access(api_keys=("one", "two")))
    for key in ("one", "two"):
        reply = server.http().post("/slots/0?action=erase", json={}, headers=bearer(key))
        assert reply.status_code == 200
    assert [action.scope for action in server.service.actions] == [digest(b"one"), digest(b"two")]
    assert server.http().post("/slots/0?action=erase", json={}).status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "words", "status"),
    [
        ("0", {"filename": "a"}, "action 'None': expected one of save, restore, erase", 400),
        ("0?action=copy", {"filename": "a"}, "action 'copy': expected one of", 400),
        ("0?action=save", {}, "filename", 400),
        ("0?action=save", {"filename": 7}, "filename", 400),
        ("9?action=erase", {}, "slot 9: there are 2", 400),
        ("x?action=erase", {}, "no slot 'x'", 404),
        (f"{9 * '9'}9?action=erase", {}, "no slot '9999999999'", 404),
        (f"{5000 * '9'}?action=erase", {}, "no slot '999", 404),
        ("0?action=save", {"filename": "ä"}, "'filename' must have letters", 400),
        ("0?action=save", {"filename": "\ud800"}, "'filename' must have letters", 400),
    ],
)
def test_bad_actions_are_refused(
    server: Any, path: str, body: dict[str, Any], words: str, status: int
) -> None:
    headers = {"Content-Type": "application/json"}  # httpx cannot write a lone surrogate
    reply = server.http().post(f"/slots/{path}", content=json.dumps(body), headers=headers)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]


def test_files_are_those_of_an_api_key(start: Any) -> None:
    """Another key neither restores a file, which would show what was asked, nor replaces it."""
    server = start(Access(api_keys=("one", "two")))
    for key in ("one", "two", "one"):
        for kind in ("save", "restore"):
            path, body = f"/slots/0?action={kind}", {"filename": "a.bin"}
            reply = server.http().post(path, json=body, headers=bearer(key))
            assert reply.json()["filename"] == "a.bin"
    one, same, two, _, again, _ = (action.file for action in server.service.actions)
    assert one == same == again != two
    assert all(file.endswith(".a.bin") for file in (one, two))


def test_actions_pass_between_processes() -> None:
    action, done = SlotAction("restore", 5, "a", b"\xff\0"), SlotDone(3, 1 << 40, 0.5)
    (call,) = wire.Frames().push(wire.frame(wire.Slot(7, action)))
    assert wire.decode_call(call) == wire.Slot(7, action)
    (reply,) = wire.Frames().push(wire.frame(wire.Round([wire.Update(7, done=done)])))
    assert wire.decode_round(reply).updates == [wire.Update(7, done=done)]
