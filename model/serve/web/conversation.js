// A conversation: a tree of messages, as a message can have several continuations, one of which is shown.
//
// {id, title, created, updated, leaf, nodes: {id: node}}; a node is {id, parent, role, content, reasoning, files,
// calls, call, note, at}: `files` are attached texts {name, text}, `calls` an answer's tool calls, `call` the id of
// the call that a tool's result answers.

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;

function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, nodes: {} };
}

function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, content: "", at: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = node.at;
  if (!conversation.title && node.role === "user") {
    conversation.title = (node.content || node.files?.[0]?.name || "").split("\n")[0].slice(0, 80);
  }
  return node;
}

// A node that never became part of the conversation; if it was the last one shown, what it continued is.
function dropNode(conversation, node) {
  delete conversation.nodes[node.id];
  if (conversation.leaf !== node.id) return;
  conversation.leaf = node.parent;
  const { leaf } = conversation;
  if (leaf !== null) selectNode(conversation, leaf);
  else selectNode(conversation, Object.values(conversation.nodes).find((each) => each.parent === null)?.id ?? null);
}

// The messages that are shown, from the first on.
function shownPath({ nodes, leaf }) {
  const path = [];
  for (let node = nodes[leaf]; node; node = nodes[node.parent]) path.push(node);
  return path.reverse();
}

const continuations = ({ nodes }, parent) =>
  Object.values(nodes).filter((node) => node.parent === parent).sort((a, b) => a.at - b.at);

// Show a node, and of its continuations the latest ones.
function selectNode(conversation, id) {
  conversation.leaf = id;
  if (id === null) return;
  for (let next; (next = continuations(conversation, conversation.leaf).at(-1));) conversation.leaf = next.id;
}

// A message as the server takes it.
function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
  const files = (node.files ?? []).map(({ name, text }) => `${name}\n${fenced(text)}\n\n`).join("");
  const message = { role: node.role, content: files + node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    message.tool_calls = node.calls.map(({ id, name, text }) =>
      ({ id, type: "function", function: { name, arguments: text } }));
  }
  return message;
}

// In a fence that the text does not have.
function fenced(text) {
  let longest = 2;
  for (const [ticks] of text.matchAll(/`{3,}/g)) longest = Math.max(longest, ticks.length);
  const ticks = "`".repeat(longest + 1);
  return `${ticks}\n${text}\n${ticks}`;
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool", system: "System" };

function asMarkdown(conversation) {
  const turns = shownPath(conversation).map((node) => `## ${NAMES[node.role]}\n\n${messageOf(node).content}\n`);
  return `# ${conversation.title}\n\n${turns.join("\n")}`;
}

const matches = (conversation, words) => {
  const text = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
};

const isText = (value) => typeof value === "string";
const isListOf = (names) => (value) => Array.isArray(value)
  && value.every((each) => names.every((name) => isText(each?.[name])));
const OPTIONAL = { // fields of a node
  reasoning: isText, note: isText, call: isText, files: isListOf(["name", "text"]),
  calls: isListOf(["id", "name", "text"]), at: Number.isFinite, used: Number.isFinite,
};

function isNode(node, id, nodes) {
  return node?.id === id && isText(node.role) && Object.hasOwn(NAMES, node.role) && isText(node.content)
    && (node.parent === null || Object.hasOwn(nodes, node.parent))
    && Object.entries(OPTIONAL).every(([name, is]) => (node[name] ?? null) === null || is(node[name]));
}

// Exported conversations. Throws an Error that says what is wrong.
function readExport(text) {
  const read = JSON.parse(text);
  const found = Array.isArray(read) ? read : [read];
  for (const each of found) {
    const nodes = Object.entries(each?.nodes ?? {});
    const isGood = isText(each?.id) && isText(each.title) && each.title && Number.isFinite(each.updated)
      && Object.hasOwn(each.nodes ?? {}, each.leaf) && nodes.every(([id, node]) => isNode(node, id, each.nodes));
    if (!isGood) throw new Error("this is no export of conversations");
    for (let node = each.nodes[each.leaf], steps = 0; node; node = each.nodes[node.parent]) {
      if (++steps > nodes.length) throw new Error("messages go around in a circle");
    }
  }
  return found;
}
