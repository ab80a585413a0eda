"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);

/** An element with text and properties, at the end of another. Names with "-" are attributes. */
function add(parent, tag, text = "", properties = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(properties))
    name.includes("-") || name === "role" ? element.setAttribute(name, value) : (element[name] = value);
  parent.append(element);
  return element;
}

/** Shades from low over the accent to high, as the colour scheme has them; 256 of four bytes. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const stops = ["--low", "--accent", "--high"].map((name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number));
  return Array.from({ length: 256 }, (_, byte) => {
    const place = byte / 127.5, first = Math.min(1, Math.floor(place)), part = place - first;
    return [...stops[first].map((low, i) => Math.round(low + (stops[first + 1][i] - low) * part)), 255];
  });
}

/** Bytes as a picture, one pixel each, and enlarged without smoothing by the canvas's own size. */
function paint(canvas, bytes, height, width, shades, scale = 1) {
  const small = document.createElement("canvas");
  small.width = width;
  small.height = height;
  const image = small.getContext("2d").createImageData(width, height);
  for (let i = 0; i < bytes.length; i++) image.data.set(shades[bytes[i]], 4 * i);
  small.getContext("2d").putImageData(image, 0, 0);
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  return context;
}

/** The bytes of what was written in base64, and maybe deflated before. */
async function unpack(text, deflated) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  if (!deflated) return packed;
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Lets the arrow keys walk over elements of which one can be reached by Tab. */
function roving(box, elements, step, choose) {
  box.onkeydown = (event) => {
    const now = elements().indexOf(document.activeElement);
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -step(), ArrowDown: step(), Home: -now, End: elements().length - 1 - now };
    if (now < 0 || !(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(elements().length - 1, now + moves[event.key]));
    choose(next);
    elements()[next].focus();
  };
}

const shown = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toString());
const percent = (p) => (p === null || p === undefined ? "–" : p >= 0.1 ? (100 * p).toFixed(0) + "%" : p >= 0.001 ? (100 * p).toFixed(1) + "%" : (100 * p).toPrecision(1) + "%");
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍"));
const quoted = (text) => "“" + visible(text) + "”";
