// The planner: a form of what `disagg plan` takes, and its report drawn.

import { $, askJson, bar, bytes, count, el, flops, percent, seconds, svg, usd } from "./common.js";

const NAMES = {
  model: "Model", gpu: "GPU", weights: "Weights", kv: "KV cache", engine: "Efficiency of", link: "Network per GPU",
  requests_per_s: "Requests/s", config: "Its config.json", tensor_parallel_size: "GPUs of a worker", input_tokens: "Prompt tokens", output_tokens: "Answer tokens", ttft: "TTFT SLO (s)", tpot: "TPOT SLO (s)",
};
const FLAGS = { kv: "kv-cache-dtype" }; // others have the names of their fields
const CONFIG = "config.json";
const NUMBERS = new Set(["requests_per_s", "tensor_parallel_size", "input_tokens", "output_tokens", "ttft", "tpot"]);
let first = null;
let timer = 0;
let numAsked = 0; // answers to earlier questions are not drawn
let needKey = () => {};

export function setUpPlan(askForKey) {
  needKey = askForKey;
  document.addEventListener("view", ({ detail }) => { if (detail === "plan" && !first) load(); });
  document.addEventListener("there", () => { if (!$("plan").hidden && !first) load(); });
  $("wishes").addEventListener("submit", (event) => event.preventDefault());
  $("wishes").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(compute, 250); });
}

async function load() {
  try {
    const said = await askJson("ui/plan");
    first = said.first;
    drawForm(said);
    await compute();
  } catch (error) {
    fail(error);
  }
}

function drawForm({ choices, usd_per_gpu_hour: prices }) {
  const select = (name) => el("label", {}, NAMES[name], el("select", { name }, choices[name].map((value) =>
    el("option", { value, selected: value === String(first[name]) }, value || "assumption"))));
  const number = (name, least, step, required = true) => el("label", {}, NAMES[name], el("input", { name, type: "number", min: least, step, value: first[name] ?? "", required, placeholder: required ? "" : "the best" }));
  const config = el("label", { hidden: true }, NAMES.config, el("textarea", { name: "config", rows: 4, spellcheck: false, placeholder: "the file of a model, pasted" }));
  const model = select("model");
  model.addEventListener("input", () => { config.hidden = model.querySelector("select").value !== CONFIG; });
  const gpus = el("fieldset", {}, el("legend", {}, "GPU, best of those chosen"), el("div", { class: "checks" }, choices.gpu.filter((gpu) => prices[gpu]).map((gpu) =>
    el("label", { class: "check" }, el("input", { type: "checkbox", name: "gpu", value: gpu, checked: first.gpu.includes(gpu) }), `${gpu} `, el("span", { class: "dim end" }, `${usd(prices[gpu])}/h`)))));
  $("wishes").replaceChildren(model, config, el("div", { class: "pair" }, number("requests_per_s", 0.01, "any"), number("tensor_parallel_size", 1, 1, false)),
    el("div", { class: "pair" }, number("input_tokens", 1, 1), number("output_tokens", 1, 1)),
    el("div", { class: "pair" }, number("ttft", 0.001, "any"), number("tpot", 0.0001, "any")), gpus,
    el("div", { class: "pair" }, select("weights"), select("kv")), el("div", { class: "pair" }, select("link"), select("engine")));
}

function wishes() {
  const data = new FormData($("wishes"));
  const asked = { gpu: data.getAll("gpu") };
  for (const [name, value] of data) if (name !== "gpu" && value !== "") asked[name] = NUMBERS.has(name) ? Number(value) : value;
  return asked;
}

async function compute() {
  const number = ++numAsked;
  if (!$("wishes").reportValidity()) return;
  const asked = wishes();
  if (asked.model === CONFIG && !asked.config) return fail(new Error("Paste the config.json of a model."));
  $("report").setAttribute("aria-busy", "true");
  try {
    const said = await askJson("ui/plan", { json: asked });
    if (number === numAsked) draw(said, asked);
  } catch (error) {
    if (number === numAsked) fail(error);
  }
  $("report").removeAttribute("aria-busy");
}

function fail(error) {
  if (error.status === 401) needKey(error.message);
  $("report").replaceChildren(el("p", { class: "problem" }, error.message));
}

function draw(said, asked) {
  const fleet = said.disaggregate ? said.apart : said.together;
  const sizes = fleet.pools.map((pool) => pool.num_workers).join(" : ");
  const figure = (name, value, what = "") => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, el("b", {}, value), what ? el("span", { class: "dim" }, ` ${what}`) : null));
  $("report").replaceChildren(
    el("p", { class: "advice" }, el("b", {}, said.disaggregate ? "Disaggregate." : "Do not disaggregate."), said.reason.replace(/^[^:]*:/, "")),
    el("dl", { class: "figures" },
      figure(fleet.pools.length > 1 ? "prefill : decode" : "workers", sizes, `${count(fleet.num_gpus)} GPUs`),
      figure("first token, p95", seconds(fleet.ttft_s), `SLO ${seconds(asked.ttft)}`),
      figure("a token, p95", seconds(fleet.tpot_s), `SLO ${seconds(asked.tpot)}`),
      figure("tokens/s a GPU", count(fleet.tokens_per_s_per_gpu)),
      figure("a million tokens", usd(fleet.usd_per_million_tokens.input_and_output), `of answers alone ${usd(fleet.usd_per_million_tokens.output)}`),
      figure("an hour", usd(fleet.usd_per_hour), fleet.transfer_s ? `KV moves in ${seconds(fleet.transfer_s)}` : "")),
    el("div", { class: "pools-planned" }, fleet.pools.map(drawPool)),
    drawRoofline(fleet),
    drawComparison(said),
    el("div", { class: "command" }, el("h2", {}, "The same in a terminal"), el("pre", { tabIndex: 0 }, command(asked)), drawFiles(said.files)),
    el("ul", { class: "notes" }, el("li", {}, `All figures are ${said.kind}. Prices of ${said.prices_as_of}.`), said.notes.map((note) => el("li", {}, note))));
}

/** Links that save what `disagg plan --write` writes. */
function drawFiles(files) {
  if (typeof files === "string") return el("p", { class: "dim" }, files);
  return el("p", { class: "row" }, "Files of --write, for Ray Serve and KubeRay:", Object.entries(files).map(([name, text]) =>
    el("a", { download: name, href: URL.createObjectURL(new Blob([text], { type: "application/yaml" })) }, name)));
}

function drawPool(pool) {
  const { memory } = pool, role = pool.role === "both" ? "decode" : pool.role;
  const free = Math.max(0, memory.kv_room_nbytes - memory.kv_nbytes);
  const parts = [["weights", memory.weights_nbytes, "weights"], ["KV of the batch", memory.kv_nbytes, "kv"], ["room for KV", free, "room"], ["activations, graphs, driver", memory.rest_nbytes, "rest"]];
  const shown = Math.min(pool.num_workers, 60);
  return el("section", { class: `planned ${role}` },
    el("h2", {}, `${pool.role === "both" ? "prefill and decode" : pool.role}`, el("span", { class: "dim" }, ` ${count(pool.num_workers)} × ${pool.tensor_parallel} ${pool.gpu}`)),
    el("div", { class: "squares", "aria-hidden": "true" }, Array.from({ length: shown }, () => el("i")), shown < pool.num_workers ? el("span", { class: "dim" }, "…") : null),
    el("p", { class: "small" }, `${percent(pool.busy)} busy`, pool.batch ? `, ${count(pool.batch)} sequences at once` : ""),
    bar(parts, `Memory of a GPU: ${parts.map(([name, value]) => `${name} ${bytes(value)}`).join(", ")}`),
    el("ul", { class: "legend" }, parts.filter(([, value]) => value > 0).map(([name, value, kind]) => el("li", { class: kind }, `${name} `, el("b", {}, bytes(value))))));
}

function drawRoofline(fleet) {
  // Steps are shown beneath the roof of one GPU of their worker.
  const width = 580, height = 240, left = 84, bottom = 34, [least, most] = [1, 1e4];
  const roofs = fleet.pools.map((pool) => ({ ...pool.roofline, gpus: pool.tensor_parallel }));
  const top = Math.max(...roofs.map((roof) => roof.peak_flops / roof.gpus)) * 2, floor = top / 1e4;
  const x = (value) => left + (width - left - 32) * Math.log(Math.max(least, value) / least) / Math.log(most / least);
  const y = (value) => 8 + (height - bottom - 8) * (1 - Math.log(Math.max(floor, value) / floor) / Math.log(top / floor));
  const chart = svg("svg", { class: "roofline", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(roofs) });
  for (const value of [1, 10, 100, 1e3, 1e4]) {
    chart.append(svg("line", { x1: x(value), x2: x(value), y1: 8, y2: height - bottom, class: "grid" }), svg("text", { x: x(value), y: height - bottom + 14, "text-anchor": "middle" }, count(value)));
  }
  for (let value = 10 ** Math.ceil(Math.log10(floor)); value <= top; value *= 10) {
    chart.append(svg("line", { x1: left, x2: width - 32, y1: y(value), y2: y(value), class: "grid" }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, flops(value)));
  }
  chart.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "FLOP per byte read"));
  const drawn = new Set();
  for (const { peak_flops: peak, bytes_per_s: speed, gpus, steps } of roofs) {
    const ridge = peak / speed, key = `${peak / gpus} ${speed / gpus}`;
    if (!drawn.has(key)) chart.append(svg("path", { class: "roof", d: `M${x(Math.max(least, floor * gpus / speed))},${y(Math.max(floor, least * speed / gpus))}L${x(ridge)},${y(peak / gpus)}L${x(most)},${y(peak / gpus)}` }));
    drawn.add(key);
    for (const [name, dot] of Object.entries(steps)) {
      const at = { cx: x(dot.flop_per_byte), cy: y(dot.flops / gpus) };
      const isRight = at.cx > width * 0.75;
      chart.append(svg("circle", { ...at, r: 7, class: name }), svg("text", { x: at.cx + (isRight ? -12 : 12), y: at.cy + 18, "text-anchor": isRight ? "end" : "start", class: `label ${name}` }, name));
    }
  }
  return el("section", { class: "chart" }, el("h2", {}, "Roofline of a GPU", el("span", { class: "dim" }, " prefill computes, decode reads memory")), chart);
}

function describe(roofs) {
  const dots = roofs.flatMap(({ steps, gpus }) => Object.entries(steps).map(([name, dot]) => `${name}: ${count(dot.flop_per_byte)} FLOP per byte, ${flops(dot.flops / gpus)} a GPU`));
  return `Roofline. ${dots.join("; ")}`;
}

function drawComparison(said) {
  const columns = [["separate pools", said.apart, said.disaggregate], ["one pool", said.together, !said.disaggregate]];
  const row = (name, read) => el("tr", {}, el("th", { scope: "row" }, name), columns.map(([, fleet, isChosen]) => el("td", { class: isChosen ? "chosen" : "" }, fleet ? read(fleet) : "–")));
  return el("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Both fleets" }, el("table", {}, el("caption", {}, "Both fleets that meet the SLOs"),
    el("thead", {}, el("tr", {}, el("td"), columns.map(([name]) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, row("workers", (fleet) => fleet.pools.map((pool) => `${count(pool.num_workers)} × ${pool.tensor_parallel} ${pool.gpu}`).join(" + ")),
      row("GPUs", (fleet) => count(fleet.num_gpus)), row("first token", (fleet) => seconds(fleet.ttft_s)), row("a token", (fleet) => seconds(fleet.tpot_s)),
      row("tokens/s a GPU", (fleet) => count(fleet.tokens_per_s_per_gpu)), row("a million tokens", (fleet) => usd(fleet.usd_per_million_tokens.input_and_output)), row("an hour", (fleet) => usd(fleet.usd_per_hour)))));
}

function command(asked) {
  const words = Object.entries(asked).filter(([name, value]) => !["model", "config", "gpu"].includes(name) && value !== first[name] || name === "requests_per_s");
  const model = asked.model === CONFIG ? "DIRECTORY" : asked.model;
  return ["disagg plan", model, ...asked.gpu.map((gpu) => `--gpu ${gpu}`), ...words.map(([name, value]) => `--${FLAGS[name] ?? name.replaceAll("_", "-")} ${value}`)].join(" ");
}
