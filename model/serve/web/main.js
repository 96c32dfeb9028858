// The page: answers, the model, and what keys and buttons do.

let server = null; // what it says of itself

// Tell a screen reader, and with `isShown` everybody for a while.
function say(words, isShown = false) {
  byId("status").textContent = words;
  if (!isShown) return;
  const note = byId("note");
  note.textContent = words;
  note.hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { note.hidden = true; }, 6000);
}

// ---- answers ----

const turnActions = {
  select: (node) => {
    stop();
    selectNode(chat, node.id);
    kept(chat);
    showChat();
  },
  again: (node) => {
    stop();
    chat.leaf = node.parent;
    showChat();
    answer(node.parent);
  },
  goOn: (node) => {
    if (!running) answer(node.parent, node);
  },
  edit: (node, turn) => editor(node, turn, (content) => {
    stop();
    const { role, files, reasoning } = node;
    const edited = addNode(chat, node.parent, { role, content, files, reasoning });
    kept(chat);
    showChat();
    if (role === "user") answer(edited.id, null, edited);
  }),
};

function submit() {
  const input = byId("input"), content = input.value.trim();
  if ((!content && !attached.length) || running) return;
  byId("messages").querySelector(".empty, .results")?.remove();
  const node = addNode(chat, chat.leaf, { role: "user", content, files: attached.splice(0) });
  userTurn(node, turnActions);
  input.value = "";
  showAttached();
  fit();
  answer(node.id, null, node);
}

// Write an answer after the node `parent`, or go on with `begun`. If that fails, `asked` is in the input again.
async function answer(parent, begun = null, asked = null) {
  const within = chat;
  const node = begun ?? addNode(within, parent, { role: "assistant" });
  const before = begun && { content: begun.content, reasoning: begun.reasoning };
  if (begun) byId("messages").lastElementChild.remove();
  const shown = new Answer(node);
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
  const control = new AbortController();
  running = { control, chat: within };
  byId("send").textContent = "Stop";
  if (server && isAway(server.model)) say(`Loading ${server.model.id}`, true);
  else say("Answering");
  const saving = setInterval(() => kept(within), 3000);
  let isFailed = false;
  try {
    node.note = await write(within, node, Boolean(begun), shown, control.signal);
    say(node.content);
  } catch (error) {
    isFailed = !control.signal.aborted;
    node.note = isFailed ? "failed" : "stopped";
    if (isFailed) shown.fail(error.message);
  }
  clearInterval(saving);
  if (isFailed && begun) Object.assign(node, before);
  else if (isFailed || !(node.content || node.reasoning || node.calls)) {
    dropNode(within, node);
    if (asked && within === chat && chat.leaf === asked.id) {
      dropNode(within, asked);
      takeBack(asked);
    }
  }
  kept(within);
  if (server && !server.props) nameModel(); // it is loaded now, or failed
  if (running?.control === control) {
    running = null;
    byId("send").textContent = "Send";
  }
  if (within !== chat) return;
  if (!shown.turn.isConnected) { // others were shown, as it was stopped
    if (!running) showChat();
    return;
  }
  shown.finish(turnActions);
  askForResults(node);
  if (node.used) showContext(node.used);
}

// Let the server write; returns a note on the answer.
async function write(within, node, isBegun, shown, signal) {
  const path = shownPath(within).filter((each) => isBegun || each !== node);
  const system = byId("system").value.trim();
  const body = {
    ...(server?.models.length ? { model: server.model.id } : {}),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...path.map(messageOf)],
    ...settingsOfRequest(),
    ...(isBegun ? { continue_final_message: true } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
  let first = 0;
  const { usage, timings, finish } = await complete(body, signal, (delta) => {
    if (!(delta.content || delta.reasoning_content || delta.tool_calls)) return;
    first ||= performance.now();
    shown.add(delta);
  });
  if (!finish) return "cut off: the connection ended"; // as a proxy's may
  const tokens = usage?.completion_tokens ?? 0;
  node.used = usage?.total_tokens ?? 0;
  const seconds = (performance.now() - first) / 1000;
  const rate = timings?.predicted_per_second ?? (seconds > 0.1 ? (tokens - 1) / seconds : 0);
  const speed = rate > 0 ? `, ${rate.toFixed(rate < 10 ? 1 : 0)} a second` : "";
  return `${tokens} tokens${speed}${finish === "length" ? ", cut off" : ""}`;
}

function stop() {
  running?.control.abort();
  running = null;
  byId("send").textContent = "Send";
}

// ---- the model ----

function showContext(used) {
  const most = server?.props?.default_generation_settings?.n_ctx ?? 0;
  const meter = byId("context");
  meter.hidden = !used || !most;
  meter.max = most || 1;
  meter.high = 0.85 * most;
  meter.value = used;
  const words = `${used.toLocaleString()} of ${most.toLocaleString()} tokens of context used`;
  meter.title = words;
  meter.setAttribute("aria-label", words);
}

// Whether a model is loaded on demand, and was not when the server was asked.
function isAway({ status }) {
  return status !== undefined && status.value !== "loaded";
}

// The models to choose from, with what is to know of each before.
function showModels({ model, models }) {
  const box = byId("models");
  box.hidden = !models.length;
  box.replaceChildren();
  for (const { id, status } of models) {
    const note = status.failed ? "failed" : status.value;
    const option = element("option", box, note === "unloaded" ? id : `${id} (${note})`);
    option.value = id;
    option.title = status.cause ?? "";
  }
  box.value = model.id;
}

async function nameModel() {
  const wanted = inStorage("models", (storage) => storage.getItem("models"));
  const found = await describe(wanted).catch(() => null);
  if (found === LOADING) {
    byId("model").textContent = "loading …";
    nameModelLater();
    return;
  }
  server = found;
  if (!server) return;
  showModels(server);
  byId("model").textContent = document.title = server.model.id;
  const settings = server.props?.default_generation_settings;
  showSampling(settings?.params ?? { temperature: null });
  byId("thinking").closest("label").hidden = !/enable_thinking/.test(server.props?.chat_template ?? "");
  const card = byId("card-list");
  card.replaceChildren();
  const facts = { Name: server.model.id, Context: (settings?.n_ctx ?? server.model.max_model_len)?.toLocaleString(), ...server.model.meta };
  for (const [name, value] of Object.entries(facts)) {
    if (value === undefined || value === null) continue;
    element("dt", card, name);
    element("dd", card, typeof value === "number" ? value.toLocaleString() : String(value));
  }
  showContext(shownPath(chat).findLast((node) => node.used)?.used ?? 0);
  if (server.model.status?.value === "loading") nameModelLater();
}

function nameModelLater() {
  clearTimeout(nameModel.timer);
  nameModel.timer = setTimeout(nameModel, 1000);
}

// ---- keys and buttons ----

for (const id of PLAIN) remember(id);
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else submit();
});
byId("input").addEventListener("input", fit);
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !byId("input").value) {
    const last = [...document.querySelectorAll(".turn.user .more button")].findLast((each) => each.textContent === "Edit");
    if (last && !running) {
      event.preventDefault();
      last.click();
    }
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("input").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async () => {
  await attach([...byId("files").files]);
  byId("files").value = "";
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
document.addEventListener("keydown", (event) => {
  const isCommand = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (isNarrow() && document.body.classList.contains("listed")) showSidebar(false);
    else stop();
  } else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    openChat(newConversation());
  } else if (isCommand && event.key.toLowerCase() === "k") {
    event.preventDefault();
    showSidebar(true);
    byId("search").focus();
  }
});
byId("messages").addEventListener("click", (event) => {
  const copy = event.target.closest(".copy-code");
  if (copy) copyFrom(copy, copy.closest("figure").querySelector("pre").textContent);
});
byId("menu").addEventListener("click", () => showSidebar(!document.body.classList.contains("listed")));
byId("shade").addEventListener("click", () => showSidebar(false));
byId("clear").addEventListener("click", () => openChat(newConversation()));
byId("search").addEventListener("input", listed);
byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("open-card").addEventListener("click", () => byId("card").showModal());
byId("reset").addEventListener("click", resetSettings);
byId("settings").addEventListener("close", nameModel);
byId("models").addEventListener("change", async () => {
  inStorage("models", (storage) => storage.setItem("models", byId("models").value));
  await nameModel();
});
byId("export").addEventListener("click", () => {
  download("conversations.json", "application/json", JSON.stringify(conversations));
});
byId("import").addEventListener("click", () => byId("imported").click());
byId("imported").addEventListener("change", async () => {
  try {
    for (const file of byId("imported").files) {
      for (const each of readExport(await file.text())) {
        const known = conversations.find(({ id }) => id === each.id);
        if (known?.updated === each.updated) continue;
        if (known) each.id = newId(); // beside it, which may be newer
        kept(each);
      }
    }
  } catch (error) {
    say(`Not imported: ${error.message}.`, true);
  }
  byId("imported").value = "";
});
addEventListener("pagehide", () => running && kept(running.chat));
tabs?.addEventListener("message", ({ data }) => keptElsewhere(data));

async function begin() {
  showSidebar(!isNarrow());
  nameModel();
  const found = await keptConversations().catch(() => []);
  conversations = [...conversations, ...found.filter((each) => !conversations.some(({ id }) => id === each.id))];
  const wanted = conversations.find(({ id }) => id === location.hash.slice(1));
  if (wanted && !shownPath(chat).length) {
    chat = wanted;
    showChat();
  }
  listed();
}
begin();
