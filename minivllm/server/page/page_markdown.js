// Markdown as elements. A model's text only ever becomes text nodes: nothing in it is parsed as HTML, and a link leads
// to the web or to mail, or is no link. No pattern takes more than linear time in a line: inline ones look at most
// MOST_INLINE characters ahead, a paragraph above MOST_PARAGRAPH characters stays plain, nesting ends at MOST_DEPTH.
const MOST_INLINE = 1000, MOST_PARAGRAPH = 20000, MOST_DEPTH = 8, MOST_MATH_LINES = 200;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const TASK = /^\[([ xX])\] +(?=\S)/;
// Display mathematics begins a line, and ends one.
const MATH = /^ {0,3}(?:\$\$(?!.*\$\$\s*[^\s.,;:])(?!\$)|\\\[(?!.*\\\]\s*[^\s.,;:]))/;
const UNDER_TABLE = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const INLINE = new RegExp([
  /\\\((.{1,N}?)\\\)/,
  /\\\[(.{1,N}?)\\\]/,
  /\$\$(?!\$)(.{1,N}?)\$\$/,
  /(?<![\w$])\$(?![\s$])((?:[^$\\\n]|\\[^\n]){1,N}?)(?<!\s)\$(?![\w$])/,
  /\\([!-/:-@[-`{-~])/,
  /(?<!`)(`+)(?!`)(.{1,N}?)(?<!`)\6(?!`)/,
  /!?\[([^\]]{0,N})\]\(<?([^\s()<>]{1,N}(?:\([^\s()<>]{0,N}\)[^\s()<>]{0,N})?)>?(?: "[^"]{0,N}")?\)/,
  /\*\*\*(?![\s*])(.{1,N}?)(?<!\s)\*\*\*/,
  /\*\*(?!\s)(.{1,N}?)(?<!\s)\*\*(?!\*)/,
  /(?<!\w)__(?!\s)(.{1,N}?)(?<!\s)__(?!\w)/,
  /\*(?![\s*])((?:[^*]|\*\*[^*]{1,N}\*\*){1,N}?)(?<!\s)\*(?!\*)/,
  /(?<!\w)_(?![\s_])([^_]{1,N}?)(?<!\s)_(?!\w)/,
  /~~(?!\s)(.{1,N}?)(?<!\s)~~/,
  /<(https?:\/\/[^\s<>]{1,N})>/,
  /(?<!\w)(https?:\/\/[^\s<>"`]{1,N})/,
].map((pattern) => pattern.source.replaceAll("N}", MOST_INLINE + "}")).join("|"), "gs");

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function link(address, children) {
  let url = null;
  try { url = new URL(address); } catch (_) { /* relative, or none at all */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return make("span", "", ...children);
  const element = make("a", "", ...children);
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  return element;
}

/** Text within a block as nodes. A line break stays one, as people expect of a chat. */
function inline(text, depth = 0) {
  if (depth > MOST_DEPTH || text.length > MOST_PARAGRAPH) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [whole, round, square, dollars, dollar, escaped, , code, label, address, both] = match;
    const [strong, strongToo, emphasis, emphasisToo, deleted, angled, bare] = match.slice(11);
    if (round || dollar) nodes.push(formula(round || dollar, false) || whole);
    else if (square || dollars) nodes.push(formula(square || dollars, true) || whole);
    else if (escaped) nodes.push(escaped);
    else if (code) nodes.push(make("code", "", code.replace(/^ (.+) $/s, "$1")));
    else if (address) nodes.push(link(address, inline(label || address, depth + 1)));
    else if (both) nodes.push(make("em", "", make("strong", "", ...inline(both, depth + 1))));
    else if (strong || strongToo) nodes.push(make("strong", "", ...inline(strong || strongToo, depth + 1)));
    else if (emphasis || emphasisToo) nodes.push(make("em", "", ...inline(emphasis || emphasisToo, depth + 1)));
    else if (deleted) nodes.push(make("del", "", ...inline(deleted, depth + 1)));
    else if (angled) nodes.push(link(angled, [angled]));
    else if (bare) {
      const address = bare.replace(/[.,;:!?)\]'*_]+$/, "");
      nodes.push(link(address, [address]), bare.slice(address.length));
    } else nodes.push(whole);
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

function codeBlock(language, text) {
  const code = make("code", "", ...coloured(language, text)), pre = make("pre", "", code);
  const button = make("button", "", "Copy");
  button.type = "button";
  button.addEventListener("click", () => copy(code, button));
  pre.tabIndex = 0; // a wide block is scrolled by keys
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", (language || "Code") + " block");
  return make("div", "code", make("header", "", make("span", "", language), button), pre);
}

async function copy(code, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch (_) { // not over plain HTTP from another machine: take the older way
    getSelection().selectAllChildren(code);
    done = document.execCommand("copy");
  }
  button.textContent = done ? "Copied" : "Press Ctrl-C";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

function cells(line) {
  return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines) {
  const sides = cells(lines[1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
  const row = (line, name) => {
    const found = cells(line);
    return make("tr", "", ...sides.map((side, column) => make(name, side, ...inline(found[column] || ""))));
  };
  const head = make("thead", "", row(lines[0], "th")), body = make("tbody", "", ...lines.slice(2).map((line) => row(line, "td")));
  return scrolled("Table", make("table", "", head, body));
}

/** Display mathematics from line ``at``: [element, the line after it], or null if it is none. Until its end is written, all
 * lines belong to it, as source. A blank line before its end makes them ordinary lines. */
function displayed(lines, at) {
  const opening = lines[at].trim().slice(0, 2), closing = opening === "$$" ? "$$" : "\\]", from = lines[at].indexOf(opening) + 2;
  for (let end = at; end < Math.min(lines.length, at + MOST_MATH_LINES); end += 1) {
    if (!lines[end].trim() && end < lines.length - 1) return null;
    const place = lines[end].indexOf(closing, end === at ? from : 0), after = lines[end].slice(place + 2).trim();
    if (place < 0) continue;
    if (/[^.,;:]/.test(after)) return null;
    const source = [lines[at].slice(from), ...lines.slice(at + 1, end + 1)], last = source.length - 1;
    source[last] = source[last].slice(0, end === at ? place - from : place);
    const drawn = formula(source.join("\n"), true);
    if (!drawn) return [make("p", "", lines.slice(at, end + 1).join("\n")), end + 1];
    return [scrolled("Formula", drawn, after), end + 1];
  }
  return lines.length - at < MOST_MATH_LINES ? [make("p", "", lines.slice(at).join("\n")), lines.length] : null;
}

/** A box for elements that may be wider than the screen; keys scroll it too. */
function scrolled(name, ...children) {
  const element = make("div", "scroll", ...children.filter((child) => child !== ""));
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
  return element;
}

const indentOf = (line) => line.length - line.trimStart().length;
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && UNDER_TABLE.test(lines[at + 1].trim())
  && cells(lines[at]).length === cells(lines[at + 1]).length;
const begins = (lines, at) => [FENCE, HEADING, RULE, QUOTE, MATH].some((pattern) => pattern.test(lines[at]))
  || (ITEM.test(lines[at]) && indentOf(lines[at]) < 4) || isTable(lines, at);

function checkbox(isDone) {
  const element = make("input");
  [element.type, element.checked, element.disabled] = ["checkbox", isDone, true];
  element.setAttribute("aria-label", isDone ? "done" : "not done");
  return element;
}

/** The list at line ``at``: [element, the line behind it]. What is indented by two belongs to an item; another kind of
 * marker begins another list. */
function list(lines, at, depth) {
  const base = indentOf(lines[at]), marker = ITEM.exec(lines[at])[2], isOrdered = /\d/.test(marker);
  const element = make(isOrdered ? "ol" : "ul");
  if (isOrdered) element.start = parseInt(marker, 10);
  const isSibling = (line) => {
    const match = ITEM.exec(line);
    return match && match[1].length < base + 2 && match[2].slice(-1) === marker.slice(-1) && !RULE.test(line);
  };
  while (at < lines.length && isSibling(lines[at])) {
    const width = ITEM.exec(lines[at])[0].length, own = [lines[at].slice(width)];
    let filled; // the next line with something on it
    for (at += 1; ;) {
      for (filled = at; filled < lines.length && !lines[filled].trim();) filled += 1;
      if (filled === lines.length) break;
      const goesOn = filled === at && own[own.length - 1].trim() && !ITEM.test(lines[at]) && !begins(lines, at);
      if (indentOf(lines[filled]) < base + 2 && !goesOn) break;
      for (; at <= filled; at += 1) own.push(lines[at].slice(Math.min(indentOf(lines[at]), width)));
    }
    const task = TASK.exec(own[0]);
    if (task) own[0] = own[0].slice(task[0].length);
    const item = make("li", task ? "task" : "", ...blocks(own, depth + 1).map((block) => block.node));
    if (task) (item.querySelector("p") === item.firstChild ? item.firstChild : item).prepend(checkbox(task[1] !== " "));
    element.append(item);
    if (filled < lines.length && isSibling(lines[filled])) at = filled;
  }
  return [element, at];
}

/** Lines as blocks: [{start: number of its first line, node}]. */
function blocks(lines, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const start = at, line = lines[at];
    let node, match;
    if (!line.trim()) {
      at += 1;
      continue;
    } else if (depth <= MOST_DEPTH && (match = FENCE.exec(line))) {
      const indent = indentOf(line), [, marks, info] = match, inside = [];
      const isEnd = (text) => text.startsWith(marks) && !text.replaceAll(marks[0], "");
      for (at += 1; at < lines.length && !isEnd(lines[at].trim()); at += 1) {
        inside.push(lines[at].slice(Math.min(indent, indentOf(lines[at]))));
      }
      at += 1;
      node = codeBlock(info.trim().split(/\s/)[0], inside.join("\n"));
    } else if ((match = HEADING.exec(line))) {
      at += 1;
      // The page itself has the levels 1 and 2.
      node = make("h" + Math.min(6, match[1].length + 2), "", ...inline(match[2].trim().replace(/ #+$/, "")));
    } else if (RULE.test(line)) {
      at += 1;
      node = make("hr");
    } else if (depth <= MOST_DEPTH && QUOTE.test(line)) {
      const inside = [];
      for (; at < lines.length && lines[at].trim() && (QUOTE.test(lines[at]) || !begins(lines, at)); at += 1) {
        inside.push(lines[at].replace(QUOTE, "$1"));
      }
      node = make("blockquote", "", ...blocks(inside, depth + 1).map((block) => block.node));
    } else if (depth <= MOST_DEPTH && ITEM.test(line)) {
      [node, at] = list(lines, at, depth);
    } else if (MATH.test(line) && (match = displayed(lines, at))) {
      [node, at] = match;
    } else if (isTable(lines, at)) {
      for (at += 2; at < lines.length && lines[at].trim() && !begins(lines, at);) at += 1;
      node = table(lines.slice(start, at));
    } else {
      do at += 1; while (at < lines.length && lines[at].trim() && !begins(lines, at));
      node = make("p", "", ...inline(lines.slice(start, at).map((one) => one.trim().replace(/\\$/, "")).join("\n")));
    }
    found.push({ start, node });
  }
  return found;
}

/** An answer that grows: what is finished stays as it is, only the block that is being written is made anew. */
class MarkdownView {
  constructor(element) {
    this.element = element;
    this.rest = ""; // from the beginning of the block that is being written
    this.open = [];
  }

  add(text) {
    this.rest += text;
    const lines = this.rest.replaceAll("\r\n", "\n").split("\n"), found = blocks(lines);
    for (const node of this.open) node.remove();
    this.element.append(...found.map((block) => block.node));
    // A block is finished when another one begins on a line that is complete.
    const behind = found.filter((block) => block.start < lines.length - 1).length - 1;
    if (behind > 0) this.rest = lines.slice(found[behind].start).join("\n");
    this.open = found.slice(Math.max(0, behind)).map((block) => block.node);
  }
}
