// How the messages of a conversation are shown, each as an article.

// Change the page; who was at its end stays there.
function atEnd(change) {
  const scroll = byId("scroll");
  const follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  change();
  if (follows) scroll.scrollTop = scroll.scrollHeight;
}

function turnOf(node, name) {
  const turn = element("article", byId("messages"), undefined, name ? `turn ${name}` : "turn");
  turn.dataset.node = node.id;
  turn.setAttribute("aria-label", NAMES[node.role]);
  return turn;
}

function textOf(turn) {
  const text = element("div", turn, undefined, "text");
  text.dir = "auto";
  return text;
}

function fileList(files, turn) {
  for (const { name, text } of files ?? []) {
    const shown = element("details", turn, undefined, "file");
    element("summary", shown, `${name} (${sizeOf(text.length)})`);
    element("pre", shown, text).dir = "auto";
  }
}

const sizeOf = (n) => (n < 1000 ? `${n} characters` : `${(n / 1000).toFixed(n < 10000 ? 1 : 0)} thousand characters`);

// Which of several continuations is shown, and the ways to the others.
function branches(node, foot, select) {
  const all = continuations(chat, node.parent);
  if (all.length < 2) return;
  const at = all.indexOf(node);
  const box = element("span", foot, undefined, "branches");
  for (const [step, mark, label] of [[-1, "‹", "Version before"], [1, "›", "Version after"]]) {
    if (step > 0) element("span", box, `${at + 1} / ${all.length}`);
    const other = all[at + step];
    const control = button(box, mark, () => select(other));
    control.setAttribute("aria-label", label);
    control.disabled = !other;
  }
}

function userTurn(node, actions) {
  const turn = turnOf(node, "user");
  fileList(node.files, turn);
  textOf(turn).textContent = node.content;
  const foot = element("div", turn, undefined, "more");
  button(foot, "Edit", () => actions.edit(node, turn));
  branches(node, foot, actions.select);
  return turn;
}

function toolTurn(node) {
  const turn = turnOf(node, "tool");
  const shown = element("details", turn, undefined, "call");
  element("summary", shown, "Result of the call");
  element("pre", shown, node.content).dir = "auto";
}

// An answer: shown at most once a frame, however fast its text comes.
class Answer {
  constructor(node) {
    this.node = node;
    this.turn = turnOf(node);
    this.thoughts = element("details", this.turn, undefined, "reasoning");
    this.thoughtsTitle = element("summary", this.thoughts, "Reasoning");
    this.thought = element("div", this.thoughts);
    this.thought.dir = "auto";
    this.markdown = new GrowingMarkdown(textOf(this.turn));
    this.calls = element("div", this.turn);
    this.frame = 0;
    this.show();
  }

  add(delta) {
    const { node } = this;
    node.content += delta.content ?? "";
    if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    for (const call of delta.tool_calls ?? []) {
      node.calls ??= [];
      const known = (node.calls[call.index ?? 0] ??= { id: "", name: "", text: "" });
      known.id ||= call.id ?? "";
      known.name += call.function?.name ?? "";
      known.text += call.function?.arguments ?? "";
    }
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { content, reasoning = "", calls = [] } = this.node;
    atEnd(() => {
      this.thoughts.hidden = !reasoning;
      this.thoughtsTitle.textContent = reasoning && !content && !calls.length ? "Thinking" : "Reasoning";
      const shown = element("div");
      shown.append(reasoning);
      patch(this.thought, shown);
      this.markdown.show(content);
      const list = element("div");
      for (const call of calls) callOf(call, list);
      patch(this.calls, list);
    });
  }

  finish(actions) {
    const { node } = this;
    this.show();
    atEnd(() => {
      const foot = element("div", this.turn, undefined, "foot");
      const copy = button(foot, "Copy", () => copyFrom(copy, node.content));
      if (chat.nodes[node.id]) {
        button(foot, "Again", () => actions.again(node)).title = "Another answer";
        if (node.id === chat.leaf && !node.calls?.length) {
          button(foot, "Continue", () => actions.goOn(node)).title = "Let this answer go on";
        }
        button(foot, "Edit", () => actions.edit(node, this.turn));
        branches(node, foot, actions.select);
      }
      element("span", foot, node.note ?? "", "note");
    });
  }

  fail(message) {
    element("p", this.turn, message, "error").setAttribute("role", "alert");
  }
}

function callOf({ name, text }, parent) {
  const shown = element("details", parent, undefined, "call");
  element("summary", shown, `Calls ${name}`);
  let pretty = text;
  try {
    pretty = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* not whole yet */ }
  highlight(pretty, "json", element("code", element("pre", shown)));
}

// Fields for the results of an answer's calls.
function resultForm(node, send) {
  const form = element("form", byId("messages"), undefined, "results");
  const areas = node.calls.map(({ name }) => {
    const label = element("label", form, `Result of ${name}`);
    const area = element("textarea", label);
    area.rows = 2;
    return area;
  });
  element("button", form, "Send results", "main");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(areas.map((area) => area.value));
  });
}

// A message's text in a field; `done` gets the new one.
function editor(node, turn, done) {
  const text = turn.querySelector(".text");
  const form = element("form", undefined, undefined, "editor");
  const area = element("textarea", form);
  area.value = node.content;
  area.dir = "auto";
  area.setAttribute("aria-label", "Message");
  area.rows = Math.min(20, node.content.split("\n").length + 1);
  const row = element("div", form);
  element("button", row, node.role === "user" ? "Send" : "Save", "main");
  const close = () => form.replaceWith(text);
  button(row, "Cancel", close, "");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim() && area.value !== node.content) done(area.value);
    else close();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  text.replaceWith(form);
  area.focus();
}
