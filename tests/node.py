"""The JavaScript of the page of `tricycle export --html` in Node; without Node the tests are skipped."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tricycle_lab.look.page import FOLDER
from tricycle_lab.look.standalone import WORKER_FILES

NODE = shutil.which("node") or shutil.which("nodejs")
# Each line of stdin is [name, arguments]; each line of stdout is the result, or {"error": message}.
DRIVER = """
const posted = [];
globalThis.postMessage = (message) => posted.push(message);
const calls = {
  logits: ({ config, tensors, content, ids }) => {
    const model = new Transformer(config, readTensors(tensors, unpack(content)));
    const weights = () => model.blocks.map((block) => [...block.weights]);
    return ids.map((id) => ({ logits: [...model.forward(id)], weights: weights() }));
  },
  encode: ({ tokenizer, text }) => new Tokenizer(tokenizer).encode(text),
  decode: ({ tokenizer, ids }) => new Tokenizer(tokenizer).decode(ids),
  random: ({ seed, n }) => Array.from({ length: n }, newGenerator(seed)),
  sample: ({ logits, seen, params, seed }) => sampleToken(Float32Array.from(logits), seen, params, newGenerator(seed)),
  worker: async (message) => {
    posted.length = 0;
    await self.onmessage({ data: { ...message, buffer: message.content && unpack(message.content) } });
    return posted.map((message) => ({ ...message, attention: message.attention && [...message.attention] }));
  },
};
function unpack(text) {
  const bytes = Buffer.from(text, "base64");
  return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
}
require("readline").createInterface({ input: process.stdin }).on("line", async (line) => {
  const [name, args] = JSON.parse(line);
  let result;
  try { result = await calls[name](args); } catch (error) { result = { error: error.message }; }
  process.stdout.write(JSON.stringify(result) + "\\n");
});
"""


class Node:
    """A process that runs the script of a page's worker."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a function of DRIVER, and return its result; bytes are sent as base64."""
        packed = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in arguments.items()}
        self.process.stdin.write(json.dumps([name, packed]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def worker_source() -> str:
    """Return the script of the worker."""
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in WORKER_FILES)


@contextmanager
def running_node(source: str, folder: Path) -> Iterator[Node]:
    """Run the script of a worker in Node until the end of the block."""
    if NODE is None:
        pytest.skip("there is no Node (Debian: nodejs)")
    path = folder / "driver.js"
    path.write_text("globalThis.self = globalThis;" + source + DRIVER, encoding="utf-8")
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen([NODE, path], **pipes) as process:
        yield Node(process)
        process.stdin.close()  # type: ignore[union-attr]
