/* The operator's page: it asks status.json every two seconds and shows the answer. */

import { $, bytes, Chart, clock, count, drawBar, duration, exact, fillTable, highlight, make, percent, set, share, swatch, sync }
  from "./drawing.js";

const POLL_S = 2;
const TIMEOUT_S = 10;
const NOW_S = 60; // what the tiles call "now"
const FEW_REQUESTS = 12;
const KEY = "mambaslots-admin-key"; // in sessionStorage
const REASONS = {
  resumed: "taken from the cache, not computed",
  state_evicted: "a state was there and was evicted",
  kv_evicted: "the prefix was there; its KV is gone",
  capacity: "a state was planned; no slot was free",
  state_not_taken: "KV is there; the plan stored no state that deep",
  branch_first_seen: "the first prompt to depart from earlier ones here",
  partial_block: "the rest, shorter than a block, of a known prompt",
  last_token: "last block of a known prompt, for its logits",
  never_seen: "no earlier request had this prefix",
  disabled: "no caching, or log-probs of these are wanted",
};

const CAUSES = {
  new_state: "its slot was needed for another state",
  live_state: "its slot was needed for a running request",
  kv_evicted: "its KV block was evicted",
  rolled: "a later state of the same answer replaced it",
  discarded: "the model's results were no numbers",
  by_host: "the host dropped it",
  reset: "all prefixes were dropped",
};

let snapshot = null;
let answeredS = null;
let windowS = null;
let showAll = false;
let asking = false;
let timer = 0;

const level = (name, of, label = name) => ({ name, label, of: (bin) => bin.last(of) });
const charts = [
  new Chart("hit-chart", [{
    name: "resumed", label: "hit rate",
    of: (bin) => percent(bin.sum((point) => point.resumed), bin.sum((point) => point.prompt)),
  }], {
    label: "Hit rate over time", line: true, full: () => 100, empty: "no prompt in this time",
    show: (value) => `${value.toFixed(1)} %`, tick: (value) => `${value} %`,
  }),
  new Chart("token-chart", Object.keys(REASONS).map((name) => ({
    name,
    of: (bin) => bin.sum((point) => (name === "resumed" ? point.resumed : point.by_reason[name])),
  })), { label: "Prompt tokens over time", parts: "prompt tokens", gap: 1, empty: "no prompt in this time" }),
  new Chart("states-chart", [
    level("pinned", (point) => point.states_pinned),
    level("committed", (point) => Math.max(0, point.states_committed - point.states_pinned), "not pinned"),
  ], { label: "States over time" }),
  new Chart("kv-chart", [level("held", (point) => point.kv_held), level("cached", (point) => point.kv_cached)],
    { label: "KV blocks over time" }),
  new Chart("queue-chart", [level("running", (point) => point.running), level("waiting", (point) => point.waiting)],
    { label: "Requests over time" }),
];

// ---- columns of tables

const text = (of, title) => ({ text: of, title });
const number = (of, show = count) => ({ class: "n", text: (item) => show(of(item)), title: (item) => exact(of(item)) });
const part = (of, all) => ({
  class: "n",
  text: (item) => `${count(of(item))} · ${share(of(item), all(item))}`,
  title: (item) => exact(of(item)),
});
const rate = (of, all) => ({ class: "n", text: (item) => share(of(item), all(item)) });

// ---- parts of the page

function showTiles() {
  const { tokens, latency, engine } = snapshot;
  const recent = snapshot.series.points.filter((point) => point.time_s > snapshot.time_s - NOW_S);
  const sum = (name) => recent.reduce((total, point) => total + point[name], 0);
  const aSecond = (name) => count(Math.round(sum(name) / Math.max(1, Math.min(NOW_S, snapshot.uptime_s))));
  const tiles = [
    ["Hit rate, last minute", share(sum("resumed"), sum("prompt")), `${share(tokens.resumed, tokens.prompt)} since the start`],
    ["First token (p50)", duration(latency.ttft_s.p50), `p90 ${duration(latency.ttft_s.p90)}`],
    ["Next tokens (p50)", duration(latency.inter_token_s.p50), `p90 ${duration(latency.inter_token_s.p90)}`],
    ["Prompt tokens / s", aSecond("prompt"), `${count(tokens.prompt)} since the start`, tokens.prompt],
    ["Generated tokens / s", aSecond("generated"), `${count(tokens.generated)} since the start`, tokens.generated],
    ["Time saved, about", duration(tokens.saved_s), `${count(tokens.resumed)} prompt tokens not computed`, tokens.resumed],
    ["Running requests", count(engine.running), `${count(engine.waiting)} waiting, ${count(engine.paused)} paused`],
  ];
  const create = ([label]) =>
    make("div", {}, make("dt", {}, label), make("dd", { class: "value" }), make("dd", { class: "more" }));
  sync($("tiles"), tiles, ([label]) => label, create, (tile, [, value, more, all]) => {
    set(tile.children[1], value);
    set(tile.children[2], more, exact(all));
  });
}

/** A cell with a name and what the name means. */
function nameEntry(cell, name, meanings, tag) {
  if (cell.childNodes.length) return;
  cell.append(make(tag, {}, name), make("small", {}, Object.hasOwn(meanings, name) ? meanings[name] : ""));
}

function nameReason(cell, { name }) {
  const row = cell.parentNode;
  if (cell.childNodes.length) return;
  nameEntry(cell, name, REASONS, name === "resumed" ? "strong" : "code");
  cell.prepend(swatch(name));
  row.tabIndex = 0;
  for (const event of ["pointerenter", "focus"]) row.addEventListener(event, () => highlight(name));
  for (const event of ["pointerleave", "blur"]) row.addEventListener(event, () => highlight(null));
}

function showReasons() {
  const { tokens } = snapshot;
  const names = new Set([...Object.keys(REASONS), ...Object.keys(tokens.by_reason)]);
  const all = [...names].map((name) => ({
    name, tokens: (name === "resumed" ? tokens.resumed : tokens.by_reason[name]) ?? 0,
  }));
  const rows = all.filter((row) => row.tokens || row.name === "resumed");
  const none = all.filter((row) => !rows.includes(row)).map((row) => row.name.replaceAll("_", " "));
  set($("no-tokens"), none.length ? `No tokens: ${none.join(", ")}.` : "");
  const columns = [{ fill: nameReason }, number((row) => row.tokens), rate((row) => row.tokens, () => tokens.prompt)];
  fillTable("reasons", columns, rows, (row) => row.name);
  const again = `Besides, ${count(tokens.recomputed)} tokens were computed again, after their request was preempted.`;
  set($("recomputed"), tokens.recomputed ? again : "");
}

function showPool(name, size, parts, all) {
  set($(`${name}-size`), size);
  const words = ([, label, value]) => `${label} ${count(value)}${value ? ` (${share(value, all)})` : ""}`;
  const filled = parts.filter(([series]) => series !== "free");
  drawBar($(`${name}-gauge`), filled.map((one) => [one[0], one[2], words(one)]), all,
    { "aria-label": `${parts.map(words).join(", ")}; ${count(all)} in all` });
  sync($(`${name}-legend`), parts, ([series]) => series, ([series]) => make("li", {}, swatch(series), make("span")),
    (item, one) => set(item.lastChild, words(one), exact(one[2])));
}

function showPools() {
  const { pools: { states, kv }, engine } = snapshot;
  const slots = states.total + states.live;
  showPool("states", `${count(slots)} slots of ${bytes(states.bytes_each)}, ${bytes(slots * states.bytes_each)} in all`, [
    ["pinned", "pinned", states.pinned], ["committed", "not pinned", Math.max(0, states.committed - states.pinned)],
    ["reserved", "reserved", states.reserved], ["live", "running requests", states.live], ["free", "free", states.free],
  ], slots);
  showPool("kv", `${count(kv.total)} of ${count(kv.block_size_tokens)} tokens, ${bytes(kv.total * kv.bytes_each)} in all`,
    [["held", "held", kv.held], ["cached", "cached", kv.cached], ["free", "free", kv.free]], kv.total);
  showPool("queue", `at most ${count(engine.max_requests)} run`,
    [["running", "running", engine.running], ["waiting", "waiting", engine.waiting]],
    Math.max(engine.max_requests, engine.running + engine.waiting));
}

function showTables() {
  const { evictions, latency } = snapshot;
  const tenants = snapshot.tenants.filter((tenant) => tenant.requests);
  fillTable("tenants", [
    text((tenant) => tenant.name), number((tenant) => tenant.requests),
    rate((tenant) => tenant.resumed_tokens, (tenant) => tenant.prompt_tokens),
  ], tenants, (tenant) => tenant.name, "No tenant yet.");
  const times = [["To the first token", latency.ttft_s], ["Between tokens", latency.inter_token_s], ["One step", latency.step_s]];
  const quantiles = ["p50", "p90", "p99"].map((name) => number(([, values]) => values[name], duration));
  fillTable("latency", [text(([name]) => name), ...quantiles], times, ([name]) => name);
  const causes = Object.entries(evictions.by_cause).filter(([, states]) => states > 0).sort((a, b) => b[1] - a[1]);
  const all = causes.reduce((total, [, states]) => total + states, 0);
  fillTable("evictions", [{ fill: (cell, [cause]) => nameEntry(cell, cause, CAUSES, "code") }, number(([, states]) => states), rate(([, states]) => states, () => all)],
    causes, ([cause]) => cause, "No state has left.");
  const { p50, p90 } = evictions.age_s;
  set($("eviction-age"), all ? `Unused before eviction: p50 ${duration(p50)}, p90 ${duration(p90)}.` : "");
}

/** All spans of a prompt: what lies before a computed span was resumed. */
function withResumed(spans, resumedTokens) {
  if (!spans.length) return resumedTokens > 0 ? [[0, resumedTokens, "resumed"]] : [];
  return spans.flatMap(([start, stop, reason], index) => {
    const before = index ? spans[index - 1][1] : 0;
    return start > before ? [[before, start, "resumed"], [start, stop, reason]] : [[start, stop, reason]];
  });
}

function showSpans(cell, { prompt_tokens: promptTokens, resumed_tokens: resumedTokens, spans, why }) {
  const shown = withResumed(spans, resumedTokens);
  const words = shown.map(([start, stop, reason]) => `${reason}: tokens ${count(start)} to ${count(stop)}`);
  const label = words.join("; ") || "nothing is computed yet";
  if (!cell.childNodes.length) cell.append(make("p", { class: "why muted" }));
  set(cell.lastChild, why ?? "");
  if (cell.dataset.shown === label) return;
  cell.dataset.shown = label;
  drawBar(cell, shown.map(([start, stop, reason], index) => [reason, stop - start, words[index]]), promptTokens,
    { "aria-label": label, class: "spans" });
}

function showEnd(cell, request) {
  const hasBegun = request.spans.length || request.resumed_tokens || request.generated_tokens;
  set(cell, request.finish_reason ?? (hasBegun ? "running" : "waiting"));
  cell.classList.toggle("unfinished", request.finish_reason === null);
}

/** A shell command that any server of this page answers. */
function firstRequest() {
  const body = JSON.stringify({ model: snapshot.model, prompt: "def close(self):", max_tokens: 64 });
  const quoted = body.replaceAll("'", "'\\''");
  return `curl ${new URL("v1/completions", location.href)} -H 'Content-Type: application/json' -d '${quoted}'`;
}

function showRequests() {
  const { requests } = snapshot;
  set($("first-request"), firstRequest());
  $("requests-table").hidden = !requests.length;
  $("no-request").hidden = requests.length > 0;
  const seen = new Set(requests.flatMap((request) => request.spans.map(([, , reason]) => reason)));
  const legend = Object.keys(REASONS).filter((name) => seen.has(name) || (name === "resumed" && requests.length));
  sync($("requests-legend"), legend, (name) => name, (name) => make("li", {}, swatch(name), name));
  fillTable("requests", [
    text((request) => request.id),
    text((request) => clock(request.arrived_s), (request) => `${duration(Math.max(0, snapshot.time_s - request.arrived_s))} ago`),
    text((request) => request.tenant), number((request) => request.prompt_tokens),
    part((request) => request.resumed_tokens, (request) => request.prompt_tokens),
    { class: "bar", fill: showSpans }, number((request) => request.ttft_s, duration),
    number((request) => request.inter_token_s, duration), number((request) => request.generated_tokens), { fill: showEnd },
  ], showAll ? requests : requests.slice(0, FEW_REQUESTS), (request) => request.id);
  $("show-all").hidden = requests.length <= FEW_REQUESTS;
  set($("show-all"), showAll ? `Show the last ${FEW_REQUESTS}` : `Show all ${requests.length}`);
}

function showCharts() {
  if (snapshot === null) return;
  for (const chart of charts) chart.draw({ ...snapshot.series, nowS: snapshot.time_s, windowS });
  const [bin] = charts[1].bins;
  if (bin) set($("token-unit"), `in each ${duration(bin.toS - bin.fromS)}`);
  highlight();
}

function show(answer) {
  snapshot = answer;
  answeredS = Date.now() / 1000;
  if (windowS === null) {
    windowS = answer.uptime_s < 240 ? 300 : 900;
    document.querySelector(`#window [value="${windowS}"]`).checked = true;
  }
  $("gone").hidden = $("key-form").hidden = true;
  $("figures").hidden = false;
  $("figures").classList.remove("stale");
  document.title = `mambaslots: ${answer.model}`;
  set($("model"), answer.model);
  set($("server"), `version ${answer.version} · up ${duration(answer.uptime_s)} · as of ${clock(answer.time_s)}`);
  $("warnings").hidden = !answer.warnings.length;
  sync($("warning-list"), answer.warnings, (sentence) => sentence, (sentence) => make("li", {}, sentence));
  set($("description"), answer.engine.description.join("\n"));
  for (const showPart of [showTiles, showReasons, showPools, showTables, showRequests, showCharts]) showPart();
}

// ---- asking the server

function askForKey(isRefused) {
  sessionStorage.removeItem(KEY);
  set($("key-error"), isRefused ? "The server refused this key." : "");
  $("figures").hidden = $("gone").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

function sayGone(why) {
  const since = answeredS === null ? "" : ` What stands here is of ${clock(answeredS)}.`;
  set($("gone"), `${why}${since} The page asks again every ${POLL_S} seconds.`);
  $("gone").hidden = false;
  $("figures").classList.add("stale");
}

/** What an answer that is an error says of itself. */
async function reasonOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return answer.statusText || "it gave no reason";
  }
}

/** The server's answer as an object; null where it was none, and the page says why. */
async function fetchSnapshot() {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  let answer;
  try {
    answer = await fetch("status.json", { cache: "no-store", headers, signal: AbortSignal.timeout(1000 * TIMEOUT_S) });
    if (answer.ok) return await answer.json();
  } catch {
    sayGone(answer ? "The server sent what this page cannot read." : "The server does not answer.");
    return null;
  }
  if (answer.status === 401) askForKey(key !== null);
  else sayGone(`The server answered ${answer.status}: ${await reasonOf(answer)}.`);
  return null;
}

async function ask() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const answer = await fetchSnapshot();
    if (answer !== null) show(answer);
  } finally {
    asking = false;
    timer = setTimeout(askUnlessUnseen, 1000 * POLL_S);
  }
}

/** Ask, but not in a hidden tab, and not while the page waits for a key. */
function askUnlessUnseen() {
  if (!document.hidden && $("key-form").hidden) ask();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    set($("key-error"), "A key is of printable ASCII characters without spaces.");
    return;
  }
  sessionStorage.setItem(KEY, key);
  ask();
});
/** Send the prompt as any client would, and say what of it was resumed. */
async function tryPrompt(event) {
  event.preventDefault();
  const button = $("try").querySelector("button");
  const key = $("try-key").value.trim();
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const body = JSON.stringify({ model: snapshot.model, prompt: $("prompt").value, max_tokens: 64 });
  button.disabled = true;
  set($("resumed"), "The server computes.");
  const begunS = performance.now() / 1000;
  try {
    const answer = await fetch("v1/completions", { method: "POST", headers, body });
    if (answer.status === 401) $("try-key").parentNode.hidden = false;
    if (!answer.ok) {
      set($("resumed"), `The server answered ${answer.status}: ${await reasonOf(answer)}.`);
      return;
    }
    const { choices, usage } = await answer.json();
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    set($("answer"), choices[0].text);
    $("answer").hidden = false;
    const tookS = performance.now() / 1000 - begunS;
    set($("resumed"), `Resumed ${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens; ` +
      `${count(usage.completion_tokens)} tokens in ${duration(tookS)}. The newest request below says why not more.`);
    ask();
  } catch {
    set($("resumed"), "The server does not answer.");
  } finally {
    button.disabled = false;
  }
}

$("try").addEventListener("submit", tryPrompt);
$("window").addEventListener("change", (event) => {
  windowS = Number(event.target.value);
  showCharts();
});
$("show-all").addEventListener("click", () => {
  showAll = !showAll;
  showRequests();
});
document.addEventListener("visibilitychange", askUnlessUnseen);
new ResizeObserver(showCharts).observe($("figures"));
ask();
