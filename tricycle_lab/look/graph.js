const { nodes, edges, steps } = data;
const RESULT = nodes.findIndex((node) => node.kind === "result");
let step = 0, selected = RESULT;
const drawn = []; // the SVG group and the gradient text of each node

/** Return the path of a smooth curve through points; it goes down everywhere. */
function curvePath(points) {
  return points.map(([x, y], i) => {
    if (!i) return "M" + x + " " + y;
    const [px, py] = points[i - 1], middle = (py + y) / 2;
    return "C" + px + " " + middle + " " + x + " " + middle + " " + x + " " + y;
  }).join("");
}

/** Return the gradients after the first steps, by node; some are still incomplete sums. */
function gradientsAfter(count) {
  const grads = new Map();
  if (count > 0) grads.set(RESULT, { label: steps[0].gradLabel, text: steps[0].grad, contributions: [] });
  for (const { node, contributions } of steps.slice(0, Math.max(0, count - 1)))
    for (const { arg, value, sum, sumLabel } of contributions) {
      const earlier = grads.get(arg)?.contributions ?? [];
      grads.set(arg, { label: sumLabel, text: sum, contributions: [...earlier, { from: node, value }] });
    }
  return grads;
}

function build() {
  const svg = addSvg($("drawing"), "svg", { width: data.width, height: data.height, viewBox: "0 0 " + data.width + " " + data.height, role: "group", "aria-label": "Tensors and their inputs" });
  for (const edge of edges) {
    edge.path = addSvg(svg, "path", { d: curvePath(edge.points) });
    const [x, y] = edge.points.at(-1);
    addSvg(svg, "path", { class: "tip", d: "M" + (x - 4) + " " + (y - 8) + "L" + (x + 4) + " " + (y - 8) + "L" + x + " " + y + "Z" });
  }
  nodes.forEach((node, i) => {
    const group = addSvg(svg, "g", { class: node.kind, role: "button", tabindex: 0 });
    const left = node.x - node.width / 2, top = node.y - node.height / 2;
    addSvg(group, "rect", { x: left, y: top, width: node.width, height: node.height, rx: 6 });
    const addLine = (number, name, text) => addSvg(group, "text", { class: name, x: node.x, y: top + 9 + 17 * number - 4, "text-anchor": "middle" }, text);
    addLine(1, "name", node.name);
    addLine(2, "value", (node.shape.length ? "" : "= ") + node.label);
    drawn.push({ group, grad: addLine(3, "grad", "") });
    group.onclick = () => select(i);
    group.onkeydown = (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), select(i));
  });
}

function select(i) {
  selected = i;
  show();
}

function goToStep(target) {
  step = Math.max(0, Math.min(steps.length + 1, target));
  if (step > 0 && step <= steps.length) selected = steps[step - 1].node;
  show();
  if (step > 0 && step <= steps.length) drawn[selected].group.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** Show the current step. Step 0: the forward pass only. Step k: the contributions of the k-th node to its inputs. After
 * the last step: all gradients. */
function show() {
  const grads = gradientsAfter(step), current = step > 0 && step <= steps.length ? steps[step - 1] : null;
  nodes.forEach((node, i) => {
    const grad = grads.get(i), { group } = drawn[i];
    drawn[i].grad.textContent = grad ? "∂ " + grad.label : "";
    group.setAttribute("class", [node.kind, current?.node === i ? "current" : "", selected === i ? "selected" : ""].join(" "));
    group.setAttribute("aria-label", node.name + ", value " + node.label + (grad ? ", gradient " + grad.label : ""));
    group.setAttribute("aria-pressed", selected === i);
  });
  const active = new Set(current?.contributions.map(({ edge }) => edge));
  edges.forEach((edge, i) => edge.path.setAttribute("class", active.has(i) ? "active" : ""));
  $("step").value = step;
  $("step").setAttribute("aria-valuetext", "step " + step + " of " + (steps.length + 1));
  $("previous").disabled = $("first").disabled = step === 0;
  $("next").disabled = $("last").disabled = step > steps.length;
  $("status").textContent = describeStep(current);
  showNode(grads);
}

function describeStep(current) {
  if (step === 0) return "Forward pass: all values are computed. “Next” starts the backward pass.";
  if (!current) return "Backward pass: all gradients are computed.";
  const texts = current.contributions.map(({ arg, label }) => (label.startsWith("(") ? "an array of shape " : "") + label + " to " + nodes[arg].name);
  const contributions = texts.length ? "it contributes " + texts.join(", ") + "." : "no input requires a gradient.";
  return (step === 1 ? "The gradient of the result is 1. " : "") + "Step " + step + " of " + steps.length + ": the gradient of " + nodes[current.node].name + " is complete; " + contributions;
}

function showNode(grads) {
  const box = $("node"), node = nodes[selected], grad = grads.get(selected);
  box.replaceChildren();
  add(box, "h2", node.name + (node.op && node.op !== node.name ? " (" + node.op + ")" : ""));
  const list = add(box, "dl");
  const addItem = (term, text) => {
    add(list, "dt", term);
    add(add(list, "dd"), "pre", text, { tabIndex: 0 });
  };
  const inputs = node.args.map((arg) => nodes[arg].name).join(", ");
  add(list, "dt", "Kind");
  add(list, "dd", { input: "input, requires a gradient", constant: "constant, without gradient", op: "computed from " + inputs, result: "result, computed from " + inputs }[node.kind]);
  addItem("Value, shape (" + node.shape.join(", ") + ")", node.value);
  const contributions = grad && grad.contributions.length > 1 ? grad.contributions : [];
  if (grad) addItem("Gradient" + (contributions.length ? ", sum of " + contributions.length + " contributions" : ""), grad.text);
  contributions.forEach(({ from, value }) => addItem("Contribution of " + nodes[from].name, value));
  if (node.formula) addItem("Formula (z: result, g: its gradient)", node.formula);
  for (const source of node.sources) addItem("Backward function, " + source.location, source.code);
}

document.title = $("title").textContent = "Gradients of " + data.title;
$("description").textContent = data.description;
$("step").max = steps.length + 1;
$("step").oninput = () => goToStep(Number($("step").value));
$("first").onclick = () => goToStep(0);
$("previous").onclick = () => goToStep(step - 1);
$("next").onclick = () => goToStep(step + 1);
$("last").onclick = () => goToStep(steps.length + 1);
document.onkeydown = (event) => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "n" || event.key === "p") goToStep(step + (event.key === "n" ? 1 : -1));
};
build();
show();
document.body.dataset.ready = "yes";
