"""Conversations of the chat page: kept in the browser, branched, edited, attached to, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.serve.conftest import Gate
from urdir.model.serve.page import _page

pytestmark = pytest.mark.slow

Browser = Any
ENTER, ESCAPE, UP = "\ue007", "\ue00c", "\ue013"
CONTROL, SHIFT = "\ue009", "\ue008"
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {}}}]


def _ask(page: Browser, text: str, answers: int = 1) -> str:
    page.type("#input", text + ENTER)
    return str(page.answer(answers))


def _prompt(server: Any, at: int = -1) -> str:
    request = server.service.requests[at]
    return str(server.service.model.tokenizer.decode(request.prompt, keep_control=True))


def _reload(page: Browser) -> None:
    page.run("keptConversations()")  # what is written is read after that
    page.run("(() => { window.old = true; location.reload(); })()")
    page.wait_for(lambda: page.run("!window.old && document.querySelectorAll('.turn').length > 0"))


def test_the_page_is_one_small_document(page: Browser) -> None:
    html, headers = _page()
    assert len(html.encode()) < 150_000
    assert "src=" not in html
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert page.run("performance.getEntriesByType('resource').every((e) => "
                    "/v1.models|props/.test(e.name))")  # fmt: skip


def test_a_conversation_outlives_a_reload(page: Browser, server: Any) -> None:
    server.service.answer = "It is **5**."
    _ask(page, "What is 2 plus 3?")
    _reload(page)
    assert page.text(".turn.user > .text") == "What is 2 plus 3?"
    assert page.texts(".turn strong") == ["5"]
    _ask(page, "And more?", 2)
    assert "It is **5**.<|im_end|>\n<|im_start|>user\nAnd more?" in _prompt(server)


def test_the_list_is_searched_renamed_and_shortened(page: Browser, server: Any) -> None:
    _ask(page, "apples")
    page.type("#input", CONTROL + SHIFT + "o")
    server.service.answer = "About pears."
    _ask(page, "oranges")
    page.run("showSidebar(true)")  # the window is narrow
    titles = "#conversations .title"
    assert page.texts(titles) == ["oranges", "apples"]
    page.type("#search", "PEARS about")
    assert page.texts(titles) == ["oranges"]
    page.run("(() => { const s = byId('search'); s.value = ''; "
             "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    page.press("apples", "#conversations")
    assert page.text(".turn.user > .text") == "apples"
    page.run("manage(conversations.find((c) => c.title === 'apples'), listActions)")
    page.type("#rename", " and plums")
    page.click("#manage button[value=rename]")
    page.wait_for(lambda: "apples and plums" in page.texts(titles))
    page.run("manage(chat, listActions)")
    page.click("#manage button[value=delete]")
    page.wait_for(lambda: page.texts(titles) == ["oranges"])
    assert page.text("#messages") == "Ask the model something."
    page.run("keptConversations()")  # the deletion comes first
    page.open(server.url)
    page.wait_for(lambda: page.texts(titles) == ["oranges"])


def test_other_answers_and_edited_questions_are_branches(page: Browser, server: Any) -> None:
    _ask(page, "one")
    server.service.answer = "Other."
    page.press("Again")
    assert page.answer() == "Other."
    assert page.texts(".turn:last-child .branches span") == ["2 / 2"]
    page.press("‹")
    assert page.text(".turn:last-child > .text") == "2 plus 3 is 5."
    page.press("Edit", ".turn.user")
    page.type(".editor textarea", " more")
    page.press("Send", ".editor")
    assert page.answer() == "Other."
    assert "user\none more<|im_end|>" in _prompt(server)
    assert page.texts(".turn.user .branches span") == ["2 / 2"]
    page.press("‹", ".turn.user")
    assert page.text(".turn.user > .text") == "one"
    page.press("Edit", ".turn:last-child")
    page.run("(() => { document.querySelector('.editor textarea').value = 'By hand.'; })()")
    page.press("Save", ".editor")
    assert page.text(".turn:last-child > .text") == "By hand."
    _reload(page)
    assert page.text(".turn:last-child > .text") == "By hand."
    _ask(page, "next", 2)
    assert "assistant\nBy hand.<|im_end|>" in _prompt(server)


def test_an_answer_goes_on(page: Browser, server: Any) -> None:
    assert _ask(page, "Hi") == "2 plus 3 is 5."
    server.service.answer = " Indeed."
    page.press("Continue")
    page.wait_for(lambda: len(server.service.requests) == 2)
    page.wait_for(lambda: page.text(".turn:last-child > .text") == "2 plus 3 is 5. Indeed.")
    assert _prompt(server).endswith("assistant\n2 plus 3 is 5.")


def test_a_failure_leaves_an_answer_as_it_was(page: Browser, server: Any) -> None:
    _ask(page, "Hi")
    server.service.error, server.service.good = ValueError("secret"), 2
    for button in ("Continue", "Again"):
        page.press(button)
        page.wait_for(lambda: page.texts(".error"))
        _reload(page)
        assert page.text(".turn:last-child > .text") == "2 plus 3 is 5."
        assert page.run("Object.keys(chat.nodes).length") == 2


def test_the_last_message_is_edited_by_key(page: Browser, server: Any) -> None:
    _ask(page, "Hi")
    page.type("#input", UP)
    page.type(".editor textarea", "!" + CONTROL + ENTER)
    page.wait_for(lambda: len(server.service.requests) == 2)
    assert page.answer() == "2 plus 3 is 5."
    assert "user\nHi!<|im_end|>" in _prompt(server)


def test_text_files_are_attached(page: Browser, server: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "notes.md", tmp_path / "data.bin"
    good.write_text("a ``` fence\nüber")
    bad.write_bytes(b"\xff\xfe\x00")
    page.run("(() => { byId('files').hidden = false; })()")
    page.type("#files", f"{good}\n{bad}")
    page.wait_for(lambda: page.texts("#attached button") == ["notes.md (16 characters) ×"])
    page.wait_for(lambda: page.texts("#note") == ["data.bin is not attached: it is no text."])
    _ask(page, "Sum it up")
    assert "user\nnotes.md\n````\na ``` fence\nüber\n````\n\nSum it up<|im_end|>" in _prompt(server)
    assert page.texts(".turn.user summary") == ["notes.md (16 characters)"]
    assert page.texts("#attached button") == []


def test_settings_show_the_defaults_of_the_server(page: Browser, server: Any) -> None:
    page.click("#open-settings")
    shown = page.run("[byId('top_k'), byId('repeat_last_n')].map((e) => e.placeholder)")
    assert shown == ["0", "64"]
    page.type("#top_k", "7")
    page.type("#seed", "11")
    page.type("#stop", "plus")
    page.click("#settings button.main")
    assert _ask(page, "Hi") == "2"
    settings = server.service.requests[0].settings
    assert (settings.top_k, settings.seed) == (7, 11)
    page.click("#open-settings")
    page.click("#reset")
    assert page.run("localStorage.length") == 0
    page.click("#settings button.main")


def test_a_call_is_shown_and_answered(page: Browser, server: Any) -> None:
    model = server.service.model
    model.answer_format = model.template.form
    page.click("#open-settings")
    page.run(f"(() => {{ byId('tools').value = {json.dumps(json.dumps(TOOLS))}; }})()")
    page.click("#settings button.main")
    server.service.answer = (
        '<tool_call>\n{"name": "weather", "arguments": {"at": "Oslo"}}\n</tool_call>'
    )
    page.type("#input", "Weather?" + ENTER)
    page.wait_for(lambda: page.texts(".results label") == ["Result of weather"])
    assert page.texts("details.call summary") == ["Calls weather"]
    assert page.texts("details.call pre") == ['{\n  "at": "Oslo"\n}']
    server.service.answer = "Cold."
    page.type(".results textarea", "-3 degrees")
    page.press("Send results")
    assert page.answer(2) == "Cold."
    assert "-3 degrees" in _prompt(server)
    _reload(page)
    assert page.texts(".turn.tool pre") == ["-3 degrees"]


def test_what_is_exported_is_imported(page: Browser, server: Any, tmp_path: Path) -> None:
    _ask(page, "apples")
    exported = tmp_path / "all.json"
    exported.write_text(page.run("JSON.stringify(conversations)"))
    assert page.run("asMarkdown(chat)") == (
        "# apples\n\n## You\n\napples\n\n## Model\n\n2 plus 3 is 5.\n"
    )
    page.run("listActions.remove(chat)")
    page.wait_for(lambda: page.texts("#conversations .title") == [])
    page.run("(() => { byId('imported').hidden = false; })()")
    page.type("#imported", str(exported))
    page.wait_for(lambda: page.texts("#conversations .title") == ["apples"])


@pytest.mark.parametrize(
    "export",
    [
        "{",
        "{}",
        '[{"id": "a", "title": "t", "leaf": "b", "nodes": {"b": {"id": "c"}}}]',
        '[{"id": "a", "title": "t", "leaf": "b", "nodes": {"b": {"id": "b", "role": "user", '
        '"content": "x", "parent": "b"}}}]',
    ],
)
def test_bad_exports_are_refused(page: Browser, export: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(export)
    page.run("(() => { byId('imported').hidden = false; })()")
    page.type("#imported", str(path))
    page.wait_for(lambda: page.texts("#note")[0].startswith("Not imported: "))
    assert page.texts("#conversations .title") == []


def test_context_and_the_model_card(page: Browser, server: Any) -> None:
    _ask(page, "Hi")
    words = page.run("byId('context').title")
    assert words.endswith(" of 512 tokens of context used")
    assert int(words.split()[0]) == len(server.service.requests[0].prompt) + 8
    page.click("#open-card")
    assert page.texts("#card-list dd")[:2] == ["toy", "512"]
    page.click("#card button")
    assert page.run("document.querySelector('dialog[open]')") is None


def test_right_to_left_and_labels(page: Browser, server: Any) -> None:
    server.service.answer = "مرحبا بالعالم"
    _ask(page, "مرحبا")
    sides = page.run("[...document.querySelectorAll('.turn .text')]"
                     ".map((e) => getComputedStyle(e).direction)")  # fmt: skip
    assert sides == ["rtl", "rtl"]
    unnamed = page.run(
        "[...document.querySelectorAll('button, input, textarea, select, meter')].filter((e) => "
        "!e.hidden && !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"
    )
    assert unnamed == 0


_NODE = '{"id": "b", "role": "user", "content": "x", "parent": null'


@pytest.mark.parametrize(
    ("leaf", "node"),
    [
        ("b", '{"id": "b", "role": "constructor", "content": "x", "parent": null}'),
        ("b", f'{_NODE}, "files": [{{"name": "x"}}]}}'),
        ("b", f'{_NODE}, "files": 3}}'),
        ("b", f'{_NODE}, "calls": {{"length": 1}}}}'),
        ("b", f'{_NODE}, "used": "x"}}'),
        ("__proto__", f"{_NODE}}}"),
    ],
)
def test_nodes_that_cannot_be_shown_are_refused(page: Browser, leaf: str, node: str) -> None:
    export = (
        f'{{"id": "a", "title": "t", "updated": 1, "leaf": "{leaf}", "nodes": {{"b": {node}}}}}'
    )
    said = page.run(
        f"(() => {{ try {{ readExport({export!r}); }} catch (e) {{ return e.message; }} }})()"
    )
    assert said == "this is no export of conversations"


def test_an_older_export_stays_beside_a_conversation(
    page: Browser, server: Any, tmp_path: Path
) -> None:
    _ask(page, "apples")
    exported = tmp_path / "all.json"
    exported.write_text(page.run("JSON.stringify(conversations)"))
    _ask(page, "pears", 2)
    page.run("(() => { byId('imported').hidden = false; })()")
    page.type("#imported", str(exported))
    page.wait_for(lambda: page.texts("#conversations .title") == ["apples", "apples"])
    assert page.run("conversations.map((c) => Object.keys(c.nodes).length)") == [4, 2]
    page.type("#imported", str(exported))
    _reload(page)
    assert page.run("conversations.map((c) => Object.keys(c.nodes).length).sort()") == [2, 2, 4]


def test_another_tab_keeps_what_this_one_kept(page: Browser, server: Any) -> None:
    """What it writes is shown here, so that this tab does not write over it."""
    _ask(page, "apples")
    theirs = "const theirs = structuredClone(chat), tab = new BroadcastChannel('urdir');"
    page.run(
        f"(() => {{ {theirs} addNode(theirs, theirs.leaf, {{ role: 'user', content: 'pears' }});"
        " tab.postMessage(theirs); })()"
    )
    page.wait_for(lambda: page.texts(".turn.user > .text") == ["apples", "pears"])
    page.run(f"(() => {{ {theirs} theirs.nodes = {{}}; tab.postMessage(theirs); }})()")
    page.wait_for(lambda: page.texts(".turn") == [])
    assert page.texts("#conversations .title") == []


def test_a_conversation_that_is_deleted_while_it_is_answered(page: Browser, server: Any) -> None:
    server.service.gate = Gate(2)
    page.type("#input", "apples" + ENTER)
    page.wait_for(lambda: page.run("running && chat.nodes[chat.leaf].content"))
    page.run("listActions.remove(chat)")
    page.wait_for(lambda: page.texts("#conversations .title") == [])
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run("conversations.length") == 0
    assert page.run("keptConversations()") == []


def test_an_answer_that_is_stopped_for_another_leaves_that_one_shown(
    page: Browser, server: Any
) -> None:
    _ask(page, "apples")
    usual, server.service.gate = server.service.gate, Gate()
    page.type("#input", "pears" + ENTER)
    page.wait_for(lambda: len(server.service.requests) == 2)  # it waits at the gate for good
    server.service.gate = usual
    page.press("Again")
    page.wait_for(lambda: page.run("running === null && shownPath(chat).length === 2"))
    assert page.run("shownPath(chat).map((node) => node.role)") == ["user", "assistant"]
    assert page.run("chat.leaf === continuations(chat, shownPath(chat)[0].id)[1].id")


def test_a_browser_that_stores_nothing(page: Browser, server: Any) -> None:
    """The page works where the storage of settings is refused."""
    refuses = "get() { throw new DOMException('refused', 'SecurityError'); }"
    added = page.devtools(
        "Page.addScriptToEvaluateOnNewDocument",
        source="for (const name of ['localStorage', 'sessionStorage', 'indexedDB'])"
        f" Object.defineProperty(window, name, {{ {refuses} }});",
    )
    try:
        page.open(server.url)
        assert _ask(page, "What is 2 plus 3?") == "2 plus 3 is 5."
        page.run(
            "(() => { const limit = byId('limit'); limit.value = 4;"
            " limit.dispatchEvent(new Event('change')); })()"
        )
        assert page.run("settingsOfRequest().max_tokens") == 4
    finally:
        page.devtools("Page.removeScriptToEvaluateOnNewDocument", **added)
