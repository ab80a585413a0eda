"""The sides of `benchmarks.generation`, each in a process of its own.

A worker loads its model, and then reads prompts and writes tokens, greedily, when it is asked. It imports its own
library and no other, for its memory is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NextTokenFn = Callable[[list[int]], int]  # reads some more tokens, and gives the most probable next one
ResetFn = Callable[[], None]


def n_threads() -> int:
    return int(os.environ["OMP_NUM_THREADS"])


# -------------------------------------------------------------------- sides
def tricycle_side(folder: Path, kind: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    from tricycle.decoding.speculative import SpeculativeState
    from tricycle.pretrained import load

    state = SpeculativeState(load(folder / "hf", kind).model, cache)
    text: list[int] = []

    def read(tokens: list[int]) -> int:
        text.extend(tokens)
        return int(state.logits(text).argmax())

    def restart() -> None:
        text.clear()
        state.reset()

    return read, restart


def transformers_side(folder: Path, kind: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(n_threads())
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=getattr(torch, kind)).eval()
    known: list[Any] = [DynamicCache()]

    @torch.inference_mode()
    def read(tokens: list[int]) -> int:
        out = model(torch.tensor([tokens]), past_key_values=known[0], use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def restart() -> None:
        known[0] = DynamicCache()

    return read, restart


def llama_side(folder: Path, kind: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    import llama_cpp
    import numpy as np

    n = n_threads()
    n_context = int((folder / "context").read_text())
    path = str(folder / f"{kind}.gguf")
    model = llama_cpp.Llama(path, n_ctx=n_context, n_threads=n, n_threads_batch=n, verbose=False)
    n_vocab = model.n_vocab()

    def read(tokens: list[int]) -> int:
        model.eval(tokens)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (n_vocab,)).argmax())

    return read, model.reset


def bandwidth_side(folder: Path, kind: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    """No model: only how fast memory is read."""
    return lambda tokens: 0, lambda: None


SIDES: dict[str, Callable[[Path, str, str | None], tuple[NextTokenFn, ResetFn]]] = {
    "tricycle": tricycle_side,
    "transformers": transformers_side,
    "llama.cpp": llama_side,
    "bandwidth": bandwidth_side,
}


# -------------------------------------------------------------------- what is measured
def memory_bandwidth(n_rows: int = 65_536, n_columns: int = 1024, repeats: int = 5) -> float:
    """Bytes a second that products of a large matrix with a vector read, the best of some: by the threads together."""
    import numpy as np

    from tricycle_accelerators import threads as workers

    matrix = np.ones((n_rows, n_columns), np.float32)
    vector = np.ones(n_columns, np.float32)
    out = np.empty(n_rows, np.float32)
    step = -(-n_rows // workers.n_threads())
    parts = [slice(start, start + step) for start in range(0, n_rows, step)]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        workers.parallel_for(lambda part: np.matmul(matrix[part], vector, out=out[part]), parts)
        times.append(time.perf_counter() - start)
    return matrix.nbytes / min(times)


def peak_memory_mb() -> float:
    """The most memory this process has held, in MB (0 where the system does not tell)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak) * 1024 / 1e6


def time_generation(read: NextTokenFn, restart: ResetFn, n_prompt: int, n_new: int, n_vocab: int) -> dict[str, Any]:
    """Seconds to read a prompt, seconds a token after it, and the tokens."""
    restart()
    prompt = [(7 + 7919 * i) % n_vocab for i in range(n_prompt)]  # no text, but the same for every side
    start = time.perf_counter()
    tokens = [read(prompt)]
    first = time.perf_counter()
    for _ in range(n_new):
        tokens.append(read(tokens[-1:]))
    last = time.perf_counter()
    return {"prompt": first - start, "token": (last - first) / max(1, n_new), "tokens": tokens}


def main() -> None:
    side, kind, folder, n_vocab, cache = sys.argv[1:6]
    read, restart = SIDES[side](Path(folder), kind, None if cache == "auto" else cache)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "write":
            answer: Any = time_generation(read, restart, *map(int, numbers), int(n_vocab))
        else:
            answer = {"memory": peak_memory_mb, "bandwidth": memory_bandwidth}[command]()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
