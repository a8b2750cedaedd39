// The fleet: workers, transfers, refusals, and an hour of history, from GET /debug/fleet.

import { $, askJson, bar, bytes, clock, count, el, percent, seconds, shortName, sparkline, svg } from "./common.js";

const PERIOD_MS = 1000, MAX_HISTORY = 720, MAX_EVENTS = 12, RATE_S = 4, MAX_ARROWS = 40;
const REFUSALS = {
  predicted_late: "would have been too late", became_late: "became too late in the queue",
  queue_full: "queue was full", no_room: "too many requests at once", tenant_limit: "a tenant's limit",
};
const STATES = { serving: "serving", draining: "draining" };

let history = [];
let polls = []; // replies of the last seconds, for rates
let known = null; // ids of workers in the last reply
let timer = null;
let isShown = false;
let needKey = () => {};
const cards = new Map(); // worker id -> {node, update}
const events = []; // newest first

export function setUpFleet(askForKey) {
  needKey = askForKey;
  document.addEventListener("view", ({ detail }) => {
    isShown = detail === "fleet";
    clearTimeout(timer);
    if (isShown) poll();
  });
  document.addEventListener("there", () => { if (isShown) { clearTimeout(timer); poll(); } });
  new ResizeObserver(() => { if (isShown && polls.length) drawArrows(polls.at(-1)); }).observe($("pools"));
}

async function poll() {
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      const said = await askJson(`debug/fleet?since=${history.at(-1)?.unix_s ?? 0}`);
      if (polls.length && said.ingress !== polls[0].ingress) polls = []; // another one, with its own counts
      take(said);
    }
  } catch (error) {
    if (error.status === 401) return lock(error.message);
    if (error.status) $("events").replaceChildren(el("li", {}, error.message));
  }
  if (isShown) timer = setTimeout(poll, PERIOD_MS);
}

function lock(why) {
  $("locked").hidden = false;
  $("locked").replaceChildren(el("p", {}, why), el("button", { class: "strong", onclick: () => needKey() }, "Enter the key"));
}

function take(said) {
  $("locked").hidden = true;
  noteEvents(said);
  history = [...history, ...said.history].slice(-MAX_HISTORY);
  polls.push(said);
  while (polls.length > 2 && polls[1].unix_s <= said.unix_s - RATE_S) polls.shift();
  drawModels(said);
  drawWorkers(said);
  drawArrows(said);
  drawTransfers(said);
  drawRefusals(said);
  drawEvents(said);
}

/** A count's growth per second in the last seconds. */
function rate(read) {
  const [first, last] = [polls[0], polls.at(-1)];
  const passed = last.unix_s - first.unix_s;
  return passed > 0.5 ? Math.max(0, (read(last) - read(first)) / passed) : 0;
}

// Models

function drawModels(said) {
  $("models").replaceChildren(...said.models.map((model, index) => {
    const { totals } = model;
    const past = history.map((sample) => sample.models[model.name]);
    const series = (name) => past.map((each) => each?.[name] ?? null);
    const lately = (name) => past.findLast((each) => each?.[name] != null)?.[name];
    const tokensS = rate((poll) => poll.models[index].totals.num_tokens + poll.models[index].totals.num_first);
    const judged = totals.slo_met + totals.slo_missed;
    const remote = totals.prefills.remote ?? 0, prefills = remote + (totals.prefills.local ?? 0);
    const figure = (name, value, chart = null) => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, el("b", {}, value), chart));
    const latency = (value) => (value == null ? "–" : seconds(value));
    return el("section", { class: "tile", "aria-label": model.name }, el("h2", {}, model.name),
      el("dl", {},
        figure("tokens/s", count(tokensS), sparkline(series("tokens_per_s"), "Tokens a second in the last hour")),
        figure("requests/s", rate((poll) => poll.models[index].totals.num_requests).toFixed(1), sparkline(series("requests_per_s"), "Requests a second in the last hour")),
        figure("first token", latency(lately("ttft_s")), sparkline(series("ttft_s"), "Mean time to the first token in the last hour")),
        figure("a token", latency(lately("tpot_s")), sparkline(series("tpot_s"), "Mean time of a token in the last hour")),
        figure("SLOs met", judged ? percent(totals.slo_met / judged) : "–"),
        figure("cached prompt", totals.num_prompt_tokens ? percent(totals.num_cached_tokens / totals.num_prompt_tokens) : "–"),
        figure("remote prefills", prefills ? percent(remote / prefills) : "–"),
        figure("queue", count(model.num_queued))));
  }));
}

// Workers

function drawWorkers(said) {
  const present = new Set(said.workers.map((each) => each.worker_id));
  for (const id of cards.keys()) if (!present.has(id)) cards.delete(id);
  const groups = said.models.filter((model) => model.name !== "auto").map((model) => {
    const pools = ["prefill", "decode"].map((role) => said.workers.filter((each) => each.model === model.name && each.role === role));
    const columns = pools.map((workers, index) => {
      const role = ["prefill", "decode"][index];
      return el("div", { class: `pool ${role}` }, el("h3", {}, `${role} `, el("span", { class: "dim" }, `${workers.length}`)),
        workers.length ? workers.map((each) => cardOf(each)) : el("p", { class: "dim empty" }, role === "prefill" && pools[1].length ? "no workers: decode workers prefill" : "no workers"));
    });
    const arrows = svg("svg", { class: "arrows", "aria-hidden": "true", "data-model": model.name });
    return el("div", { class: "group", "data-model": model.name }, said.models.length > 1 ? el("p", { class: "group-name" }, model.name) : null, columns[0], arrows, columns[1]);
  });
  const focused = document.activeElement;
  $("pools").replaceChildren(...groups);
  if (document.contains(focused)) focused.focus({ preventScroll: true });
}

function doing(worker) {
  const decoding = worker.num_running - worker.num_prefilling;
  const parts = [];
  if (worker.num_prefilling) parts.push(`reads ${count(worker.num_prefilling)} prompt${worker.num_prefilling > 1 ? "s" : ""}`);
  if (decoding > 0) parts.push(`writes ${count(decoding)} answer${decoding > 1 ? "s" : ""}`);
  return parts.join(", ") || "idle";
}

function cardOf(worker) {
  const id = worker.worker_id, [role, number] = shortName(id, worker.model);
  const past = history.map((sample) => sample.workers[id]?.[0] ?? null);
  const roles = { prefill: worker.num_prefilling > 0, decode: worker.num_running > worker.num_prefilling };
  const meter = (name, value, most, words) => el("div", { class: "meter" }, el("span", {}, name),
    bar([[name, value, worker.role], ["free", Math.max(0, most - value), "free"]], `${name}: ${words}`), el("span", {}, words));
  const card = el("article", { class: `worker ${worker.role} ${worker.state}${worker.num_running ? " busy" : ""}`, title: id, "data-worker": id, "aria-label": `${role} ${number}` },
    el("header", {}, el("span", { class: `chip ${worker.role}` }, el("b", {}, role), ` ${number}`), el("span", { class: "doing" }, doing(worker)),
      el("span", { class: `state ${worker.state}` }, STATES[worker.state])),
    meter("KV", worker.kv_usage, 1, percent(worker.kv_usage)),
    meter("batch", worker.num_running, Math.max(1, worker.max_num_seqs), `${count(worker.num_running)} of ${count(worker.max_num_seqs)}`),
    el("div", { class: "load" }, el("p", { class: "small" }, `queue ${count(worker.num_waiting)}`, worker.num_uncomputed_tokens ? ` · ${count(worker.num_uncomputed_tokens)} tokens to read` : "",
      worker.step_s === null ? "" : ` · step ${seconds(worker.step_s)}`, worker.num_preempted ? ` · ${count(worker.num_preempted)} preempted` : "",
      worker.host_kv_nbytes ? ` · ${bytes(worker.host_kv_nbytes)} in host memory` : ""),
    sparkline(past, "Running requests in the last hour", 1)));
  if (roles.prefill && worker.role === "decode") card.classList.add("helps");
  cards.set(id, card);
  return card;
}

// Transfers

function pulledBy(poll, id) {
  const worker = poll.workers.find((each) => each.worker_id === id);
  return worker ? worker.pulls.reduce((sum, each) => sum + each.nbytes, 0) : 0;
}

/** Measured bytes a second of pulls by the lane of a transfer, with all that a pull takes. */
function speed(said, { destination, lane }) {
  const pulls = said.workers.find((each) => each.worker_id === destination)?.pulls.filter((each) => each.lane === lane) ?? [];
  const sum = (name) => pulls.reduce((total, each) => total + each[name], 0);
  return sum("seconds") ? `${bytes(sum("nbytes") / sum("seconds"))}/s` : "";
}

function drawArrows(said) {
  for (const plane of document.querySelectorAll("#pools .arrows")) {
    const box = plane.getBoundingClientRect();
    plane.replaceChildren();
    if (!box.width) continue;
    plane.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const shown = said.transfers.filter((each) => cards.get(each.source)?.closest(".group") === plane.parentElement).slice(0, MAX_ARROWS);
    for (const each of shown) {
      const [from, to] = [cards.get(each.source), cards.get(each.destination)];
      if (!from || !to || from.parentElement === to.parentElement) continue;
      const isBack = from.parentElement.classList.contains("decode"), aside = isBack ? 10 : -4; // of those the other way
      const [y1, y2] = [from, to].map((card) => { const at = card.getBoundingClientRect(); return at.top + at.height / 2 - box.top + aside; });
      const [x1, x2] = isBack ? [box.width, 0] : [0, box.width];
      const flow = rate((poll) => pulledBy(poll, each.destination));
      const path = `M${x1},${y1}C${box.width / 2},${y1} ${box.width / 2},${y2} ${x2},${y2}`;
      plane.append(svg("path", { d: path, class: "track" }), svg("path", { d: path, class: flow > 0 ? "flow moving" : "flow" }));
      if (shown.length <= 6) {
        plane.append(svg("text", { x: box.width / 2, y: (y1 + y2) / 2 + (isBack ? 16 : -8), "text-anchor": "middle" }, speed(said, each)));
      }
    }
  }
}

function drawTransfers(said) {
  const models = Object.fromEntries(said.workers.map((each) => [each.worker_id, each.model]));
  const rows = said.transfers.slice(0, MAX_ARROWS).map((each) => el("li", {},
    el("span", { title: each.source }, shortName(each.source, models[each.source]).join(" ")), el("span", { class: "dim" }, " → "),
    el("span", { title: each.destination }, shortName(each.destination, models[each.destination]).join(" ")),
    el("b", { class: "end" }, `${speed(said, each)}${each.lane ? ` by ${each.lane}` : ""}`)));
  const now = rate((poll) => poll.workers.reduce((sum, each) => sum + pulledBy(poll, each.worker_id), 0));
  const total = said.workers.reduce((sum, each) => sum + pulledBy(said, each.worker_id), 0);
  $("transfers").replaceChildren(
    el("p", {}, el("b", {}, `${bytes(now)}/s`), ` now, ${bytes(total)} in all`),
    sparkline(history.map((sample) => sample.kv_bytes_per_s), "Bytes of KV a second in the last hour"),
    rows.length ? el("ul", { class: "plain" }, rows) : el("p", { class: "dim" }, "No KV has moved yet. Send a long prompt."));
}

// What went wrong, and what happened

function drawRefusals(said) {
  const all = [...Object.entries(said.refused).map(([reason, number]) => [REFUSALS[reason] ?? reason, number]), ...Object.entries(said.failed)].filter(([, number]) => number);
  const most = Math.max(...all.map(([, number]) => number), 1);
  $("refusals").replaceChildren(all.length ? el("ul", { class: "plain" }, all.map(([reason, number]) => el("li", {}, reason, el("b", { class: "end" }, count(number)),
    bar([[reason, number, "refused"], ["", most - number, "free"]], `${reason}: ${number}`)))) : el("p", { class: "dim" }, "Nothing."));
}

function noteEvents(said) {
  const note = (unix, id, what) => events.unshift([unix, id, what]);
  if (known === null) {
    said.history.forEach((sample, index) => {
      if (!index) return;
      const before = said.history[index - 1].workers;
      for (const id of Object.keys(sample.workers)) if (!(id in before)) note(sample.unix_s, id, "joined");
      for (const id of Object.keys(before)) if (!(id in sample.workers)) note(sample.unix_s, id, "left");
    });
  } else {
    for (const { worker_id: id } of said.workers) if (!known.has(id)) note(said.unix_s, id, "joined");
    for (const id of known) if (!said.workers.some((each) => each.worker_id === id)) note(said.unix_s, id, "left");
  }
  known = new Set(said.workers.map((each) => each.worker_id));
  events.length = Math.min(events.length, MAX_EVENTS);
}

function describe({ role, num_before: before, num_workers: now, predicted_s: predicted, slo_s: goal, lacks }) {
  const what = role === "prefill" ? "first token" : "token";
  const why = predicted === null ? "" : `: then a ${what} is predicted to take ${seconds(predicted)} (goal ${seconds(goal)})`;
  return `scaled from ${before} to ${now}${why}${lacks ? `. ${lacks}` : ""}`;
}

function drawEvents({ scaling }) {
  const scaled = scaling.map((each) => [each.unix_s, `${each.model}-${each.role}`, describe(each)]);
  const rows = [...scaled, ...events].sort((one, other) => other[0] - one[0]).slice(0, MAX_EVENTS).map(([unix, who, what]) => el("li", {}, el("time", { class: "dim" }, clock(unix)), ` ${who} `, el("b", {}, what)));
  $("events").replaceChildren(...(rows.length ? rows : [el("li", { class: "dim" }, "No worker has come or gone in the last hour, and no pool was scaled.")]));
}
