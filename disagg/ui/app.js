// Tabs, the connection, and sessions; the views are in files of their own.

import { $, ask, askJson, tellConnection } from "./common.js";
import { loadModels, setUpChat } from "./chat.js";
import { setUpFleet } from "./fleet.js";
import { setUpPlan } from "./plan.js";

const POLL_MS = 4000, POLL_GONE_MS = 1000;
const VIEWS = ["chat", "fleet", "plan"];
let isThere = null;
let hasModels = false;

// Tabs

function show(name, focus = false) {
  for (const each of VIEWS) {
    const isShown = each === name, tab = $(`tab-${each}`);
    $(each).hidden = !isShown;
    tab.setAttribute("aria-selected", isShown);
    tab.tabIndex = isShown ? 0 : -1;
    if (isShown && focus) tab.focus();
  }
  document.dispatchEvent(new CustomEvent("view", { detail: name }));
}

$("tabs").addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) location.hash = tab.id.slice(4);
});
$("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const now = VIEWS.findIndex((each) => $(`tab-${each}`).getAttribute("aria-selected") === "true");
  location.hash = VIEWS[(now + step + VIEWS.length) % VIEWS.length];
  show(location.hash.slice(1), true);
});
addEventListener("hashchange", () => show(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat"));

// The connection

document.addEventListener("connection", ({ detail }) => showConnection(detail, "The server does not answer. Trying again …"));

function showConnection(isNow, words, isReady = isNow) {
  const hasChanged = isThere !== isNow;
  isThere = isNow;
  $("status").className = isReady ? "there" : "gone";
  const text = $("status").querySelector(".words");
  if (text.textContent !== words) text.textContent = words;
  if (hasChanged && isNow) onThere();
}

async function onThere() {
  if (!hasModels) {
    try {
      await readSession();
      await loadModels();
      hasModels = true;
    } catch (error) {
      if (error.status === 401) askForKey();
    }
  }
  document.dispatchEvent(new Event("there"));
}

async function poll() {
  try {
    const reply = await fetch("../ready");
    const { ready, reason, pools } = await reply.json();
    const sum = (name) => Object.values(pools).reduce((total, pool) => total + pool[name], 0);
    const workers = `${sum("num_prefill")} prefill + ${sum("num_decode")} decode`;
    showConnection(true, ready ? workers : `not ready: ${reason}`, ready);
  } catch {
    tellConnection(false);
  }
  setTimeout(poll, isThere ? POLL_MS : POLL_GONE_MS);
}

// Sessions

async function readSession() {
  const { needs_key: needsKey, may_chat: mayChat, is_operator: isOperator, tenant } = await askJson("ui/session");
  $("account").hidden = !needsKey;
  const who = [mayChat && needsKey ? tenant || "signed in" : "", isOperator && needsKey ? "operator" : ""].filter(Boolean);
  $("account").textContent = who.length ? who.join(", ") : "Sign in";
  $("sign-out").hidden = !who.length;
}

function askForKey(why = "") {
  $("key-error").textContent = why;
  if (!$("sign-in").open) $("sign-in").showModal();
}

$("account").addEventListener("click", () => askForKey());
$("not-now").addEventListener("click", () => $("sign-in").close());
$("sign-out").addEventListener("click", async () => {
  await ask("ui/session", { method: "DELETE" });
  location.reload();
});
$("sign-in").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await ask("ui/session", { method: "POST", headers: { authorization: `Bearer ${$("key").value}` } });
  } catch (error) {
    $("key-error").textContent = error.message;
    return;
  }
  $("key").value = "";
  $("sign-in").close();
  hasModels = false;
  await onThere();
});

setUpChat(askForKey);
setUpFleet(askForKey);
setUpPlan(askForKey);
show(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
poll();
