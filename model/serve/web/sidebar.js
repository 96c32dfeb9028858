// The list of conversations: searched, opened, renamed, deleted, exported.

const isNarrow = () => matchMedia("(max-width: 56rem)").matches;

function showSidebar(isOpen) {
  document.body.classList.toggle("listed", isOpen);
  byId("menu").setAttribute("aria-expanded", String(isOpen));
  byId("sidebar").inert = !isOpen;
  if (isOpen && isNarrow()) byId("search").focus();
}

function showList(conversations, actions) {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = conversations.filter((each) => each.title && matches(each, words)).sort((a, b) => b.updated - a.updated);
  const rows = byId("conversations");
  rows.replaceChildren();
  let day = "";
  for (const conversation of found) {
    const date = new Date(conversation.updated).toLocaleDateString(undefined, { dateStyle: "medium" });
    if (date !== day) element("li", rows, day = date, "day");
    rowOf(conversation, element("li", rows), actions);
  }
  if (!found.length) element("li", rows, words.length ? "Nothing found." : "No conversations yet.", "day");
}

function rowOf(conversation, row, actions) {
  const open = button(row, conversation.title, () => actions.open(conversation), "title");
  open.dir = "auto";
  if (conversation.id === chat.id) open.setAttribute("aria-current", "page");
  const more = button(row, "⋯", () => actions.menu(conversation));
  more.setAttribute("aria-label", `More about ${conversation.title}`);
}

// Ask what to do with a conversation.
function manage(conversation, actions) {
  const dialog = byId("manage");
  byId("rename").value = conversation.title;
  dialog.returnValue = "";
  dialog.showModal();
  dialog.onclose = () => {
    const title = byId("rename").value.trim();
    if (dialog.returnValue === "rename" && title) actions.rename(conversation, title);
    if (dialog.returnValue === "delete") actions.remove(conversation);
    if (dialog.returnValue === "markdown") download(`${fileName(conversation)}.md`, "text/markdown", asMarkdown(conversation));
    if (dialog.returnValue === "json") download(`${fileName(conversation)}.json`, "application/json", JSON.stringify(conversation));
  };
}

const fileName = (conversation) => conversation.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";
