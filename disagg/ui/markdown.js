// The part of Markdown that answers of models need, as DOM nodes: code blocks, code, bold, italics,
// headings and lists as lines. Everything else stays the text that it is.

import { el } from "./common.js";

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*/g;

export function markdown(text) {
  const nodes = [];
  let rest = text;
  for (;;) {
    const begin = /^```([^\n`]*)\n/m.exec(rest);
    if (!begin) break;
    if (begin.index) nodes.push(prose(rest.slice(0, begin.index)));
    rest = rest.slice(begin.index + begin[0].length);
    const end = /^```[ \t]*$/m.exec(rest);
    nodes.push(code(end ? rest.slice(0, end.index) : rest, begin[1].trim()));
    rest = end ? rest.slice(end.index + end[0].length).replace(/^\n/, "") : "";
  }
  if (rest) nodes.push(prose(rest));
  return nodes;
}

function code(text, language) {
  const copy = el("button", { type: "button", class: "quiet copy", onclick: () => navigator.clipboard?.writeText(text) }, "Copy");
  return el("div", { class: "code" }, el("div", { class: "code-head" }, language || "code", copy), el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function prose(text) {
  const block = el("div", { class: "prose" });
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    block.append(text.slice(at, match.index));
    if (match[2] !== undefined) block.append(el("code", {}, match[2]));
    else if (match[3] !== undefined) block.append(el("strong", {}, match[3]));
    else block.append(el("em", {}, match[4]));
    at = match.index + match[0].length;
  }
  block.append(text.slice(at));
  return block;
}
