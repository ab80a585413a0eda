// Sampling as in `tricycle generate`: the same seed selects the same tokens.

const bits = (n) => (1n << n) - 1n;
const PCG_MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

/** Return a function that draws numbers in [0, 1) as NumPy's `default_rng(seed).random()`, for a seed below 2^32: PCG64 (O'Neill 2014). */
function newGenerator(seed) {
  const words = seedWords(seed), join = (i) => words.slice(i, i + 4).reduceRight((high, word) => (high << 32n) | BigInt(word), 0n);
  const swap = (value) => ((value & bits(64n)) << 64n) | (value >> 64n); // NumPy passes the high half first
  const increment = ((swap(join(4)) << 1n) | 1n) & bits(128n);
  const step = (state) => (state * PCG_MULTIPLIER + increment) & bits(128n);
  let state = step((increment + swap(join(0))) & bits(128n));
  return () => {
    state = step(state);
    const mixed = (state >> 64n) ^ (state & bits(64n)), rotation = state >> 122n;
    const output = ((mixed >> rotation) | (mixed << (64n - rotation))) & bits(64n);
    return Number(output >> 11n) / 2 ** 53;
  };
}

/** Return eight 32-bit words made of a seed as by NumPy's `SeedSequence`. */
function seedWords(seed) {
  const hash = (constant, factor) => (value) => {
    value = (value ^ constant) >>> 0;
    constant = Math.imul(constant, factor) >>> 0;
    value = Math.imul(value, constant) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const mix = (x, y) => {
    const value = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const enter = hash(0x43b0d7e5, 0x931e8875), leave = hash(0x8b51f9dd, 0x58f38ded);
  const pool = [seed, 0, 0, 0].map((word) => enter(word));
  for (let from = 0; from < 4; from++) for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], enter(pool[from]));
  return Array.from({ length: 8 }, (_, i) => leave(pool[i % 4]));
}

/** Select a token by logits, the tokens so far, and parameters with the names of `PenalizedSamplingParams`. */
function sampleToken(logits, seen, params, generator) {
  const penalized = penalizeLogits(logits, seen, params);
  if (params.temperature === 0) return penalized.reduce((best, logit, i) => (logit > penalized[best] ? i : best), 0);
  const kept = candidates(penalized, params).sort((a, b) => a.id - b.id), number = generator();
  const total = kept.reduce((sum, { weight }) => sum + weight, 0);
  let sum = 0;
  return (kept.find(({ weight }) => (sum += weight) / total > number) ?? kept.at(-1)).id;
}

/** Return the logits of all ids of the tokenizer as float64 after the repetition penalty; -Infinity for repeated n-grams. */
function penalizeLogits(logits, seen, { n_vocab, repetition_penalty, no_repeat_ngram_size: size }) {
  const result = Float64Array.from(logits.subarray(0, n_vocab));
  if (!result.every(Number.isFinite)) throw new Error("The model computed numbers that are not finite.");
  if (repetition_penalty !== 1)
    for (const id of new Set(seen)) if (id < result.length) result[id] = result[id] < 0 ? result[id] * repetition_penalty : result[id] / repetition_penalty;
  const tail = seen.slice(seen.length - size + 1), excluded = new Set();
  for (let i = 0; size && i + size <= seen.length; i++) if (tail.every((id, k) => id === seen[i + k])) excluded.add(seen[i + size - 1]);
  if (excluded.size < result.length) for (const id of excluded) if (id < result.length) result[id] = -Infinity;
  return result;
}

/** Return the {id, weight} that temperature, top_k, top_p and min_p keep. */
function candidates(logits, { temperature, top_k, top_p, min_p }) {
  const max = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  let kept = Array.from(logits, (logit, id) => ({ id, logit, weight: Math.exp((logit - max) / Math.max(temperature, 1e-6)) }));
  if (!top_k && top_p === 1) return kept.filter(({ weight }) => weight >= min_p);
  kept.sort((a, b) => b.logit - a.logit || a.id - b.id);
  if (top_k) kept = kept.slice(0, top_k);
  const total = kept.reduce((sum, { weight }) => sum + weight, 0);
  let sum = 0;
  const nLikely = kept.filter(({ weight }) => weight >= min_p).length, nKept = kept.findIndex(({ weight }) => (sum += weight / total) >= top_p) + 1;
  return kept.slice(0, Math.min(nLikely, nKept || kept.length));
}
