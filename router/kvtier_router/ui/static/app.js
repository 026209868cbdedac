// The page: asks the feed, keeps a bounded picture, and shows it. Everything from outside (names of
// workers, models, causes) is set as text; the Content-Security-Policy forbids anything else.

import { Chart, bar, el } from "./charts.js";

const EVERY_MS = 2000;
const FLEET_MS = 4000;
const POINTS_MAX = 720;
const EVENTS_MAX = 200;
const FLEET_ROWS = 50;
const REQUEST_ROWS = 25;
const LOST_AFTER = 2;
const MINUTE_S = 60;

const byId = (id) => document.getElementById(id);
const state = {
  columns: {}, last: 0, event: 0, events: [], told: null, upSince: 0,
  failures: 0, lostAt: null, paused: false, window: 300,
  fleet: { offset: 0, count: 0, text: "", trouble: false, at: 0, asked: 0 },
  requests: { before: 0, text: "", errors: false, rows: [], asked: 0 },
};

// ---- words

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

function compact(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 10000) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  return number(value, value < 10 && !Number.isInteger(value) ? 1 : 0);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  let left = value;
  while (left >= 1024 && power < units.length - 1) { left /= 1024; power += 1; }
  return `${number(left, left < 10 && power ? 1 : 0)} ${units[power]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${number(value * 1e6)} µs`;
  if (value < 0.1) return `${number(value * 1e3, value < 0.01 ? 1 : 0)} ms`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  return `${number(value, value < 10 ? 2 : 1)} s`;
}

function ago(value) {
  if (value < 120) return `${number(value)} s`;
  if (value < 7200) return `${number(value / 60)} min`;
  if (value < 172800) return `${number(value / 3600)} h`;
  return `${number(value / 86400)} days`;
}

const percent = (share) => (share === null ? "–" : `${number(share * 100, share > 0 && share < 0.1 ? 1 : 0)} %`);
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

// ---- asking

async function ask(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value));
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), 8000);
  try {
    const answer = await fetch(`/ui/${path}?${query}`, { cache: "no-store", signal: stop.signal });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    return await answer.json();
  } finally {
    clearTimeout(timer);
  }
}

async function refresh() {
  if (state.paused || document.visibilityState === "hidden") return;
  try {
    let told = await ask("feed", { point: state.last, event: state.event });
    const began = told.router.now - told.router.up_s;
    if (state.told && Math.abs(began - state.upSince) > 5) {
      Object.assign(state, { columns: {}, last: 0, event: 0, events: [] });
      state.requests.before = 0;
      told = await ask("feed");
    }
    state.upSince = began;
    take(told);
    state.failures = 0;
    state.lostAt = null;
    await Promise.all([
      Date.now() - state.fleet.at > FLEET_MS ? refreshFleet() : null,
      state.requests.before === 0 ? refreshRequests() : null,
    ]);
  } catch (error) {
    state.failures += 1;
    if (state.failures === 1) state.lostAt = Date.now();
  }
  show();
}

function take(told) {
  const fresh = told.series.columns;
  for (const [name, values] of Object.entries(fresh)) {
    const all = (state.columns[name] ?? []).concat(values);
    state.columns[name] = all.slice(-POINTS_MAX);
  }
  state.last = told.series.last;
  state.events = told.events.concat(state.events).slice(0, EVENTS_MAX);
  state.event = told.events_count;
  state.told = told;
}

async function refreshFleet() {
  const fleet = state.fleet;
  fleet.asked += 1;
  const turn = fleet.asked;
  const told = await ask("fleet", { offset: fleet.offset, limit: FLEET_ROWS, text: fleet.text, only: fleet.trouble ? "trouble" : "" });
  if (turn !== fleet.asked) return;
  fleet.at = Date.now();
  if (told.rows.length === 0 && told.offset > 0) { fleet.offset = 0; await refreshFleet(); return; }
  showFleet(told);
}

async function refreshRequests() {
  const list = state.requests;
  list.asked += 1;
  const turn = list.asked;
  const told = await ask("requests", { before: list.before, limit: REQUEST_ROWS, text: list.text, only: list.errors ? "errors" : "" });
  if (turn !== list.asked) return;
  list.rows = told.rows;
  showRequests(told);
}

// ---- showing

/** Change text only where it differs, so that a selection or a screen reader is left alone. */
function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

function big(id, value, unit = "") {
  const node = byId(id);
  if (node.dataset.shown === value + unit) return;
  node.dataset.shown = value + unit;
  node.replaceChildren(value, ...(unit ? [el("span", { class: "unit" }, ` ${unit}`)] : []));
}

function recent(name) {
  const { at = [] } = state.columns;
  const values = state.columns[name] ?? [];
  const from = (state.told?.router.now ?? 0) - MINUTE_S - 1;
  return values.filter((_, i) => at[i] > from);
}

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

function show() {
  const told = state.told;
  const lost = state.failures >= LOST_AFTER || (state.failures > 0 && !told);
  const live = byId("live");
  live.dataset.state = lost ? "lost" : state.paused ? "paused" : told ? "live" : "waiting";
  say("live-text", lost ? "no answer" : state.paused ? "paused" : told ? "live" : "connecting");
  byId("main").classList.toggle("stale", lost);
  showAlerts(told, lost);
  if (!told) return;
  showRouter(told);
  showCards(told);
  showCharts(told);
  showTiers(told);
  showModels(told);
  showEvents(told);
}

function showAlerts(told, lost) {
  const found = [];
  if (lost) found.push(["bad", "The router does not answer.", ` Since ${new Date(state.lostAt).toLocaleTimeString("en-GB")}; asking again every ${EVERY_MS / 1000} s. What is shown is what it said last.`]);
  if (told) {
    if (told.index.trust === "degraded") {
      const age = told.index.age_s;
      found.push(["bad", "The index is not heard.", age === null ? " It has not been heard yet: requests go by hashing." : ` Silent for ${ago(age)}: routing goes on with what was known, and its credit fades.`]);
    }
    for (const model of told.models.filter((one) => one.cause).slice(0, 5)) {
      found.push(["warning", `Model ${model.name} is DEGRADED.`, ` ${model.cause}`]);
    }
    for (const model of told.models.filter((one) => one.eligible === 0).slice(0, 5)) {
      found.push(["bad", `No worker takes requests for ${model.name}.`, ""]);
    }
    if (told.models_count === 0) found.push(["warning", "No model is served yet.", " Workers appear here once they publish to the index, or are named in the configuration."]);
  }
  const node = byId("alerts");
  const key = JSON.stringify(found);
  if (node.dataset.shown === key) return;
  node.dataset.shown = key;
  node.replaceChildren(...found.map(([level, strong, more]) => el("div", { class: "alert", "data-level": level }, el("strong", {}, strong), el("span", { class: "muted" }, more))));
}

function showRouter(told) {
  const { router, index } = told;
  say("instance", router.instance);
  document.title = `${router.instance} · kvtier router`;
  say("about", `version ${router.version} · policy ${router.policy} · up ${ago(router.up_s)}`);
  const pill = byId("index-pill");
  const [level, words] = index.mode === "none"
    ? ["info", "no index: affinity by hashing"]
    : index.trust === "exact" ? ["good", `index EXACT · ${index.mode}`] : ["bad", "index DEGRADED"];
  pill.dataset.level = level;
  pill.title = index.target ? `follows ${index.target}, position ${index.position}` : index.targets.join(", ");
  say("index-pill", words);
  const list = byId("processes");
  list.hidden = router.processes < 2;
  if (list.hidden || list.dataset.shown === router.instance) return;
  list.dataset.shown = router.instance;
  const numbers = [...Array(router.processes).keys()];
  list.replaceChildren(
    el("span", { class: "muted" }, `requests of process ${router.process + 1} of ${router.processes} only:`),
    ...numbers.map((n) => {
      if (n === router.process) return el("b", { "aria-current": "page" }, String(n + 1));
      const port = router.admin_ports[n];
      return port ? el("a", { href: `http://${location.hostname}:${port}/ui` }, String(n + 1)) : el("span", { class: "muted" }, String(n + 1));
    }),
  );
}

function tone(id, value) {
  byId(id).closest(".card").dataset.tone = value;
}

function showCards(told) {
  const { totals, gauges, fleet } = told;
  const points = recent("requests").length;
  const spell = Math.max(points, 1) * told.series.point_s;
  big("k-rate", points ? number(sum(recent("requests")) / spell, 1) : "–", "/s");
  say("k-rate-more", `${compact(totals.requests)} since the start`);
  const actual = ratio(sum(recent("cached_tokens")), sum(recent("told_tokens")));
  const expected = ratio(sum(recent("matched_tokens")), sum(recent("prompt_tokens")));
  big("k-hit", percent(actual ?? expected));
  say("k-hit-more", actual === null ? (expected === null ? "no prompt in the last minute" : "expected; workers do not say") : `of ${compact(sum(recent("told_tokens")))} prompt tokens; expected ${percent(expected)}`);
  const medians = recent("ttft_p50_s").filter((one) => one !== null).sort((a, b) => a - b);
  const slow = recent("ttft_p95_s").filter((one) => one !== null);
  big("k-ttft", medians.length ? seconds(medians[Math.floor((medians.length - 1) / 2)]) : "–");
  say("k-ttft-more", slow.length ? `median; p95 up to ${seconds(Math.max(...slow))}` : "no answer in the last minute");
  big("k-running", number(gauges.running));
  say("k-running-more", `${number(gauges.queued)} queued · ${plural(gauges.connections, "connection")}`);
  const failed = sum(recent("failed"));
  const limited = sum(recent("limited"));
  big("k-errors", number(failed), "× 5xx");
  tone("k-errors", failed ? "bad" : limited ? "warning" : "");
  say("k-errors-more", `${number(limited)} × 429, ${number(sum(recent("refused")))} other 4xx in the last minute`);
  byId("k-errors-more").title = `since the start: ${number(totals.failed)} × 5xx, ${number(totals.limited)} × 429, ${number(totals.refused)} other 4xx, ${number(totals.left)} whose client left`;
  const workers = fleet.kinds.worker ?? 0;
  const able = fleet.states.candidate ?? 0;
  big("k-workers", `${number(able)}`, `of ${number(workers)}`);
  tone("k-workers", workers && !able ? "bad" : able < workers ? "warning" : "");
  const others = Object.entries(fleet.states).filter(([name]) => name !== "candidate").map(([name, count]) => `${number(count)} ${name}`);
  say("k-workers-more", others.length ? others.join(", ") : "take requests");
}

const charts = {};

function makeCharts() {
  charts.hit = new Chart(byId("chart-hit"), {
    label: "Hit rate", most: 1, format: percent, nothing: "no prompts in this time",
    series: [{ name: "served from cache", colour: "c3" }, { name: "expected by the router", colour: "c1" }],
  });
  charts.ttft = new Chart(byId("chart-ttft"), {
    label: "Time to first token", format: seconds, nothing: "no answers in this time",
    series: [{ name: "median", colour: "c1" }, { name: "p95", colour: "c2" }, { name: "p99", colour: "c4" }],
  });
  charts.rate = new Chart(byId("chart-rate"), {
    label: "Requests a second", stacked: true, format: (value) => number(value, value < 10 ? 1 : 0), nothing: "no requests in this time",
    series: [{ name: "answered", colour: "c3" }, { name: "4xx", colour: "c5" }, { name: "429", colour: "c2" }, { name: "5xx", colour: "c4" }, { name: "left", colour: "c6" }],
  });
}

function showCharts(told) {
  const { columns } = state;
  const at = columns.at ?? [];
  const to = told.router.now;
  const from = to - state.window;
  let first = at.findIndex((time) => time >= from);
  if (first < 0) first = at.length;
  const group = Math.max(1, Math.round(state.window / told.series.point_s / 180));
  const times = [];
  const groups = [];
  for (let i = first; i < at.length; i += group) {
    const end = Math.min(i + group, at.length);
    times.push(at[end - 1]);
    groups.push([i, end]);
  }
  const summed = (name) => groups.map(([a, b]) => sum(columns[name].slice(a, b)));
  const highest = (name) => groups.map(([a, b]) => {
    const values = columns[name].slice(a, b).filter((one) => one !== null);
    return values.length ? Math.max(...values) : null;
  });
  const middle = (name) => groups.map(([a, b]) => {
    const values = columns[name].slice(a, b).filter((one) => one !== null).sort((x, y) => x - y);
    return values.length ? values[Math.floor((values.length - 1) / 2)] : null;
  });
  const divided = (part, whole) => { const all = summed(whole); return summed(part).map((value, i) => ratio(value, all[i])); };
  const span = { times, from, to };
  if (at.length === 0) {
    for (const chart of Object.values(charts)) chart.set({ ...span, columns: [], every: told.series.point_s });
    return;
  }
  charts.hit.set({ ...span, columns: [divided("cached_tokens", "told_tokens"), divided("matched_tokens", "prompt_tokens")] });
  charts.ttft.set({ ...span, columns: [middle("ttft_p50_s"), highest("ttft_p95_s"), highest("ttft_p99_s")] });
  const every = group * told.series.point_s;
  const rate = (name) => summed(name).map((value) => value / every);
  charts.rate.set({ ...span, every, columns: ["answered", "refused", "limited", "failed", "left"].map(rate) });
}

const TIER_WORDS = { gpu: "workers' own caches", dram: "stores, shared memory", nvme: "stores, disk", redis: "shared" };
const TIER_COLOURS = { gpu: "c1", dram: "c3", nvme: "c5", redis: "c2" };

function showTiers(told) {
  const unknown = told.index.mode !== "embedded";
  say("tiers-note", unknown ? "" : stale() ? "as the index told it last" : "as the index tells it");
  if (told.tiers.length === 0) {
    const words = unknown ? "Only a router with an embedded index knows what holders keep." : "Nobody has told the index of any block yet.";
    byId("tiers").replaceChildren(el("p", { class: "empty-note" }, words));
    return;
  }
  byId("tiers").replaceChildren(...told.tiers.map((tier) => {
    const share = tier.bytes_max ? tier.bytes / tier.bytes_max : tier.blocks_max ? tier.blocks / tier.blocks_max : 0;
    const colour = TIER_COLOURS[tier.tier] ?? "c6";
    const room = tier.bytes_max ? `${bytes(tier.bytes)} of ${bytes(tier.bytes_max)}` : tier.bytes ? bytes(tier.bytes) : "size not told";
    return el("div", { class: "tier" },
      el("strong", {}, tier.tier),
      bar([[colour, share]], 100, `${tier.tier}: ${percent(share)} full`, "meter"),
      el("span", { class: "what" }, el("b", {}, plural(tier.blocks, "block")), " · ", room),
      el("span", { class: "more" },
        el("span", {}, `${plural(tier.holders, "holder")}, ${TIER_WORDS[tier.tier] ?? ""}`),
        tier.degraded ? el("span", { class: "tag", "data-level": "warning" }, `${number(tier.degraded)} DEGRADED`) : stale() ? el("span", { class: "tag", "data-level": "warning" }, "as last heard") : el("span", { class: "tag", "data-level": "good" }, "all EXACT")));
  }));
}

function showModels(told) {
  say("models-note", told.models_count > told.models.length ? `${told.models.length} of ${told.models_count}, those in trouble first` : "");
  if (told.models.length === 0) {
    byId("models").replaceChildren(el("p", { class: "empty-note" }, "No model is served."));
    return;
  }
  const head = ["Model", "Workers", "Routing", "Token counts that differed", "Promised hits that missed"];
  byId("models").replaceChildren(el("table", {},
    el("thead", {}, el("tr", {}, head.map((word, n) => el("th", { scope: "col", class: n === 1 || n > 2 ? "n" : null }, word)))),
    el("tbody", {}, told.models.map((model) => el("tr", {},
      el("td", { class: "name" }, model.name, model.is_adapter ? el("span", { class: "sub" }, "adapter") : null),
      el("td", { class: "n" }, `${number(model.eligible)} of ${number(model.workers)}`),
      el("td", { class: "cause" }, model.cause ? el("span", { class: "tag", "data-level": "warning" }, "DEGRADED") : el("span", { class: "tag", "data-level": "good" }, "EXACT"), model.cause ? el("span", { class: "sub" }, model.cause) : null),
      el("td", { class: "n" }, `${compact(model.token_mismatches)} of ${compact(model.responses)}`),
      el("td", { class: "n" }, compact(model.hit_mismatches)))))));
}

function showEvents(told) {
  say("events-note", told.events_count > state.events.length ? `last ${state.events.length} of ${number(told.events_count)}` : "");
  const list = byId("events");
  const key = `${state.events[0]?.number ?? 0}/${state.events.length}`;
  if (list.dataset.shown === key) return;
  list.dataset.shown = key;
  list.replaceChildren(...state.events.map((event) => el("li", {},
    el("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
    el("span", { class: "what" }, el("span", { class: "tag", "data-level": event.level }, event.kind), el("b", {}, event.subject), " ", event.detail ? el("span", { class: "detail" }, event.detail) : null))));
}

// ---- fleet

const STATE_LEVELS = { candidate: "good", draining: "info", busy: "warning", role: "info" };

function showFleet(told) {
  const fleet = state.fleet;
  fleet.count = told.count;
  const rows = told.rows.map((row) => el("tr", {},
    el("td", { class: "name" }, el("b", {}, row.dp_rank ? `${row.name}/${row.dp_rank}` : row.name), el("span", { class: "sub" }, [row.node, row.address].filter(Boolean).join(" · "))),
    el("td", { class: "name" }, row.kind === "shared" ? "shared Redis" : row.kind, row.models.length ? el("span", { class: "sub" }, row.models.slice(0, 3).join(", ")) : null),
    el("td", {}, row.kind === "worker" ? el("span", { class: "tag", "data-level": STATE_LEVELS[row.state] ?? "bad" }, row.state === "candidate" ? "takes requests" : row.state) : el("span", { class: "tag", "data-level": row.state === "candidate" ? "good" : "bad" }, row.state === "candidate" ? "present" : row.state), row.ramp !== undefined && row.ramp !== null && row.ramp < 1 ? el("span", { class: "sub" }, `slow start ${percent(row.ramp)}`) : null),
    el("td", { class: "cause" }, trust(row), row.cause ? el("span", { class: "sub" }, row.cause) : null),
    el("td", {}, el("div", { class: "holds" }, holds(row.tiers))),
    el("td", { class: "n" }, row.in_flight === undefined ? "" : number(row.in_flight)),
    el("td", { class: "n" }, row.waiting_tokens === undefined ? "" : compact(row.waiting_tokens)),
    el("td", { class: "n" }, row.prefill_tokens_per_s ? compact(row.prefill_tokens_per_s) : ""),
    el("td", { class: "n" }, row.heard_s === null ? "" : row.heard_s < 2 ? "now" : `${ago(row.heard_s)} ago`)));
  const searched = fleet.text || fleet.trouble;
  const nothing = el("tr", {}, el("td", { class: "empty", colspan: 9 }, searched ? "No holder fits." : "No worker, store or Redis is known yet."));
  byId("fleet").tBodies[0].replaceChildren(...(rows.length ? rows : [nothing]));
  const kinds = state.told?.fleet.kinds ?? {};
  const counted = Object.entries(kinds).map(([kind, count]) => (kind === "shared" ? `${number(count)} shared` : plural(count, kind)));
  say("fleet-note", counted.join(" · "));
  say("fleet-page", told.count ? `${number(told.offset + 1)}–${number(told.offset + told.rows.length)} of ${number(told.count)}` : "");
  byId("fleet-back").disabled = told.offset === 0;
  byId("fleet-next").disabled = told.offset + told.rows.length >= told.count;
}

/** Whether the index is silent, so that what it said of holders may be old. */
const stale = () => state.told?.index.trust === "degraded";

function trust(row) {
  if (row.trust === "exact" && stale()) return el("span", { class: "tag", "data-level": "warning" }, "was EXACT");
  if (row.trust === "exact") return el("span", { class: "tag", "data-level": "good" }, "EXACT");
  if (row.trust === "degraded") return el("span", { class: "tag", "data-level": "warning" }, "DEGRADED");
  return el("span", { class: "tag" }, "not in an index");
}

function holds(tiers) {
  const parts = Object.entries(tiers).map(([tier, held]) => el("span", { title: held.bytes_max ? `${bytes(held.bytes)} of ${bytes(held.bytes_max)}` : null },
    el("span", { class: `key ${TIER_COLOURS[tier] ?? "c6"}`, "aria-hidden": "true" }), `${tier} ${compact(held.blocks)}`, held.bytes ? el("span", { class: "muted" }, ` ${bytes(held.bytes)}`) : null));
  return parts.length ? parts : ["nothing"];
}

// ---- requests

const statusLevel = (status) => (status === 0 ? "info" : status < 400 ? "good" : status === 429 ? "warning" : status >= 500 ? "bad" : "warning");

function matched(row) {
  const parts = Object.entries(row.matched_tokens ?? {}).filter(([, count]) => count > 0);
  return parts.map(([tier, count]) => `${tier} ${compact(count)}`).join(", ");
}

function whyShort(row) {
  if (!row.policy) return row.error || "";
  if (row.policy !== "cache_aware") return `policy ${row.policy}`;
  if (row.knowledge === "fresh") return row.matched_count ? "least cost, with its prefix" : "least cost, no prefix anywhere";
  if (row.knowledge === "stale") return "least cost by a stale picture";
  if (row.knowledge === "hashed") return "hashed on the first blocks";
  return "by load alone";
}

function showRequests(told) {
  const list = state.requests;
  const rows = told.rows.map((row) => {
    const open = () => openWhy(row.number);
    const reused = row.cached_tokens ?? null;
    const line = el("tr", { class: "click" },
      el("td", { class: "nowrap" }, clock(row.at)),
      el("td", { class: "name" }, el("button", { type: "button", class: "link", onclick: (event) => { event.stopPropagation(); open(); } }, row.id), el("span", { class: "sub" }, [row.model, row.api, row.tenant].filter(Boolean).join(" · "))),
      el("td", {}, el("span", { class: "tag", "data-level": statusLevel(row.status) }, row.status ? String(row.status) : "client left"), row.error ? el("span", { class: "sub" }, row.error) : null),
      el("td", { class: "name" }, row.worker || "nowhere", row.attempts > 1 ? el("span", { class: "sub" }, `after ${plural(row.attempts, "attempt")}`) : null),
      el("td", { class: "cause" }, whyShort(row), row.cause ? el("span", { class: "sub" }, row.cause) : null),
      el("td", { class: "n" }, compact(row.prompt_tokens)),
      el("td", { class: "nowrap after" }, reused === null ? (row.matched_count ? `expected ${compact(row.matched_count)}` : "–") : `${compact(reused)} (${percent(ratio(reused, row.prompt_tokens))})`, el("span", { class: "sub" }, matched(row))),
      el("td", { class: "n" }, seconds(row.ttft_s)),
      el("td", { class: "n" }, seconds(row.total_s)));
    line.addEventListener("click", open);
    return line;
  });
  const focused = document.activeElement?.closest("#requests tbody") ? document.activeElement.textContent : null;
  const searched = list.text || list.errors;
  const nothing = el("tr", {}, el("td", { class: "empty", colspan: 9 }, searched ? "No kept request fits." : "No request has ended yet. Send one to the router's public port, and it appears here."));
  const body = byId("requests").tBodies[0];
  body.replaceChildren(...(rows.length ? rows : [nothing]));
  if (focused) [...body.querySelectorAll("button.link")].find((one) => one.textContent === focused)?.focus({ preventScroll: true });
  say("requests-note", told.count ? `${number(told.kept)} of ${number(told.count)} are kept` : "");
  say("requests-page", list.before ? "older ones; not refreshed" : "newest first");
  byId("requests-back").disabled = list.before === 0;
  byId("requests-next").disabled = told.rows.length < REQUEST_ROWS;
}

const COSTS = [["queue_s", "queue", "c2"], ["load_s", "load", "c3"], ["compute_s", "compute", "c1"], ["decode_s", "decode", "c5"], ["adapter_s", "adapter", "c6"]];

function sentence(row) {
  if (!row.worker) return `It was answered by the router itself: ${row.error || `status ${row.status}`}.`;
  const held = matched(row);
  const had = held ? `which was expected to have ${compact(row.matched_count)} of its ${compact(row.prompt_tokens)} prompt tokens (${held})` : `which had none of its ${compact(row.prompt_tokens)} prompt tokens`;
  const start = `It went to ${row.worker}, ${had}. `;
  if (row.policy !== "cache_aware") return `${start}The policy ${row.policy} does not compare costs.`;
  if (row.knowledge === "hashed") return `${start}Prompts are hashed on their first blocks, because ${row.cause}.`;
  const tied = (row.candidates ?? []).filter((one) => one.tied).length;
  const draw = tied > 1 ? ` ${tied} were so near to the least that the rank of their common prefix decided.` : "";
  const age = { fresh: "", load_only: ` Its prefix did not count: ${row.cause}.` }[row.knowledge] ?? ` The picture was not fresh: ${row.cause}.`;
  return `${start}It had the least predicted cost: ${seconds(row.predicted_ttft_s)} to the first token; it took ${seconds(row.ttft_s)}.${draw}${age}`;
}

async function openWhy(n) {
  let row;
  try {
    row = await ask("request", { number: n });
  } catch (error) {
    row = null;
  }
  const dialog = byId("why");
  say("why-title", row ? `Why request ${row.id} went there` : "Request");
  byId("why-body").replaceChildren(...(row ? details(row) : [el("p", {}, "This request is not kept any more, or the router does not answer.")]));
  if (!dialog.open) dialog.showModal();
}

function details(row) {
  const facts = [
    ["Status", row.status ? `${row.status}${row.error ? `, ${row.error}` : ""}` : "the client left"],
    ["Policy and knowledge", row.policy ? `${row.policy}, ${row.knowledge}` : "–"],
    ["Prompt tokens", compact(row.prompt_tokens)],
    ["Reused, expected and told", `${compact(row.reused_tokens ?? null)} and ${compact(row.cached_tokens)}`],
    ["First token, predicted and seen", `${seconds(row.predicted_ttft_s)} and ${seconds(row.ttft_s)}`],
    ["Whole answer", seconds(row.total_s)],
    ["Decided in", seconds(row.decided_in_s)],
    ["Attempts, resumptions", `${row.attempts}, ${row.resumed}`],
    ["Model, tenant", [row.model, row.tenant].filter(Boolean).join(", ") || "–"],
  ];
  const parts = [el("p", { class: "sentence" }, sentence(row)), el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))];
  if (row.candidates.length === 0) {
    parts.push(el("p", { class: "muted" }, "The costs of this decision are not kept (any more)."));
    return parts;
  }
  const most = Math.max(...row.candidates.map((one) => sum(COSTS.map(([name]) => one[name]))), 1e-9);
  const head = ["Candidate", "Had", ...COSTS.slice(0, 4).map(([, word]) => word), "First token", "Cost", ""];
  parts.push(
    el("div", { class: "legend" }, COSTS.map(([, word, colour]) => el("span", {}, el("span", { class: `key ${colour}`, "aria-hidden": "true" }), word))),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" }, el("table", { id: "candidates" },
      el("thead", {}, el("tr", {}, head.map((word, i) => el("th", { scope: "col", class: i > 1 && i < 8 ? "n" : null }, word)))),
      el("tbody", {}, row.candidates.map((one) => el("tr", { class: one.chosen ? "chosen" : null },
        el("td", { class: "name" }, el("b", {}, one.dp_rank ? `${one.worker}/${one.dp_rank}` : one.worker), el("span", { class: "sub" }, one.chosen ? (one.tied && row.candidates.filter((other) => other.tied).length > 1 ? "chosen among near-ties" : "chosen") : one.tied ? "near-tie" : one.state === "candidate" ? "" : "took no part")),
        el("td", {}, matched(one) || "nothing"),
        ...COSTS.slice(0, 4).map(([name]) => el("td", { class: "n" }, seconds(one[name]))),
        el("td", { class: "n" }, seconds(one.ttft_s)),
        el("td", { class: "n" }, one.total_s === null ? "–" : seconds(one.total_s)),
        el("td", {}, bar(COSTS.map(([name, , colour]) => [colour, one[name] / most]), 150, `cost of ${one.worker}`, "cost"))))))),
    el("p", { class: "small" }, row.candidates_count > row.candidates.length ? `The best ${row.candidates.length} of ${number(row.candidates_count)} workers. ` : "", "Cost is the predicted time to the first token and the work that this request takes from others."),
  );
  return parts;
}

// ---- controls

function later(action, delay = 250) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(action, delay); };
}

function quietly(action) {
  return () => { action().catch(() => { state.failures += 1; state.lostAt ??= Date.now(); show(); }); };
}

function bind() {
  byId("pause").addEventListener("click", (event) => {
    state.paused = !state.paused;
    event.target.setAttribute("aria-pressed", String(state.paused));
    event.target.textContent = state.paused ? "Go on" : "Pause";
    if (state.paused) show(); else refresh();
  });
  const themes = ["auto", "light", "dark"];
  const theme = byId("theme");
  const apply = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
    localStorage.setItem("kvtier-theme", name);
  };
  const kept = localStorage.getItem("kvtier-theme");
  apply(themes.includes(kept) ? kept : "auto");
  theme.addEventListener("click", () => apply(themes[(themes.indexOf(theme.textContent.slice(7)) + 1) % themes.length]));
  for (const button of document.querySelectorAll("[data-window]")) {
    button.addEventListener("click", () => {
      state.window = Number(button.dataset.window);
      for (const other of document.querySelectorAll("[data-window]")) other.setAttribute("aria-pressed", String(other === button));
      if (state.told) showCharts(state.told);
    });
  }
  const fleet = state.fleet;
  const fleetAgain = quietly(refreshFleet);
  const searchFleet = later(() => { fleet.text = byId("fleet-text").value.trim(); fleet.offset = 0; fleetAgain(); });
  byId("fleet-text").addEventListener("input", searchFleet);
  byId("fleet-trouble").addEventListener("change", (event) => { fleet.trouble = event.target.checked; fleet.offset = 0; fleetAgain(); });
  byId("fleet-back").addEventListener("click", () => { fleet.offset = Math.max(0, fleet.offset - FLEET_ROWS); fleetAgain(); });
  byId("fleet-next").addEventListener("click", () => { fleet.offset += FLEET_ROWS; fleetAgain(); });
  const list = state.requests;
  const requestsAgain = quietly(refreshRequests);
  const searchRequests = later(() => { list.text = byId("requests-text").value.trim(); list.before = 0; requestsAgain(); });
  byId("requests-text").addEventListener("input", searchRequests);
  byId("requests-errors").addEventListener("change", (event) => { list.errors = event.target.checked; list.before = 0; requestsAgain(); });
  byId("requests-back").addEventListener("click", () => { list.before = 0; requestsAgain(); });
  byId("requests-next").addEventListener("click", () => { const last = list.rows.at(-1); if (last) { list.before = last.number; requestsAgain(); } });
  byId("why-close").addEventListener("click", () => byId("why").close());
  byId("why").addEventListener("click", (event) => { if (event.target === byId("why")) byId("why").close(); });
  document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") refresh(); });
}

async function run() {
  for (;;) {
    await refresh();
    await new Promise((resolve) => { setTimeout(resolve, EVERY_MS); });
  }
}

makeCharts();
bind();
run();
