"use strict";
// Shows what /api/view returns, once a second. Every text goes in as text, never as HTML.
const state = { rows: {}, events: [], last: 0, view: null, job: null, chosen: false, failed: 0 };
state.hover = null; // Place of the pointer in the charts, 0 to 1.
state.sorted = "worker"; // Column of the workers' table.
const SVG = "http://www.w3.org/2000/svg";
const ROWS_MAX = 3000;
const JOBS_MAX = 12; // Buttons; psserver jobs lists all.
const ANSWER_MS_MAX = 10000;
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
const age = (value) => (value !== null && value < 60 ? value.toFixed(0) + " s" : time(value));
const loss = (value) => (value === null || value === undefined ? "–" : value.toPrecision(4));
const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(1) + "×");
const share = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(0) + " %");
const clock = (at) => new Date(1000 * at).toTimeString().slice(0, 8);

// ----- the view

async function poll() {
  try {
    const url = new URL("api/view?since=" + state.last, location.origin + location.pathname);
    const answer = await fetch(url, { signal: AbortSignal.timeout(ANSWER_MS_MAX) });
    if (!answer.ok) throw new Error("HTTP " + answer.status);
    take(await answer.json());
    state.failed = 0;
  } catch (problem) {
    state.failed += 1;
  }
  show();
  setTimeout(poll, 1000); // After the answer: two requests at a time would bring their rows twice.
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
  showReaders(job);
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
  const more = jobs.length - shown.length;
  const now = JSON.stringify([shown.map((job) => [job.name, job.state]), state.job, more]);
  if (byId("jobs").dataset.now === now) return; // A new button would lose the focus.
  byId("jobs").dataset.now = now;
  const buttons = shown.map((job) => {
    const about = job.state === "live" ? [] : [make("small", {}, job.state + " ")];
    const button = make("button", { type: "button", "aria-pressed": job.name === state.job, title: job.name + ", " + job.state }, ...about, job.name);
    button.addEventListener("click", () => { state.job = job.name; state.chosen = true; show(); });
    return button;
  });
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
    tile("checkpoint_age_s", "checkpoint", job.checkpoint_age_s, job.checkpoint_age_s === null ? "none" : age(job.checkpoint_age_s) + " ago", job.checkpoint_age_s === null ? "seen by these shards" : "the newest whole one"),
  ];
  byId("tiles").replaceChildren(...made);
}

// ----- charts

const CHARTS = [
  { title: "Loss", columns: ["loss"], format: loss },
  { title: "Steps per second", columns: ["steps_per_s"], format: count, fromZero: true, smooth: true },
  { title: "Bytes per second", columns: ["pushed_per_s", "pulled_per_s"], names: ["pushed", "pulled"], format: bytes, fromZero: true, smooth: true },
  { title: "Compression", columns: ["push_ratio", "pull_ratio"], names: ["pushes", "pulls"], format: ratio, fromZero: true, unit: "×" },
  { title: "Waiting for the slowest", columns: ["waited_for"], format: share, fromZero: true, to: 1 },
  { title: "Largest staleness", columns: ["staleness"], format: count, fromZero: true, whole: true },
];
const [LEFT, BOTTOM, TOP, RIGHT] = [58, 18, 6, 4]; // Margins of a chart in pixels.

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

// Means over some seconds: a step of half a second would look like a saw.
function smooth(points, seconds) {
  let [from, sum, many] = [0, 0, 0];
  return points.map(([at, value]) => {
    if (value === null) return [at, null];
    sum += value; many += 1;
    for (; points[from][0] <= at - seconds; from += 1)
      if (points[from][1] !== null) { sum -= points[from][1]; many -= 1; }
    return [at, sum / many];
  });
}

// The lowest and highest value of the axis, and the round values between them.
function scaleOf(chart, values) {
  let low = chart.fromZero ? 0 : Math.min(...values);
  let high = chart.to ?? Math.max(...values);
  if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= chart.fromZero ? 0 : Math.abs(low) * 0.1; }
  const unit = chart.format === bytes ? 1024 ** Math.max(0, Math.floor(Math.log(high) / Math.log(1024))) : 1;
  const rough = (high - low) / unit / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999) * power * unit;
  if (chart.whole) step = Math.max(1, Math.ceil(step));
  if (chart.to) step = chart.to / 2;
  [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  const marks = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, number) => low + number * step);
  return { low, high, marks, label: (value) => labelOf(chart, value, step, unit) };
}

function labelOf(chart, value, step, unit) {
  if (chart.format === share) return share(value);
  if (chart.format === bytes && unit > 1 && value) return Number((value / unit).toFixed(2)) + " " + bytes(unit).split(" ")[1];
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const text = value >= 1e5 ? count(value) : String(Number(value.toFixed(digits + 1)));
  return text + (chart.unit || "");
}

function chartOf(chart, rows, begin, end, columns, faults) {
  // As wide as the chart before it, so that text is not stretched.
  const former = byId("charts").querySelector("svg");
  const [width, height] = former && former.clientWidth ? [former.clientWidth, former.clientHeight] : [400, 132];
  const series = chart.columns.map((name) => {
    const points = rows.map((row) => [row[0], row[columns.indexOf(name)]]);
    return chart.smooth ? smooth(points, Math.max(5, (end - begin) / 120)) : points;
  });
  const there = series.map((points) => points.filter((point) => point[1] !== null));
  const at = state.hover === null ? null : begin + state.hover * (end - begin);
  const told = there.map((points) => (at === null ? points[points.length - 1] : nearest(points, at, (end - begin) / 40)));
  const head = make("h2", {}, make("span", {}, chart.title));
  told.forEach((point, number) => {
    const name = chart.names ? chart.names[number] + " " : "";
    head.append(make("i", { class: chart.names ? "key" + (number + 1) : "" }, name + chart.format(point ? point[1] : null)));
  });
  if (at !== null && !chart.names) head.append(make("i", { class: "at" }, clock(at)));
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title, preserveAspectRatio: "none" });
  const box = make("div", { class: "chart" }, head, svg);
  if (!there.flat().length) {
    svg.append(draw("text", { x: LEFT, y: height / 2 }, chart.title === "Loss" ? "not reported" : "nothing yet"));
    return box;
  }
  const scale = scaleOf(chart, there.flat().map((point) => point[1]));
  const x = (time) => LEFT + ((time - begin) / (end - begin)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - scale.low) / (scale.high - scale.low)) * (height - TOP - BOTTOM);
  for (const value of scale.marks) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, scale.label(value)));
  }
  for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const place = begin + part * (end - begin);
    svg.append(draw("text", { x: x(place), y: height - 2, "text-anchor": anchor }, clock(place)));
  }
  for (const fault of faults) {
    const mark = draw("line", { class: "mark", x1: x(fault.t), x2: x(fault.t), y1: TOP, y2: height - BOTTOM });
    mark.append(draw("title", {}, clock(fault.t) + " " + fault.text));
    svg.append(mark);
  }
  series.forEach((points, number) => lines(points, x, y, number, svg, height - BOTTOM, chart.fromZero && series.length === 1));
  if (at !== null) {
    svg.append(draw("line", { class: "here", x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }));
    told.forEach((point, number) => point && svg.append(draw("circle", { class: "d" + (number + 1), cx: x(point[0]), cy: y(point[1]), r: 3.5 })));
  }
  return box;
}

// The point next to a time, unless it is far away.
function nearest(points, at, far) {
  const found = points.reduce((best, point) => (best && Math.abs(best[0] - at) <= Math.abs(point[0] - at) ? best : point), null);
  return found && Math.abs(found[0] - at) <= far ? found : null;
}

// The pointer in one chart shows the values of its time in all of them.
byId("charts").addEventListener("pointermove", (event) => {
  const svg = event.target.closest(".chart")?.querySelector("svg");
  if (!svg) return;
  const { left, width } = svg.getBoundingClientRect();
  const part = (event.clientX - left - LEFT) / (width - LEFT - RIGHT);
  state.hover = part < 0 || part > 1 ? null : part;
  show();
});
byId("charts").addEventListener("pointerleave", () => { state.hover = null; show(); });

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
// Columns that can be sorted by have a function that returns the value of a row.
function table(id, head, rows, sorts = {}) {
  const into = byId(id);
  const now = JSON.stringify([head, state.sorted]);
  if (into.dataset.now !== now || !into.tHead) { // A new button would lose the focus.
    into.dataset.now = now;
    const titles = head.map((text) => {
      if (!sorts[text]) return make("th", { scope: "col" }, text);
      const button = make("button", { type: "button", title: "sort by this column" }, text);
      button.addEventListener("click", () => { state.sorted = text; show(); });
      return make("th", { scope: "col", "aria-sort": state.sorted !== text ? "none" : text === "worker" ? "ascending" : "descending" }, button);
    });
    into.replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody"));
  }
  into.tBodies[0].replaceChildren(...rows);
}

const PEER_COLUMNS = ["partner", "distance"]; // In modes whose workers exchange models.

function showWorkers(job) {
  if (!job) return byId("workers").replaceChildren();
  const first = Math.max(0, ...job.workers.map((worker) => worker.step));
  const hasLoss = job.workers.some((worker) => "loss" in worker.reported);
  const hasPeers = job.workers.some((worker) => worker.peers.length);
  const sorts = {
    worker: (worker) => -worker.rank,
    state: (worker) => ["left", "live", "lost"].indexOf(worker.state),
    behind: (worker) => first - worker.step,
    "step time": (worker) => worker.recent.step_s ?? -1,
    "waits for shards": (worker) => worker.recent.wait ?? -1,
    hidden: (worker) => worker.recent.hidden ?? -1,
    "others wait for it": (worker) => worker.recent.waited_for ?? -1,
    staleness: (worker) => worker.staleness,
    heard: (worker) => worker.last_heard_s,
    loss: (worker) => worker.reported.loss ?? -Infinity,
  };
  const head = [
    "worker", "state", "step", "behind", "others wait for it", "step time", "waits for shards", "hidden", "staleness",
    ...(hasPeers ? PEER_COLUMNS : []), "heard", ...(hasLoss ? ["loss"] : []), "data", "host",
  ];
  const by = sorts[state.sorted] || sorts.worker;
  const workers = [...job.workers].sort((a, b) => by(b) - by(a) || a.rank - b.rank);
  byId("workers-count").textContent = workers.length > 10 ? workers.length + ", by " + state.sorted : "";
  table("workers", head, workers.map((worker) => {
    const key = "worker-" + worker.rank + "-";
    const { step_s, wait, hidden, waited_for } = worker.recent;
    const peer = worker.peers[0];
    const peers = [
      cell(null, null, peer && peer.partner >= 0 ? peer.partner : "–"),
      cell(null, null, peer && peer.distance !== null ? peer.distance.toPrecision(2) : "–"),
    ];
    return make("tr", {},
      cell(null, null, worker.rank),
      cell(key + "state", worker.state, worker.state, { live: "good", lost: "bad" }[worker.state] || "dim"),
      cell(key + "step", worker.step, worker.step),
      cell(null, null, first - worker.step || "–", first === worker.step ? "dim" : ""),
      bar(worker.state === "live" ? waited_for : null, waited_for > 0.2),
      cell(null, null, time(step_s)),
      bar(wait, false),
      bar(hidden, false),
      cell(key + "staleness", worker.staleness, worker.staleness),
      ...(hasPeers ? peers : []),
      cell(null, null, time(worker.last_heard_s), worker.state === "live" && worker.last_heard_s > 5 ? "warn" : ""),
      ...(hasLoss ? [cell(null, null, loss(worker.reported.loss))] : []),
      cell(key + "data", worker.data_planes.join(","), [...new Set(worker.data_planes)].join(", ") || "–", "dim"),
      cell(null, null, worker.host + ":" + worker.pid, "dim"));
  }), sorts);
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

// The card keeps its place without a wait, so that nothing below it jumps.
function showWaits(job) {
  byId("waits-card").hidden = !job;
  const rows = (job ? job.waits : []).slice(0, 8).map(({ text, places }) => {
    const more = places.length > 1 ? `, and ${places.length - 1} more` : "";
    return make("li", {}, text, make("span", { class: "dim", title: places.join("\n") }, places.length ? `at ${places[0]}${more}` : ""));
  });
  if (job && job.advice) rows.push(make("li", {}, job.advice));
  byId("waits").replaceChildren(...(rows.length ? rows : [make("li", { class: "dim" }, "no worker waits for another one")]));
}

function held(one) {
  const { rows, rows_max, rows_nbytes, ...others } = one.held || {};
  if (rows_max === undefined) return bytes(one.nbytes);
  const more = Object.entries(others).filter(([, number]) => number).map(([name, number]) => `${count(number)} ${name.replaceAll("_", " ")}`);
  return [`${count(rows)} of ${count(rows_max)} rows`, bytes(rows_nbytes), ...more].join(", ");
}

function showTables(job) {
  const tables = job ? job.tables : [];
  table("tables", ["table", "mode", "compression", "optimizer", "slices", "weights", "version"], tables.slice(0, 20).map((one) => make("tr", {},
    cell(null, null, one.name), cell(null, null, one.mode), cell(null, null, one.compressor), cell(null, null, one.optimizer),
    cell(null, null, one.num_slices), cell(null, null, held(one)),
    cell(null, null, one.version_min === one.version_max ? one.version_min : one.version_min + "–" + one.version_max))));
}

function showReaders(job) {
  const published = (job && job.published) || [];
  byId("readers-card").hidden = !published.length;
  byId("readers-count").textContent = published.map((one) => {
    const sent = Object.entries(one.sent).map(([form, nbytes]) => form + " " + bytes(nbytes)).join(", ");
    return `${one.table}: version ${one.version}, step ${one.step}, sent ${sent || "nothing"}`;
  }).join("; ");
  const rows = published.flatMap((one) => one.readers.map((reader) => make("tr", {},
    cell(null, null, one.table), cell(null, null, reader.host), cell(null, null, reader.pid), cell(null, null, reader.version),
    cell(null, null, reader.lag), cell(null, null, reader.lag_steps), cell(null, null, age(reader.lag_s)), cell(null, null, reader.resyncs))));
  table("readers", ["table", "host", "process", "version", "versions behind", "steps behind", "behind for", "resyncs"], rows);
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
