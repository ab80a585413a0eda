const SVG = "http://www.w3.org/2000/svg";
const { nodes, edges, steps } = data;
let step = 0, chosen = nodes.findIndex((node) => node.kind === "result");
const drawn = [];

function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

/** A smooth line through points, downwards everywhere. */
function line(points) {
  return points.map(([x, y], i) => {
    if (!i) return "M" + x + " " + y;
    const [px, py] = points[i - 1], middle = (py + y) / 2;
    return "C" + px + " " + middle + " " + x + " " + middle + " " + x + " " + y;
  }).join("");
}

/** The gradients that have arrived after some steps, by node: whole or so far. */
function arrived(count) {
  const grads = new Map();
  const result = nodes.findIndex((node) => node.kind === "result");
  if (count > 0) grads.set(result, { label: steps[0].gradLabel, text: steps[0].grad, parts: [] });
  for (const { node, to } of steps.slice(0, Math.max(0, count - 1)))
    for (const { arg, part, sum, sumLabel } of to) {
      const parts = [...(grads.get(arg)?.parts ?? []), { from: node, part }];
      grads.set(arg, { label: sumLabel, text: sum, parts });
    }
  return grads;
}

function build() {
  const svg = draw($("drawing"), "svg", { width: data.width, height: data.height, viewBox: "0 0 " + data.width + " " + data.height, role: "group", "aria-label": "Tensors and what they were made from" });
  for (const edge of edges) {
    edge.path = draw(svg, "path", { d: line(edge.points) });
    const [x, y] = edge.points.at(-1);
    draw(svg, "path", { class: "tip", d: "M" + (x - 4) + " " + (y - 8) + "L" + (x + 4) + " " + (y - 8) + "L" + x + " " + y + "Z" });
  }
  nodes.forEach((node, i) => {
    const group = draw(svg, "g", { class: node.kind, role: "button", tabindex: 0 });
    const left = node.x - node.width / 2, top = node.y - node.height / 2;
    draw(group, "rect", { x: left, y: top, width: node.width, height: node.height, rx: 6 });
    const row = (number, name, text) => draw(group, "text", { class: name, x: node.x, y: top + 9 + 17 * number - 4, "text-anchor": "middle" }, text);
    row(1, "name", node.name);
    row(2, "value", (node.shape.length ? "" : "= ") + node.label);
    drawn.push({ group, grad: row(3, "grad", "") });
    group.onclick = () => choose(i);
    group.onkeydown = (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), choose(i));
  });
}

function choose(i) {
  chosen = i;
  show();
}

function go(to) {
  step = Math.max(0, Math.min(steps.length + 1, to));
  if (step > 0 && step <= steps.length) chosen = steps[step - 1].node;
  show();
  if (step > 0 && step <= steps.length) drawn[chosen].group.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** Step 0: values alone. Step k: node k has its whole gradient and is about to hand it on. After the last: all have theirs. */
function show() {
  const grads = arrived(step), now = step > 0 && step <= steps.length ? steps[step - 1] : null;
  nodes.forEach((node, i) => {
    const grad = grads.get(i);
    drawn[i].grad.textContent = grad ? "∂ " + grad.label : "";
    drawn[i].group.setAttribute("class", [node.kind, now?.node === i ? "now" : "", chosen === i ? "chosen" : ""].join(" "));
    drawn[i].group.setAttribute("aria-label", node.name + ", value " + node.label + (grad ? ", gradient " + grad.label : ""));
    drawn[i].group.setAttribute("aria-pressed", chosen === i);
  });
  const flowing = new Set(now?.to.map(({ edge }) => edge));
  edges.forEach((edge, i) => edge.path.setAttribute("class", flowing.has(i) ? "flows" : ""));
  $("step").value = step;
  $("step").setAttribute("aria-valuetext", "step " + step + " of " + (steps.length + 1));
  $("back").disabled = $("first").disabled = step === 0;
  $("on").disabled = $("last").disabled = step > steps.length;
  $("status").textContent = told(now);
  showNode(grads);
}

function told(now) {
  if (step === 0) return "Forward: every Tensor has its value. Step to begin the way back.";
  if (!now) return "All gradients have arrived.";
  const names = now.to.map(({ arg, label }) => nodes[arg].name + " gets " + label);
  const first = step === 1 ? "The gradient of the result is 1. " : "";
  return first + "Step " + step + " of " + steps.length + ": the gradient of " + nodes[now.node].name + " is complete; " + (names.length ? names.join(", ") + "." : "nothing behind it wants one.");
}

function showNode(grads) {
  const box = $("node"), node = nodes[chosen], grad = grads.get(chosen);
  box.replaceChildren();
  add(box, "h2", node.name + (node.op && node.op !== node.name ? " (" + node.op + ")" : ""));
  const list = add(box, "dl");
  const item = (term, text) => {
    add(list, "dt", term);
    add(add(list, "dd"), "pre", text, { tabIndex: 0 });
  };
  const made = node.args.map((arg) => nodes[arg].name).join(", ");
  add(list, "dt", "What it is");
  add(list, "dd", { input: "an input, which keeps its gradient", constant: "a constant, which gets none", op: "made from " + made, result: "the result, made from " + made }[node.kind]);
  item("Value, shape (" + node.shape.join(", ") + ")", node.value);
  if (grad) item("Gradient" + (grad.parts.length > 1 ? ", the sum of " + grad.parts.length + " that came" : ""), grad.text);
  if (grad?.parts.length > 1) grad.parts.forEach(({ from, part }) => item("from " + nodes[from].name, part));
  if (node.formula) item("Formula (z the result, g its gradient)", node.formula);
  for (const source of node.sources) item("Its backward function, " + source.place, source.code);
}

document.title = $("title").textContent = "Gradients of " + data.title;
$("said").textContent = data.said;
$("step").max = steps.length + 1;
$("step").oninput = () => go(Number($("step").value));
$("first").onclick = () => go(0);
$("back").onclick = () => go(step - 1);
$("on").onclick = () => go(step + 1);
$("last").onclick = () => go(steps.length + 1);
document.onkeydown = (event) => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "n" || event.key === "p") go(step + (event.key === "n" ? 1 : -1));
};
build();
show();
document.body.dataset.ready = "yes";
