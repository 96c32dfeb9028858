// The field of the next message, with the text files attached to it.

const LARGEST_FILE = 2_000_000; // bytes
const attached = []; // {name, text}

function fit() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

// A text without an answer is in the input again, before what was typed since.
function takeBack(node) {
  const input = byId("input");
  input.value = input.value ? `${node.content}\n${input.value}` : node.content;
  attached.unshift(...(node.files ?? []));
  showAttached();
  fit();
}

function showAttached() {
  const row = byId("attached");
  row.replaceChildren();
  row.hidden = !attached.length;
  attached.forEach(({ name, text }, at) => {
    const chip = button(row, `${name} (${sizeOf(text.length)}) ×`, () => {
      attached.splice(at, 1);
      showAttached();
    });
    chip.setAttribute("aria-label", `Remove ${name}`);
  });
}

async function attach(files) {
  for (const file of files) {
    try {
      if (file.size > LARGEST_FILE) throw new Error("it is larger than 2 MB");
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error("it is no text");
      attached.push({ name: file.name, text });
    } catch (error) {
      say(`${file.name} is not attached: ${error instanceof TypeError ? "it is no text" : error.message}.`, true);
    }
  }
  showAttached();
  byId("input").focus();
}
