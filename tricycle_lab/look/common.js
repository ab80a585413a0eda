"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);

/** Append an element with a text and properties to a parent. Names with "-" are attributes. */
function add(parent, tag, text = "", properties = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(properties))
    name.includes("-") || name === "role" ? element.setAttribute(name, value) : (element[name] = value);
  parent.append(element);
  return element;
}

/** Append an SVG element with attributes and a text to a parent. */
function addSvg(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

/** Return 256 RGBA colors of the color scheme, from the first over the second to the third name. */
function palette(names = ["--low", "--accent", "--high"]) {
  const style = getComputedStyle(document.documentElement);
  const stops = names.map((name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number));
  return Array.from({ length: 256 }, (_, byte) => {
    const position = byte / 127.5, first = Math.min(1, Math.floor(position)), fraction = position - first;
    return [...stops[first].map((low, i) => Math.round(low + (stops[first + 1][i] - low) * fraction)), 255];
  });
}

/** Paint bytes on a canvas, one pixel each, enlarged by an integer factor without smoothing. */
function paint(canvas, bytes, height, width, colors, scale = 1) {
  const small = document.createElement("canvas");
  small.width = width;
  small.height = height;
  const image = small.getContext("2d").createImageData(width, height);
  for (let i = 0; i < bytes.length; i++) image.data.set(colors[bytes[i]], 4 * i);
  small.getContext("2d").putImageData(image, 0, 0);
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  return context;
}

/** Decode base64, and decompress if the bytes are deflated. */
async function decodeBytes(text, deflated) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  if (!deflated) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return row and column at the pointer in a canvas with n rows and m columns. */
function findCell(canvas, event, n, m) {
  const box = canvas.getBoundingClientRect();
  const index = (offset, size, count) => Math.min(count - 1, Math.max(0, Math.floor((offset / size) * count)));
  return [index(event.clientY - box.top, box.height, n), index(event.clientX - box.left, box.width, m)];
}

/** Set an ARIA attribute to true for one of the elements, which alone is in the tab order. */
function markElement(elements, index, attribute) {
  elements.forEach((element, i) => {
    element.setAttribute(attribute, i === index);
    element.tabIndex = i === index ? 0 : -1;
  });
}

/** Let the arrow keys move the focus within a group of elements, of which one is in the tab order (roving tabindex). */
function addArrowKeys(box, elements, rowLength, select) {
  box.onkeydown = (event) => {
    const current = elements().indexOf(document.activeElement), last = elements().length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -rowLength(), ArrowDown: rowLength(), Home: -current, End: last - current };
    if (current < 0 || !(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(last, current + moves[event.key]));
    select(next);
    elements()[next].focus();
  };
}

function showMessage(error, status = "") {
  $("trouble").textContent = error;
  $("status").textContent = status;
}

const formatNumber = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toString());
const percent = (p) => (p === null || p === undefined ? "–" : p >= 0.1 ? (100 * p).toFixed(0) + "%" : p >= 0.001 ? (100 * p).toFixed(1) + "%" : (100 * p).toPrecision(1) + "%");
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍"));
const quoted = (text) => "“" + visible(text) + "”";
const MAX_OPACITY = 0.55; // of a color behind text
/** Return the color behind a token for a value from -1 to 1; "" for 0. */
const tokenColor = (value) => (value ? "rgb(var(--" + (value > 0 ? "accent" : "less") + ") / " + (Math.abs(value) * MAX_OPACITY).toFixed(3) + ")" : "");
const formatRank = (rank) => "rank " + (rank + 1).toLocaleString("en");
const code = (text) => add(document.createElement("span"), "code", visible(text));

/** Replace the content of a table by a header; columns are pairs of a text and a class. */
function addHeader(table, columns) {
  table.replaceChildren();
  const row = add(add(table, "thead"), "tr");
  for (const [text, className = ""] of columns) text ? add(row, "th", text, { className, scope: "col" }) : add(row, "td", "", { className });
}

/** Append an element for a token to a box; role is "option" or "span". */
function addToken(box, text, role) {
  const element = add(box, "span", "", role === "option" ? { role: "option" } : {});
  if (role === "option" && !text.trim()) element.setAttribute("aria-label", text.includes("\n") ? "line break" : text ? "space" : "empty token");
  for (const part of (text || "∅").split(/(\n)/)) part === "\n" ? add(element, "i", "↵\n") : element.append(part);
  return element;
}
