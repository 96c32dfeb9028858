// Nodes of the document. Texts only ever become text, so that no message can run a script.

const byId = (id) => document.getElementById(id);

function element(tag, parent, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  parent?.append(node);
  return node;
}

function button(parent, text, onClick, className = "small") {
  const node = element("button", parent, text, className);
  node.type = "button";
  if (onClick) node.addEventListener("click", onClick);
  return node;
}

// Make the children of `parent` from number `from` on like those of `wanted`, changing what differs
// alone: a growing answer is laid out again where it grows.
function patch(parent, wanted, from = 0) {
  let old = parent.childNodes[from] ?? null;
  for (const node of [...wanted.childNodes]) {
    const next = old?.nextSibling ?? null;
    if (!old) parent.append(node);
    else if (!isAlike(old, node)) old.replaceWith(node);
    else if (old.nodeType !== Node.TEXT_NODE) patch(old, node);
    else if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.data.length));
    else old.data = node.data;
    old = next;
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

function isAlike(old, node) {
  if (old.nodeName !== node.nodeName) return false;
  if (old.nodeType === Node.TEXT_NODE) return true;
  const { attributes } = node;
  return old.attributes.length === attributes.length
    && [...attributes].every(({ name, value }) => old.getAttribute(name) === value);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // not over plain HTTP from another machine; the old way works there
    const area = element("textarea", document.body, text, "hidden");
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

async function copyFrom(node, text) {
  const label = node.textContent;
  node.textContent = (await copyText(text)) ? "Copied" : "Not allowed";
  setTimeout(() => { node.textContent = label; }, 1500);
}

function download(name, type, text) {
  const anchor = element("a");
  anchor.href = URL.createObjectURL(new Blob([text], { type }));
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}
