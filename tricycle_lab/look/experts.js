const N_EXPERTS = 16; // in the table of the experts with the highest loads

/** The section of a model's panel that shows to which experts the routers of mixtures send each token. */
class ExpertView {
  constructor(panel, part) {
    Object.assign(this, { panel, part, layer: 0, map: null });
    this.layerBox = add(add(add(part, "div", "", { className: "bar" }), "label", "Layer "), "select");
    this.layerBox.onchange = () => this.showLayer(Number(this.layerBox.value));
    this.caption = add(part, "p", "", { className: "quiet" });
    const frame = addFrame(part, "Router weights");
    Object.assign(this, { canvas: frame.canvas, rows: frame.rows, columns: frame.columns });
    this.canvas.className = "map";
    const find = (event) => findCell(this.canvas, event, ...(this.map?.shape ?? [1, 1]));
    this.canvas.onclick = (event) => panel.selectToken(find(event)[1]);
    this.canvas.onpointermove = (event) => this.describe(...find(event));
    this.cell = add(part, "p", "", { className: "quiet" });
    this.table = add(panel.addRegion(part, "Experts with the highest loads"), "table");
    const details = add(part, "details");
    add(details, "summary", "Load of all layers");
    this.loads = addFrame(details, "Load of each expert in each layer");
    details.ontoggle = () => this.drawLoads();
    this.loadsCaption = add(details, "p", "", { className: "quiet" });
  }

  /** Show the mixtures of a trace; a model without mixtures has no such section. */
  async show(trace) {
    this.part.hidden = !trace.mixtures.length;
    if (this.part.hidden) return;
    this.layerBox.replaceChildren();
    trace.mixtures.forEach(({ name }, i) => add(this.layerBox, "option", shortName(name), { value: i }));
    this.layerBox.value = this.layer = Math.min(this.layer, trace.mixtures.length - 1);
    await this.showLayer(this.layer);
    this.drawLoads();
  }

  async showLayer(layer) {
    const run = this.panel.nRuns;
    this.layer = layer;
    try {
      const map = await this.panel.get("router_map", { name: this.mixture.name });
      const bytes = await decodeBytes(map.weights, map.deflated);
      if (run !== this.panel.nRuns || layer !== this.layer) return;
      this.map = { ...map, bytes };
      this.draw();
    } catch (error) {
      showMessage(error.message);
    }
  }

  get mixture() {
    return this.panel.trace.mixtures[this.layer];
  }

  weight(expert, token) {
    return (this.map.bytes[expert * this.map.shape[1] + token] / 255) * this.map.max;
  }

  draw() {
    if (!this.map || this.part.hidden) return;
    const { tokens } = this.panel.trace, { nActive, load } = this.mixture, [n, m] = this.map.shape;
    this.caption.textContent = "Each token is processed by " + nActive + " of " + n + " experts. Load: fraction of all selections in this text; " + percent(1 / n) + " if balanced.";
    const scale = Math.max(1, Math.ceil(640 / Math.max(n, m))), context = paint(this.canvas, this.map.bytes, n, m, colors, scale);
    this.canvas.style.maxWidth = this.columns.style.maxWidth = "min(100%, " + Math.max(4, Math.min(60, m * 2)) + "rem)";
    this.canvas.style.height = Math.max(3, Math.min(30, n * 1.1)) + "rem";
    this.canvas.setAttribute("aria-label", "Router weights of " + shortName(this.mixture.name) + ": " + n + " experts (rows), " + m + " tokens (columns). The table below lists the experts with the highest loads.");
    labelCanvas(this.canvas, [[this.rows, Array.from(load, (_, expert) => "expert " + expert), n], [this.columns, tokens, m]]);
    context.strokeStyle = getComputedStyle(document.body).color;
    context.lineWidth = 2;
    context.strokeRect(this.panel.token * scale - 1, 0, scale + 2, scale * n);
    this.cell.textContent = "Router weights, from 0 (not selected) to " + formatNumber(this.map.max) + ". Rows: experts. Columns: tokens.";
    addHeader(this.table, [["expert"], ["load", "n"], [""], ["weight at " + quoted(tokens[this.panel.token]), "n"]]);
    const body = add(this.table, "tbody"), highest = Math.max(...load);
    for (const expert of Array.from(load.keys()).sort((a, b) => load[b] - load[a]).slice(0, N_EXPERTS)) {
      const row = add(body, "tr"), weight = this.weight(expert, this.panel.token);
      add(row, "th", expert, { scope: "row" });
      add(row, "td", percent(load[expert]), { className: "n" });
      add(add(row, "td"), "span", "", { className: "gauge" }).style.width = (5 * load[expert]) / highest + "rem";
      add(row, "td", weight ? formatNumber(weight, 2) : "–", { className: "n" });
    }
  }

  describe(expert, token) {
    if (!this.map) return;
    const weight = this.weight(expert, token);
    this.cell.textContent = "Expert " + expert + ", token " + quoted(this.panel.trace.tokens[token]) + " (" + token + "): " + (weight ? "weight " + formatNumber(weight, 2) : "not selected") + ".";
  }

  /** Draw the loads of all layers (rows) and experts (columns), if this part is open. */
  drawLoads() {
    if (!this.loads.canvas.checkVisibility()) return;
    const { mixtures } = this.panel.trace, m = Math.max(...mixtures.map(({ load }) => load.length)), n = mixtures.length;
    const max = Math.max(...mixtures.flatMap(({ load }) => load)), { canvas, rows, columns } = this.loads;
    const bytes = mixtures.flatMap(({ load }) => Array.from({ length: m }, (_, expert) => (255 * (load[expert] ?? 0)) / max));
    paint(canvas, Uint8Array.from(bytes), n, m, colors, Math.max(1, Math.ceil(480 / Math.max(n, m))));
    canvas.style.maxWidth = columns.style.maxWidth = "min(100%, " + Math.max(8, m * 2) + "rem)";
    canvas.style.width = "100%";
    canvas.style.height = Math.max(2, Math.min(30, n * 1.2)) + "rem";
    canvas.setAttribute("aria-label", "Loads of " + m + " experts (columns) in " + n + " layers (rows), up to " + percent(max));
    labelCanvas(canvas, [[rows, mixtures.map(({ name }) => shortName(name)), n], [columns, Array.from({ length: m }, (_, expert) => String(expert)), m]]);
    this.loadsCaption.textContent = "Rows: layers. Columns: experts. Loads from 0% to " + percent(max) + ".";
  }
}
