// What all views share: elements, numbers for people, requests. Text of models and servers becomes
// text nodes only, never markup.

export const $ = (id) => document.getElementById(id);

/** An element. `props` are properties; `class`, `on...`, `aria-...`, `role` and `data-...` too. */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "role" || name.includes("-")) node.setAttribute(name, value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) node.style.setProperty(key, to);
    else node[name] = value;
  }
  node.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return node;
}

// Numbers

const THIN = "\u202f";
export const digits = (value, places) => value.toLocaleString("en", { maximumFractionDigits: places, signDisplay: "negative" });

export function count(value) {
  return digits(value, 0);
}

function scaled(value, units) {
  const [size, unit] = units.find(([least]) => value >= least) ?? units.at(-1);
  const number = value / size;
  return `${digits(number, number < 10 ? 2 : number < 100 ? 1 : 0)}${THIN}${unit}`;
}

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
export const bytes = (value) => scaled(value, PREFIXES.map(([size, unit]) => [size, `${unit}B`]));
export const flops = (value) => scaled(value, PREFIXES.map(([size, unit]) => [size, `${unit}FLOP/s`]));
export const seconds = (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
export const percent = (share) => `${digits(100 * share, share && share < 0.1 ? 1 : 0)}${THIN}%`;
export const usd = (value) => `$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 3 : 2 })}`;
export const clock = (unix) => new Date(1000 * unix).toLocaleTimeString();

/** A worker's name without its model, in two parts: role and the begin of its number. */
export function shortName(id, model = "") {
  const rest = model && id.startsWith(`${model}-`) ? id.slice(model.length + 1) : id;
  const match = /(prefill|decode)-(\w+)$/.exec(rest);
  return match ? [match[1], match[2].slice(0, 4)] : ["worker", rest.slice(-6)];
}

// Requests

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A reply. Throws `Problem` with the server's sentence; status 0: it does not answer. */
export async function ask(path, { json, ...options } = {}) {
  if (json !== undefined) {
    options = { method: "POST", body: JSON.stringify(json), ...options };
    options.headers = { "content-type": "application/json", ...options.headers };
  }
  let reply;
  try {
    reply = await fetch(`../${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    tellConnection(false);
    throw new Problem(0, "The server does not answer.");
  }
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  const problem = new Problem(reply.status, said.error?.message ?? `The server answered with status ${reply.status}.`);
  if (reply.status === 502 || reply.status === 504) tellConnection(false);
  throw problem;
}

export const askJson = async (path, options) => (await ask(path, options)).json();

export function tellConnection(isThere) {
  document.dispatchEvent(new CustomEvent("connection", { detail: isThere }));
}

// Figures

/** A line of `values` over time as SVG, `null` where there is none; its scale begins at 0. */
export function sparkline(values, label, most = 0) {
  const width = 120, height = 28;
  const top = Math.max(most, ...values.map((value) => value ?? 0), 1e-12);
  const step = width / Math.max(1, values.length - 1);
  let path = "", area = "", last = null;
  values.forEach((value, index) => {
    if (value === null) { last = null; return; }
    const point = `${(index * step).toFixed(1)},${(height - 2 - (height - 4) * value / top).toFixed(1)}`;
    path += `${last === null ? "M" : "L"}${point}`;
    area += last === null ? `M${(index * step).toFixed(1)},${height}L${point}` : `L${point}`;
    if (values[index + 1] === undefined || values[index + 1] === null) area += `L${(index * step).toFixed(1)},${height}Z`;
    last = value;
  });
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: area, class: "area" }), svg("path", { d: path, class: "line" }));
}

/** A horizontal bar of parts: `[name, value, class]`. */
export function bar(parts, label) {
  const track = el("div", { class: "bar", role: "img", "aria-label": label });
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  for (const [name, value, kind] of parts) {
    if (value > 0) track.append(el("span", { class: kind, title: name, style: { "flex-grow": (1000 * value) / total } }));
  }
  return track;
}
