// The conversations that are kept, and the one that is shown.

let conversations = []; // all that are kept
let chat = newConversation(); // the one that is shown
let running = null; // {control, chat}: the answer that is written

const listActions = {
  open: (conversation) => openChat(conversation),
  menu: (conversation) => manage(conversation, listActions),
  rename: (conversation, title) => {
    conversation.title = title;
    kept(conversation);
  },
  remove: (conversation) => {
    removed(conversation);
    keep(conversation);
  },
};
const listed = () => showList(conversations, listActions);

function kept(conversation) {
  if (!Object.keys(conversation.nodes).length) return;
  if (!conversations.includes(conversation)) conversations.push(conversation);
  if (conversation === chat) history.replaceState(null, "", `#${chat.id}`); // so that a reload finds it
  keep(conversation);
  listed();
}

// A conversation without messages is kept no more, also once an answer in it has ended.
function removed(conversation) {
  if (running?.chat === conversation) stop();
  conversation.nodes = {};
  conversations = conversations.filter((each) => each !== conversation);
  if (conversation === chat) openChat(newConversation());
  else listed();
}

// A conversation as another tab has kept it; an answer that is written here stays in it.
function keptElsewhere(theirs) {
  const ours = conversations.find(({ id }) => id === theirs.id);
  if (!Object.keys(theirs.nodes).length) {
    if (ours) removed(ours);
    return;
  }
  if (ours && running?.chat === ours) {
    ours.nodes = { ...theirs.nodes, ...ours.nodes };
    return;
  }
  if (ours) Object.assign(ours, theirs);
  else conversations.push(theirs);
  if (ours === chat && !byId("messages").querySelector(".editor")) showChat();
  listed();
}

function openChat(conversation) {
  stop();
  chat = conversation;
  history.replaceState(null, "", chat.title ? `#${chat.id}` : location.pathname);
  showChat();
  listed();
  if (isNarrow()) showSidebar(false);
  byId("input").focus();
}

function showChat() {
  byId("messages").replaceChildren();
  const path = shownPath(chat);
  if (!path.length) element("p", byId("messages"), "Ask the model something.", "empty");
  for (const node of path) {
    if (node.role === "assistant") new Answer(node).finish(turnActions);
    else if (node.role === "tool") toolTurn(node);
    else userTurn(node, turnActions);
  }
  askForResults(path.at(-1));
  showContext(path.findLast((node) => node.used)?.used ?? 0);
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

function askForResults(node) {
  if (!node?.calls?.length || chat.leaf !== node.id) return;
  resultForm(node, (results) => {
    let parent = node.id;
    results.forEach((content, at) => {
      parent = addNode(chat, parent, { role: "tool", content, call: node.calls[at].id }).id;
    });
    showChat();
    answer(parent);
  });
}
