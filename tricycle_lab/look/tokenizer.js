/** A byte-level BPE tokenizer, as `tricycle.tokeniser.BPETokeniser`: names of special tokens in a text are ordinary text. */
class Tokenizer {
  /** Tokens are strings of bytes (Latin-1), special tokens are names, and the pattern splits text into pieces. */
  constructor({ tokens, special_tokens, pattern }) {
    this.ids = new Map(tokens.map((token, id) => [token, id]));
    this.bytes = [...tokens.map((token) => Uint8Array.from(token, (c) => c.charCodeAt(0))), ...special_tokens.map((name) => new TextEncoder().encode(name))];
    this.pattern = new RegExp(pattern, "gu");
  }

  encode(text) {
    return (text.match(this.pattern) ?? []).flatMap((piece) => this.encodePiece(piece));
  }

  /** Merge the adjacent pair that forms the token with the lowest id, the leftmost of several, until none forms a token. */
  encodePiece(piece) {
    const parts = Array.from(new TextEncoder().encode(piece), (byte) => String.fromCharCode(byte)), whole = this.ids.get(parts.join(""));
    if (whole !== undefined) return [whole];
    const idOfPair = (i) => (i >= 0 && i + 1 < parts.length ? this.ids.get(parts[i] + parts[i + 1]) : undefined) ?? Infinity;
    const pairs = parts.map((_, i) => idOfPair(i)); // the id that parts i and i + 1 form
    for (;;) {
      let best = 0;
      for (let i = 1; i < pairs.length; i++) if (pairs[i] < pairs[best]) best = i;
      if (pairs[best] === Infinity) return parts.map((part) => this.ids.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      pairs.splice(best, 1);
      for (const i of [best - 1, best]) if (i >= 0) pairs[i] = idOfPair(i);
    }
  }

  /** Return a function that decodes one id after another to the characters that it completes; the rest of the text without an id. */
  stream() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return (id) => (id === undefined ? decoder.decode() : decoder.decode(this.bytes[id], { stream: true }));
  }

  decode(ids) {
    const push = this.stream();
    return ids.map(push).join("") + push();
  }
}
