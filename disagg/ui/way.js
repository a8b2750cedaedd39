// The way of one answer, drawn from GET /debug/requests/{id}.

import { bar, bytes, count, digits, el, seconds, shortName } from "./common.js";

const STAGES = {
  queue: "queue", prefill: "prefill", transfer: "KV transfer", wait: "wait for the batch",
  first: "first step", decode: "decode",
};

/** What is under an answer. `measured`: what the page saw, as `ttftS` and `usage`. */
export function drawWay(said, measured) {
  const ways = said.routes.map((each, index) => drawRoute(each, said.routes.length > 1 ? index + 1 : 0));
  return el("div", { class: "way" }, said.cascade ? drawCascade(said.cascade) : null, ways, drawSums(said, measured));
}

function worker(id, model, role) {
  const [own, number] = shortName(id, model);
  return el("span", { class: `chip ${role}`, title: id }, el("b", {}, role === "both" ? own : role), ` ${number}`);
}

function drawRoute({ route, model, because, queued, visits }, number) {
  const chain = el("div", { class: "chain" });
  const [first, second] = [visits[0], visits.at(-1)];
  const isRemote = route.prefill !== null;
  if (number) chain.append(el("span", { class: "dim" }, `${number}. ${model}`));
  if (because) chain.append(el("span", { class: "dim" }, `after ${because}`));
  if (route.prefix_source) {
    chain.append(worker(route.prefix_source, model, "cache"), arrow("cached prefix"));
  }
  if (isRemote) {
    const moved = second?.pull_nbytes ? `${bytes(second.pull_nbytes)}${second.pull_lane ? ` by ${second.pull_lane}` : ""}` : "KV";
    chain.append(worker(route.prefill, model, "prefill"), arrow(moved), worker(route.decode, model, "decode"));
  } else {
    chain.append(worker(route.decode, model, "both"), el("span", { class: "dim" }, "prefill and decode on one worker"));
  }
  if (first?.num_cached_tokens) chain.append(el("span", { class: "chip cache" }, `${count(first.num_cached_tokens)} tokens cached`));
  return el("div", { class: "route" }, chain, drawStages(stagesOf(visits, queued, isRemote)), drawReason(route, model));
}

function arrow(text) {
  return el("span", { class: "arrow" }, el("span", { class: "moved" }, text));
}

/** Measured seconds of each stage: `[stage, seconds, tokens]`. */
export function stagesOf(visits, queued, isRemote) {
  const sums = {};
  const add = (stage, value) => { if (value > 0) sums[stage] = (sums[stage] ?? 0) + value; };
  add("queue", queued?.waited_s);
  visits.forEach((visit, index) => {
    if (visit.compute_s === null) return;
    const prefills = index === 0;
    add(prefills ? "queue" : "wait", visit.queue_s);
    add("transfer", visit.pull_s);
    add(prefills ? "prefill" : "first", visit.compute_s);
    if (visit.ended_unix_s && !(isRemote && prefills)) add("decode", visit.ended_unix_s - visit.first_token_unix_s);
  });
  return Object.keys(STAGES).filter((stage) => sums[stage]).map((stage) => [stage, sums[stage]]);
}

function drawStages(stages) {
  if (!stages.length) return null;
  const words = stages.map(([stage, took]) => `${STAGES[stage]} ${seconds(took)}`);
  const legend = stages.map(([stage, took]) => el("li", { class: stage }, `${STAGES[stage]} `, el("b", {}, seconds(took))));
  return el("div", { class: "stages" }, bar(stages.map(([stage, took]) => [STAGES[stage], took, stage]), words.join(", ")), el("ul", {}, legend));
}

function drawReason(route, model) {
  const rows = route.candidates.map((each) => {
    const isChosen = each.prefill === route.prefill && each.decode === route.decode && each.prefix_source === route.prefix_source;
    const name = (id) => (id ? shortName(id, model).join(" ") : "");
    const way = each.prefill ? `${name(each.prefill)} → ${name(each.decode)}` : `${name(each.decode)} alone`;
    return el("tr", { class: isChosen ? "chosen" : "" }, el("th", { scope: "row" }, `${isChosen ? "✓ " : ""}${way}`),
      el("td", {}, count(each.num_cached_tokens)), el("td", {}, seconds(each.wait_s)), el("td", {}, seconds(each.first_token_s)), el("td", {}, seconds(each.total_s)));
  });
  const head = ["Way", "Cached tokens", "Wait", "First token", "Cost"].map((name) => el("th", { scope: "col" }, name));
  return el("details", {}, el("summary", {}, `Why: ${route.reason}`),
    el("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Candidates" },
      el("table", {}, el("caption", {}, "What the router weighed, as predicted. The least cost wins; it includes what other requests lose."),
        el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))));
}

const REASONS = {
  sure: "was sure", unsure: "was unsure", largest: "answered, as the largest", kept: "answered after all",
  poor: "was passed over: prompts like this one are too hard for it",
};

function drawCascade({ signal, attempts }) {
  const steps = attempts.map(({ model, reason, verdict, threshold }) => {
    const why = verdict && threshold !== null
      ? ` (${signal} log-probability ${digits(verdict.value, 2)} ${verdict.is_sure ? "≥" : "<"} ${digits(threshold, 2)} after ${verdict.num_tokens} token${verdict.num_tokens > 1 ? "s" : ""})` : "";
    return el("li", {}, el("b", {}, model), ` ${REASONS[reason] ?? `failed: ${reason}`}${why}`);
  });
  return el("div", { class: "cascade" }, el("span", { class: "dim" }, "auto"), el("ol", {}, steps));
}

function drawSums(said, { ttftS, usage }) {
  const last = said.routes.at(-1);
  const visit = last.visits.at(-1);
  const facts = [];
  if (ttftS) facts.push(["first token", seconds(ttftS)], ["predicted", seconds(last.route.predicted_s)]);
  if (visit?.ended_unix_s && visit.num_tokens > 1) {
    const gap = (visit.ended_unix_s - visit.first_token_unix_s) / (visit.num_tokens - 1);
    if (gap > 0) facts.push(["a token", seconds(gap)]);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    facts.push(["prompt", `${count(usage.prompt_tokens)} tokens, ${count(cached)} cached`], ["answer", `${count(usage.completion_tokens)} tokens`]);
  }
  return el("dl", { class: "sums" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}
