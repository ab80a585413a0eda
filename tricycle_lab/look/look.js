const SHADES = { surprise: "how surprising it was", attention: "attention from the chosen token", change: "what your changes did", norm: "its norm in the last layer" };
const MOST_LABELS = 40, LEAST_CELL = 11; // tokens beside a map, and pixels for each
const STRONGEST = 0.55; // of a shade behind text
let shades = palette();

/** Asks whoever served the page; a file has everything in it already. */
async function ask(question, fields) {
  let response;
  try {
    response = await fetch(question, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields) });
  } catch {
    throw new Error("The model is gone. Start `tricycle look` again and open the address that it prints; what is here stays to be read.");
  }
  const answer = await response.json().catch(() => ({ error: "an answer could not be read" }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function tell(trouble, status = "") {
  $("trouble").textContent = trouble;
  $("status").textContent = status;
}

/** One model: what it made of the text, what is chosen, and what is switched off. */
class Side {
  constructor(number, given) {
    Object.assign(this, { number, given, about: given.about, view: null, before: null, maps: new Map(), heads: new Map(), states: null });
    Object.assign(this, { site: given.about.site, head: 0, token: 0, shade: "surprise", map: "weights", off: new Set(), headsOff: new Set(), asked: 0, lensed: null });
    this.build();
  }

  // ---------------------------------------------------------------- what it asks
  get changes() {
    const heads = [...this.headsOff].map((key) => [key.slice(0, key.lastIndexOf("/")), Number(key.slice(key.lastIndexOf("/") + 1))]);
    const temperature = Number($("temperature").value) || 1;
    return { off: [...this.off], heads, softmax: $("softmax").value || null, temperature };
  }
  get changed() {
    const { off, heads, softmax, temperature } = this.changes;
    return off.length > 0 || heads.length > 0 || softmax !== null || temperature !== 1;
  }

  /** Reads a text, or the ids of the one that is shown, and shows what came of it. */
  async read(fields) {
    const asked = ++this.asked, started = performance.now();
    const view = await ask("view", { side: this.number, changes: this.changes, map: [this.site, this.head], ...fields });
    if (asked !== this.asked) return;
    this.take(view);
    if (view.map) await this.keepMap(this.mapKey, view.map);
    await this.showMap();
    document.body.dataset.took = Math.round(performance.now() - started);
    this.showToken();
    this.later(asked);
  }

  take(view) {
    const same = this.view && view.ids.join() === this.view.ids.join() && String(view.sources) === String(this.view.sources);
    if (!this.changed) this.before = view;
    else if (!same) this.before = null;
    this.view = view;
    this.maps.clear();
    this.lensed = null;
    this.heads.clear();
    this.states = null;
    this.site = Math.min(this.site, view.sites.length - 1);
    this.token = same ? this.token : Math.min(view.tokens.length - 1, Math.max(this.token, 1));
    if (this.changed && this.before?.predictions) this.shade = this.shadeBox.value = "change";
    else if (this.shade === "change") this.shade = this.shadeBox.value = "surprise";
    if (!view.predictions && this.shade === "surprise") this.shade = this.shadeBox.value = "attention";
    // what stays as it is keeps the focus of who uses the keyboard
    if (same) this.markToken();
    else this.showTokens();
    if (this.headElements) this.shadeHeads();
    else this.showHeads();
  }

  /** What takes longer, some layers at a time, so that a change need not wait for it. */
  async later(asked) {
    try {
      if (data.served) await new Promise((done) => setTimeout(done, 150));
      if (asked !== this.asked) return;
      this.states = await this.get("states");
      if (asked !== this.asked) return;
      this.showStates();
      for (let start = 0; start < this.view.sites.length && asked === this.asked; start += 2) {
        const { heads } = await this.get("overview", { start, stop: start + 2 });
        if (asked !== this.asked) return;
        for (const head of heads) this.heads.set(head.name, head);
        this.shadeHeads();
      }
    } catch (error) {
      if (asked === this.asked) tell(error.message);
    }
  }

  /** An answer about the reading that is shown, from the server or out of the file. */
  async get(question, fields = {}) {
    if (data.served) return ask(question, { side: this.number, reading: this.view.reading, ...fields });
    if (question === "attention") return this.given.attention[fields.site][fields.head];
    if (question === "overview") return { heads: this.given.heads.slice(fields.start, fields.stop) };
    if (question === "token") return this.given.tokens[fields.place];
    return this.given[question];
  }

  async again(fields = {}) {
    const asked = this.asked + 1;
    try {
      tell("", "computing …");
      await this.read({ ids: this.view.ids, ...fields });
      if (asked === this.asked) tell("", this.said());
    } catch (error) {
      if (asked === this.asked) tell(error.message);
    }
  }

  /** What a change did, in words. */
  said() {
    const { predictions } = this.view;
    if (!predictions || predictions.logP.length < 2) return "";
    const mean = (logs) => -logs.slice(0, -1).reduce((a, b) => a + (b ?? 0), 0) / (logs.length - 1);
    const loss = "Loss " + mean(predictions.logP).toFixed(3) + " nats a token";
    const known = this.changed && this.before?.predictions;
    return loss + (known ? ", unchanged " + mean(known.logP).toFixed(3) + "." : ".");
  }

  // ---------------------------------------------------------------- the parts of the page
  build() {
    const box = add($("sides"), "section", "", { className: "side", "aria-label": this.about.title });
    add(box, "h2", this.about.title);
    add(box, "p", this.about.class + ", " + this.about.parameters.toLocaleString("en") + " parameters", { className: "quiet" });
    const parts = add(box, "div", "", { className: "parts" });
    const part = (title, wide = "") => {
      const element = add(parts, "section", "", { className: "part " + wide, "aria-label": this.named(title) });
      add(element, "h3", title);
      return element;
    };
    this.buildTokens(part("Tokens", "wide"));
    this.buildToken(part("The chosen token"));
    this.buildHeads(part("Layers and heads"));
    this.buildMap(part("Attention of one head"));
    this.buildLens(part("What each layer would say"));
    this.buildStream(part("The residual stream", "wide"));
  }

  /** A label that only this model's part has. */
  named(label) {
    return label + (data.sides.length > 1 ? " of model " + (this.number + 1) : "");
  }

  /** What may be larger than its room, and can then be moved by keys, too. */
  region(parent, label, className = "scroll", hidden = false) {
    return add(parent, "div", "", { className, tabIndex: 0, role: "region", "aria-label": this.named(label), hidden });
  }

  buildTokens(part) {
    const bar = add(part, "div", "", { className: "bar" });
    const label = add(bar, "label", "Shade each token by ");
    this.shadeBox = add(label, "select");
    for (const [value, text] of Object.entries(SHADES)) add(this.shadeBox, "option", text, { value });
    this.shadeBox.onchange = () => this.setShade(this.shadeBox.value);
    this.sourceBox = add(part, "div", "", { className: "tokens", role: "group", "aria-label": "Source tokens", hidden: true });
    this.tokenBox = add(part, "div", "", { className: "tokens", role: "listbox", "aria-label": "Tokens", "aria-orientation": "horizontal" });
    roving(this.tokenBox, () => this.tokenElements, () => 10, (i) => this.choose(i));
    add(part, "p", "Choose a token by pointer or arrow keys: the other parts are about what comes after it and where it looks.", { className: "quiet" });
  }

  buildToken(part) {
    this.tokenSaid = add(part, "p", "");
    this.rivalCaption = add(part, "p", "", { className: "quiet" });
    this.rivals = add(this.region(part, "What may come next"), "table");
    if (!data.served) return;
    const form = add(part, "form", "", { className: "bar" });
    const label = add(form, "label", "Put in its place ");
    this.newToken = add(label, "input", "", { type: "text", size: 10, maxLength: 200, autocomplete: "off" });
    add(form, "button", "Change token", { type: "submit" });
    form.onsubmit = (event) => {
      event.preventDefault();
      this.again({ edit: { place: this.token, by: this.newToken.value } });
    };
  }

  buildHeads(part) {
    const bar = add(part, "div", "", { className: "bar" });
    const label = add(bar, "label", "Shade each head by ");
    this.measure = add(label, "select");
    for (const [value, text] of [["entropy", "entropy of its weights"], ["scoreKurtosis", "kurtosis of its scores"]]) add(this.measure, "option", text, { value });
    this.measure.onchange = () => this.shadeHeads();
    this.headBox = add(part, "div", "", { className: "heads", role: "group", "aria-label": "Heads, one row a layer" });
    roving(this.headBox, () => this.headElements, () => this.view.sites[0].heads, (i) => this.chooseHead(i));
    this.headSaid = add(part, "p", "", { className: "quiet" });
    this.switches = add(part, "fieldset", "", { className: "bar" });
  }

  buildMap(part) {
    const bar = add(part, "div", "", { className: "bar" });
    const set = add(bar, "fieldset");
    add(set, "legend", "Show");
    for (const [value, text] of [["scores", "before the softmax"], ["weights", "after it"]]) {
      const label = add(set, "label");
      const radio = add(label, "input", "", { type: "radio", name: "map" + this.number, value, checked: value === this.map });
      label.append(" " + text);
      radio.onchange = () => ((this.map = value), this.showMap());
    }
    const frame = add(part, "div", "", { className: "frame" });
    this.columnBox = add(frame, "div", "", { className: "columns", "aria-hidden": "true" });
    this.rowBox = add(frame, "div", "", { className: "rows", "aria-hidden": "true" });
    this.canvas = add(frame, "canvas", "", { className: "map", role: "img", "aria-label": "Attention map" });
    this.canvas.onclick = (event) => this.choose(this.cell(event)[0]);
    this.canvas.onpointermove = (event) => this.point(...this.cell(event));
    this.mapSaid = add(part, "p", "", { className: "quiet" });
    this.pointed = add(part, "p", "Each row is a token that attends, each column one that is attended to.", { className: "quiet" });
    this.most = add(this.region(part, "What the chosen token attends to most"), "table");
  }

  buildLens(part) {
    this.lensCaption = add(part, "p", "The stream after each layer, through the last norm and the head, as if the layer were the last; and how it ranks the token that came.", { className: "quiet" });
    this.lens = add(this.region(part, "Logit lens of the chosen token"), "table");
    this.lensButton = add(add(part, "div", "", { className: "bar" }), "button", "Show it for all tokens", { type: "button" });
    this.lensButton.onclick = () => this.showWholeLens();
    this.wholeLens = this.region(part, "Logit lens of all tokens", "scroll lens", true);
  }

  buildStream(part) {
    this.norms = add(part, "canvas", "", { className: "norms", role: "img", "aria-label": "Norms of the residual stream" });
    add(part, "p", "Norm of each token (across) after each layer (down), logarithmic.", { className: "quiet" });
    const more = add(part, "details");
    add(more, "summary", "Kurtosis and outliers of each layer");
    this.outliers = add(this.region(more, "Kurtosis and outliers"), "table");
  }

  // ---------------------------------------------------------------- tokens
  setShade(shade) {
    this.shade = shade;
    this.shadeBox.value = shade;
    this.shadeTokens();
  }

  showTokens() {
    const { tokens, sources } = this.view;
    this.sourceBox.hidden = !sources;
    this.sourceElements = sources ? write(this.sourceBox, sources, "span") : [];
    this.tokenElements = write(this.tokenBox, tokens, "option");
    this.tokenElements.forEach((element, i) => (element.onclick = () => this.choose(i)));
    this.markToken();
  }

  markToken() {
    this.tokenElements.forEach((element, i) => {
      element.setAttribute("aria-selected", i === this.token);
      element.tabIndex = i === this.token ? 0 : -1;
    });
    this.shadeTokens();
  }

  async choose(i) {
    this.token = i;
    this.markToken();
    this.drawMap();
    await this.showToken();
  }

  /** From -1 to 1 for each token, by what tokens are shaded. */
  shadesOfTokens() {
    const { tokens, predictions } = this.view, held = this.held;
    const own = (logs, i) => (i === 0 || !logs ? null : logs[i - 1]);
    if (this.shade === "surprise") return tokens.map((_, i) => Math.min(1, -(own(predictions?.logP, i) ?? 0) / 8));
    if (this.shade === "change") {
      const old = this.before?.predictions;
      return tokens.map((_, i) => Math.max(-1, Math.min(1, ((own(old?.logP, i) ?? 0) - (own(predictions?.logP, i) ?? 0)) / 3)));
    }
    if (this.shade === "attention" && held && this.view.sites[this.site].kind === "self") return Array.from(this.row(held), (byte) => byte / 255);
    if (this.shade === "norm" && this.states?.length) {
      const norms = this.states.at(-1).norms, most = Math.max(...norms), least = Math.min(...norms);
      return norms.map((norm) => (norm - least) / (most - least || 1));
    }
    return tokens.map(() => 0);
  }

  shadeTokens() {
    const colour = (value) => (value ? "rgb(var(--" + (value > 0 ? "accent" : "less") + ") / " + (Math.abs(value) * STRONGEST).toFixed(3) + ")" : "");
    this.shadesOfTokens().forEach((value, i) => (this.tokenElements[i].style.background = colour(value)));
    const held = this.held;
    const looks = held && this.view.sites[this.site].kind !== "self";
    this.sourceElements.forEach((element, i) => (element.style.background = looks && this.view.sites[this.site].kind === "cross" ? colour(this.row(held)[i] / 255) : ""));
  }

  async showToken() {
    const { tokens, predictions } = this.view, i = this.token;
    const asked = this.asked;
    this.tokenSaid.replaceChildren(code(tokens[i]), " at place " + i + (predictions && i > 0 ? ": probability " + percent(Math.exp(predictions.logP[i - 1])) + ", " + placed(predictions.rank[i - 1]) + "." : "."));
    if (predictions && this.changed && this.before?.predictions && i > 0) this.tokenSaid.append(" Unchanged: " + percent(Math.exp(this.before.predictions.logP[i - 1])) + ".");
    if (!predictions) {
      this.rivalCaption.textContent = "This model predicts no tokens.";
      this.lensCaption.textContent = "This model predicts no tokens.";
      this.lensButton.hidden = true;
      return;
    }
    this.rivalCaption.textContent = "What may come next (entropy " + shown(predictions.entropy[i]) + " nats):";
    let said;
    try {
      said = await this.get("token", { place: i });
    } catch (error) {
      tell(error.message);
      return;
    }
    if (asked !== this.asked || i !== this.token) return;
    this.showRivals(said.rivals);
    this.showLens(said.lens);
  }

  showRivals(rivals) {
    const next = this.view.ids[this.token + 1];
    heading(this.rivals, [["token"], ["probability", "n"], [""]]);
    const body = add(this.rivals, "tbody");
    for (const { id, text, p } of rivals) {
      const row = add(body, "tr");
      add(row, "td").append(code(text), id === next ? " ← came" : "");
      add(row, "td", percent(p), { className: "n" });
      const last = add(row, "td");
      if (!data.served) add(last, "span", "", { className: "gauge" }).style.width = 5 * p + "rem";
      else if (id !== next) add(last, "button", "put it there", { type: "button", "aria-label": "put " + visible(text) + " there" }).onclick = () => this.put(id);
    }
  }

  put(id) {
    const last = this.token + 1 === this.view.ids.length;
    this.again(last ? { ids: [...this.view.ids, id] } : { edit: { place: this.token + 1, by: id } });
  }

  // ---------------------------------------------------------------- heads
  showHeads() {
    const { sites } = this.view, widest = Math.max(...sites.map((site) => site.heads));
    this.headBox.replaceChildren();
    this.headBox.style.gridTemplateColumns = "auto repeat(" + widest + ", 1.6rem)";
    this.headPlaces = [];
    this.headElements = [];
    sites.forEach((site, s) => {
      const name = add(this.headBox, "span", short(site.name), { className: "name" });
      name.style.gridColumn = "1";
      for (let head = 0; head < site.heads; head++) {
        const number = this.headElements.length;
        this.headPlaces.push([s, head]);
        const button = add(this.headBox, "button", "", { type: "button", "aria-label": short(site.name) + ", head " + head });
        button.onclick = () => this.chooseHead(number);
        this.headElements.push(button);
      }
    });
    this.shadeHeads();
    this.showSwitches();
  }

  async chooseHead(number) {
    [this.site, this.head] = this.headPlaces[number];
    this.shadeHeads();
    this.showSwitches();
    await this.showMap();
  }

  shadeHeads() {
    const values = this.headPlaces.map(([s, head]) => this.heads.get(this.view.sites[s].name)?.[this.measure.value]?.[head] ?? null);
    const known = values.filter((value) => value !== null).map((value) => (this.measure.value === "entropy" ? value : Math.log1p(Math.max(0, value))));
    const most = Math.max(...known, 1e-9), label = this.measure.selectedOptions[0].textContent;
    this.headElements.forEach((button, i) => {
      const [s, head] = this.headPlaces[i], site = this.view.sites[s];
      const value = values[i] === null ? 0 : (this.measure.value === "entropy" ? values[i] : Math.log1p(Math.max(0, values[i]))) / most;
      const off = this.isOff(site.name, head), chosen = s === this.site && head === this.head;
      button.style.background = "rgb(var(--accent) / " + (0.08 + 0.9 * value).toFixed(3) + ")";
      button.textContent = off ? "×" : "";
      button.setAttribute("aria-pressed", chosen);
      button.tabIndex = chosen ? 0 : -1;
      button.title = short(site.name) + ", head " + head + (off ? ", off" : "") + (values[i] === null ? "" : ": " + label + " " + shown(values[i]));
      button.setAttribute("aria-label", button.title);
    });
  }

  isOff(name, head) {
    return this.headsOff.has(name + "/" + head) || this.off.has(name) || this.off.has(name.replace(/\.[^.]+$/, ""));
  }

  showSwitches() {
    const site = this.view.sites[this.site], block = site.name.replace(/\.[^.]+$/, "");
    this.headSaid.textContent = short(site.name) + ", head " + this.head + " of " + site.heads;
    this.switches.replaceChildren();
    if (!data.served) return;
    add(this.switches, "legend", "Switch off");
    const box = (text, set, key) => {
      const label = add(this.switches, "label");
      const input = add(label, "input", "", { type: "checkbox", checked: set.has(key) });
      label.append(text);
      input.onchange = () => {
        set[input.checked ? "add" : "delete"](key);
        this.shadeHeads();
        this.again();
      };
    };
    if (this.about.kind !== "translator" || site.name.includes(".")) box("this head", this.headsOff, site.name + "/" + this.head);
    if (this.about.parts.includes(site.name)) box("this attention", this.off, site.name);
    if (this.about.parts.includes(block + ".mlp")) box("the MLP", this.off, block + ".mlp");
    if (this.about.parts.includes(block)) box("the whole layer", this.off, block);
  }

  // ---------------------------------------------------------------- the map
  row(held) {
    const n = held.shape[1], start = this.rowOf() * n;
    return held.bytes.weights.subarray(start, start + n);
  }
  get mapKey() {
    return this.view.sites[this.site].name + "/" + this.head;
  }
  /** The maps of the chosen head, if they have come. */
  get held() {
    return this.maps.get(this.mapKey);
  }
  rowOf() {
    return this.view.sites[this.site].kind === "source" ? 0 : this.token;
  }

  async showMap() {
    const key = this.mapKey, asked = this.asked;
    if (!this.maps.has(key)) {
      try {
        const held = await this.get("attention", { site: this.view.sites[this.site].name, head: this.head });
        if (asked !== this.asked) return;
        await this.keepMap(key, held);
      } catch (error) {
        tell(error.message);
        return;
      }
    }
    if (asked !== this.asked) return;
    this.drawMap();
    this.shadeTokens();
  }

  async keepMap(key, held) {
    const asked = this.asked, [weights, scores] = await Promise.all([unpack(held.weights, held.deflated), unpack(held.scores, held.deflated)]);
    if (asked === this.asked) this.maps.set(key, { ...held, bytes: { weights, scores } });
  }

  drawMap() {
    const site = this.view.sites[this.site], held = this.held;
    if (!held) return;
    const [n, m] = held.shape, scale = Math.max(1, Math.ceil(640 / Math.max(n, m)));
    const context = paint(this.canvas, held.bytes[this.map], n, m, shades, scale);
    this.canvas.style.aspectRatio = m + " / " + n;
    this.canvas.style.maxWidth = "min(100%, " + Math.max(4, Math.min(34, m * 2)) + "rem)";
    this.labelMap(n, m);
    context.strokeStyle = getComputedStyle(document.body).color;
    context.lineWidth = 2;
    if (site.kind !== "source") context.strokeRect(0, this.token * scale - 1, scale * m, scale + 2);
    const row = this.rowOf(), nothing = held.nothing[row];
    const kurtosis = this.map === "scores" ? held.scoreKurtosis : held.weightKurtosis;
    const range = this.map === "scores" ? " from " + shown(held.low) + " to " + shown(held.high) : "";
    const what = (this.map === "scores" ? "Scores" : "Weights") + " of " + short(site.name) + ", head " + this.head + range;
    this.mapSaid.textContent = what + ": kurtosis " + shown(kurtosis) + ". The chosen row: entropy " + shown(held.entropy[row]) + " nats" + (Math.abs(nothing) > 0.005 ? ", " + percent(nothing) + " to nothing." : ".");
    this.canvas.setAttribute("aria-label", what + ". " + n + " rows, " + m + " columns. The table after it says what the chosen token attends to most.");
    this.showMost(held);
  }

  /** The tokens beside a map and above it, where there is room for them. */
  labelMap(n, m) {
    const boxes = [[this.rowBox, this.rows(), n], [this.columnBox, this.columns(), m]];
    for (const [box, texts, count] of boxes) {
      box.hidden = count > MOST_LABELS;
      box.replaceChildren();
      if (!box.hidden) for (const text of texts) add(box, "span", visible(text).trim() || "␣");
    }
    this.columnBox.style.maxWidth = this.canvas.style.maxWidth;
    const fits = this.canvas.clientWidth / m >= LEAST_CELL && this.canvas.clientHeight / n >= LEAST_CELL;
    if (!fits) this.rowBox.hidden = this.columnBox.hidden = true;
  }

  rows() {
    return this.view.sites[this.site].kind === "source" ? this.view.sources : this.view.tokens;
  }
  columns() {
    return this.view.sites[this.site].kind === "self" ? this.view.tokens : this.view.sources;
  }

  showMost(held) {
    const texts = this.columns(), row = this.row(held), { low, high } = held, m = held.shape[1];
    const scores = held.bytes.scores.subarray(this.rowOf() * m, (this.rowOf() + 1) * m);
    heading(this.most, [["attends to"], ["place", "n"], ["weight", "n"], ["score", "n"]]);
    const body = add(this.most, "tbody");
    for (const i of Array.from(row.keys()).sort((a, b) => row[b] - row[a]).slice(0, 6).filter((i) => row[i])) {
      const line = add(body, "tr");
      add(line, "td").append(code(texts[i]));
      add(line, "td", i, { className: "n" });
      add(line, "td", ((row[i] / 255) ** 2).toFixed(3), { className: "n" });
      add(line, "td", scores[i] ? shown(low + ((scores[i] - 1) / 254) * (high - low)) : "–", { className: "n" });
    }
  }

  cell(event) {
    const box = this.canvas.getBoundingClientRect(), held = this.held;
    const place = (from, size, count) => Math.min(count - 1, Math.max(0, Math.floor((from / size) * count)));
    return [place(event.clientY - box.top, box.height, held?.shape[0] ?? 1), place(event.clientX - box.left, box.width, held?.shape[1] ?? 1)];
  }

  point(row, column) {
    const held = this.held;
    if (!held) return;
    const weight = (held.bytes.weights[row * held.shape[1] + column] / 255) ** 2;
    this.pointed.textContent = quoted(this.rows()[row]) + " (" + row + ") to " + quoted(this.columns()[column]) + " (" + column + "): " + weight.toFixed(3);
  }

  // ---------------------------------------------------------------- the lens
  showLens(lens) {
    heading(this.lens, [["after"], ["rank", "n"], ["would say", "would"]]);
    const body = add(this.lens, "tbody");
    lens.forEach(({ top, p, rank }, i) => {
      const row = add(body, "tr");
      add(row, "th", short(this.view.states[i]), { scope: "row" });
      add(row, "td", rank === undefined ? "–" : (rank + 1).toLocaleString("en"), { className: "n", title: percent(p) });
      const said = add(row, "td", "", { className: "would" });
      top.forEach(({ text, p: probability }, k) => said.append(k ? " " : "", code(text), k ? "" : " " + percent(probability)));
    });
    this.lensButton.hidden = lens.length === 0;
    if (lens.length === 0) this.lensCaption.textContent = "This model has no residual stream to read.";
  }

  async showWholeLens() {
    const asked = this.asked;
    this.lensButton.disabled = true;
    try {
      tell("", "computing what every layer would say …");
      this.lensed ??= await this.get("lens");
      tell("", "");
      if (asked === this.asked) this.drawWholeLens();
    } catch (error) {
      tell(error.message);
    }
    this.lensButton.disabled = false;
  }

  drawWholeLens() {
    const { texts, tokens, p } = this.lensed;
    this.wholeLens.replaceChildren();
    const table = add(this.wholeLens, "table");
    const head = add(add(table, "thead"), "tr");
    add(head, "th", "after", { scope: "col" });
    this.view.tokens.forEach((token) => add(head, "th", visible(token), { scope: "col" }));
    const body = add(table, "tbody");
    tokens.map((_, i) => tokens.length - 1 - i).forEach((state) => {
      const row = add(body, "tr");
      add(row, "th", short(this.view.states[state]), { scope: "row" });
      tokens[state].forEach((token, i) => {
        const cell = add(row, "td", visible(texts[token]), { title: visible(texts[token]) + " " + percent(p[state][i]) });
        cell.style.background = "rgb(var(--accent) / " + (p[state][i] * STRONGEST).toFixed(3) + ")";
        if (token === this.view.ids[i + 1]) cell.style.fontWeight = "bold";
      });
    });
    this.wholeLens.hidden = false;
  }

  // ---------------------------------------------------------------- the stream
  showStates() {
    const states = this.states, n = this.view.tokens.length;
    this.norms.hidden = states.length === 0;
    if (!states.length) return;
    const logs = states.flatMap((state) => state.norms.map((norm) => Math.log((norm ?? 0) + 1e-9)));
    const least = Math.min(...logs), span = Math.max(...logs) - least || 1;
    paint(this.norms, Uint8Array.from(logs, (log) => (255 * (log - least)) / span), states.length, n, shades, 4);
    const name = (value) => shown(Math.exp(value));
    this.norms.setAttribute("aria-label", "Norms of the residual stream after " + states.length + " states of " + n + " tokens, from " + name(least) + " to " + name(least + span) + "; the table after it names the outliers.");
    heading(this.outliers, [["after"], ["kurtosis", "n"], ["largest values: channel, token, value, times the median channel"]]);
    const body = add(this.outliers, "tbody");
    for (const { name, kurtosis, outliers } of states) {
      const row = add(body, "tr");
      add(row, "th", short(name), { scope: "row" });
      add(row, "td", shown(kurtosis), { className: "n" });
      const cell = add(row, "td");
      outliers.forEach(({ channel, place, value, times }, i) => cell.append((i ? "; " : "") + channel + ", ", code(this.view.tokens[place]), " " + shown(value) + ", " + shown(times) + "×"));
    }
    if (this.shade === "norm") this.shadeTokens();
  }
}

// ---------------------------------------------------------------- small things
const code = (text) => add(document.createElement("span"), "code", visible(text));
const short = (name) => name.replace(/blocks\.(\d+)/, (_, i) => "layer " + i).replace(/\./g, " ").replace(/(layer \d+) attention$/, "$1");
const placed = (rank) => (rank === 0 ? "the likeliest" : "number " + (rank + 1).toLocaleString("en") + " of all");

function heading(table, columns) {
  table.replaceChildren();
  const row = add(add(table, "thead"), "tr");
  for (const [text, className = ""] of columns) text ? add(row, "th", text, { className, scope: "col" }) : add(row, "td", "", { className });
}

function write(box, texts, kind) {
  box.replaceChildren();
  return texts.map((text) => {
    const element = add(box, "span", "", kind === "option" ? { role: "option" } : {});
    if (kind === "option" && !text.trim()) element.setAttribute("aria-label", text.includes("\n") ? "line break" : text ? "space" : "nothing");
    for (const part of (text || "∅").split(/(\n)/)) part === "\n" ? add(element, "i", "↵\n") : element.append(part);
    return element;
  });
}

// ---------------------------------------------------------------- both models
const sides = data.sides.map((given, number) => new Side(number, given));

async function readText() {
  try {
    tell("", "reading …");
    for (const side of sides) await side.read({ text: $("text").value });
    tell("", sides.map((side) => side.said()).join(" "));
  } catch (error) {
    tell(error.message);
  }
}

async function changeAll() {
  if (!$("temperature").checkValidity()) {
    for (const side of sides) side.asked++; // an answer that is still to come is no longer wanted
    return tell("Expected a temperature from 0.001 to 1000.");
  }
  for (const side of sides) if (side.view) await side.again();
}

async function showFile() {
  for (const side of sides) {
    side.take(side.given.view);
    await side.showMap();
    await side.showToken();
    await side.later(side.asked);
  }
  tell("", sides.map((side) => side.said()).join(" "));
}

async function start() {
  document.title = $("title").textContent = "A look inside " + sides.map((side) => side.about.title).join(" and ");
  $("form").hidden = !data.served;
  $("static").hidden = data.served;
  $("command").textContent = data.command ?? "tricycle look";
  add($("softmax"), "option", "as it is", { value: "" });
  for (const name of data.softmaxes ?? []) add($("softmax"), "option", name, { value: name });
  if (sides.some((side) => side.about.kind === "translator")) $("text-label").textContent = "Source; after => a target, if the model is not to write its own";
  $("text").value = data.text;
  $("form").onsubmit = (event) => (event.preventDefault(), readText());
  $("softmax").onchange = $("temperature").onchange = changeAll;
  $("undo").onclick = () => {
    $("softmax").value = "";
    $("temperature").value = 1;
    for (const side of sides) side.off.clear(), side.headsOff.clear(), side.view && side.showSwitches();
    changeAll();
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    shades = palette();
    for (const side of sides) side.view && (side.drawMap(), side.states && side.showStates());
  };
  await (data.served ? readText() : showFile());
  document.body.dataset.ready = Math.round(performance.now()); // since the page was asked for
}
start();
