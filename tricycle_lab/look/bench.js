// The color-blind-safe palette of Okabe and Ito.
const COLORS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 4", "12 4"];

function showTable() {
  const body = add($("table"), "table"), head = add(add(body, "thead"), "tr"), rows = add(body, "tbody");
  for (const [text, className] of [["softmax", ""], ["held-out loss, nats/token", "n"], ["std. dev.", "n"], ["difference from " + data.own, "n"], ["ms/step", "n"]])
    add(head, "th", text, { className, scope: "col" });
  data.softmaxes.forEach(({ name, mean, spread, ms }, i) => {
    const row = add(rows, "tr"), first = add(row, "th", "", { scope: "row" });
    add(first, "span", "", { className: "key" }).style.background = COLORS[i % COLORS.length];
    first.append(name);
    const difference = mean - data.softmaxes[0].mean;
    for (const text of [mean.toFixed(4), spread.toFixed(4), i ? (difference > 0 ? "+" : "") + difference.toFixed(4) : "", ms.toFixed(1)]) add(row, "td", text, { className: "n" });
  });
}

function drawCurves() {
  const width = 760, height = 380, left = 60, bottom = 40, all = data.softmaxes.flatMap(({ losses }) => losses.flat());
  const min = Math.min(...all), span = Math.max(...all) - min || 1, last = data.steps.at(-1);
  const x = (step) => left + (step / last) * (width - left - 12), y = (loss) => 10 + (1 - (loss - min) / span) * (height - bottom - 20);
  const svg = addSvg($("curves"), "svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": "Held-out loss of each softmax during training; the table above lists the final values." });
  for (let i = 0; i <= 4; i++) {
    const loss = min + (span * i) / 4;
    addSvg(svg, "line", { class: "axis", x1: left, x2: width - 12, y1: y(loss), y2: y(loss) });
    addSvg(svg, "text", { x: left - 8, y: y(loss) + 4, "text-anchor": "end" }, loss.toFixed(2));
    const step = Math.round((last * i) / 4);
    addSvg(svg, "text", { x: x(step), y: height - 14, "text-anchor": i === 4 ? "end" : "middle" }, i === 4 ? "step " + step : step);
  }
  data.softmaxes.forEach(({ losses }, i) => {
    for (const run of losses) addSvg(svg, "polyline", { points: run.map((loss, k) => x(data.steps[k]) + "," + y(loss)).join(" "), stroke: COLORS[i % COLORS.length], "stroke-dasharray": DASHES[i % DASHES.length] });
  });
}

document.title = $("title").textContent = data.own + " compared with built-in softmaxes";
$("description").textContent = "GPT with " + data.shape + ", trained for " + data.steps.at(-1) + " steps on the source code of Python's standard library, with " + data.seeds + " seeds per softmax. Runs of the same seed have the same initial weights and batches. Duration: " + data.minutes + " minutes. Differences below the standard deviation over seeds may be noise.";
$("file").textContent = data.file;
$("source").textContent = data.source;
showTable();
drawCurves();
document.body.dataset.ready = "yes";
