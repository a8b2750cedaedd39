// Chat: turns of a user and one or two models, streamed, with the way of each answer.

import { $, ask, askJson, count, el, Problem, seconds, tellConnection } from "./common.js";
import { markdown } from "./markdown.js";
import { drawWay } from "./way.js";

const turns = []; // {text, answers: [Answer]}
let stopping = null; // the AbortController of the answers that run
let needKey = () => {};

export function setUpChat(askForKey) {
  needKey = askForKey;
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    stopping ? stopping.abort() : send($("prompt").value);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!stopping) send($("prompt").value);
  });
  $("prompt").addEventListener("input", fit);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("sign-in").open) stopping?.abort(); });
  $("compare").addEventListener("change", () => { $("other-label").hidden = !$("compare").checked; });
  $("model").addEventListener("change", chooseOther);
  $("clear").addEventListener("click", () => {
    stopping?.abort();
    cutFrom(0);
    $("prompt").focus();
  });
}

/** Fill the lists of models. Throws `Problem`. */
export async function loadModels() {
  const { data } = await askJson("v1/models");
  const names = data.map((each) => each.id).sort((one, other) => (other === "auto") - (one === "auto"));
  for (const list of [$("model"), $("other")]) {
    const before = list.value;
    list.replaceChildren(...names.map((name) => el("option", { value: name }, name === "auto" ? "auto (small first)" : name)));
    if (names.includes(before)) list.value = before;
  }
  chooseOther();
  $("compare").parentElement.hidden = names.length < 2;
  showExamples(names);
}

/** A model is not compared with itself, if there is another one. */
function chooseOther() {
  const other = [...$("other").options].find((each) => each.value !== $("model").value);
  if (other && $("other").value === $("model").value) $("other").value = other.value;
}

function showExamples(names) {
  const examples = [
    ["A short question", "may stay on one worker", "What is the capital of France?"],
    ["A long document", "a prefill worker reads it, its KV moves", `${longDocument()}What is the code of Kate?`],
    ["The same document again", "most of it is cached now", `${longDocument()}List the codes of Anna, Oscar, Zoe.`],
  ];
  if (names.includes("auto")) examples.push(["A hard sum for auto", "the small model passes it on", "What is 51234 plus 23456?", "auto"]);
  $("examples").replaceChildren(...examples.map(([title, what, text, model]) =>
    el("button", { type: "button", class: "example", onclick: () => { if (model) $("model").value = model; send(text); } }, el("b", {}, title), el("span", {}, what))));
}

/** About a thousand tokens whose answer one wrong KV block would change. */
function longDocument() {
  const names = "Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Nina Oscar Paul Rosa Sam Tina Uma Victor Wendy Yara Zoe";
  const facts = names.split(" ").map((name, index) => `The code of ${name} is ${1000 + ((index * index * 397 + index * 7919) % 9000)}.`);
  return `Remember this. ${facts.join(" ")} ${"Nothing else happened that day. ".repeat(60)}`;
}

function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, 220)}px`;
}

function cutFrom(index) {
  for (const turn of turns.splice(index)) turn.node.remove();
  $("welcome").hidden = turns.length > 0;
}

async function send(text) {
  if (!text.trim() || stopping) return;
  const models = [$("model").value, ...($("compare").checked && !$("compare").parentElement.hidden ? [$("other").value] : [])];
  let parameters;
  try {
    parameters = readParameters();
  } catch (error) {
    say(error.message);
    $("settings").open = true;
    return $("tools").focus();
  }
  const turn = addTurn(text, models);
  $("prompt").value = "";
  fit();
  stopping = new AbortController();
  $("send").textContent = "Stop";
  say(`${models.join(" and ")} answering`);
  const before = turns.slice(0, -1);
  await Promise.all(turn.answers.map((answer, column) => answer.run({ ...parameters, messages: messages(before, column, text) }, stopping.signal)));
  stopping = null;
  $("send").textContent = "Send";
  say(turn.answers.map((answer) => `${answer.model}: ${answer.text.slice(0, 1000) || answer.outcome}`).join(". "));
}

function messages(before, column, text) {
  const list = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  for (const turn of before) {
    const answer = turn.answers[column] ?? turn.answers[0];
    list.push({ role: "user", content: turn.text });
    if (answer.text) list.push({ role: "assistant", content: answer.text });
  }
  return [...list, { role: "user", content: text }];
}

function readParameters() {
  const found = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") found[name] = Number($(name).value);
  }
  if ($("tools").value.trim()) {
    try {
      found.tools = JSON.parse($("tools").value);
    } catch (error) {
      throw new Error(`The tools are not JSON: ${error.message}`);
    }
  }
  return found;
}

function say(words) {
  $("spoken").textContent = words;
}

function addTurn(text, models) {
  const index = turns.length;
  const edit = el("button", { type: "button", class: "quiet", onclick: () => {
    stopping?.abort();
    cutFrom(turns.indexOf(turn));
    $("prompt").value = text;
    fit();
    $("prompt").focus();
  } }, "Edit");
  const answers = models.map((model) => new Answer(model, () => {
    if (stopping) return;
    cutFrom(turns.indexOf(turn));
    send(text);
  }));
  const shown = text.length > 600 ? `${text.slice(0, 200)} … ${text.slice(-200)}` : text;
  const size = text.length > 600 ? el("span", { class: "dim" }, `${count(text.length)} characters`) : null;
  const turn = { text, answers };
  turn.node = el("article", { "aria-label": `Turn ${index + 1}` },
    el("div", { class: "user" }, el("div", { class: "bubble" }, shown), el("div", { class: "row end" }, size, edit)),
    el("div", { class: models.length > 1 ? "answers two" : "answers" }, answers.map((each) => each.node)));
  turns.push(turn);
  $("welcome").hidden = true;
  $("log").append(turn.node);
  turn.node.scrollIntoView({ block: "end" });
  return turn;
}

class Answer {
  constructor(model, again) {
    Object.assign(this, { model, again, text: "", reasoning: "", calls: [], id: "", usage: null, ttftS: 0, outcome: "" });
    this.name = el("b", {}, model);
    this.pace = el("span", { class: "pace" });
    this.body = el("div", { class: "text", "aria-busy": "true" }, el("span", { class: "waiting" }, el("i"), el("i"), el("i")));
    this.foot = el("div");
    this.node = el("div", { class: "answer" }, el("div", { class: "who" }, this.name, this.pace), this.body, this.foot);
  }

  async run(request, signal) {
    const began = performance.now();
    try {
      const reply = await ask("v1/chat/completions", { json: { model: this.model, ...request }, signal });
      for await (const chunk of eventsOf(reply)) {
        if (chunk.error) throw new Problem(500, chunk.error.message);
        this.take(chunk, (performance.now() - began) / 1000);
      }
    } catch (error) {
      this.end(error);
    }
    this.draw();
    this.body.removeAttribute("aria-busy");
    if (this.id) await this.showWay();
  }

  take(chunk, sinceS) {
    this.id ||= chunk.id;
    if (chunk.model && chunk.model !== this.model) this.name.textContent = `${this.model} → ${chunk.model}`;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    if (content || thought || calls) {
      this.ttftS ||= sinceS;
      const following = (this.usage?.completion_tokens ?? 1) - 1;
      if (following > 0 && sinceS > this.ttftS) {
        this.pace.textContent = `first token ${seconds(this.ttftS)} · ${count(following / (sinceS - this.ttftS))} tokens/s`;
      }
    }
    this.text += content ?? "";
    this.reasoning += thought ?? "";
    for (const { index, function: said } of calls ?? []) {
      const call = (this.calls[index] ??= { name: "", arguments: "" });
      call.name += said?.name ?? "";
      call.arguments += said?.arguments ?? "";
    }
    if (choice.finish_reason === "length") this.outcome = "Cut at the largest number of tokens.";
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  end(error) {
    if (error.name === "AbortError") {
      this.outcome = "Stopped.";
    } else if (error instanceof Problem) {
      this.outcome = error.message;
      this.failed = true;
      if (error.status === 401) needKey(error.message);
    } else {
      tellConnection(false);
      this.outcome = "The server went away during this answer.";
      this.failed = true;
    }
  }

  draw() {
    const isAtEnd = atEnd();
    const parts = [];
    if (this.reasoning) parts.push(fold(this.text ? "Thoughts" : "Thinking…", el("div", { class: "prose dim" }, this.reasoning)));
    parts.push(...markdown(this.text));
    for (const call of this.calls.filter(Boolean)) parts.push(fold(`Calls ${call.name}`, el("pre", { tabIndex: 0 }, call.arguments)));
    if (this.outcome) parts.push(el("p", { class: this.failed ? "problem" : "dim" }, this.outcome));
    const isOpen = this.body.querySelector("details")?.open;
    this.body.replaceChildren(...parts);
    if (isOpen) this.body.querySelector("details").open = true;
    if (isAtEnd) scrollTo({ top: document.body.scrollHeight });
  }

  async showWay() {
    const again = el("button", { type: "button", class: "quiet", onclick: this.again }, "Try again");
    for (let trial = 0; trial < 8; trial++) {
      // Another ingress may answer, and of a stopped answer the worker's last word is on its way.
      await new Promise((resolve) => setTimeout(resolve, trial ? 250 : 60));
      try {
        const said = await askJson(`debug/requests/${encodeURIComponent(this.id)}`);
        if (said.routes.at(-1).visits.at(-1)?.ended_unix_s || trial > 4) {
          const isAtEnd = atEnd();
          this.foot.replaceChildren(drawWay(said, this), el("div", { class: "row end" }, again));
          if (isAtEnd) scrollTo({ top: document.body.scrollHeight });
          return;
        }
      } catch (error) {
        if (error.status !== 404) break;
      }
    }
    this.foot.replaceChildren(el("div", { class: "row end" }, again));
  }
}

const atEnd = () => innerHeight + scrollY > document.body.scrollHeight - 80;

function fold(title, content) {
  return el("details", { class: "fold" }, el("summary", {}, title), content);
}

/** The JSON of each event of a stream. */
async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      if (rest !== null && !rest.includes("[DONE]")) throw new TypeError("The stream ended early.");
      return;
    }
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") { rest = null; return; }
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
    }
  }
}
