// Markdown as nodes of the document.
//
// All of it takes time in proportion to a text: no pattern looks at the same characters from many
// places, for it either ends where the next of its kind could begin, or cannot fail.

const DEEPEST = 16; // quotes, and lists, in one another
// A longer table, list or quote (lines), or paragraph (characters), goes on in a block of its own: a growing
// text is shown again from its last block on.
const MOST_LINES = 200, MOST_CHARACTERS = 5000;
const MOST_NODES = 64; // that have ended before they are put into a section, which the browser lays out when it is seen
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s(.*)$/s;
const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s(.*)$/s;
const DISPLAY = /^\s*(\$\$|\\\[)/; // a formula on lines of its own

// In this order: an escape; code, and with single backticks in it; formulas; bold and italic, bold, italic, slanted,
// struck; a link, also an image's; a bare link; a line break.
const INLINE = new RegExp([
  /\\([!-/:-@[-`{-~])/, /(?<!`)`([^`]+)`(?!`)/, /(?<!`)``+(?!`)((?:[^`]|`(?!`))+)``+/,
  /\$\$([^$]+)\$\$/, /\$(?![\s$])((?:[^$\\]|\\[^])+)(?<!\s)\$(?!\d)/,
  /\*\*\*(?![\s*])(.+?)\*\*\*/, /\*\*(?![\s*])(.+?)\*\*(?!\*)/, /\*([^\s*](?:[^*\n]*[^\s*])?)\*/, /(?<![\w])_([^\s_](?:[^_\n]*[^\s_])?)_(?!\w)/, /~~([^~\n]+)~~/,
  /!?\[([^[\]]*)\]\((https?:(?:[^\s()[]|\([^\s()[]*\))+)(?:\s"[^"\n]*")?\)/, /(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"*])/, /(\n|<br\s?\/?>)/,
].map((pattern) => pattern.source).join("|"), "g");

function inline(text, parent) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index < end) continue; // in a formula
    const [all, escape, code, ticked, display, math, both, bold, italic, slanted, struck, label, link, bare, line] = match;
    parent.append(text.slice(end, match.index));
    end = match.index + all.length;
    if (escape !== undefined) end = escaped(text, match.index, parent);
    else if ((code ?? ticked) !== undefined) element("code", parent, (code ?? ticked).trim());
    else if ((display ?? math) !== undefined) formula(display ?? math, display !== undefined, parent);
    else if (both !== undefined) inline(both, element("em", element("strong", parent)));
    else if (bold !== undefined) inline(bold, element("strong", parent));
    else if ((italic ?? slanted) !== undefined) inline(italic ?? slanted, element("em", parent));
    else if (struck !== undefined) inline(struck, element("del", parent));
    else if (line !== undefined) element("br", parent);
    else {
      const anchor = element("a", parent, label || link || bare);
      anchor.href = link ?? bare; // the pattern takes http and https alone
      anchor.target = "_blank";
      anchor.rel = "noopener noreferrer";
    }
  }
  parent.append(text.slice(end));
}

// A formula in \(...\) or \[...\], or one character; returns where it ends.
function escaped(text, start, parent) {
  const close = { "(": "\\)", "[": "\\]" }[text[start + 1]];
  const length = close ? text.slice(start, start + LONGEST_FORMULA).indexOf(close) : -1;
  if (length < 0) {
    parent.append(text[start + 1]);
    return start + 2;
  }
  formula(text.slice(start + 2, start + length), text[start + 1] === "[", parent);
  return start + length + 2;
}

const indentOf = (line) => line.length - line.trimStart().length;
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
// of a line between a table's head and its body
const isRule = (line) => /^\s*[-*_]/.test(line) && /^(---+|\*\*\*+|___+)$/.test(line.replace(/\s/g, ""));
const isTableRule = (line) => line.includes("-") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && isTableRule(lines[i + 1]);
// A line that begins code: one with backticks behind the first ones has code within it.
function fenceOf(line) {
  const match = line.match(FENCE), mark = match?.[1];
  const isWithin = mark?.startsWith("`") && line.includes("`", line.indexOf(mark) + mark.length);
  return isWithin ? null : match;
}

const begins = (line) => ITEM.test(line) || fenceOf(line) || HEADING.test(line) || line.startsWith(">")
  || DISPLAY.test(line) || isRule(line);

// Append the blocks of a text. Returns of each the character that it begins at, its first node's number, and of the rest
// of a table its head.
function markdown(text, parent, depth = 0, isTight = false) {
  const lines = text.split("\n");
  const starts = [];
  let at = 0, counted = 0; // characters before a line
  const start = (i, more) => {
    while (counted < i) at += lines[counted++].length + 1;
    starts.push({ at, node: parent.childNodes.length, ...more });
  };
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    if (!line.trim()) {
      i++;
      continue;
    }
    start(i);
    const fence = fenceOf(line);
    const heading = line.match(HEADING);
    if (fence) {
      i = codeBlock(lines, i, fence, parent);
    } else if (heading) {
      inline(heading[2].replace(/\s#+\s*$/, "").trim(), element(`h${Math.min(5, heading[1].length + 1)}`, parent));
      i++;
    } else if (isRule(line)) {
      element("hr", parent);
      i++;
    } else if (ITEM.test(line) && depth < DEEPEST) {
      i = list(lines, i, parent, depth);
    } else if (line.startsWith(">") && depth < DEEPEST) {
      const first = i;
      while (i < lines.length && i - first < MOST_LINES && lines[i].startsWith(">")) i++;
      const inner = lines.slice(first, i).map((l) => l.replace(/^> ?/, "")).join("\n");
      markdown(inner, element("blockquote", parent), depth + 1);
    } else if (DISPLAY.test(line) && closing(lines, i) >= 0) {
      const last = closing(lines, i);
      const source = lines.slice(i, last + 1).join("\n").trim();
      formula(source.slice(2, -2), true, element("p", parent));
      i = last + 1;
    } else if (isTable(lines, i)) {
      const head = lines.slice(i, i + 2);
      i = tableRows(head, lines, i + 2, parent);
      while (i < lines.length && lines[i].includes("|")) {
        start(i, { head });
        i = tableRows(head, lines, i, parent);
      }
    } else {
      const cut = line.length > MOST_CHARACTERS ? line.lastIndexOf(" ", MOST_CHARACTERS) : -1;
      if (cut > 0) lines.splice(i, 1, line.slice(0, cut), line.slice(cut + 1));
      const first = i++;
      let length = lines[first].length + (cut > 0 ? MOST_CHARACTERS : 0);
      while (i < lines.length && lines[i].trim() && length < MOST_CHARACTERS && !begins(lines[i]) && !isTable(lines, i)) {
        length += lines[i++].length;
      }
      inline(lines.slice(first, i).join("\n"), isTight ? parent : element("p", parent));
    }
  }
  return starts;
}

// The line that a formula ends on, or -1; "$$" or "\]" must be the end of its line.
function closing(lines, start) {
  const mark = lines[start].trim().startsWith("$$") ? "$$" : "\\]";
  for (let i = start; i < Math.min(lines.length, start + 100); i++) {
    const line = lines[i].trim();
    if (line.endsWith(mark) && (i > start || line.length > 3)) return i;
    if (i > start && !line) return -1;
  }
  return -1;
}

// Whether a line is a fence, and nothing else: code may have such that begin others.
const endsCode = (line, mark) => line.startsWith(mark) && !line.replaceAll(mark[0], "");

function codeBlock(lines, start, [, mark, label], parent) {
  const indent = indentOf(lines[start]);
  let i = start + 1;
  while (i < lines.length && !endsCode(lines[i].trim(), mark)) i++;
  const body = lines.slice(start + 1, i).map((line) => line.slice(Math.min(indent, indentOf(line))));
  const figure = element("figure", parent, undefined, "code");
  const caption = element("figcaption", figure, undefined);
  element("span", caption, label || "code");
  button(caption, "Copy", null, "small copy-code");
  highlight(body.join("\n"), label.toLowerCase(), element("code", element("pre", figure)));
  return i + 1;
}

// A table of a head and the rows from line `i` on; returns the line after them.
function tableRows(head, lines, i, parent) {
  const grid = element("table", parent);
  const sides = cells(head[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  const row = (line, tag, part) => {
    const tr = element("tr", part);
    cells(line).forEach((cell, at) => inline(cell, element(tag, tr, undefined, sides[at])));
  };
  row(head[0], "th", element("thead", grid));
  const body = element("tbody", grid);
  const end = i + MOST_LINES;
  for (; i < lines.length && i < end && lines[i].includes("|"); i++) row(lines[i], "td", body);
  return i;
}

// A list with what is indented under its items; returns the line after it.
function list(lines, i, parent, depth) {
  const [, { length: indent }, bullet] = lines[i].match(ITEM);
  const isOrdered = /\d/.test(bullet);
  const node = element(isOrdered ? "ol" : "ul", parent);
  if (isOrdered && parseInt(bullet, 10) !== 1) node.start = parseInt(bullet, 10);
  while (i < lines.length && node.childNodes.length < MOST_LINES) {
    const match = lines[i].match(ITEM);
    if (!match || indentOf(lines[i]) < indent || /\d/.test(match[2]) !== isOrdered || isRule(lines[i])) break;
    const content = match[1].length + match[2].length + 1;
    const inner = [match[3]];
    let blanks = 0;
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      if (!line.trim()) {
        blanks++;
        continue;
      }
      const isUnder = indentOf(line) > indent && !(depth + 1 >= DEEPEST && ITEM.test(line));
      if (!isUnder && (blanks || begins(line))) break;
      while (blanks) {
        inner.push("");
        blanks--;
      }
      inner.push(line.slice(Math.min(content, indentOf(line))));
    }
    const item = element("li", node);
    const task = inner[0].match(/^\[([ xX])\]\s/);
    if (task) {
      const box = element("input", item);
      box.type = "checkbox";
      box.disabled = true;
      box.toggleAttribute("checked", task[1] !== " ");
      box.setAttribute("aria-label", task[1] === " " ? "To do" : "Done");
      inner[0] = inner[0].slice(4);
      item.className = "task";
    }
    markdown(inner.join("\n"), item, depth + 1, true);
  }
  return i;
}

// Markdown that grows: blocks that have ended are left alone.
class GrowingMarkdown {
  constructor(parent) {
    this.parent = parent;
    this.ended = 0; // characters of the text
    this.nodes = 0; // that they became
    this.sections = 0; // of these nodes, the first
    this.head = ""; // of a table that goes on
  }

  show(text) {
    const rest = this.head + text.slice(this.ended);
    const fragment = document.createDocumentFragment();
    const starts = markdown(rest, fragment);
    patch(this.parent, fragment, this.nodes);
    const open = starts.at(-2); // the last block may join the one before it
    if (!open?.at) return;
    this.ended += open.at - this.head.length;
    this.nodes += open.node;
    this.head = open.head ? `${open.head.join("\n")}\n` : "";
    if (this.nodes - this.sections < MOST_NODES) return;
    const section = element("div", undefined, undefined, "section");
    this.parent.insertBefore(section, this.parent.childNodes[this.sections]);
    while (this.nodes > this.sections) {
      section.append(section.nextSibling);
      this.nodes--;
    }
    this.nodes = ++this.sections;
  }
}
