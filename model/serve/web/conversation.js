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

// A node that never became part of the conversation; what it continued is shown again.
function dropNode(conversation, node) {
  delete conversation.nodes[node.id];
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
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
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

// What was exported, and nothing else. Throws an Error that says what is wrong.
function readExport(text) {
  const read = JSON.parse(text);
  const found = Array.isArray(read) ? read : [read];
  for (const each of found) {
    const nodes = Object.entries(each?.nodes ?? {});
    const isGood = typeof each?.id === "string" && typeof each.title === "string" && nodes.length
      && nodes.every(([id, node]) => node.id === id && NAMES[node.role] && typeof node.content === "string"
        && (node.parent === null || Object.hasOwn(each.nodes, node.parent)));
    if (!isGood) throw new Error("this is no export of conversations");
    for (let node = each.nodes[each.leaf], steps = 0; node; node = each.nodes[node.parent]) {
      if (++steps > nodes.length) throw new Error("messages go around in a circle");
    }
  }
  return found;
}
