const N_STRONGEST = 10; // values in the table of each heat map
const INPUT_LABELS = { corruptedPrompt: "Corrupted prompt", answer: "Answer", otherAnswer: "Other answer" };
let signedColors = palette(["--less", "--low", "--accent"]);

/** The section of a model's panel that computes measures in the server, and draws their tables as heat maps. */
class MeasureView {
  constructor(panel, part) {
    Object.assign(this, { panel, measures: panel.given.measures, nRuns: 0, tables: new Map(), inputs: {} });
    add(part, "p", "Measures of the model. Patching compares the text above with a corrupted prompt of equally many tokens: 0 is no effect, 1 restores the logit difference of two answers (one token each, usually with a space in front). Patching, attribution, circuits and head scores ignore interventions.", { className: "quiet" });
    const form = add(part, "form", "", { className: "bar" });
    this.nameBox = add(add(form, "label", "Measure "), "select");
    for (const { name, title } of this.measures) add(this.nameBox, "option", title, { value: name });
    for (const [name, text] of Object.entries(INPUT_LABELS)) {
      const label = add(form, "label", text + " "), isPrompt = name === "corruptedPrompt"; // may contain line breaks
      this.inputs[name] = add(label, isPrompt ? "textarea" : "input", "", isPrompt ? { rows: 1, spellcheck: false, className: "prompt" } : { type: "text", size: 8, autocomplete: "off" });
      this.inputs[name].maxLength = 5000;
    }
    this.button = add(form, "button", "Compute", { type: "submit" });
    this.stopButton = add(form, "button", "Stop", { type: "button", disabled: true });
    this.status = add(part, "p", "", { className: "quiet", role: "status" });
    this.box = add(part, "div", "", { className: "grids" });
    this.nameBox.onchange = () => this.showInputs();
    this.stopButton.onclick = () => this.finish("Stopped.");
    form.onsubmit = (event) => (event.preventDefault(), this.compute());
    this.showInputs();
  }

  get measure() {
    return this.measures.find(({ name }) => name === this.nameBox.value);
  }

  showInputs() {
    for (const [name, input] of Object.entries(this.inputs)) input.parentElement.hidden = !this.measure.inputs.includes(name);
  }

  /** Request the tables of the measure, layer by layer, and draw each of them. */
  async compute() {
    const { panel } = this, run = ++this.nRuns, started = performance.now();
    const texts = Object.fromEntries(this.measure.inputs.map((name) => [name, this.inputs[name].value]));
    this.tables.clear();
    this.box.replaceChildren();
    this.stopButton.disabled = false;
    this.tokens = panel.trace.tokens.join();
    showMessage("");
    this.status.textContent = "computing …";
    try {
      const { measure } = await request("start_measure", { model: panel.index, trace: panel.trace.trace, name: this.measure.name, position: panel.token, ...texts });
      for (;;) {
        const { table } = await request("next_table", { model: panel.index, measure });
        if (run !== this.nRuns) return;
        if (!table) return this.finish("Computed in " + ((performance.now() - started) / 1000).toFixed(1) + " s.");
        this.showTable(table);
        const n = table.values.filter((row) => row.some((value) => value !== null)).length;
        this.status.textContent = table.title + ": " + n + " of " + table.values.length + " rows";
      }
    } catch (error) {
      if (run === this.nRuns) this.finish(""), showMessage(error.message);
    }
  }

  finish(text) {
    this.nRuns++;
    this.stopButton.disabled = true;
    this.status.textContent = text;
  }

  /** Draw a table, in the place of an earlier one with its title. */
  showTable(table) {
    let view = this.tables.get(table.title);
    if (!view) {
      const box = add(this.box, "section", "", { className: "grid", "aria-label": this.panel.uniqueLabel(table.title) });
      add(box, "h3", table.title);
      view = { ...addFrame(box, ""), cell: add(box, "p", "", { className: "quiet" }) };
      const details = add(box, "details");
      add(details, "summary", "Strongest values");
      view.strongest = add(this.panel.addRegion(details, "Strongest values of " + table.title), "table");
      this.tables.set(table.title, view);
    }
    view.table = table;
    this.draw(view);
    this.showStrongest(view);
  }

  draw({ canvas, rows, columns, cell, table }) {
    const { values, title } = table, n = values.length, m = table.columns.length;
    const limit = values.flat().reduce((max, value) => Math.max(max, Math.abs(value ?? 0)), 1e-30);
    cell.textContent = n ? "Scale: −" + formatNumber(limit) + " to " + formatNumber(limit) + ". Rows: " + table.rowName + ". Columns: " + table.columnName + "." : "No value.";
    canvas.hidden = !n;
    if (!n) return;
    const bytes = Uint8Array.from(values.flat(), (value) => Math.round(127.5 + (127.5 * (value ?? 0)) / limit));
    paint(canvas, bytes, n, m, signedColors, Math.max(1, Math.ceil(480 / Math.max(n, m))));
    canvas.style.width = "min(100%, " + Math.max(4, m * 1.6) + "rem)";
    canvas.style.height = Math.max(3, Math.min(26, n * 1.1)) + "rem";
    canvas.setAttribute("aria-label", title + ": " + n + " rows (" + table.rowName + "), " + m + " columns (" + table.columnName + "). The table below lists the strongest values.");
    labelCanvas(canvas, [[rows, table.rows, n], [columns, table.columns, m]]);
    columns.style.maxWidth = canvas.style.width.slice(4, -1).split(", ")[1];
    const find = (event) => findCell(canvas, event, n, m);
    canvas.onpointermove = (event) => (cell.textContent = this.describe(table, ...find(event)));
    canvas.onclick = (event) => this.select(table, ...find(event));
  }

  describe({ rowName, rows, columnName, columns, values, texts }, row, column) {
    const label = columnName === "position" ? "position " + column + " " + quoted(columns[column]) : columnName === "part" ? columns[column] : columnName + " " + columns[column];
    const text = texts?.[row][column];
    return rowName + " " + rows[row] + ", " + label + ": " + formatNumber(values[row][column]) + (text ? ", most probable " + quoted(text) : "");
  }

  showStrongest({ table, strongest }) {
    const m = table.columns.length, flat = table.values.flat();
    const indices = flat.map((_, i) => i).filter((i) => flat[i]);
    const body = add(strongest, "tbody");
    strongest.replaceChildren(body);
    for (const i of indices.sort((a, b) => Math.abs(flat[b]) - Math.abs(flat[a])).slice(0, N_STRONGEST)) {
      const row = Math.floor(i / m), column = i % m, cell = add(add(body, "tr"), "td"), text = this.describe(table, row, column);
      if (["head", "position"].includes(table.columnName)) add(cell, "button", text, { type: "button" }).onclick = () => this.select(table, row, column);
      else cell.textContent = text;
    }
  }

  /** Show the head or the token of a cell in the other sections. */
  select({ columnName, values }, row, column) {
    const { panel } = this;
    if (columnName === "head" && values.length === panel.trace.attentionLayers.length) panel.selectHead(panel.headIndices.findIndex(([layer, head]) => layer === row && head === column));
    if (columnName === "position" && panel.trace.tokens.join() === this.tokens) panel.selectToken(column);
  }

  /** Draw all tables again, with the colors of the color scheme. */
  redraw() {
    for (const view of this.tables.values()) this.draw(view);
  }
}
