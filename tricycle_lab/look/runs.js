// The color-blind-safe palette of Okabe and Ito; further runs have other dash patterns.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4"];
const WIDTH = 1000, NARROW_HEIGHT = 900, WIDE_HEIGHT = 460, RIGHT = 14, TOP = 12, BOTTOM = 46, NARROW = 544;
let HEIGHT = WIDE_HEIGHT, LEFT = 74;
const AXES = { step: "steps", seconds: "time", tokens: "tokens" };
const isScore = (unit) => data.scores.includes(unit);
const unitName = (unit) => (isScore(unit) ? unit.replaceAll("_", " ") : "loss in " + (unit === "bits" ? "bits/byte" : "nats/token"));
const hiddenRuns = new Set();

const color = (i) => COLORS[i % COLORS.length];
const dash = (i) => DASHES[Math.floor(i / COLORS.length) % DASHES.length];
const checkedValue = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const formatCount = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en"));

function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return formatNumber(seconds) + " s";
  return seconds < 7200 ? (seconds / 60).toFixed(1) + " min" : (seconds / 3600).toFixed(2) + " h";
}
const abbreviate = (n) => (n >= 1e9 ? formatNumber(n / 1e9) + "G" : n >= 1e6 ? formatNumber(n / 1e6) + "M" : n >= 1e4 ? formatNumber(n / 1e3) + "k" : formatNumber(n, 4));
const formatX = (value, axis) => (axis === "seconds" ? formatDuration(value) : abbreviate(value));

/** Return the exponential moving average with bias correction. */
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Return the points of a curve in the selected units; none if a run does not have them. */
function curvePoints(run, kind, axis, unit, weight) {
  const curve = run[kind], factor = unit === "bits" ? run.bitsPerNat : 1;
  if (factor === null) return [];
  const xs = axis === "tokens" ? (run.tokensPerStep ? curve.step.map((step) => step * run.tokensPerStep) : []) : curve[axis];
  if (isScore(unit)) return xs.map((x, i) => ({ x, y: curve.scores?.[unit]?.[i] })).filter(({ y }) => Number.isFinite(y));
  const ys = kind === "training" ? smooth(curve.loss, weight) : curve.loss;
  return xs.map((x, i) => ({ x, y: ys[i] * factor }));
}

function visibleCurves() {
  const axis = checkedValue("axis"), unit = checkedValue("unit"), weight = Number($("smoothing").value), curves = [];
  data.runs.forEach((run, i) => {
    if (hiddenRuns.has(i)) return;
    for (const kind of isScore(unit) ? ["heldOut"] : ["training", "heldOut"]) {
      if (!isScore(unit) && !$(kind).checked) continue;
      if (kind === "training" && weight > 0) curves.push({ run, i, kind: "raw", points: curvePoints(run, kind, axis, unit, 0) });
      curves.push({ run, i, kind, points: curvePoints(run, kind, axis, unit, weight) });
    }
  });
  return curves.filter((curve) => curve.points.length);
}

/** Return a linear or logarithmic scale from the range of values to pixels. */
function createScale(values, log, from, to) {
  const usable = log ? values.filter((value) => value > 0) : values;
  let min = usable.reduce((a, b) => Math.min(a, b), Infinity), max = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(min < max)) [min, max] = min === max ? [min * 0.9 - (min === 0), max * 1.1 + (max === 0)] : [log ? 0.1 : 0, 1];
  const f = log ? Math.log : (value) => value, inverse = log ? Math.exp : (value) => value;
  const [a, b] = [f(min), f(max)];
  return {
    toPixel: (value) => from + ((f(value) - a) / (b - a)) * (to - from),
    valueAt: (fraction) => inverse(a + fraction * (b - a)),
  };
}

/** Return losses for the range of the axis: all held-out losses, and 97% of the training losses. */
function lossRange(curves) {
  const values = [];
  for (const { points, kind } of curves) {
    const ys = points.map(({ y }) => y).filter(Number.isFinite).sort((a, b) => a - b);
    if (kind === "raw") values.push(ys[Math.floor(0.005 * ys.length)], ys[Math.floor(0.97 * (ys.length - 1))]);
    else values.push(ys[0], ys[Math.floor((kind === "training" ? 0.97 : 1) * (ys.length - 1))]);
  }
  return values;
}

let chart = null; // the x scale, the curves, the cursor line and the x axis of the drawing

function drawChart() {
  [HEIGHT, LEFT] = innerWidth > NARROW ? [WIDE_HEIGHT, 74] : [NARROW_HEIGHT, 104];
  const curves = visibleCurves(), axis = checkedValue("axis"), unit = unitName(checkedValue("unit"));
  $("smoothing-value").textContent = Number($("smoothing").value).toFixed(2);
  $("chart").textContent = "";
  $("trouble").textContent = curves.length ? "" : "No data: no selected curve shows the " + unit + " over " + AXES[axis] + ".";
  chart = null;
  if (!curves.length) { $("readout").textContent = ""; $("cursor-value").textContent = ""; return; }
  const xs = curves.flatMap(({ points }) => [points[0].x, points.at(-1).x]), logX = $("log-x").checked, logY = $("log-y").checked;
  const x = createScale(logX ? xs : [0, ...xs], logX, LEFT, WIDTH - RIGHT), y = createScale(lossRange(curves), logY, HEIGHT - BOTTOM, TOP);
  const label = "Curves of the " + unit + " over " + AXES[axis] + " of " + data.runs.map(({ name }) => name).join(", ") + "; the tables below list the values.";
  const svg = addSvg($("chart"), "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  addSvg(addSvg(addSvg(svg, "defs", {}), "clipPath", { id: "inside" }), "rect", { x: LEFT, y: TOP - 4, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 8 });
  drawAxes(svg, x, y, axis);
  drawCurves(addSvg(svg, "g", { "clip-path": "url(#inside)" }), curves, x, y, logX, logY);
  const cursor = addSvg(svg, "line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  chart = { x, curves, cursor, axis };
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect(), pixel = ((event.clientX - box.left) / box.width) * WIDTH;
    $("cursor").value = Math.round(1000 * Math.max(0, Math.min(1, (pixel - LEFT) / (WIDTH - LEFT - RIGHT))));
    showReadout();
  };
  showReadout();
}

function drawAxes(svg, x, y, axis) {
  for (let i = 0; i <= 4; i++) {
    const loss = y.valueAt(i / 4), value = x.valueAt(i / 4);
    addSvg(svg, "line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y.toPixel(loss), y2: y.toPixel(loss) });
    addSvg(svg, "text", { x: LEFT - 8, y: y.toPixel(loss) + 4, "text-anchor": "end" }, formatNumber(loss, 3));
    if (innerWidth > NARROW || i % 2 === 0)
      addSvg(svg, "text", { x: x.toPixel(value), y: HEIGHT - 16, "text-anchor": i === 4 ? "end" : i ? "middle" : "start" }, i === 4 && axis !== "seconds" ? formatX(value, axis) + " " + AXES[axis] : formatX(value, axis));
  }
}

function drawCurves(group, curves, x, y, logX, logY) {
  for (const { i, kind, points } of curves) {
    const shown = points.filter((p) => !logX || p.x > 0);
    const path = shown.map((p, k) => (k ? "L" : "M") + x.toPixel(p.x).toFixed(1) + " " + y.toPixel(Math.max(p.y, logY ? 1e-9 : -1e9)).toFixed(1)).join("");
    addSvg(group, "path", { class: kind, d: path, stroke: color(i), "stroke-dasharray": kind === "raw" ? "" : dash(i) });
    if (kind === "heldOut") for (const p of points) addSvg(group, "circle", { cx: x.toPixel(p.x), cy: y.toPixel(p.y), r: points.length > 60 ? 1.5 : 3.5, fill: color(i) });
  }
}

/** Return the point whose x is nearest, by binary search. */
function nearestPoint(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle + 1; else high = middle;
  }
  return low && x - points[low - 1].x < points[low].x - x ? points[low - 1] : points[low];
}

/** Replace the content of an element by a table; cells are texts, or pairs of a text and a class. */
function showTable(parent, header, rows) {
  parent.textContent = "";
  const element = add(parent, "table"), first = add(add(element, "thead"), "tr"), body = add(element, "tbody");
  header.forEach((text, i) => add(first, "th", text, { className: i ? "n" : "", scope: "col" }));
  for (const { writeName, cells } of rows) {
    const row = add(body, "tr");
    writeName(add(row, "th", "", { scope: "row" }));
    for (const cell of cells) {
      const [text, className] = Array.isArray(cell) ? cell : [cell, "n"];
      add(row, "td", text, { className });
    }
  }
}

/** Return a function that writes the color and the name of a run to an element. */
function runNameWriter(i) {
  return (element) => {
    add(element, "span", "", { className: "key" }).style.background = color(i);
    element.append(data.runs[i].name);
  };
}

function showReadout() {
  if (!chart) return;
  const { x, axis, curves, cursor } = chart, value = x.valueAt(Number($("cursor").value) / 1000);
  cursor.setAttribute("x1", x.toPixel(value));
  cursor.setAttribute("x2", x.toPixel(value));
  $("cursor-value").textContent = axis === "seconds" ? formatDuration(value) : (axis === "step" ? "step " : "token ") + formatCount(value);
  const rows = data.runs.map((run, i) => {
    const nearest = (kind) => {
      const curve = curves.find((curve) => curve.i === i && curve.kind === kind);
      return curve ? nearestPoint(curve.points, value) : null;
    };
    const training = nearest("training"), heldOut = nearest("heldOut");
    return { writeName: runNameWriter(i), cells: [training ? training.y.toFixed(4) : "–", heldOut ? heldOut.y.toFixed(4) + " at " + formatX(heldOut.x, axis) : "–"] };
  });
  const unit = checkedValue("unit");
  showTable($("readout"), ["run", "training loss, smoothed", "nearest " + (isScore(unit) ? unitName(unit) : "held-out loss")], rows);
}

function showSummary() {
  const lowest = (name) => Math.min(...data.runs.map(({ summary }) => summary[name] ?? Infinity));
  const lowestValues = { bestBitsPerByte: lowest("bestBitsPerByte"), finalBitsPerByte: lowest("finalBitsPerByte") };
  const loss = (summary, name) => [summary[name] === null || summary[name] === undefined ? "–" : summary[name].toFixed(4), "n" + (summary[name] === lowestValues[name] && data.runs.length > 1 ? " best" : "")];
  const rows = data.runs.map(({ summary: s }, i) => {
    const writeName = (cell) => {
      const label = add(cell, "label"), box = add(label, "input", "", { type: "checkbox", checked: true });
      box.onchange = () => { box.checked ? hiddenRuns.delete(i) : hiddenRuns.add(i); drawChart(); };
      label.append(" ");
      runNameWriter(i)(label);
    };
    const cells = [s.state, formatCount(s.nParameters), s.tokens ? abbreviate(s.tokens) : "–", formatDuration(s.seconds), formatCount(s.tokensPerSecond), loss(s, "bestLoss"), loss(s, "bestBitsPerByte"), formatCount(s.bestStep), loss(s, "finalLoss"), loss(s, "finalBitsPerByte")];
    return { writeName, cells };
  });
  showTable($("summary"), ["run", "state", "parameters", "tokens", "time", "tokens/s", "best held-out, nats/token", "bits/byte", "at step", "final, nats/token", "bits/byte"], rows);
}

function showDifferences() {
  if (!data.differences.length) { add($("differences"), "p", "None.", { className: "quiet" }); return; }
  const rows = data.differences.map(({ field, values }) => ({ writeName: (cell) => cell.append(field), cells: values }));
  showTable($("differences"), ["field", ...data.runs.map(({ name }) => name)], rows);
}

function showSamples() {
  data.runs.forEach((run, i) => {
    const box = add($("samples"), "section"), head = add(box, "h3");
    runNameWriter(i)(head);
    const last = run.samples.at(-1);
    if (!last) { add(box, "p", "No samples.", { className: "quiet" }); return; }
    const select = add(box, "select", "", { "aria-label": "Sample of " + run.name });
    for (const { title } of run.samples) add(select, "option", title);
    select.selectedIndex = run.samples.length - 1;
    const text = add(box, "pre", last.text, { tabIndex: 0 });
    select.onchange = () => (text.textContent = run.samples[select.selectedIndex].text);
  });
}

document.title = $("title").textContent = "Run comparison: " + data.runs.map(({ name }) => name).join(", ");
for (const note of data.notes) add($("notes"), "li", note);
$("scores-note").hidden = !data.scores.length;
for (const name of data.scores) {
  const label = add($("units"), "label");
  add(label, "input", "", { type: "radio", name: "unit", value: name });
  label.append(" " + unitName(name));
}
document.querySelector(`input[value=${data.unit}]`).checked = true;
if (!data.runs.some(({ bitsPerNat }) => bitsPerNat)) document.querySelector("input[value=bits]").disabled = true;
$("controls").onchange = drawChart;
$("controls").onsubmit = (event) => event.preventDefault();
$("smoothing").oninput = drawChart;
$("smoothing").value = Math.max(...data.runs.map(({ training }) => training.step.length)) < 100 ? 0.5 : 0.9;
$("cursor").oninput = showReadout;
window.onresize = drawChart;
showSummary();
showDifferences();
showSamples();
drawChart();
document.body.dataset.ready = "yes";
