const MAX_MAP = 512; // the latest tokens that an attention map shows
const THUMBNAIL = 48; // the maximum number of cells of a thumbnail in each direction
const MAP_INTERVAL = 400; // ms between drawings of the attention maps during generation
const N_KEYS = 6; // in the table of the keys with the highest weights
const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"];
const { config } = data;
const worker = new Worker(URL.createObjectURL(new Blob([data.worker], { type: "text/javascript" })));

let colors = palette();
let tokens = []; // the messages of the worker, one for each token of the prompt and the text
let elements = []; // of the tokens
let heads = []; // the buttons of all heads
let selected = 0, layer = 0, head = 0;
let run = 0, seed = 0; // of the latest generation
let follows = true; // whether the latest token is selected
let frame = 0, mapsAt = -Infinity; // of the next drawing, and the time of the last one of the maps

// ---------------------------------------------------------------- generation
/** Start to generate after a prompt, or after ids in place of it. */
function generateText(input) {
  if (!$("form").reportValidity()) return;
  const params = { ...data.sampling, seed: $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number($("seed").value) };
  for (const name of NUMBERS) params[name] = Number($(name).value);
  seed = params.seed;
  tokens = [];
  elements = [];
  $("tokens").replaceChildren();
  selected = 0;
  mapsAt = -Infinity;
  follows = true;
  setBusy(true);
  showMessage("", "generating …");
  worker.postMessage({ kind: "generate", run: ++run, length: Number($("length").value), params, ...input });
}

function setBusy(isBusy) {
  $("stop").disabled = !isBusy;
  document.body.dataset.busy = isBusy;
}

function stop() {
  worker.postMessage({ kind: "stop" });
  run++;
  finish("stopped after " + tokens.filter(({ isGiven }) => !isGiven).length.toLocaleString("en") + " tokens, seed " + seed);
}

function finish(status, error = "") {
  setBusy(false);
  showMessage(error, status);
  mapsAt = -Infinity;
  requestDrawing();
}

worker.onmessage = ({ data: message }) => {
  if (message.kind === "ready") {
    $("generate").disabled = false;
    showMessage("");
    document.body.dataset.ready = Math.round(performance.now()); // ms since the navigation started
  } else if (message.kind === "token" && message.run === run) {
    tokens.push(message);
    requestDrawing();
  } else if (message.kind === "done" && message.run === run) {
    const speed = message.nTokens > 1 ? ", " + Math.round(message.nTokens / message.seconds).toLocaleString("en") + " tokens/s" : "";
    finish(message.nTokens.toLocaleString("en") + " tokens" + speed + ", seed " + seed);
  } else if (message.kind === "error" && (message.run ?? run) === run) finish("", message.message);
};
worker.onerror = (event) => finish("", event.message || "The browser did not start the worker that runs the model.");

// ---------------------------------------------------------------- drawing
/** Draw before the next frame; messages of many tokens may arrive within one. */
function requestDrawing() {
  frame ||= requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  if (!tokens.length) return;
  for (const part of document.querySelectorAll(".result")) part.hidden = false;
  for (let i = elements.length; i < tokens.length; i++) {
    const element = addToken($("tokens"), tokens[i].text, "option");
    if (tokens[i].isGiven) element.classList.add("given");
    elements.push(element);
  }
  if (follows) selected = tokens.length - 1;
  markToken();
  if (follows) $("tokens").scrollTop = $("tokens").scrollHeight;
  colorTokens();
  if (performance.now() - mapsAt > MAP_INTERVAL) {
    mapsAt = performance.now();
    drawMap();
    heads.forEach((button, i) => drawThumbnail(button.firstChild, Math.floor(i / config.n_heads), i % config.n_heads));
  }
}

/** Return the weights of a token's attention as bytes (of their square roots), one for each of the tokens from its `start` on. */
function attentionRow(i, layer, head) {
  const { start, attention } = tokens[i], n = i - start + 1, offset = (layer * config.n_heads + head) * n;
  return attention.subarray(offset, offset + n);
}

/** Return [bytes, size] of the map of the latest tokens, each cell the maximum of step x step weights. */
function attentionMap(layer, head, step) {
  const first = Math.max(0, tokens.length - MAX_MAP), size = Math.ceil((tokens.length - first) / step), bytes = new Uint8Array(size * size);
  for (let i = first; i < tokens.length; i++) {
    const row = attentionRow(i, layer, head), { start } = tokens[i], line = Math.floor((i - first) / step) * size;
    for (let j = Math.max(first, start); j <= i; j++) {
      const cell = line + Math.floor((j - first) / step);
      bytes[cell] = Math.max(bytes[cell], row[j - start]);
    }
  }
  return [bytes, size];
}

function drawThumbnail(canvas, layer, head) {
  const step = Math.ceil(Math.min(tokens.length, MAX_MAP) / THUMBNAIL), [bytes, size] = attentionMap(layer, head, step);
  paint(canvas, bytes, size, size, colors, Math.ceil(THUMBNAIL / size));
}

function drawMap() {
  const [bytes, size] = attentionMap(layer, head, 1), scale = Math.max(1, Math.ceil(640 / size)), title = "layer " + layer + ", head " + head;
  const context = paint($("map"), bytes, size, size, colors, scale);
  context.strokeStyle = getComputedStyle(document.body).color;
  context.lineWidth = 2;
  context.strokeRect(0, (selected - tokens.length + size) * scale - 1, scale * size, scale + 2);
  $("map").style.maxWidth = "min(100%, " + Math.max(4, Math.min(34, size * 2)) + "rem)";
  $("map-heading").textContent = "Attention map of " + title;
  $("map").setAttribute("aria-label", "Attention weights of " + title + ". " + size + " queries (rows), " + size + " keys (columns). The table below lists the keys with the highest weights for the selected query.");
  showTopKeys();
}

function showTopKeys() {
  const row = attentionRow(selected, layer, head), { start } = tokens[selected];
  addHeader($("keys"), [["key of the selected token"], ["position", "n"], ["weight", "n"]]);
  const body = add($("keys"), "tbody");
  for (const i of Array.from(row.keys()).sort((a, b) => row[b] - row[a]).slice(0, N_KEYS).filter((i) => row[i])) {
    const line = add(body, "tr");
    add(line, "td").append(code(tokens[start + i].text));
    add(line, "td", start + i, { className: "n" });
    add(line, "td", ((row[i] / 255) ** 2).toFixed(3), { className: "n" });
  }
}

// ---------------------------------------------------------------- tokens
function colorTokens() {
  const isAttention = $("coloring").value === "attention", row = attentionRow(selected, layer, head), { start } = tokens[selected];
  elements.forEach((element, i) => {
    const value = isAttention ? (row[i - start] ?? 0) / 255 : tokens[i].prob === undefined ? 0 : Math.min(1, -Math.log(tokens[i].prob + 1e-30) / 8);
    element.style.background = tokenColor(value);
  });
}

function markToken() {
  markElement(elements, selected, "aria-selected");
  showToken(selected);
}

function selectToken(i) {
  selected = i;
  follows = false;
  markToken();
  drawMap();
  colorTokens();
}

/** Show a token and its alternatives; "Use" buttons are for the selected token. */
function showToken(i) {
  const { id, text, prob, rank, top, isGiven } = tokens[i];
  $("token-heading").textContent = i === selected ? "Selected token" : "Token";
  $("token-summary").replaceChildren(code(text), " at position " + i + (isGiven ? " of the prompt" : "") + (prob === undefined ? "." : ": probability " + percent(prob) + ", " + formatRank(rank) + "."));
  $("alternatives").replaceChildren();
  if (!top) return;
  addHeader($("alternatives"), [["token"], ["probability", "n"], [""], [""]]);
  const body = add($("alternatives"), "tbody");
  for (const other of rank < top.length ? top : [...top, { id, text, prob }]) {
    const row = add(body, "tr", "", { className: other.id === id ? "chosen" : "" });
    add(row, "td").append(code(other.text));
    add(row, "td", percent(other.prob), { className: "n" });
    add(add(row, "td"), "span", "", { className: "gauge" }).style.width = 5 * other.prob + "rem";
    const last = add(row, "td");
    if (other.id === id) last.textContent = "← actual";
    else add(last, "button", "use", { type: "button", "aria-label": "use " + visible(other.text) }).onclick = () => generateText({ ids: [...tokens.slice(0, i).map((token) => token.id), other.id] });
  }
}

// ---------------------------------------------------------------- heads
function buildHeads() {
  const box = $("heads");
  box.style.gridTemplateColumns = "auto repeat(" + config.n_heads + ", minmax(2.6rem, 6rem))";
  for (let l = 0; l < config.n_layers; l++) {
    add(box, "span", "layer " + l, { className: "name" });
    for (let h = 0; h < config.n_heads; h++) {
      const button = add(box, "button", "", { type: "button", "aria-label": "layer " + l + ", head " + h }), i = heads.push(button) - 1;
      add(button, "canvas");
      button.onclick = () => selectHead(i);
    }
  }
  addArrowKeys(box, () => heads, () => config.n_heads, selectHead);
}

function markHead() {
  markElement(heads, layer * config.n_heads + head, "aria-pressed");
}

function selectHead(i) {
  [layer, head] = [Math.floor(i / config.n_heads), i % config.n_heads];
  markHead();
  drawMap();
  colorTokens();
}

/** Return row and column of the map at the pointer, as positions of tokens. */
function findTokens(event) {
  const size = Math.min(tokens.length, MAX_MAP);
  return findCell($("map"), event, size, size).map((i) => tokens.length - size + i);
}

function describeCell([query, key]) {
  const weight = ((attentionRow(query, layer, head)[key - tokens[query].start] ?? 0) / 255) ** 2;
  $("cell").textContent = "Query " + quoted(tokens[query].text) + " (" + query + "), key " + quoted(tokens[key].text) + " (" + key + "): weight " + weight.toFixed(3);
}

// ---------------------------------------------------------------- start
function connectControls() {
  const tokenAt = (event) => elements.indexOf(event.target.closest("[role=option]"));
  $("form").onsubmit = (event) => (event.preventDefault(), generateText({ prompt: $("prompt").value }));
  $("stop").onclick = stop;
  $("coloring").onchange = colorTokens;
  $("tokens").onclick = (event) => tokenAt(event) >= 0 && selectToken(tokenAt(event));
  $("tokens").onpointerover = (event) => tokenAt(event) >= 0 && showToken(tokenAt(event));
  $("tokens").onpointerleave = () => tokens.length && showToken(selected);
  addArrowKeys($("tokens"), () => elements, () => 10, selectToken);
  $("map").onclick = (event) => selectToken(findTokens(event)[0]);
  $("map").onpointermove = (event) => describeCell(findTokens(event));
  matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    colors = palette();
    mapsAt = -Infinity;
    requestDrawing();
  };
}

async function start() {
  document.title = $("title").textContent = data.title;
  for (const name of NUMBERS) $(name).value = data.sampling[name];
  const facts = add($("facts"), "tbody");
  for (const [name, value] of Object.entries(data.facts)) {
    const row = add(facts, "tr");
    add(row, "th", name, { scope: "row" });
    add(row, "td", value);
  }
  showMessage("", "loading the model …");
  buildHeads();
  markHead();
  connectControls();
  const weights = await decodeBytes(data.weights, true), { tensors, tokenizer } = data;
  worker.postMessage({ kind: "load", config, tensors, tokenizer, buffer: weights.buffer }, [weights.buffer]);
}
start();
