"""`urdir ptx explain` as a user types it."""

from __future__ import annotations

import json

import pytest

from urdir.model.cli import main


def test_it_prints_the_worst_lines_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "rows=2", "--set", "cols=257", "--top", "2"]
    assert main(["ptx", "explain", "normalise", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "rows=2 cols=257 kind=rms eps=1e-05 weight=True\nnormalise\n"
        "sm_90a, (2, 1, 1) CTAs of (64, 1, 1) threads:"
    )
    assert "global memory: 214 sectors, 198 would do" in shown
    first = shown.split("at best\n")[1].splitlines()[0].split()
    assert first[:6] == ["54", "4", "32.0", "18", "4.50", "4.00"]
    assert " ".join(first[6:]) == "ld.global.f32 %v0, [%x+0]"
    assert "  and 13 more lines" in shown
    assert "shared memory: 12 wavefronts, 12 would do" in shown
    assert "bar.sync 0" in shown


def test_json_is_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert main(["ptx", "explain", "argmax", "--json", "--target", "sm_80"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert (found["kernel"], found["target"], found["block"]) == ("argmax", "sm_80", [32, 1, 1])
    assert found["global"][0].keys() == {
        "line", "text", "kind", "requests", "active_lanes", "sectors", "fewest", "per_request",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give a KERNEL"),
        (["nonesuch"], 2, "no kernel 'nonesuch'"),
        (["argmax", "--set", "size=3"], 2, "size"),
        (["argmax", "--target", "sm_12"], 2, "sm_12"),
        (["argmax", "--top", "0"], 2, "at least 1"),
    ],
)
def test_bad_input(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["ptx", "explain", *arguments])
    except SystemExit as exc:
        found = int(exc.code or 0)
    assert (found, message in capsys.readouterr().err) == (code, True)
