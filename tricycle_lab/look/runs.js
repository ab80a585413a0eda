// Okabe and Ito's colours, which the colour-blind can tell apart; after them, other strokes.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4"];
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, TALL = 900, HIGH = 460, RIGHT = 14, TOP = 12, BOTTOM = 46, NARROW = 544;
let HEIGHT = HIGH, LEFT = 74;
const AXES = { step: "steps", seconds: "time", tokens: "tokens" };
const hiddenRuns = new Set();

function draw(parent, tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

const colour = (i) => COLOURS[i % COLOURS.length];
const dash = (i) => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en"));

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return shown(seconds) + " s";
  return seconds < 7200 ? (seconds / 60).toFixed(1) + " min" : (seconds / 3600).toFixed(2) + " h";
}
const short = (n) => (n >= 1e9 ? shown(n / 1e9) + "G" : n >= 1e6 ? shown(n / 1e6) + "M" : n >= 1e4 ? shown(n / 1e3) + "k" : shown(n, 4));
const along = (value, axis) => (axis === "seconds" ? duration(value) : short(value));

/** A running mean in which the past loses its weight; the first values count as if there had been more of them. */
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Points of a curve in the chosen units; none where a run does not have them. */
function points(run, kind, axis, unit, weight) {
  const curve = run[kind], factor = unit === "bits" ? run.bits : 1;
  if (factor === null) return [];
  const xs = axis === "tokens" ? (run.tokens ? curve.step.map((step) => step * run.tokens) : []) : curve[axis];
  const ys = kind === "training" ? smooth(curve.loss, weight) : curve.loss;
  return xs.map((x, i) => ({ x, y: ys[i] * factor }));
}

function lines() {
  const axis = chosen("axis"), unit = chosen("unit"), weight = Number($("smoothing").value), found = [];
  data.runs.forEach((run, i) => {
    if (hiddenRuns.has(i)) return;
    for (const kind of ["training", "held_out"]) {
      if (!$(kind).checked) continue;
      if (kind === "training" && weight > 0) found.push({ run, i, kind: "raw", points: points(run, kind, axis, unit, 0) });
      found.push({ run, i, kind, points: points(run, kind, axis, unit, weight) });
    }
  });
  return found.filter((line) => line.points.length);
}

/** The scale of an axis: between which values, and where each of them stands. */
function scale(values, log, from, to) {
  const usable = log ? values.filter((value) => value > 0) : values;
  let least = usable.reduce((a, b) => Math.min(a, b), Infinity), most = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(least < most)) [least, most] = least === most ? [least * 0.9 - (least === 0), most * 1.1 + (most === 0)] : [log ? 0.1 : 0, 1];
  const f = log ? Math.log : (value) => value, back = log ? Math.exp : (value) => value;
  const [a, b] = [f(least), f(most)];
  return {
    least, most,
    at: (value) => from + ((f(value) - a) / (b - a)) * (to - from),
    value: (part) => back(a + part * (b - a)),
    fits: (value) => value >= least && value <= most,
  };
}

/** Losses, without the first ones that tower above all others: what nearly all points have, and all that is held out. */
function losses(all) {
  const values = [];
  for (const { points, kind } of all) {
    const ys = points.map(({ y }) => y).filter(Number.isFinite).sort((a, b) => a - b);
    if (kind === "raw") values.push(ys[Math.floor(0.005 * ys.length)], ys[Math.floor(0.97 * (ys.length - 1))]);
    else values.push(ys[0], ys[Math.floor((kind === "training" ? 0.97 : 1) * (ys.length - 1))]);
  }
  return values;
}

let view = null;

function chart() {
  [HEIGHT, LEFT] = innerWidth > NARROW ? [HIGH, 74] : [TALL, 104];
  const all = lines(), axis = chosen("axis"), unit = chosen("unit");
  $("smoothed").textContent = Number($("smoothing").value).toFixed(2);
  const named = unit === "bits" ? "bits a byte" : "nats a token";
  $("chart").textContent = "";
  $("trouble").textContent = all.length ? "" : "There is nothing to draw: no run has this over " + AXES[axis] + " in " + named + ".";
  view = null;
  if (!all.length) { $("readout").textContent = ""; $("at").textContent = ""; return; }
  const xs = all.flatMap(({ points }) => [points[0].x, points.at(-1).x]);
  const x = scale($("log-x").checked ? xs : [0, ...xs], $("log-x").checked, LEFT, WIDTH - RIGHT), y = scale(losses(all), $("log-y").checked, HEIGHT - BOTTOM, TOP);
  const label = "Loss in " + named + " over " + AXES[axis] + " of " + data.runs.map(({ name }) => name).join(", ") + "; the tables below have the values.";
  const svg = draw($("chart"), "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const clip = draw(draw(draw(svg, "defs", {}), "clipPath", { id: "inside" }), "rect", { x: LEFT, y: TOP - 4, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 8 });
  for (let i = 0; i <= 4; i++) {
    const loss = y.value(i / 4), place = x.value(i / 4);
    draw(svg, "line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y.at(loss), y2: y.at(loss) });
    draw(svg, "text", { x: LEFT - 8, y: y.at(loss) + 4, "text-anchor": "end" }, shown(loss, 3));
    if (innerWidth > NARROW || i % 2 === 0)
      draw(svg, "text", { x: x.at(place), y: HEIGHT - 16, "text-anchor": i === 4 ? "end" : i ? "middle" : "start" }, i === 4 && axis !== "seconds" ? along(place, axis) + " " + AXES[axis] : along(place, axis));
  }
  const group = draw(svg, "g", { "clip-path": "url(#inside)" });
  for (const { i, kind, points } of all) {
    const path = points.filter((p) => !$("log-x").checked || p.x > 0).map((p, k) => (k ? "L" : "M") + x.at(p.x).toFixed(1) + " " + y.at(Math.max(p.y, $("log-y").checked ? 1e-9 : -1e9)).toFixed(1)).join("");
    draw(group, "path", { class: kind === "held_out" ? "held" : kind, d: path, stroke: colour(i), "stroke-dasharray": kind === "raw" ? "" : dash(i) });
    if (kind === "held_out") for (const p of points) draw(group, "circle", { cx: x.at(p.x), cy: y.at(p.y), r: points.length > 60 ? 1.5 : 3.5, fill: colour(i) });
  }
  const cursor = draw(svg, "line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  view = { x, all, cursor, axis };
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect(), px = ((event.clientX - box.left) / box.width) * WIDTH;
    $("place").value = Math.round(1000 * Math.max(0, Math.min(1, (px - LEFT) / (WIDTH - LEFT - RIGHT))));
    readout();
  };
  readout();
}

/** The point nearest to a place. */
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle + 1; else high = middle;
  }
  return low && x - points[low - 1].x < points[low].x - x ? points[low - 1] : points[low];
}

/** A table with a head; cells are texts, or [text, class]. */
function table(parent, head, rows) {
  parent.textContent = "";
  const element = add(parent, "table"), first = add(add(element, "thead"), "tr"), body = add(element, "tbody");
  head.forEach((text, i) => add(first, "th", text, { className: i ? "n" : "", scope: "col" }));
  for (const { key, cells } of rows) {
    const row = add(body, "tr"), name = add(row, "th", "", { scope: "row" });
    key(name);
    for (const cell of cells) {
      const [text, className] = Array.isArray(cell) ? cell : [cell, "n"];
      add(row, "td", text, { className });
    }
  }
  return element;
}

function named(i) {
  return (cell) => {
    add(cell, "span", "", { className: "key" }).style.background = colour(i);
    cell.append(data.runs[i].name);
  };
}

function readout() {
  if (!view) return;
  const place = view.x.value(Number($("place").value) / 1000);
  view.cursor.setAttribute("x1", view.x.at(place));
  view.cursor.setAttribute("x2", view.x.at(place));
  $("at").textContent = (view.axis === "seconds" ? "" : view.axis === "step" ? "step " : "token ") + (view.axis === "seconds" ? duration(place) : count(place));
  const rows = data.runs.map((run, i) => {
    const value = (kind) => {
      const line = view.all.find((one) => one.i === i && one.kind === kind);
      return line ? nearest(line.points, place) : null;
    };
    const [training, held] = [value("training"), value("held_out")];
    return { key: named(i), cells: [training ? training.y.toFixed(4) : "–", held ? held.y.toFixed(4) + " at " + along(held.x, view.axis) : "–"] };
  });
  table($("readout"), ["run", "training, smoothed", "held-out, nearest"], rows);
}

function figures() {
  const lowest = (name) => Math.min(...data.runs.map(({ figures }) => figures[name] ?? Infinity));
  const compare = { best_bits: lowest("best_bits"), final_bits: lowest("final_bits") };
  const loss = (f, name) => [f[name] === null || f[name] === undefined ? "–" : f[name].toFixed(4), "n" + (f[name] === compare[name] && data.runs.length > 1 ? " best" : "")];
  const rows = data.runs.map((run, i) => {
    const f = run.figures;
    const key = (cell) => {
      const label = add(cell, "label"), box = add(label, "input", "", { type: "checkbox", checked: true });
      box.onchange = () => { box.checked ? hiddenRuns.delete(i) : hiddenRuns.add(i); chart(); };
      label.append(" ");
      named(i)(label);
    };
    const cells = [f.state, count(f.weights), f.tokens ? short(f.tokens) : "–", duration(f.seconds), count(f.speed), loss(f, "best_loss"), loss(f, "best_bits"), count(f.best_step), loss(f, "final_loss"), loss(f, "final_bits")];
    return { key, cells };
  });
  table($("figures"), ["run", "state", "weights", "tokens read", "time", "tokens/s", "best held-out, nats a token", "bits a byte", "at step", "final, nats a token", "bits a byte"], rows);
}

function differences() {
  if (!data.differences.length) { add($("differences"), "p", "None.", { className: "quiet" }); return; }
  const rows = data.differences.map(({ field, values }) => ({ key: (cell) => cell.append(field), cells: values }));
  table($("differences"), ["field", ...data.runs.map(({ name }) => name)], rows);
}

function samples() {
  data.runs.forEach((run, i) => {
    const box = add($("samples"), "section"), head = add(box, "h3");
    named(i)(head);
    const last = run.samples.at(-1);
    if (!last) { add(box, "p", "None yet.", { className: "quiet" }); return; }
    const select = add(box, "select", "", { "aria-label": "Sample of " + run.name });
    for (const { title } of run.samples) add(select, "option", title);
    select.selectedIndex = run.samples.length - 1;
    const text = add(box, "pre", last.text, { tabIndex: 0 });
    select.onchange = () => (text.textContent = run.samples[select.selectedIndex].text);
  });
}

document.title = $("title").textContent = data.runs.map(({ name }) => name).join(" beside ");
for (const note of data.notes) add($("notes"), "li", note);
document.querySelector(`input[value=${data.unit}]`).checked = true;
if (!data.runs.some(({ bits }) => bits)) document.querySelector("input[value=bits]").disabled = true;
$("controls").onchange = chart;
$("controls").onsubmit = (event) => event.preventDefault();
$("smoothing").oninput = chart;
$("smoothing").value = Math.max(...data.runs.map(({ training }) => training.step.length)) < 100 ? 0.5 : 0.9;
$("place").oninput = readout;
window.onresize = chart;
figures();
differences();
samples();
chart();
document.body.dataset.ready = "yes";
