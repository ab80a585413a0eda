"use strict";
// The forward pass of a decoder for one token after another, as `tricycle.models.GPT` computes it. Sums are in float64.
// Names of fields are those of `ModelConfig`, names of tensors those of the state dict.

const ACTIVATIONS = {
  gelu: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  gelu_exact: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  relu: (x) => Math.max(x, 0),
  relu_squared: (x) => Math.max(x, 0) ** 2,
  sigmoid: (x) => 1 / (1 + Math.exp(-x)),
  swiglu: (x) => x / (1 + Math.exp(-x)),
  swish: (x) => x / (1 + Math.exp(-x)),
  tanh: Math.tanh,
};
/** The gate of gpt-oss for both halves of the hidden layer. */
const clampedSwiglu = (a, b) => (Math.max(-7, Math.min(7, a)) + 1) * Math.min(b, 7) * ACTIVATIONS.sigmoid(1.702 * Math.min(b, 7));
const ADAPTIVE = { coefficients: [-0.037, 0.481, -2.3, 4.917, -1.791], threshold: 0.5 }; // of `AdaptiveSoftmax`

/** Return erf(x) by 2 x / sqrt(pi) exp(-x^2) sum (2 x^2)^n / (2n + 1)!!, a series of positive terms. */
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= (2 * x * x) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

/** Replace scores by exp(score) / (exp(sink) + sum of exp(scores)); without a sink by softmax. */
function softmax(scores, sink = -Infinity) {
  const max = scores.reduce((a, b) => Math.max(a, b), sink);
  let total = Math.exp(sink - max);
  for (let i = 0; i < scores.length; i++) total += scores[i] = Math.exp(scores[i] - max);
  for (let i = 0; i < scores.length; i++) scores[i] /= total;
}

/** Replace scores by softmax(beta scores), beta a polynomial of the entropy of softmax(scores), at least 1. */
function adaptiveSoftmax(scores) {
  const plain = scores.slice();
  softmax(plain);
  const entropy = -plain.reduce((sum, p) => sum + (p > 0 ? p * Math.log(p) : 0), 0);
  const value = ADAPTIVE.coefficients.reduce((sum, c) => sum * entropy + c, 0);
  const beta = entropy > ADAPTIVE.threshold && value > 1 ? value : 1;
  for (let i = 0; i < scores.length; i++) scores[i] *= beta;
  softmax(scores);
}

/** Return tensors by name from [name, shape, dtype, offset in bytes]; an int8 matrix has float32 scales of its rows. */
function readTensors(list, buffer) {
  const arrays = { int8: Int8Array, float32: Float32Array }, tensors = new Map();
  for (const [name, shape, dtype, offset] of list)
    tensors.set(name, { shape, values: new arrays[dtype](buffer, offset, shape.reduce((a, b) => a * b, 1)) });
  for (const [name, tensor] of tensors) tensor.scales = tensors.get(name + ".scales")?.values;
  return tensors;
}

/** Return the product of a matrix of stored rows and a vector, plus a bias. Four rows at a time share the reads of x. */
function multiply({ shape: [nRows, nColumns], values, scales }, x, bias) {
  const y = new Float32Array(nRows), end = nRows - (nRows % 4);
  for (let row = 0; row < end; row += 4) {
    let a = 0, b = 0, c = 0, d = 0;
    const first = row * nColumns, second = first + nColumns, third = second + nColumns, fourth = third + nColumns;
    for (let i = 0; i < nColumns; i++) {
      const value = x[i];
      a += values[first + i] * value;
      b += values[second + i] * value;
      c += values[third + i] * value;
      d += values[fourth + i] * value;
    }
    y[row] = a;
    y[row + 1] = b;
    y[row + 2] = c;
    y[row + 3] = d;
  }
  for (let row = end; row < nRows; row++) {
    let total = 0;
    for (let i = 0; i < nColumns; i++) total += values[row * nColumns + i] * x[i];
    y[row] = total;
  }
  for (let row = 0; row < nRows; row++) y[row] = y[row] * (scales ? scales[row] : 1) + (bias ? bias[row] : 0);
  return y;
}

/** Return a row of a matrix as float32. */
function lookUp({ shape: [, nColumns], values, scales }, row) {
  return Float32Array.from(values.subarray(row * nColumns, (row + 1) * nColumns), (value) => value * (scales ? scales[row] : 1));
}

class Transformer {
  /** Tensors are as of `readTensors`; throw an Error if one is missing or is not used. */
  constructor(config, tensors) {
    const unused = new Set(tensors.keys());
    const find = (name) => (unused.delete(name), unused.delete(name + ".scales"), tensors.get(name));
    const values = (name) => find(name)?.values;
    const linear = (name) => {
      const matrix = find(name + ".weights"), bias = values(name + ".bias");
      return matrix && ((x) => multiply(matrix, x, bias));
    };
    const norm = (name, isQuery = false) => {
      const gain = values(name + ".gain"), bias = values(name + ".bias");
      const center = !isQuery && config.norm === "layer_norm", eps = isQuery ? config.qk_norm_eps : config.norm_eps;
      return gain || isQuery ? (x) => this.normalize(x, gain, bias, eps, center) : null;
    };
    this.config = config;
    this.nKeyHeads = config.n_key_heads || config.n_heads;
    this.headSize = config.head_size || config.embedding_dim / config.n_heads;
    this.embedding = find("token_embedding.weights");
    this.positions = find("position_embedding.weights");
    this.embeddingProjection = linear("embedding_projection");
    this.norm = norm("norm");
    this.headProjection = linear("head_projection");
    this.head = linear("head") ?? ((x) => multiply(this.embedding, x));
    this.blocks = Array.from({ length: config.n_layers }, (_, layer) => {
      const attention = `blocks.${layer}.attention`, mlp = `blocks.${layer}.mlp`;
      return {
        window: config.window && !config.full_layers.includes(layer) ? config.window : Infinity,
        ...this.newRotary(layer),
        attentionNorm: norm(attention + "_norm"), attentionPostNorm: norm(attention + "_post_norm"),
        mlpNorm: norm(mlp + "_norm"), mlpPostNorm: norm(mlp + "_post_norm"),
        shift: values(attention + ".shift.mix"), keyShift: values(attention + ".key_shift.mix"),
        queryNorm: config.qk_norm && norm(attention + ".query_norm", true), keyNorm: config.qk_norm && norm(attention + ".key_norm", true),
        sinks: values(attention + ".softmax_scales"),
        qkv: linear(attention + ".qkv"), projection: linear(attention + ".projection"),
        up: linear(mlp + ".up"), down: linear(mlp + ".projection"),
        keys: new Float32Array(config.context_window * this.nKeyHeads * this.headSize),
        values: new Float32Array(config.context_window * this.nKeyHeads * this.headSize),
      };
    });
    if (unused.size) throw new Error("expected only tensors that the forward pass uses, got " + [...unused].join(", "));
    this.reset();
  }

  /** Forget all tokens, so that the next one is the first. */
  reset() {
    this.length = 0;
    for (const block of this.blocks) block.lastInput = block.lastKeys = null;
  }

  /** Append a token; return the logits of the next one (none unless `needsLogits`), and set the `weights` of each block. */
  forward(token, needsLogits = true) {
    const { config } = this, position = this.length;
    if (position >= config.context_window) throw new Error(`expected at most ${config.context_window} tokens`);
    let x = lookUp(this.embedding, token).map((value) => value * config.embedding_scale);
    if (this.embeddingProjection) x = this.embeddingProjection(x);
    if (this.positions) {
      const row = lookUp(this.positions, position + config.position_offset);
      x = x.map((value, i) => value + row[i]);
    }
    for (const block of this.blocks) x = this.runBlock(block, x);
    this.length++;
    if (!needsLogits) return null;
    if (this.norm) x = this.norm(x);
    x = x.map((value) => value * config.logit_scale);
    if (this.headProjection) x = this.headProjection(x);
    const logits = this.head(x), cap = config.logit_cap;
    return cap ? logits.map((logit) => cap * Math.tanh(logit / cap)) : logits;
  }

  runBlock(block, x) {
    const attend = (y) => this.attend(block, y), mlp = (y) => this.mlp(block, y);
    if (this.config.parallel) {
      const normal = block.attentionNorm(x);
      return this.addBranch(this.addBranch(x, attend(normal)), mlp(block.mlpNorm ? block.mlpNorm(x) : normal));
    }
    x = this.addSublayer(x, attend, block.attentionNorm, block.attentionPostNorm);
    return this.addSublayer(x, mlp, block.mlpNorm, block.mlpPostNorm);
  }

  addSublayer(x, part, norm, postNorm) {
    if (this.config.norm_placement === "after") return norm(this.addBranch(x, part(x)));
    if (this.config.norm_placement === "output") return this.addBranch(x, norm(part(x)));
    const out = part(norm(x));
    return this.addBranch(x, postNorm ? postNorm(out) : out);
  }

  addBranch(x, branch) {
    return x.map((value, i) => value + this.config.residual_scale * branch[i]);
  }

  normalize(x, gain, bias, eps, center) {
    const mean = center ? x.reduce((total, value) => total + value, 0) / x.length : 0;
    const variance = x.reduce((total, value) => total + (value - mean) ** 2, 0) / x.length;
    const scale = 1 / Math.sqrt(variance + eps), offset = this.config.norm_unit_offset ? 1 : 0;
    return x.map((value, i) => (value - mean) * scale * (gain ? offset + gain[i] : 1) + (bias ? bias[i] : 0));
  }

  mlp(block, x) {
    const { activation, gated } = this.config, f = ACTIVATIONS[activation], hidden = block.up(x), half = hidden.length / 2;
    if (!gated && !activation.includes("swiglu")) return block.down(hidden.map(f));
    const gate = activation === "clamped_swiglu" ? clampedSwiglu : (a, b) => a * f(b);
    return block.down(hidden.subarray(0, half).map((value, i) => gate(value, hidden[half + i])));
  }

  attend(block, x) {
    const { n_heads, score_scale } = this.config, { nKeyHeads, headSize, length } = this, width = nKeyHeads * headSize;
    const qkv = block.qkv(this.shiftTokens(block, x));
    const q = this.placeHeads(block, qkv.subarray(0, n_heads * headSize), block.queryNorm);
    const keys = this.shiftKeys(block, qkv.slice(n_heads * headSize, n_heads * headSize + width));
    block.keys.set(this.placeHeads(block, keys, block.keyNorm), length * width);
    block.values.set(qkv.subarray(n_heads * headSize + width), length * width);
    const first = Math.max(0, length + 1 - block.window), out = new Float32Array(n_heads * headSize);
    block.weights = new Float32Array(n_heads * (length + 1)); // (head, key)
    for (let head = 0; head < n_heads; head++) {
      const query = q.subarray(head * headSize, (head + 1) * headSize), scores = new Float64Array(length + 1 - first);
      const offset = Math.floor(head / (n_heads / nKeyHeads)) * headSize; // of the key head
      for (let i = 0; i < scores.length; i++) {
        const at = (first + i) * width + offset;
        for (let c = 0; c < headSize; c++) scores[i] += query[c] * block.keys[at + c];
        scores[i] = this.capScore(scores[i] * (score_scale || 1 / Math.sqrt(headSize)));
      }
      this.normalizeScores(scores, block, head);
      block.weights.set(scores, head * (length + 1) + first);
      const sums = new Float64Array(headSize);
      for (let i = 0; i < scores.length; i++) {
        const at = (first + i) * width + offset;
        for (let c = 0; c < headSize; c++) sums[c] += scores[i] * block.values[at + c];
      }
      out.set(sums, head * headSize);
    }
    return block.projection(out);
  }

  /** Replace the scores of one head by attention weights. */
  normalizeScores(scores, block, head) {
    const name = this.config.softmax;
    if (name === "adaptive") return adaptiveSoftmax(scores);
    softmax(scores, name === "sink" ? block.sinks[head] : name === "softmax1" ? 0 : -Infinity);
  }

  capScore(score) {
    const cap = this.config.score_cap;
    return cap ? cap * Math.tanh(score / cap) : score;
  }

  /** Return x_t + mix x_(t-1) if the block has a token shift, else x. */
  shiftTokens(block, x) {
    const earlier = block.lastInput;
    block.lastInput = x;
    return block.shift && earlier ? x.map((value, i) => value + block.shift[i] * earlier[i]) : x;
  }

  /** Return k_t + mix (k_(t-1) - k_t) if the block has a key shift, else k; before the first token k is 0. */
  shiftKeys(block, k) {
    const earlier = block.lastKeys;
    block.lastKeys = k;
    return block.keyShift ? k.map((value, i) => value + block.keyShift[i] * ((earlier ? earlier[i] : 0) - value)) : k;
  }

  /** Return the query or key heads of one token, normalized and rotated to its position. */
  placeHeads(block, x, norm) {
    const { headSize, length } = this, { frequencies, rotaryFactor } = block, half = frequencies.length;
    const y = norm && !this.config.qk_norm_per_head ? norm(x) : x.slice();
    for (let start = 0; start < y.length; start += headSize) {
      if (norm && this.config.qk_norm_per_head) y.set(norm(y.subarray(start, start + headSize)), start);
      for (let i = start; i < start + half; i++) {
        const angle = length * frequencies[i - start], cos = rotaryFactor * Math.cos(angle), sin = rotaryFactor * Math.sin(angle), a = y[i], b = y[i + half];
        y[i] = a * cos - b * sin;
        y[i + half] = b * cos + a * sin;
      }
    }
    return y;
  }

  /** Return the rotary frequencies of a layer in radians per token, one for each pair of channels, and a factor of what is rotated. */
  newRotary(layer) {
    const c = this.config, isWindowed = c.window && !c.full_layers.includes(layer), isLocal = c.rotary_local_base && isWindowed;
    if (c.positions !== "rotary" || c.unrotated_layers.includes(layer)) return { frequencies: [], rotaryFactor: 1 };
    const half = Math.floor(this.headSize * c.rotary_fraction) / 2, base = isLocal ? c.rotary_local_base : c.rotary_base;
    const plain = Array.from({ length: half }, (_, i) => base ** (-i / half));
    if (isLocal || c.rotary_scaling === "none") return { frequencies: plain, rotaryFactor: 1 };
    const kept = keptFrequencies(c, plain), frequencies = plain.map((frequency, i) => frequency * ((1 - kept[i]) / c.rotary_factor + kept[i]));
    return { frequencies, rotaryFactor: c.rotary_attention_factor };
  }
}

/** Return the share of each rotary frequency that a scaling keeps, as `attention.scaling.RotaryScaling`. */
function keptFrequencies(config, frequencies) {
  const { rotary_low_frequency: low, rotary_high_frequency: high, rotary_scaling: scaling } = config, n = frequencies.length;
  const rotations = frequencies.map((frequency) => (config.rotary_original_window * frequency) / (2 * Math.PI));
  const clip = (share) => Math.min(1, Math.max(0, share));
  if (scaling === "linear") return rotations.fill(0);
  if (scaling === "llama3") return rotations.map((number) => clip((number - low) / (high - low)));
  if (n < 2) return rotations.fill(1);
  const step = Math.log(rotations[0] / rotations[1]); // yarn interpolates by the number of the pair
  let [first, last] = [high, low].map((bound) => Math.log(rotations[0] / bound) / step);
  if (config.rotary_rounded) [first, last] = [Math.floor(first), Math.ceil(last)];
  [first, last] = [Math.max(first, 0), Math.min(last, 2 * n - 1)];
  return rotations.map((_, i) => 1 - clip((i - first) / (last - first || 0.001)));
}
