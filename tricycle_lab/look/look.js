const TOKEN_COLORINGS = {
  surprisal: "surprisal",
  attention: "attention from selected token",
  effect: "effect of the interventions",
  norm: "norm after the last layer",
};
const MAX_LABELS = 40, MIN_CELL = 11; // tokens beside an attention map, and pixels for each
const N_KEYS = 6; // in the table of the keys with the highest weights
let colors = palette();

/** Send a request to the server of the page, and return the response. */
async function request(name, fields) {
  let response;
  try {
    response = await fetch(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields) });
  } catch {
    throw new Error("The server does not respond. Start `tricycle look` again and open the printed address. The results on this page remain readable.");
  }
  const content = await response.json().catch(() => ({ error: "The response of the server is not valid." }));
  if (!response.ok) throw new Error(content.error);
  return content;
}

/** The part of the page for one model: its results for the text, the selection, and the ablated layers and heads. */
class ModelPanel {
  constructor(index, given) {
    Object.assign(this, { index, given, info: given.info, trace: null, baseline: null, maps: new Map(), headStatistics: new Map(), streamStatistics: null });
    Object.assign(this, { layer: given.info.initialLayer, head: 0, token: 0, coloring: "surprisal", mapKind: "weights" });
    Object.assign(this, { ablatedLayers: new Set(), ablatedHeads: new Set(), nRuns: 0, lensOfAll: null });
    this.build();
  }

  // ---------------------------------------------------------------- requests
  get interventions() {
    const ablatedHeads = [...this.ablatedHeads].map((key) => [key.slice(0, key.lastIndexOf("/")), Number(key.slice(key.lastIndexOf("/") + 1))]);
    const temperature = Number($("temperature").value) || 1;
    const steering = this.info.isSteerable ? Number($("steering").value) : 0;
    return { ablatedLayers: [...this.ablatedLayers], ablatedHeads, softmax: $("softmax").value || null, temperature, steering };
  }
  get hasInterventions() {
    const { ablatedLayers, ablatedHeads, softmax, temperature, steering } = this.interventions;
    return ablatedLayers.length > 0 || ablatedHeads.length > 0 || softmax !== null || temperature !== 1 || steering !== 0;
  }

  /** Run the model on a text or on tokens, and show the results. */
  async run(fields) {
    const run = ++this.nRuns, started = performance.now();
    const trace = await request("run", { model: this.index, interventions: this.interventions, map: [this.layer, this.head], ...fields });
    if (run !== this.nRuns) return;
    this.showTrace(trace);
    if (trace.map) await this.storeMap(this.mapKey, trace.map);
    await this.showMap();
    document.body.dataset.took = Math.round(performance.now() - started);
    this.showSelectedToken();
    this.loadStatistics(run);
  }

  showTrace(trace) {
    const isSameText = this.trace && trace.ids.join() === this.trace.ids.join() && String(trace.sourceTokens) === String(this.trace.sourceTokens);
    if (!this.hasInterventions) this.baseline = trace;
    else if (!isSameText) this.baseline = null;
    this.trace = trace;
    this.maps.clear();
    this.lensOfAll = null;
    this.headStatistics.clear();
    this.streamStatistics = null;
    this.layer = Math.min(this.layer, trace.attentionLayers.length - 1);
    this.token = isSameText ? this.token : Math.min(trace.tokens.length - 1, Math.max(this.token, 1));
    if (this.hasInterventions && this.baseline?.predictions) this.coloring = this.coloringBox.value = "effect";
    else if (this.coloring === "effect") this.coloring = this.coloringBox.value = "surprisal";
    if (!trace.predictions && this.coloring === "surprisal") this.coloring = this.coloringBox.value = "attention";
    // unchanged elements are kept, because new ones would lose the keyboard focus
    if (isSameText) this.markToken();
    else this.showTokens();
    if (this.headElements) this.colorHeads();
    else this.showHeads();
    this.experts.show(trace);
  }

  /** Load slow statistics after a pause and two layers at a time, so that the next run does not wait for them. */
  async loadStatistics(run) {
    try {
      if (data.hasServer) await new Promise((done) => setTimeout(done, 150));
      if (run !== this.nRuns) return;
      this.streamStatistics = await this.get("stream_statistics");
      if (run !== this.nRuns) return;
      this.showStream();
      for (let start = 0; start < this.trace.attentionLayers.length && run === this.nRuns; start += 2) {
        const { layers } = await this.get("head_statistics", { start, stop: start + 2 });
        if (run !== this.nRuns) return;
        for (const layer of layers) this.headStatistics.set(layer.name, layer);
        this.colorHeads();
      }
    } catch (error) {
      if (run === this.nRuns) showMessage(error.message);
    }
  }

  /** Return a part of the current trace, from the server or from the data of the file. */
  async get(name, fields = {}) {
    if (data.hasServer) return request(name, { model: this.index, trace: this.trace.trace, ...fields });
    if (name === "attention_map") return this.given.attentionMaps[fields.layer][fields.head];
    if (name === "router_map") return this.given.routerMaps[fields.name];
    if (name === "head_statistics") return { layers: this.given.headStatistics.slice(fields.start, fields.stop) };
    if (name === "top_predictions") return this.given.topPredictions[fields.position];
    return name === "logit_lens" ? this.given.logitLens : this.given.streamStatistics;
  }

  /** Run the model on the current tokens again, after a change of the interventions or with an edit. */
  async rerun(fields = {}) {
    const run = this.nRuns + 1;
    try {
      showMessage("", "running the model …");
      await this.run({ ids: this.trace.ids, trace: this.trace.trace, ...fields });
      if (run === this.nRuns) showMessage("", this.describeLoss());
    } catch (error) {
      if (run === this.nRuns) showMessage(error.message);
    }
  }

  describeLoss() {
    const { predictions } = this.trace;
    if (!predictions || predictions.logProbs.length < 2) return "";
    const mean = (logs) => (logs.slice(0, -1).includes(null) ? "–" : (-logs.slice(0, -1).reduce((a, b) => a + b) / (logs.length - 1)).toFixed(3));
    const loss = "Loss " + mean(predictions.logProbs) + " nats/token";
    const baseline = this.hasInterventions && this.baseline?.predictions;
    return loss + (baseline ? ", without interventions " + mean(baseline.logProbs) + "." : ".");
  }

  // ---------------------------------------------------------------- sections of the page
  build() {
    const box = add($("models"), "section", "", { className: "model", "aria-label": this.info.title });
    add(box, "h2", this.info.title);
    add(box, "p", this.info.class + ", " + this.info.nParameters.toLocaleString("en") + " parameters", { className: "quiet" });
    const parts = add(box, "div", "", { className: "parts" });
    const part = (title, wide = "") => {
      const element = add(parts, "section", "", { className: "part " + wide, "aria-label": this.uniqueLabel(title) });
      add(element, "h3", title);
      return element;
    };
    this.buildTokens(part("Tokens", "wide"));
    this.buildSelectedToken(part("Selected token"));
    this.buildHeads(part("Layers and heads"));
    this.buildMap(part("Attention map"));
    this.buildLens(part("Logit lens"));
    this.experts = new ExpertView(this, part("Experts", "wide"));
    this.buildStream(part("Residual stream", "wide"));
    if (this.given.measures?.length) this.measureView = new MeasureView(this, part("Measures", "wide"));
  }

  /** Return a label that differs between the models of a comparison. */
  uniqueLabel(label) {
    return label + (data.models.length > 1 ? " of model " + (this.index + 1) : "");
  }

  /** Add a region that scrolls if its content is too large, also by keyboard. */
  addRegion(parent, label, className = "scroll", hidden = false) {
    return add(parent, "div", "", { className, tabIndex: 0, role: "region", "aria-label": this.uniqueLabel(label), hidden });
  }

  buildTokens(part) {
    const bar = add(part, "div", "", { className: "bar" });
    const label = add(bar, "label", "Color tokens by ");
    this.coloringBox = add(label, "select");
    for (const [value, text] of Object.entries(TOKEN_COLORINGS)) add(this.coloringBox, "option", text, { value });
    this.coloringBox.onchange = () => {
      this.coloring = this.coloringBox.value;
      this.colorTokens();
    };
    this.sourceBox = add(part, "div", "", { className: "tokens", role: "group", "aria-label": "Source tokens", hidden: true });
    this.tokenBox = add(part, "div", "", { className: "tokens", role: "listbox", "aria-label": "Tokens", "aria-orientation": "horizontal" });
    addArrowKeys(this.tokenBox, () => this.tokenElements, () => 10, (i) => this.selectToken(i));
    add(part, "p", "Select a token by click or with the arrow keys. The other sections show the predictions at this position and its attention.", { className: "quiet" });
  }

  buildSelectedToken(part) {
    this.tokenSummary = add(part, "p", "");
    this.predictionsCaption = add(part, "p", "", { className: "quiet" });
    this.predictionsTable = add(this.addRegion(part, "Next-token predictions"), "table");
    if (!data.hasServer) return;
    const form = add(part, "form", "", { className: "bar" });
    const label = add(form, "label", "Replace by ");
    this.replacement = add(label, "input", "", { type: "text", size: 10, maxLength: 200, autocomplete: "off" });
    add(form, "button", "Replace token", { type: "submit" });
    form.onsubmit = (event) => {
      event.preventDefault();
      this.rerun({ edit: { position: this.token, replacement: this.replacement.value } });
    };
  }

  buildHeads(part) {
    const bar = add(part, "div", "", { className: "bar" });
    const label = add(bar, "label", "Color heads by ");
    this.statisticBox = add(label, "select");
    for (const [value, text] of [["entropy", "attention entropy"], ["scoreKurtosis", "score kurtosis"]]) add(this.statisticBox, "option", text, { value });
    this.halfLifeOption = add(this.statisticBox, "option", "half-life of the state in tokens", { value: "halfLife" });
    this.unassignedOption = add(this.statisticBox, "option", "attention weight on no key", { value: "unassigned", hidden: true });
    this.statisticBox.onchange = () => this.colorHeads();
    this.headBox = add(part, "div", "", { className: "heads", role: "group", "aria-label": "Heads, one row per layer" });
    addArrowKeys(this.headBox, () => this.headElements, () => this.trace.attentionLayers[0].nHeads, (i) => this.selectHead(i));
    this.headSummary = add(part, "p", "", { className: "quiet" });
    this.ablations = add(part, "fieldset", "", { className: "bar" });
  }

  buildMap(part) {
    const bar = add(part, "div", "", { className: "bar" });
    const set = add(bar, "fieldset");
    add(set, "legend", "Show");
    for (const [value, text] of [["scores", "scores"], ["weights", "weights"]]) {
      const label = add(set, "label");
      const radio = add(label, "input", "", { type: "radio", name: "map" + this.index, value, checked: value === this.mapKind });
      label.append(" " + text);
      radio.onchange = () => ((this.mapKind = value), this.showMap());
    }
    const frame = addFrame(part, "Attention map");
    Object.assign(this, { keyLabels: frame.columns, queryLabels: frame.rows, canvas: frame.canvas });
    this.canvas.className = "map";
    this.canvas.onclick = (event) => this.selectToken(this.findCell(event)[0]);
    this.canvas.onpointermove = (event) => this.describeCell(...this.findCell(event));
    this.mapSummary = add(part, "p", "", { className: "quiet" });
    this.cellSummary = add(part, "p", "Rows: queries. Columns: keys.", { className: "quiet" });
    this.keysTable = add(this.addRegion(part, "Keys with the highest attention weights"), "table");
  }

  buildLens(part) {
    this.lensCaption = add(part, "p", "The residual stream after each layer, passed through the final norm and the output head. Rank: that of the actual next token.", { className: "quiet" });
    this.lensTable = add(this.addRegion(part, "Logit lens of the selected token"), "table");
    this.lensButton = add(add(part, "div", "", { className: "bar" }), "button", "Show all positions", { type: "button" });
    this.lensButton.onclick = () => this.showLensOfAll();
    this.lensOfAllBox = this.addRegion(part, "Logit lens of all tokens", "scroll lens", true);
  }

  buildStream(part) {
    this.norms = addFrame(part, "Norms of the residual stream");
    this.norms.canvas.className = "norms";
    this.normsCaption = add(part, "p", "", { className: "quiet" });
    const details = add(part, "details");
    add(details, "summary", "Kurtosis and outliers per layer");
    this.outliersTable = add(this.addRegion(details, "Kurtosis and outliers"), "table");
  }

  // ---------------------------------------------------------------- tokens
  showTokens() {
    const { tokens, sourceTokens } = this.trace;
    this.sourceBox.hidden = !sourceTokens;
    this.sourceElements = sourceTokens ? writeTokens(this.sourceBox, sourceTokens, "span") : [];
    this.tokenElements = writeTokens(this.tokenBox, tokens, "option");
    this.tokenElements.forEach((element, i) => (element.onclick = () => this.selectToken(i)));
    this.markToken();
  }

  markToken() {
    markElement(this.tokenElements, this.token, "aria-selected");
    this.colorTokens();
  }

  async selectToken(i) {
    this.token = i;
    this.markToken();
    this.drawMap();
    this.experts.draw();
    await this.showSelectedToken();
  }

  /** Return a value from -1 to 1 for the color of each token. */
  tokenColorValues() {
    const { tokens, predictions } = this.trace, map = this.currentMap;
    const logProb = (logs, i) => (i === 0 || !logs ? 0 : logs[i - 1] ?? 0); // of token i, predicted at the position before it
    if (this.coloring === "surprisal") return tokens.map((_, i) => Math.min(1, -logProb(predictions?.logProbs, i) / 8));
    if (this.coloring === "effect") {
      const before = this.baseline?.predictions;
      return tokens.map((_, i) => Math.max(-1, Math.min(1, (logProb(before?.logProbs, i) - logProb(predictions?.logProbs, i)) / 3)));
    }
    if (this.coloring === "attention" && map && this.readsTrace) return Array.from(this.selectedRow(map), (byte) => byte / 255);
    if (this.coloring === "norm" && this.streamStatistics?.length) {
      const norms = this.streamStatistics.at(-1).norms, max = Math.max(...norms), min = Math.min(...norms);
      return norms.map((norm) => (norm - min) / (max - min || 1));
    }
    return tokens.map(() => 0);
  }

  colorTokens() {
    this.tokenColorValues().forEach((value, i) => (this.tokenElements[i].style.background = tokenColor(value)));
    const map = this.currentMap, isCross = map && this.attentionLayer.kind === "cross";
    this.sourceElements.forEach((element, i) => (element.style.background = isCross ? tokenColor(this.selectedRow(map)[i] / 255) : ""));
  }

  async showSelectedToken() {
    const { tokens, predictions } = this.trace, i = this.token, run = this.nRuns;
    const score = predictions && i > 0 ? ": probability " + percentOfLog(predictions.logProbs[i - 1]) + ", " + formatRank(predictions.ranks[i - 1]) + "." : ".";
    this.tokenSummary.replaceChildren(code(tokens[i]), " at position " + i + score);
    if (predictions && this.hasInterventions && this.baseline?.predictions && i > 0) this.tokenSummary.append(" Without interventions: " + percentOfLog(this.baseline.predictions.logProbs[i - 1]) + ".");
    if (!predictions) {
      this.predictionsCaption.textContent = "This model does not predict tokens.";
      this.lensCaption.textContent = "This model does not predict tokens.";
      this.lensButton.hidden = true;
      return;
    }
    this.predictionsCaption.textContent = "Top next-token predictions (entropy " + formatNumber(predictions.entropy[i]) + " nats):";
    let response;
    try {
      response = await this.get("top_predictions", { position: i });
    } catch (error) {
      showMessage(error.message);
      return;
    }
    if (run !== this.nRuns || i !== this.token) return;
    this.showPredictions(response.top);
    this.showLens(response.lens);
  }

  showPredictions(top) {
    const next = this.trace.ids[this.token + 1];
    addHeader(this.predictionsTable, [["token"], ["probability", "n"], [""]]);
    const body = add(this.predictionsTable, "tbody");
    for (const { id, text, prob } of top) {
      const row = add(body, "tr");
      add(row, "td").append(code(text), id === next ? " ← actual" : "");
      add(row, "td", percent(prob), { className: "n" });
      const last = add(row, "td");
      if (!data.hasServer) add(last, "span", "", { className: "gauge" }).style.width = 5 * prob + "rem";
      else if (id !== next) add(last, "button", "set next", { type: "button", "aria-label": "set next token: " + visible(text) }).onclick = () => this.setNextToken(id);
    }
  }

  setNextToken(id) {
    const isLast = this.token + 1 === this.trace.ids.length;
    this.rerun(isLast ? { ids: [...this.trace.ids, id] } : { edit: { position: this.token + 1, replacement: id } });
  }

  // ---------------------------------------------------------------- heads
  showHeads() {
    const { attentionLayers } = this.trace, maxHeads = Math.max(...attentionLayers.map((layer) => layer.nHeads));
    this.halfLifeOption.hidden = !attentionLayers.some((layer) => layer.kind === "state");
    this.headBox.replaceChildren();
    this.headBox.style.gridTemplateColumns = "auto repeat(" + maxHeads + ", 1.6rem)";
    this.headIndices = []; // pairs of the index of a layer and that of a head
    this.headElements = [];
    attentionLayers.forEach((layer, layerIndex) => {
      const name = add(this.headBox, "span", layerName(layer), { className: "name" });
      name.style.gridColumn = "1";
      for (let head = 0; head < layer.nHeads; head++) {
        const index = this.headElements.length;
        this.headIndices.push([layerIndex, head]);
        const button = add(this.headBox, "button", "", { type: "button", "aria-label": layerName(layer) + ", head " + head });
        button.onclick = () => this.selectHead(index);
        this.headElements.push(button);
      }
    });
    this.colorHeads();
    this.showAblations();
  }

  async selectHead(index) {
    [this.layer, this.head] = this.headIndices[index];
    this.colorHeads();
    this.showAblations();
    await this.showMap();
  }

  colorHeads() {
    if ([...this.headStatistics.values()].some(({ unassigned }) => unassigned.some((weight) => weight > 0.005))) this.unassignedOption.hidden = false;
    const statistic = this.statisticBox.value, label = this.statisticBox.selectedOptions[0].textContent;
    const scaled = (value) => (["entropy", "unassigned"].includes(statistic) ? value : Math.log1p(Math.max(0, value)));
    const values = this.headIndices.map(([layer, head]) => this.headStatistics.get(this.trace.attentionLayers[layer].name)?.[statistic]?.[head] ?? null);
    const max = Math.max(...values.filter((value) => value !== null).map(scaled), 1e-9);
    this.headElements.forEach((button, i) => {
      const [layerIndex, head] = this.headIndices[i], layer = this.trace.attentionLayers[layerIndex];
      const value = values[i] === null ? 0 : scaled(values[i]) / max;
      const isAblated = this.isAblated(layer.name, head), isSelected = layerIndex === this.layer && head === this.head;
      button.style.background = "rgb(var(--accent) / " + (0.08 + 0.9 * value).toFixed(3) + ")";
      button.textContent = isAblated ? "×" : "";
      button.setAttribute("aria-pressed", isSelected);
      button.tabIndex = isSelected ? 0 : -1;
      button.title = layerName(layer) + ", head " + head + (isAblated ? ", ablated" : "") + (values[i] === null ? "" : ": " + label + " " + formatNumber(values[i]));
      button.setAttribute("aria-label", button.title);
    });
  }

  isAblated(name, head) {
    return this.ablatedHeads.has(name + "/" + head) || this.ablatedLayers.has(name) || this.ablatedLayers.has(name.replace(/\.[^.]+$/, ""));
  }

  showAblations() {
    const layer = this.attentionLayer, block = layer.name.replace(/\.[^.]+$/, "");
    this.headSummary.textContent = layerName(layer) + ", head " + this.head + " of " + layer.nHeads;
    this.ablations.replaceChildren();
    if (!data.hasServer) return;
    add(this.ablations, "legend", "Ablate");
    const addCheckbox = (text, set, key) => {
      const label = add(this.ablations, "label");
      const input = add(label, "input", "", { type: "checkbox", checked: set.has(key) });
      label.append(text);
      input.onchange = () => {
        set[input.checked ? "add" : "delete"](key);
        this.colorHeads();
        this.rerun();
      };
    };
    if (this.info.kind !== "encoder-decoder" || layer.name.includes(".")) addCheckbox("this head", this.ablatedHeads, layer.name + "/" + this.head);
    if (this.info.ablatable.includes(layer.name)) addCheckbox(layer.kind === "state" ? "this mixer" : "this attention", this.ablatedLayers, layer.name);
    if (this.info.ablatable.includes(block + ".mlp")) addCheckbox("the MLP", this.ablatedLayers, block + ".mlp");
    if (this.info.ablatable.includes(block)) addCheckbox("the layer", this.ablatedLayers, block);
  }

  // ---------------------------------------------------------------- attention map
  get attentionLayer() {
    return this.trace.attentionLayers[this.layer];
  }
  get mapKey() {
    return this.attentionLayer.name + "/" + this.head;
  }
  /** The map of the selected head, if it is loaded. */
  get currentMap() {
    return this.maps.get(this.mapKey);
  }
  /** The row of the selected token; 0 in the encoder of an encoder-decoder, whose tokens cannot be selected. */
  get rowIndex() {
    return this.attentionLayer.kind === "encoder" ? 0 : this.token;
  }
  get queryTexts() {
    return this.attentionLayer.kind === "encoder" ? this.trace.sourceTokens : this.trace.tokens;
  }
  get keyTexts() {
    return this.readsTrace ? this.trace.tokens : this.trace.sourceTokens;
  }
  /** Whether the keys of the selected layer are tokens of the trace, not of a source. */
  get readsTrace() {
    return ["self", "state"].includes(this.attentionLayer.kind);
  }
  /** Return the bytes of the weights of the selected query. */
  selectedRow(map) {
    const n = map.shape[1], start = this.rowIndex * n;
    return map.bytes.weights.subarray(start, start + n);
  }

  async showMap() {
    const key = this.mapKey, run = this.nRuns;
    if (!this.maps.has(key)) {
      try {
        const map = await this.get("attention_map", { layer: this.attentionLayer.name, head: this.head });
        if (run !== this.nRuns) return;
        await this.storeMap(key, map);
      } catch (error) {
        showMessage(error.message);
        return;
      }
    }
    if (run !== this.nRuns) return;
    this.drawMap();
    this.colorTokens();
  }

  async storeMap(key, map) {
    const run = this.nRuns, [weights, scores] = await Promise.all([decodeBytes(map.weights, map.deflated), decodeBytes(map.scores, map.deflated)]);
    if (run === this.nRuns) this.maps.set(key, { ...map, bytes: { weights, scores } });
  }

  drawMap() {
    const layer = this.attentionLayer, map = this.currentMap;
    if (!map) return;
    const [n, m] = map.shape, scale = Math.max(1, Math.ceil(640 / Math.max(n, m))), isScores = this.mapKind === "scores";
    const context = paint(this.canvas, map.bytes[this.mapKind], n, m, colors, scale);
    this.canvas.style.aspectRatio = m + " / " + n;
    this.canvas.style.maxWidth = "min(100%, " + Math.max(4, Math.min(34, m * 2)) + "rem)";
    this.labelMap(n, m);
    context.strokeStyle = getComputedStyle(document.body).color;
    context.lineWidth = 2;
    if (layer.kind !== "encoder") context.strokeRect(0, this.token * scale - 1, scale * m, scale + 2);
    const unassigned = map.unassigned[this.rowIndex];
    const range = isScores ? ", from " + formatNumber(map.minScore) + " to " + formatNumber(map.maxScore) : "";
    const title = (isScores ? "Scores" : "Weights") + " of " + layerName(layer) + ", head " + this.head + range;
    const query = "Selected query: entropy " + formatNumber(map.entropy[this.rowIndex]) + " nats" + (Math.abs(unassigned) > 0.005 ? ", " + percent(unassigned) + " of the weight on no key." : ".");
    const kept = map.kept ? " The state before it is multiplied by " + formatNumber(map.kept[this.rowIndex]) + ". Scores: factors of the earlier tokens in the result; weights: shares of their magnitudes." : "";
    this.mapSummary.textContent = title + ": kurtosis " + formatNumber(isScores ? map.scoreKurtosis : map.weightKurtosis) + ". " + query + kept;
    this.canvas.setAttribute("aria-label", title + ". " + n + " queries (rows), " + m + " keys (columns). The table below lists the keys with the highest weights for the selected query.");
    this.showTopKeys(map);
  }

  /** Show the tokens at the left and at the top of a map if there is room. */
  labelMap(n, m) {
    this.keyLabels.style.maxWidth = this.canvas.style.maxWidth;
    labelCanvas(this.canvas, [[this.queryLabels, this.queryTexts, n], [this.keyLabels, this.keyTexts, m]]);
  }

  showTopKeys(map) {
    const texts = this.keyTexts, weights = this.selectedRow(map), { minScore, maxScore } = map, m = map.shape[1];
    const scores = map.bytes.scores.subarray(this.rowIndex * m, (this.rowIndex + 1) * m);
    addHeader(this.keysTable, [["key"], ["position", "n"], ["weight", "n"], ["score", "n"]]);
    const body = add(this.keysTable, "tbody");
    for (const i of Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a]).slice(0, N_KEYS).filter((i) => weights[i])) {
      const row = add(body, "tr");
      add(row, "td").append(code(texts[i]));
      add(row, "td", i, { className: "n" });
      add(row, "td", ((weights[i] / 255) ** 2).toFixed(3), { className: "n" });
      add(row, "td", scores[i] ? formatNumber(minScore + ((scores[i] - 1) / 254) * (maxScore - minScore)) : "–", { className: "n" });
    }
    if (map.unassigned[this.rowIndex] > 0.005) {
      const row = add(body, "tr");
      for (const text of ["no key", "–", map.unassigned[this.rowIndex].toFixed(2), "–"]) add(row, "td", text, { className: text === "no key" ? "quiet" : "n" });
    }
  }

  /** Return row and column of the map at the pointer. */
  findCell(event) {
    return findCell(this.canvas, event, ...(this.currentMap?.shape ?? [1, 1]));
  }

  describeCell(row, column) {
    const map = this.currentMap;
    if (!map) return;
    const weight = (map.bytes.weights[row * map.shape[1] + column] / 255) ** 2;
    this.cellSummary.textContent = "Query " + quoted(this.queryTexts[row]) + " (" + row + "), key " + quoted(this.keyTexts[column]) + " (" + column + "): weight " + weight.toFixed(3);
  }

  // ---------------------------------------------------------------- logit lens
  showLens(lens) {
    addHeader(this.lensTable, [["layer"], ["rank", "n"], ["top predictions", "top"]]);
    const body = add(this.lensTable, "tbody");
    lens.forEach(({ top, prob, rank }, i) => {
      const row = add(body, "tr");
      add(row, "th", shortName(this.trace.streamNames[i]), { scope: "row" });
      add(row, "td", rank === undefined ? "–" : (rank + 1).toLocaleString("en"), { className: "n", title: percent(prob) });
      const cell = add(row, "td", "", { className: "top" });
      top.forEach(({ text, prob: topProb }, k) => cell.append(k ? " " : "", code(text), k ? "" : " " + percent(topProb)));
    });
    this.lensButton.hidden = lens.length === 0;
    if (lens.length === 0) this.lensCaption.textContent = "This model has no residual stream.";
  }

  async showLensOfAll() {
    const run = this.nRuns;
    this.lensButton.disabled = true;
    try {
      showMessage("", "computing the logit lens …");
      this.lensOfAll ??= await this.get("logit_lens");
      showMessage("", "");
      if (run === this.nRuns) this.drawLensOfAll();
    } catch (error) {
      showMessage(error.message);
    }
    this.lensButton.disabled = false;
  }

  drawLensOfAll() {
    const { texts, tokens, probs } = this.lensOfAll;
    this.lensOfAllBox.replaceChildren();
    const table = add(this.lensOfAllBox, "table");
    const head = add(add(table, "thead"), "tr");
    add(head, "th", "layer", { scope: "col" });
    this.trace.tokens.forEach((token) => add(head, "th", visible(token), { scope: "col" }));
    const body = add(table, "tbody");
    for (let layer = tokens.length - 1; layer >= 0; layer--) {
      const row = add(body, "tr");
      add(row, "th", shortName(this.trace.streamNames[layer]), { scope: "row" });
      tokens[layer].forEach((token, i) => {
        const cell = add(row, "td", visible(texts[token]), { title: visible(texts[token]) + " " + percent(probs[layer][i]) });
        cell.style.background = "rgb(var(--accent) / " + (probs[layer][i] * MAX_OPACITY).toFixed(3) + ")";
        if (token === this.trace.ids[i + 1]) cell.style.fontWeight = "bold";
      });
    }
    this.lensOfAllBox.hidden = false;
  }

  // ---------------------------------------------------------------- residual stream
  showStream() {
    const statistics = this.streamStatistics, n = this.trace.tokens.length;
    const { canvas, rows, columns } = this.norms;
    canvas.hidden = statistics.length === 0;
    if (!statistics.length) return void (this.normsCaption.textContent = "This model has no residual stream.");
    const logs = statistics.flatMap(({ norms }) => norms.map((norm) => Math.log((norm ?? 0) + 1e-9)));
    const min = Math.min(...logs), span = Math.max(...logs) - min || 1;
    paint(canvas, Uint8Array.from(logs, (log) => (255 * (log - min)) / span), statistics.length, n, colors, 4);
    const norm = (log) => formatNumber(Math.exp(log));
    labelCanvas(canvas, [[rows, statistics.map(({ name }) => shortName(name)), statistics.length], [columns, this.trace.tokens, n]]);
    this.normsCaption.textContent = "Norm of the residual stream for each token (columns) after each layer (rows), on a log scale from " + norm(min) + " to " + norm(min + span) + ".";
    canvas.setAttribute("aria-label", "Norms of the residual stream after " + statistics.length + " layers for " + n + " tokens, from " + norm(min) + " to " + norm(min + span) + "; the table below lists the outliers.");
    addHeader(this.outliersTable, [["layer"], ["kurtosis", "n"], ["outliers: channel, token, value, ratio to the median channel"]]);
    const body = add(this.outliersTable, "tbody");
    for (const { name, kurtosis, outliers } of statistics) {
      const row = add(body, "tr");
      add(row, "th", shortName(name), { scope: "row" });
      add(row, "td", formatNumber(kurtosis), { className: "n" });
      const cell = add(row, "td");
      outliers.forEach(({ channel, position, value, ratio }, i) => cell.append((i ? "; " : "") + channel + ", ", code(this.trace.tokens[position]), " " + formatNumber(value) + ", " + formatNumber(ratio) + "×"));
    }
    if (this.coloring === "norm") this.colorTokens();
  }
}

// ---------------------------------------------------------------- helpers
/** Replace the content of a box by an element for each token; role is "option" or "span". */
function writeTokens(box, texts, role) {
  box.replaceChildren();
  return texts.map((text) => addToken(box, text, role));
}

/** Add a frame with a canvas, and boxes for the labels of its rows and columns. */
function addFrame(parent, label) {
  const frame = add(parent, "div", "", { className: "frame" });
  const columns = add(frame, "div", "", { className: "columns", "aria-hidden": "true" });
  const rows = add(frame, "div", "", { className: "rows", "aria-hidden": "true" });
  return { rows, columns, canvas: add(frame, "canvas", "", { role: "img", "aria-label": label }) };
}

/** Show labels at the left and at the top of a canvas if there is room, from [box, texts, count] of rows and of columns. */
function labelCanvas(canvas, labels) {
  for (const [box, texts, count] of labels) {
    box.hidden = count > MAX_LABELS;
    box.replaceChildren();
    if (!box.hidden) for (const text of texts) add(box, "span", visible(text).trim() || "␣");
  }
  const [[rows, , n], [columns, , m]] = labels;
  if (canvas.clientWidth / m < MIN_CELL || canvas.clientHeight / n < MIN_CELL) rows.hidden = columns.hidden = true;
}

const percentOfLog = (log) => percent(log === null ? null : Math.exp(log));
const shortName = (name) => name.replace(/blocks\.(\d+)/, (_, i) => "layer " + i).replace(/\./g, " ").replace(/(layer \d+) attention$/, "$1");
const layerName = ({ name, kind }) => shortName(kind === "state" ? name.replace(/attention$/, "mixer") : name);

// ---------------------------------------------------------------- all models
const panels = data.models.map((given, index) => new ModelPanel(index, given));

async function runText() {
  try {
    showMessage("", "running the model …");
    for (const panel of panels) await panel.run({ text: $("text").value });
    showMessage("", panels.map((panel) => panel.describeLoss()).join(" "));
  } catch (error) {
    showMessage(error.message);
  }
}

async function rerunAll() {
  for (const [id, text] of [["temperature", "a temperature from 0.001"], ["steering", "a steering strength from -1000"]]) {
    if ($(id).checkValidity()) continue;
    for (const panel of panels) panel.nRuns++; // discard the results of runs in progress
    return showMessage("Expected " + text + " to 1000.");
  }
  for (const panel of panels) if (panel.trace) await panel.rerun();
}

async function showStaticData() {
  for (const panel of panels) {
    panel.showTrace(panel.given.trace);
    await panel.showMap();
    await panel.showSelectedToken();
    await panel.loadStatistics(panel.nRuns);
  }
  showMessage("", panels.map((panel) => panel.describeLoss()).join(" "));
}

async function start() {
  document.title = $("title").textContent = "Model viewer: " + panels.map((panel) => panel.info.title).join(" and ");
  $("form").hidden = !data.hasServer;
  $("static").hidden = data.hasServer;
  $("command").textContent = data.command ?? "tricycle look";
  add($("softmax"), "option", "model default", { value: "" });
  for (const name of data.softmaxes ?? []) add($("softmax"), "option", name, { value: name });
  if (panels.some((panel) => panel.info.kind === "encoder-decoder")) $("text-label").textContent = "Source => target (without a target, the model generates one)";
  $("text").value = data.text;
  $("form").onsubmit = (event) => (event.preventDefault(), runText());
  $("softmax").onchange = $("temperature").onchange = $("steering").onchange = rerunAll;
  $("steering").parentElement.hidden = !panels.some((panel) => panel.info.isSteerable);
  $("reset").onclick = () => {
    $("softmax").value = "";
    $("temperature").value = 1;
    $("steering").value = 0;
    for (const panel of panels) panel.ablatedLayers.clear(), panel.ablatedHeads.clear(), panel.trace && panel.showAblations();
    rerunAll();
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    colors = palette();
    if (data.hasServer) signedColors = palette(["--less", "--low", "--accent"]);
    for (const panel of panels) panel.trace && (panel.drawMap(), panel.experts.draw(), panel.experts.drawLoads(), panel.streamStatistics && panel.showStream(), panel.measureView?.redraw());
  };
  await (data.hasServer ? runText() : showStaticData());
  document.body.dataset.ready = Math.round(performance.now()); // ms since the navigation started
}
start();
