// Reads api/status every few seconds and shows it. Text from the store (names of models, requests, problems) may come
// from anybody: it becomes text nodes, never markup.

import { chart, element } from "./charts.js";

const REFRESH_MS = 5000;
const TIMEOUT_MS = 8000;
const STALE_MS = 20000;
const SILENT_S = 30;
const LEAST_S = 300;
//: Reasons of misses that have a colour of their own; the others share the last one.
const REASONS = ["absent", "window", "computing_is_faster", "deadline", "capacity", "unavailable", "corrupt"];

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const state = { report: null, received: null, problem: "", window: 3600, turn: 0 };

// -- how numbers are written, as cache-admin writes them ----------------------------------------------------------

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(bytes) < 1024) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

function count(number, noun) {
  return `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function percent(part, all) {
  return all > 0 ? `${((100 * part) / all).toFixed(1)} %` : "–";
}

function short(number) {
  for (const [least, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (number >= least) return `${+(number / (unit === "k" ? 1e3 : least)).toPrecision(3)}${unit}`;
  }
  return whole.format(+number.toFixed(2));
}

function duration(seconds) {
  for (const [length, unit] of [[86400, "days"], [3600, "h"], [60, "min"]]) {
    if (seconds >= length) return `${(seconds / length).toFixed(1)} ${unit}`;
  }
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

function age(seconds) {
  const past = Math.max(0, Math.round(seconds));
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60]]) {
    if (past >= length) return `${Math.floor(past / length)}${unit}`;
  }
  return `${past}s`;
}

function clock(seconds, exact = true) {
  const then = new Date(seconds * 1000);
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: exact ? "2-digit" : undefined, hour12: false });
  return then.toDateString() === new Date().toDateString() || !exact ? time : `${then.toLocaleDateString()} ${time}`;
}

// -- tables ---------------------------------------------------------------------------------------------------------

/**
 * Columns: [title, row => value, classes, raw?]. A value is text or a node; `raw` gives the number behind it. Narrow
 * screens leave out the class `minor`, and show rows of a table with the class `cards` as one card each.
 */
function table(id, columns, rows, nothing) {
  const found = $(id);
  const cells = rows.map((row) => columns.map(([, value, , raw]) => [value(row), raw ? raw(row) : null]));
  const key = JSON.stringify([cells.map((row) => row.map(([value, raw]) => [value.outerHTML ?? value, raw])), nothing]);
  if (found.key === key) return; // what somebody has selected stays selected
  found.key = key;
  const head = columns.map(([title, , kind]) => element("th", { scope: "col", className: kind ?? "", textContent: title }));
  const body = cells.map((row) =>
    element("tr", {}, ...row.map(([value, raw], i) => {
      const [title, , kind] = columns[i];
      const cell = element("td", { className: kind ?? "", "data-label": title });
      cell.classList.toggle("empty", value === "–");
      cell.append(raw === null ? value : element("data", { value: String(raw) }, value));
      return cell;
    })),
  );
  const none = element("tr", {}, element("td", { className: "none", colSpan: columns.length, textContent: nothing }));
  found.replaceChildren(
    element("thead", { hidden: !body.length }, element("tr", {}, ...head)),
    element("tbody", {}, ...(body.length ? body : [none])),
  );
}

function bar(part, all) {
  const share = all > 0 ? part / all : 0;
  const filled = element("span");
  filled.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  const kind = share > 1 ? "bar bad" : "bar";
  return element("div", { className: kind, role: "img", "aria-label": `${percent(part, all)} of ${size(all)}` }, filled);
}

function figure(id, text, raw) {
  $(id).replaceChildren(raw === undefined ? text : element("data", { value: String(raw) }, text));
}

// -- the report -----------------------------------------------------------------------------------------------------

function show(report) {
  const { status } = report;
  const known = status.total !== null;
  const points = report.history.points;
  const sum = (of) => points.reduce((total, one) => total + of(one), 0);
  const [asked, served] = [sum((one) => one.asked), sum((one) => one.served)];
  const since = report.history.since_s > report.at_s - report.history.window_s ? `since ${clock(report.history.since_s)}` : `in the last ${span(report.history.window_s)}`;
  figure("tile-served", percent(served, asked), asked ? served / asked : "");
  figure("tile-served-of", asked ? `of ${count(asked, "block")} asked for ${since}` : `no block was asked for ${since}`);
  const total = status.total ?? { segments: 0, blocks: 0, stored_bytes: 0 };
  figure("tile-stored", known ? size(total.stored_bytes) : "–", known ? total.stored_bytes : "");
  figure("tile-stored-of", `of ${size(status.capacity_bytes)}${known ? `, ${percent(total.stored_bytes, status.capacity_bytes)}` : ""}`);
  $("tile-stored-bar").replaceWith(Object.assign(bar(total.stored_bytes, status.capacity_bytes), { id: "tile-stored-bar" }));
  figure("tile-blocks", known ? whole.format(total.blocks) : "–", known ? total.blocks : "");
  const namespaces = status.namespaces.length + report.others;
  figure("tile-blocks-of", known ? `in ${count(total.segments, "segment")}, ${count(namespaces, "namespace")}` : "");
  figure("tile-cost", report.cost_s ? duration(report.cost_s) : "–", known ? report.cost_s : "");
  const evicted = sum((one) => one.evicted_bytes);
  figure("tile-evicted", size(evicted), evicted);
  figure("tile-evicted-of", since);
  attention(report);
  parts(report);
  overTime(report);
  lists(report);
  janitor(report);
  figure("about", `kvstore ${report.version}, serving since ${clock(report.started_s)}`);
}

function span(seconds) {
  return { 900: "15 minutes", 3600: "hour", 21600: "6 hours", 86400: "day" }[seconds] ?? duration(seconds);
}

function attention(report) {
  const lines = [];
  const { status } = report;
  for (const [, name, one, { since_s: since }] of backends(report)) {
    if (one.state === "unreachable" && since !== null) lines.push(["bad", `${name} does not answer: ${one.problem}`]);
    // A fast tier is on the nodes with engines, and this server may run on another.
    else if (one.state === "absent" && one !== status.fast) lines.push(["warning", `${name} is not there yet: ${one.problem || "nothing has been stored"}`]);
  }
  if (report.looked_s !== null && report.at_s - report.looked_s > SILENT_S) {
    lines.push(["bad", `What the index holds is as of ${clock(report.looked_s)}.`]);
  }
  for (const quota of status.quotas) {
    if (quota.state === "over") {
      lines.push(["warning", `Over quota: ${quota.scope} holds ${size(quota.used_bytes)} of ${size(quota.quota_bytes)}.`]);
    }
  }
  for (const step of report.janitor?.steps ?? []) {
    if (step.failing) lines.push(["warning", `The janitor's step "${step.step}" fails: ${step.problem}`]);
  }
  $("attention").replaceChildren(...lines.map(([kind, text]) => element("li", { className: kind, textContent: text })));
  const worst = ["bad", "warning"].find((kind) => lines.some(([of]) => of === kind));
  const unknown = report.looked_s === null && !worst;
  pill(worst ?? (unknown ? "" : "ok"), worst ? { bad: "trouble", warning: "attention" }[worst] : unknown ? "starting" : "all well");
}

function pill(kind, text) {
  $("state").className = `pill ${kind}`;
  if ($("state").textContent !== text) $("state").textContent = text;
}

/** The parts that may fail to answer: title, name, state, and since when: null if it was not asked yet. */
function backends(report) {
  const { index, payloads, fast } = report.status;
  const all = [["Index", "The index", index, report.index], ["Payloads", "The payload store", payloads, report.payloads]];
  return fast ? [...all, ["Fast tier of this node", "The fast tier", fast, {}]] : all;
}

function parts(report) {
  const { fast } = report.status;
  const items = backends(report).map(([title, , one, { since_s: since }]) => {
    const kind = { ok: "ok", absent: one === fast ? "" : "warning", unreachable: "bad" }[one.state];
    return since === null
      ? part(title, "", "not asked yet", one.url, "")
      : part(title, kind, one.state, one.url, since ? `since ${clock(since)}` : "");
  });
  const janitor = report.janitor;
  const elsewhere = report.status.janitor ? "at work elsewhere" : "none at work: engines evict when they save";
  if (!janitor) items.push(part("Janitor", "", report.status.janitor ? "elsewhere" : "none", "this server only watches", elsewhere));
  else items.push(part("Janitor", "ok", "at work", "", `${count(janitor.rounds, "round")} since ${clock(report.started_s)}`));
  $("parts").replaceChildren(...items);
}

function part(name, kind, text, where, since) {
  return element("li", {},
    element("p", {}, element("b", { textContent: name }), element("span", { className: `pill ${kind}`, textContent: text })),
    element("p", { className: "hint", textContent: [where, since].filter(Boolean).join(", ") }));
}

function overTime(report) {
  const { points, step_s: step, window_s: window } = report.history;
  const x = points.map((one) => one.at_s + step / 2);
  // While the server is young the axis is shorter, so that its points are not squeezed into a corner.
  const from = Math.max(report.at_s - window, Math.min(report.history.since_s, report.at_s - LEAST_S));
  const common = {
    x, width: step, gap: 1.5 * step, xFrom: from, xTo: report.at_s, xTicks: times(from, report.at_s - from),
    xText: (at) => `${clock(at - step / 2)}–${clock(at + step / 2)}`, xName: "Time",
    nothing: "Nothing has been seen yet.",
  };
  const [asked, served] = ["asked", "served"].map((name) => points.reduce((total, one) => total + one[name], 0));
  chart($("chart-ratio"), {
    ...common, kind: "area", yTicks: [0, 25, 50, 75, 100], yText: (value) => `${+value.toFixed(1)} %`,
    series: [{ name: "served", color: 0, values: points.map((one) => (one.asked ? (100 * one.served) / one.asked : null)) }],
    label: `Share of blocks served over the last ${span(window)}: ${percent(served, asked)} of ${count(asked, "block")}.`,
  });
  const seen = new Set(points.flatMap((one) => Object.keys(one.misses)));
  const series = REASONS.filter((reason) => seen.has(reason)).map((reason) => ({
    name: reason.replaceAll("_", " "), color: REASONS.indexOf(reason), values: points.map((one) => one.misses[reason] ?? 0),
  }));
  const rest = [...seen].filter((reason) => !REASONS.includes(reason));
  if (rest.length) {
    const sums = points.map((one) => rest.reduce((total, reason) => total + (one.misses[reason] ?? 0), 0));
    series.push({ name: rest.length === 1 ? rest[0].replaceAll("_", " ") : "other reasons", color: REASONS.length, values: sums });
  }
  const missed = series.map((one) => `${one.name} ${whole.format(one.values.reduce((a, b) => a + b, 0))}`);
  chart($("chart-missed"), {
    ...common, kind: "bars", yText: short, series, x: series.length ? x : [], nothing: x.length ? "Nothing was missed." : common.nothing,
    label: `Blocks missed by reason over the last ${span(window)}: ${missed.join(", ") || "none"}.`,
  });
  const stored = points.map((one) => one.stored_bytes);
  const near = stored.some((bytes) => bytes > report.status.capacity_bytes / 3);
  chart($("chart-stored"), {
    ...common, kind: "area", binary: true, yText: size, series: [{ name: "stored", color: 2, values: stored }],
    limit: near ? { value: report.status.capacity_bytes, name: "capacity" } : null,
    label: `Bytes stored over the last ${span(window)}: now ${size(stored.at(-1) ?? 0)} of ${size(report.status.capacity_bytes)}.`,
  });
}

function times(from, window) {
  const every = [60, 120, 300, 600, 1800, 3600, 7200, 10800, 21600].find((length) => window / length <= 8) ?? 21600;
  // Ticks are at full hours of the reader's time zone.
  const shift = new Date().getTimezoneOffset() * 60;
  const first = Math.ceil((from - shift) / every) * every + shift;
  return Array.from({ length: Math.floor((from + window - first) / every) + 1 }, (_, i) => {
    const at = first + i * every;
    return [at, clock(at, false)];
  });
}

function lists(report) {
  const now = report.at_s;
  const { status, top } = report;
  const models = new Map(status.namespaces.map((one) => [one.id, one.model]));
  const traffic = new Map(report.stats.namespaces.map((one) => [one.id, one]));
  const named = (id) => element("span", {}, element("bdi", { textContent: models.get(id) || "namespace" }), element("span", { className: "minor", textContent: ` (${id.slice(0, 8)})` }));
  const rows = status.namespaces.map((one) => ({ ...one, limit: one.quota_bytes ?? status.capacity_bytes }));
  if (report.others) {
    const rest = (all, of) => all - rows.reduce((sum, one) => sum + of(one), 0);
    const usage = Object.fromEntries(Object.entries(status.total).map(([key, all]) => [key, rest(all, (one) => one.usage[key])]));
    const upkeep = { pinned_bytes: rest(status.upkeep.pinned_bytes, (one) => one.upkeep.pinned_bytes) };
    rows.push({
      id: "", model: count(report.others, "other"), kind: "", tenant: "", usage, upkeep, quota_bytes: null, seen_s: null,
      limit: status.capacity_bytes, cost_s: rest(report.cost_s, (one) => one.cost_s),
    });
  }
  table("namespaces", [
    ["Model", (one) => one.model || "(no name)", "text"],
    ["Namespace", (one) => one.id.slice(0, 8) || "–", "id"],
    ["Kind", (one) => one.kind || "–"],
    ["Tenant", (one) => one.tenant || "–", "text"],
    ["Stored", (one) => size(one.usage.stored_bytes), "right", (one) => one.usage.stored_bytes],
    ["Full", (one) => bar(one.usage.stored_bytes, one.limit)],
    ["Quota", (one) => (one.quota_bytes === null ? "–" : size(one.quota_bytes)), "right"],
    ["Segments", (one) => whole.format(one.usage.segments), "right", (one) => one.usage.segments],
    ["Blocks", (one) => whole.format(one.usage.blocks), "right", (one) => one.usage.blocks],
    ["Pinned", (one) => (one.upkeep.pinned_bytes ? size(one.upkeep.pinned_bytes) : "–"), "right", (one) => one.upkeep.pinned_bytes],
    ["Served", (one) => (traffic.has(one.id) ? percent(traffic.get(one.id).served, traffic.get(one.id).asked) : "–"), "right"],
    ["To compute", (one) => (one.cost_s ? duration(one.cost_s) : "–"), "right"],
    ["Opened", (one) => (one.seen_s ? `${age(now - one.seen_s)} ago` : "–"), "right"],
  ], rows, report.looked_s === null ? "The index has not answered yet." : "No engine has registered with this index yet.");
  // The store's own is the last.
  const tiers = status.quotas.toReversed().map((one) => ({ name: one.scope === "store" ? "shared store" : one.scope, used: one.used_bytes, most: one.quota_bytes, more: "" }));
  if (status.fast) {
    const dirty = status.fast.dirty_bytes ? `${size(status.fast.dirty_bytes)} not uploaded yet` : "";
    tiers.unshift({ name: "fast tier of this node", used: status.fast.used_bytes ?? 0, most: status.fast.capacity_bytes, more: dirty });
  }
  table("tiers", [
    ["What", (one) => one.name, "text"],
    ["Stored", (one) => size(one.used), "right", (one) => one.used],
    ["Of", (one) => size(one.most), "right", (one) => one.most],
    ["Full", (one) => bar(one.used, one.most)],
    ["", (one) => one.more || ""],
  ].filter(([title]) => title || tiers.some((one) => one.more)), tiers, "The index has not answered yet.");
  sessions(report, named);
  const prefix = [
    ["Segment", (one) => one.segment, "id whole minor"],
    ["Namespace", (one) => named(one.namespace), "text"],
    ["Blocks", (one) => `${one.depth}–${one.depth + one.blocks - 1}`, "right"],
    ["Size", (one) => size(one.stored_bytes), "right minor", (one) => one.stored_bytes],
    // Used in minute 1 of all time: by a session alone that has ended.
    ["Used", (one) => (one.last_use_s <= 60 ? "ended" : `${age(now - one.last_use_s)} ago`), "right"],
  ];
  table("hottest", [["Minutes", (one) => String(+one.minutes.toFixed(1)), "right", (one) => one.minutes], ...prefix], top.hottest, "Nothing has been loaded lately.");
  table("coldest", prefix, top.coldest, "There is nothing to evict.");
  const rules = Object.entries(report.evictions_by_rule).map(([rule, number]) => `${rule.replaceAll("_", " ")} ${whole.format(number)}`);
  figure("rules", `Since ${clock(report.started_s)}: ${rules.join(", ") || "none"}.`);
  table("evictions", [
    ["When", (one) => clock(one.at_s), "right"],
    ["Rule", (one) => one.rule.replaceAll("_", " ")],
    ["Segment", (one) => one.segment ?? "all of it", "id whole minor"],
    ["Namespace", (one) => named(one.namespace), "text"],
    ["Blocks", (one) => (one.segment ? `${one.depth}–${one.depth + one.blocks - 1}` : "–"), "right minor"],
    ["Size", (one) => size(one.stored_bytes), "right", (one) => one.stored_bytes],
  ], report.events.events.toReversed().slice(0, 20), "Nothing has been evicted.");
  table("faults", [
    ["When", (one) => clock(one.at_s), "right"],
    ["Where", (one) => one.where],
    ["What", (one) => one.problem, "text"],
    ["Namespace", (one) => (one.namespace ? named(one.namespace) : "–"), "text minor"],
    ["Segment or request", (one) => one.subject || "–", "id minor"],
  ], report.faults.slice(0, 20), "None.");
}

function sessions(report, named) {
  const { live, retained, ended, retained_bytes: held, sessions: largest } = report.sessions;
  const all = live + retained + ended;
  const states = [[live, "live"], [retained, "retained"], [ended, "ended"]].map(([number, name]) => `${whole.format(number)} ${name}`);
  const so = report.sessions_read_s === null && all ? " met so far" : "";
  figure("sessions-says", `${count(all, "session")}${so}: ${states.join(", ")}. ${size(held)} retained of ${size(report.retainable_bytes)} that may be.`);
  table("sessions", [
    ["Session", (one) => one.session.slice(0, 12), "id"],
    ["Namespace", (one) => named(one.namespace), "text"],
    ["State", (one) => one.state],
    ["Until", (one) => (one.until_s ? clock(one.until_s) : "–"), "right"],
    ["Priority", (one) => one.priority, "minor"],
    ["Used", (one) => `${age(report.at_s - one.last_use_s)} ago`, "right minor"],
    ["Segments", (one) => whole.format(one.segments), "right", (one) => one.segments],
    ["Alone uses", (one) => size(one.stored_bytes), "right", (one) => one.stored_bytes],
  ], largest, "No request has named its session lately.");
}

function janitor(report) {
  const one = report.janitor;
  $("janitor").hidden = !one;
  if (!one) return;
  const round = one.last_round_s === null ? "no round yet" : `${count(one.rounds, "round")}, the last ${age(report.at_s - one.last_round_s)} ago in ${duration(one.last_round_seconds ?? 0)}`;
  const scrub = one.scrub;
  const read = scrub.payloads ? `; ${count(scrub.payloads, "payload")} (${size(scrub.read_bytes)}) read and verified, ${whole.format(scrub.bad)} bad` : "";
  figure("janitor-says", `${round}${read}.`);
  table("steps", [
    ["Step", (step) => step.step],
    ["Runs", (step) => whole.format(step.runs), "right", (step) => step.runs],
    ["Done", (step) => whole.format(step.done), "right", (step) => step.done],
    ["Failures", (step) => whole.format(step.failures), "right", (step) => step.failures],
    ["Time", (step) => duration(step.seconds), "right minor"],
    ["Last", (step) => (step.last_run_s ? `${age(report.at_s - step.last_run_s)} ago` : "–"), "right minor"],
    ["Problem", (step) => step.problem || "–", "text minor"],
  ], one.steps, "");
}

// -- the loop -------------------------------------------------------------------------------------------------------

async function refresh() {
  const turn = ++state.turn;
  try {
    const answer = await fetch(`api/status?window_s=${state.window}`, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    const report = await answer.json();
    if (turn !== state.turn) return; // another window was chosen meanwhile
    Object.assign(state, { report, received: Date.now(), problem: "" });
    show(report);
    document.body.classList.remove("loading");
  } catch (error) {
    if (turn === state.turn) state.problem = error.name === "TimeoutError" ? "it takes too long" : error.message;
  }
  staleness();
}

function staleness() {
  const old = state.received === null ? null : Date.now() - state.received;
  const stale = state.problem !== "" || (old !== null && old > STALE_MS);
  document.body.classList.toggle("stale", stale);
  $("stale").hidden = !stale;
  if (stale) {
    const text = old === null ? "This server does not answer; it is asked again every few seconds." : `This server does not answer. What you see is as of ${clock(state.received / 1000)}.`;
    if ($("stale").textContent !== text) $("stale").textContent = text;
    pill("bad", "no answer");
  }
  $("updated").textContent = old === null ? "" : `updated ${age(old / 1000)} ago`;
}

function choose(seconds) {
  const offered = [...$("window").options].map((option) => Number(option.value));
  state.window = offered.includes(seconds) ? seconds : 3600;
  $("window").value = String(state.window);
}

$("window").addEventListener("change", () => {
  choose(Number($("window").value));
  window.history.replaceState(null, "", `#${state.window}`);
  refresh();
});


choose(Number(location.hash.slice(1)));
refresh();
setInterval(staleness, 1000);
setInterval(() => {
  if (!document.hidden) refresh();
}, REFRESH_MS);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
