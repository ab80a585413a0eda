// The worker of the page: messages {kind: "load" | "generate" | "stop"} come in, {kind: "ready" | "token" | "done" | "error"} go out.

const N_ALTERNATIVES = 8;
const YIELD_INTERVAL = 40; // ms between the moments at which a message of the page can arrive
let model, tokenizer, run = 0;

self.onmessage = async ({ data: message }) => {
  const own = ++run; // a new message ends the generation in progress
  try {
    if (message.kind === "load") {
      model = new Transformer(message.config, readTensors(message.tensors, message.buffer));
      tokenizer = new Tokenizer(message.tokenizer);
      postMessage({ kind: "ready" });
    } else if (message.kind === "generate") await generateText(message, () => run === own);
  } catch (error) {
    postMessage({ kind: "error", run: message.run, message: error.message });
  }
};

/** Generate up to `length` tokens after `ids`, or after a prompt, while `isCurrent()`, and post each token. */
async function generateText({ prompt, ids, length, params, run: pageRun }, isCurrent) {
  const given = ids ?? encodePrompt(prompt, params.new_text), tokens = [], generator = newGenerator(params.seed), push = tokenizer.stream();
  let logits = null, start = 0, seconds = 0, lastYield = performance.now();
  model.reset();
  for (;;) {
    const begin = performance.now(), i = tokens.length, isGiven = i < given.length;
    const id = isGiven ? given[i] : sampleToken(logits, tokens, params, generator);
    tokens.push(id);
    const prediction = logits && describePrediction(logits.subarray(0, params.n_vocab), id);
    if (i + 1 - start > model.config.context_window) start = restart(tokens);
    logits = model.forward(id);
    if (!isGiven) seconds += (performance.now() - begin) / 1000;
    const attention = attentionBytes();
    const isLast = (!isGiven && params.stop_tokens.includes(id)) || tokens.length >= given.length + length;
    const text = push(id) + (isLast ? push() : "");
    postMessage({ kind: "token", run: pageRun, id, text, isGiven, start, attention, ...prediction }, [attention.buffer]);
    if (isLast) return postMessage({ kind: "done", run: pageRun, seconds, nTokens: tokens.length - given.length });
    if (performance.now() - lastYield > YIELD_INTERVAL) {
      await new Promise((resolve) => setTimeout(resolve));
      if (!isCurrent()) return;
      lastYield = performance.now();
    }
  }
}

/** Encode a prompt; an empty one is the token after which a new text begins. */
function encodePrompt(prompt, newText) {
  const ids = prompt ? tokenizer.encode(prompt) : [newText], window = model.config.context_window;
  if (ids.length > window) throw new Error(`The prompt has ${ids.length} tokens. Expected at most ${window}, the context window of the model.`);
  return ids;
}

/** Process the later half of a full context again, without the last token; return the index of its first token. */
function restart(tokens) {
  const start = tokens.length - Math.max(1, Math.floor(model.config.context_window / 2));
  model.reset();
  for (const id of tokens.slice(start, -1)) model.forward(id, false);
  return start;
}

/** Return the probability and rank of a token, and the most probable tokens, by a softmax of logits. */
function describePrediction(logits, id) {
  const probs = Float64Array.from(logits), top = [];
  softmax(probs);
  let rank = 0;
  for (let i = 0; i < probs.length; i++) {
    if (probs[i] > probs[id]) rank++;
    if (top.length === N_ALTERNATIVES && probs[i] <= probs[top.at(-1)]) continue;
    const place = top.findIndex((other) => probs[i] > probs[other]);
    top.splice(place < 0 ? top.length : place, 0, i);
    top.length = Math.min(top.length, N_ALTERNATIVES);
  }
  return { prob: probs[id], rank, top: top.map((i) => ({ id: i, text: tokenizer.decode([i]), prob: probs[i] })) };
}

/** Return the square roots of the last token's attention weights as bytes, (layer, head, key). */
function attentionBytes() {
  return Uint8Array.from(model.blocks.flatMap(({ weights }) => Array.from(weights, (weight) => Math.round(255 * Math.sqrt(weight)))));
}
