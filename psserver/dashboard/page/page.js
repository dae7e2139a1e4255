"use strict";
// Shows what /api/view returns, once a second. Every text goes in as text, never as HTML.
const state = { rows: {}, events: [], last: 0, view: null, job: null, chosen: false, failed: 0 };
const SVG = "http://www.w3.org/2000/svg";
const ROWS_MAX = 3000;
const JOBS_MAX = 12; // Buttons; psserver jobs lists all.
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  fill(made, attributes, children);
  return made;
}
function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  fill(made, attributes, children);
  return made;
}
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
}

// ----- numbers for people

function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return (value / 1e9).toFixed(2) + "G";
  if (value >= 1e6) return (value / 1e6).toFixed(2) + "M";
  if (value >= 1e5) return (value / 1e3).toFixed(0) + "k";
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toPrecision(3);
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return (value / size).toFixed(value >= 100 * size ? 0 : 1) + " " + unit;
  return value.toFixed(0) + " B";
}
function time(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (value >= size) return (value / size).toFixed(1) + " " + unit;
  return value < 1 ? (value * 1000).toFixed(0) + " ms" : value.toFixed(value < 10 ? 2 : 0) + " s";
}
const loss = (value) => (value === null || value === undefined ? "–" : value.toPrecision(4));
const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(1) + "×");
const share = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(0) + " %");
const clock = (at) => new Date(1000 * at).toTimeString().slice(0, 8);

// ----- the view

async function poll() {
  try {
    const url = new URL("api/view?since=" + state.last, location.origin + location.pathname);
    const answer = await fetch(url);
    if (!answer.ok) throw new Error("HTTP " + answer.status);
    take(await answer.json());
    state.failed = 0;
  } catch (problem) {
    state.failed += 1;
  }
  show();
}

function take(view) {
  if (view.now_s < state.last) { state.rows = {}; state.events = []; } // The dashboard is another one.
  for (const [job, rows] of Object.entries(view.rows)) {
    const known = (state.rows[job] ||= []);
    known.push(...rows);
    if (known.length > ROWS_MAX) known.splice(0, known.length - ROWS_MAX);
  }
  state.events.push(...view.events);
  state.events.splice(0, Math.max(0, state.events.length - 300));
  state.view = view;
  state.last = view.now_s;
}

function show() {
  const { view } = state;
  showAlive(view);
  if (!view || !view.status) return;
  const { status } = view;
  byId("cluster").textContent = "cluster " + status.cluster + ", " + status.version;
  showJobs(status.jobs);
  const job = status.jobs.find((one) => one.name === state.job);
  byId("none").hidden = Boolean(job);
  document.title = job ? job.name + " · step " + job.step : "Paceline";
  showShards(status, view);
  showEvents();
  const rows = (job && state.rows[job.name]) || [];
  showTiles(job, rows, view);
  showCharts(job, rows, view);
  showWorkers(job);
  showWaits(job);
  showTables(job);
}

function showAlive(view) {
  const pill = byId("alive");
  let [text, kind] = ["live", "good"];
  if (state.failed) [text, kind] = ["the dashboard does not answer", "bad"];
  else if (!view || !view.status) [text, kind] = ["no shard answers", "bad"];
  else if (!view.status.shards.length) [text, kind] = ["no shard answers since " + clock(view.answered_s), "bad"];
  else if (view.status.silent.length) [text, kind] = [view.status.silent.length + " of " + (view.status.shards.length + view.status.silent.length) + " shards silent", "bad"];
  pill.textContent = text;
  pill.className = "pill " + kind;
}

// Jobs come with the live ones first, then the newest.
function showJobs(jobs) {
  const current = jobs.find((job) => job.name === state.job);
  if (!current || (!state.chosen && current.state !== "live")) state.job = jobs.length ? jobs[0].name : null;
  const shown = jobs.filter((job, place) => place < JOBS_MAX || job.name === state.job);
  const buttons = shown.map((job) => {
    const button = make("button", { type: "button", "aria-pressed": job.name === state.job, title: job.name + ", " + job.state }, job.name);
    button.addEventListener("click", () => { state.job = job.name; state.chosen = true; show(); });
    return button;
  });
  const more = jobs.length - shown.length;
  byId("jobs").replaceChildren(...buttons, ...(more ? [make("small", { class: "dim" }, "and " + more + " more")] : []));
}

// Mean of a column over the newest rows that have one.
function recent(rows, column, seconds = 10) {
  const index = state.view.columns.indexOf(column);
  const begin = rows.length ? rows[rows.length - 1][0] - seconds : 0;
  const values = rows.filter((row) => row[0] > begin && row[index] !== null).map((row) => row[index]);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

function tile(key, label, value, text, more = "", kind = "") {
  const number = make("b", { "data-key": key, "data-value": value ?? "", class: kind }, text);
  return make("div", { class: "tile" }, make("span", {}, label), number, make("small", { title: more }, more));
}

function showTiles(job, rows) {
  if (!job) return byId("tiles").replaceChildren();
  const live = job.workers.filter((worker) => worker.state === "live").length;
  const lost = job.workers.filter((worker) => worker.state === "lost").length;
  const per = recent(rows, "steps_per_s");
  const tokens = job.reported.tokens_per_s;
  const made = [
    tile("step", "step", job.step, count(job.step), job.tables.length ? job.tables[0].mode : ""),
    tile("steps_per_s", "steps per second", per, count(per), tokens === undefined ? "" : count(tokens) + " tokens/s"),
    tile("loss", "loss", job.reported.loss ?? null, loss(job.reported.loss), job.reported.loss === undefined ? "optimizer.report(loss=...)" : "mean of live workers"),
    tile("workers", "workers", live, live + " of " + (job.min_workers ? job.min_workers + "–" : "") + job.num_workers, lost ? lost + " lost" : job.state, lost || live < (job.min_workers || job.num_workers) && job.state === "live" ? "bad" : ""),
    tile("pushed_nbytes", "pushed", job.pushed_nbytes, bytes(recent(rows, "pushed_per_s")) + "/s", bytes(job.pushed_nbytes) + ", " + ratio(job.pushed_nbytes ? job.raw_pushed_nbytes / job.pushed_nbytes : 1)),
    tile("pulled_nbytes", "pulled", job.pulled_nbytes, bytes(recent(rows, "pulled_per_s")) + "/s", bytes(job.pulled_nbytes) + ", " + ratio(job.pulled_nbytes ? job.raw_pulled_nbytes / job.pulled_nbytes : 1)),
    tile("num_updates", "updates", job.num_updates, count(job.num_updates), count(job.num_pushes) + " pushes"),
    tile("checkpoint_age_s", "checkpoint", job.checkpoint_age_s, job.checkpoint_age_s === null ? "none" : time(job.checkpoint_age_s) + " ago", job.checkpoint_age_s === null ? "seen by these shards" : "the newest whole one"),
  ];
  byId("tiles").replaceChildren(...made);
}

// ----- charts

const CHARTS = [
  { title: "Loss", columns: ["loss"], format: loss, fromZero: false },
  { title: "Steps per second", columns: ["steps_per_s"], format: count, fromZero: true, smooth: true },
  { title: "Bytes per second", columns: ["pushed_per_s", "pulled_per_s"], names: ["pushed", "pulled"], format: bytes, fromZero: true, smooth: true },
  { title: "Compression", columns: ["push_ratio", "pull_ratio"], names: ["pushes", "pulls"], format: ratio, fromZero: true },
  { title: "Waiting for the slowest", columns: ["waited_for"], format: share, fromZero: true },
  { title: "Largest staleness", columns: ["staleness"], format: count, fromZero: true },
];

function showCharts(job, rows, view) {
  if (!job) return byId("charts").replaceChildren();
  const end = view.now_s;
  const wanted = Number(byId("range").value);
  const first = rows.length ? rows[0][0] : end - 60;
  const begin = Math.max(end - wanted, Math.min(first, end - 60));
  const shown = thin(rows.filter((row) => row[0] >= begin - 20), 400);
  const faults = state.events.filter((event) => event.kind === "bad" && event.t >= begin);
  byId("charts").replaceChildren(...CHARTS.map((chart) => chartOf(chart, shown, begin, end, view.columns, faults)));
}

// Means of neighbours, so that at most `most` points are drawn.
function thin(rows, most) {
  const size = Math.ceil(rows.length / most);
  if (size <= 1) return rows;
  const out = [];
  for (let at = 0; at < rows.length; at += size) {
    const group = rows.slice(at, at + size);
    out.push(group[0].map((_, column) => {
      const values = group.map((row) => row[column]).filter((value) => value !== null);
      return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    }));
  }
  return out;
}

// Means over five seconds: a step of half a second would look like a saw.
function smooth(points) {
  return points.map(([at, value], index) => {
    const near = points.slice(Math.max(0, index - 4), index + 1).filter((one) => one[1] !== null && one[0] > at - 5);
    return [at, value === null ? null : near.reduce((sum, one) => sum + one[1], 0) / near.length];
  });
}

function chartOf(chart, rows, begin, end, columns, faults) {
  // As wide as the chart before it, so that text is not stretched.
  const former = byId("charts").querySelector("svg");
  const [width, height] = former && former.clientWidth ? [former.clientWidth, former.clientHeight] : [400, 132];
  const [left, bottom, top] = [58, 18, 6];
  const series = chart.columns.map((name) => {
    const points = rows.map((row) => [row[0], row[columns.indexOf(name)]]);
    return chart.smooth ? smooth(points) : points;
  });
  const values = series.flat().map((point) => point[1]).filter((value) => value !== null);
  const head = make("h2", {}, make("span", {}, chart.title));
  series.forEach((points, number) => {
    const last = [...points].reverse().find((point) => point[1] !== null);
    const name = chart.names ? chart.names[number] + " " : "";
    head.append(make("i", { class: chart.names ? "key" + (number + 1) : "" }, name + chart.format(last ? last[1] : null)));
  });
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title, preserveAspectRatio: "none" });
  const box = make("div", { class: "chart" }, head, svg);
  if (!values.length) {
    svg.append(draw("text", { x: left, y: height / 2 }, chart.title === "Loss" ? "not reported" : "nothing yet"));
    return box;
  }
  let low = chart.fromZero ? 0 : Math.min(...values);
  let high = Math.max(...values);
  if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= chart.fromZero ? 0 : Math.abs(low) * 0.1; }
  const x = (at) => left + ((at - begin) / (end - begin)) * (width - left);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  for (const part of [0, 0.5, 1]) {
    const value = low + part * (high - low);
    svg.append(draw("line", { class: "grid", x1: left, x2: width, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, chart.format(value)));
  }
  svg.append(draw("text", { x: left, y: height - 2 }, clock(begin)));
  svg.append(draw("text", { x: width, y: height - 2, "text-anchor": "end" }, clock(end)));
  for (const fault of faults) {
    const mark = draw("line", { class: "mark", x1: x(fault.t), x2: x(fault.t), y1: top, y2: height - bottom });
    mark.append(draw("title", {}, clock(fault.t) + " " + fault.text));
    svg.append(mark);
  }
  series.forEach((points, number) => lines(points, x, y, number, svg, height - bottom, chart.fromZero && series.length === 1));
  return box;
}

// A line for each run of points without a gap.
function lines(points, x, y, number, svg, floor, filled) {
  let run = [];
  const runs = [];
  for (const [at, value] of points) {
    if (value === null || (run.length && at - run[run.length - 1][0] > 60)) { runs.push(run); run = []; }
    if (value !== null) run.push([at, value]);
  }
  runs.push(run);
  for (const part of runs.filter((one) => one.length)) {
    const path = part.map(([at, value], index) => (index ? "L" : "M") + x(at).toFixed(1) + " " + y(value).toFixed(1)).join("");
    if (filled) {
      const [from, to] = [x(part[0][0]), x(part[part.length - 1][0])];
      svg.append(draw("path", { class: "a1", d: `${path}L${to.toFixed(1)} ${floor}L${from.toFixed(1)} ${floor}Z` }));
    }
    svg.append(draw("path", { class: "l" + (number + 1), d: path }));
  }
}

// ----- tables

function cell(key, value, text, kind = "") {
  const attributes = key ? { "data-key": key, "data-value": value ?? "" } : {};
  return make("td", { ...attributes, class: kind }, text);
}
function bar(value, hot) {
  if (value === null) return make("td", { class: "dim" }, "–");
  const inner = make("i");
  inner.style.width = (100 * value).toFixed(0) + "%";
  return make("td", {}, make("span", { class: hot ? "bar hot" : "bar" }, inner), share(value));
}
function table(id, head, rows) {
  const titles = head.map((text) => make("th", { scope: "col" }, text));
  byId(id).replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows));
}

function showWorkers(job) {
  if (!job) return byId("workers").replaceChildren();
  const first = Math.max(0, ...job.workers.map((worker) => worker.step));
  const hasLoss = job.workers.some((worker) => "loss" in worker.reported);
  const head = ["worker", "state", "step", "behind", "step time", "waits for shards", "hidden", "others wait for it", "staleness", "heard", "host"];
  if (hasLoss) head.splice(10, 0, "loss");
  table("workers", head, job.workers.map((worker) => {
    const key = "worker-" + worker.rank + "-";
    const { step_s, wait, hidden, waited_for } = worker.recent;
    const cells = [
      cell(null, null, worker.rank),
      cell(key + "state", worker.state, worker.state, { live: "good", lost: "bad" }[worker.state] || "dim"),
      cell(key + "step", worker.step, worker.step),
      cell(null, null, first - worker.step || "–", first === worker.step ? "dim" : ""),
      cell(null, null, time(step_s)),
      bar(wait, false),
      bar(hidden, false),
      bar(worker.state === "live" ? waited_for : null, waited_for > 0.2),
      cell(key + "staleness", worker.staleness, worker.staleness),
      cell(null, null, time(worker.last_heard_s), worker.state === "live" && worker.last_heard_s > 5 ? "warn" : ""),
      cell(null, null, worker.host + ":" + worker.pid, "dim"),
    ];
    if (hasLoss) cells.splice(10, 0, cell(null, null, loss(worker.reported.loss)));
    return make("tr", {}, ...cells);
  }));
}

function showShards(status, view) {
  const answered = status.shards.map((shard) => [shard.index, make("tr", {},
    cell(null, null, shard.index),
    cell("shard-" + shard.index + "-state", "answers", "answers", "good"),
    cell("shard-" + shard.index + "-pid", shard.pid, shard.pid),
    cell(null, null, time(shard.uptime_s)),
    cell(null, null, bytes(shard.memory_nbytes)),
    cell(null, null, bytes(shard.under_way_nbytes)),
    cell("shard-" + shard.index + "-recoveries", shard.num_recoveries, shard.num_recoveries, shard.num_recoveries ? "warn" : ""),
    cell(null, null, shard.address, "dim"))]);
  const silent = status.silent.map((shard) => [shard.index, make("tr", {},
    cell(null, null, shard.index),
    cell("shard-" + shard.index + "-state", "silent", "silent", "bad"),
    cell(null, null, "–"), cell(null, null, "–"), cell(null, null, "–"), cell(null, null, "–"), cell(null, null, "–"),
    cell(null, null, shard.address, "dim"))]);
  const rows = [...answered, ...silent].sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
  table("shards", ["shard", "state", "process", "up", "memory", "under way", "recoveries", "address"], rows);
}

function showEvents() {
  const rows = [...state.events].reverse().slice(0, 100).map((event) =>
    make("li", {}, make("time", {}, clock(event.t)), make("span", { class: event.kind === "info" ? "" : event.kind }, event.text)));
  byId("events").replaceChildren(...(rows.length ? rows : [make("li", { class: "dim" }, make("span", {}, "none"), make("span", {}, "since the dashboard runs"))]));
}

function showWaits(job) {
  const texts = job ? [...new Set([...job.waiting_for, ...job.tables.flatMap((one) => one.waiting_for)])] : [];
  byId("waits-card").hidden = !texts.length;
  byId("waits").replaceChildren(...texts.slice(0, 8).map((text) => make("li", {}, text)));
}

function showTables(job) {
  const tables = job ? job.tables : [];
  table("tables", ["table", "mode", "compression", "optimizer", "slices", "weights", "version"], tables.slice(0, 20).map((one) => make("tr", {},
    cell(null, null, one.name), cell(null, null, one.mode), cell(null, null, one.compressor), cell(null, null, one.optimizer),
    cell(null, null, one.num_slices), cell(null, null, bytes(one.nbytes)),
    cell(null, null, one.version_min === one.version_max ? one.version_min : one.version_min + "–" + one.version_max))));
}

// ----- light and dark

function setTheme(theme) { document.documentElement.dataset.theme = theme; }
const asked = new URLSearchParams(location.search).get("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
function kept() { try { return localStorage.getItem("theme"); } catch (problem) { return null; } }
setTheme(asked || kept() || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!asked && !kept()) setTheme(dark.matches ? "dark" : "light"); });
byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try { localStorage.setItem("theme", theme); } catch (problem) { /* Private windows keep nothing. */ }
});
byId("range").addEventListener("change", show);

poll();
setInterval(poll, 1000);
