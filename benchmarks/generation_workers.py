"""Worker processes of `benchmarks.generation`, one for each side.

A worker loads its model, and generates greedily from a prompt for each request. It imports only its own library,
because its memory is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.interleave import peak_memory_mb

NextTokenFn = Callable[[list[int]], int]  # appends tokens to the context, and returns the most probable next token
ResetFn = Callable[[], None]


def n_threads() -> int:
    """Return OMP_NUM_THREADS, which the benchmark sets for this process, as an integer; KeyError without it."""
    return int(os.environ["OMP_NUM_THREADS"])


# -------------------------------------------------------------------- sides
def tricycle_side(folder: Path, weights: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    """Return (next_token, reset) of Tricycle: append tokens and return the argmax token; clear the context.

    Args:
        folder: the exported models.
        weights: dtype of the weights, or GGUF type.
        cache: dtype of the KV cache, None for the default; only Tricycle's.
    """
    from tricycle.decoding.speculative import SpeculativeState
    from tricycle.pretrained import load

    path = folder / f"{weights}.gguf"
    model = load(path, "stored").model if path.exists() else load(folder / "hf", weights).model
    state = SpeculativeState(model, cache)
    context: list[int] = []

    def next_token(tokens: list[int]) -> int:
        context.extend(tokens)
        return int(state.logits(context).argmax())

    def reset() -> None:
        context.clear()
        state.reset()

    return next_token, reset


def transformers_side(folder: Path, weights: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    """Return (next_token, reset) of transformers: append tokens and return the argmax token; clear the context."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(n_threads())
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=getattr(torch, weights)).eval()
    past = DynamicCache()

    @torch.inference_mode()
    def next_token(tokens: list[int]) -> int:
        out = model(torch.tensor([tokens]), past_key_values=past, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def reset() -> None:
        nonlocal past
        past = DynamicCache()

    return next_token, reset


def llama_side(folder: Path, weights: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    """Return (next_token, reset) of llama.cpp: append tokens and return the argmax token; clear the context."""
    import llama_cpp
    import numpy as np

    n = n_threads()
    n_context = int((folder / "context").read_text())
    path = str(folder / f"{weights}.gguf")
    model = llama_cpp.Llama(path, n_ctx=n_context, n_threads=n, n_threads_batch=n, verbose=False)
    n_vocab = model.n_vocab()

    def next_token(tokens: list[int]) -> int:
        model.eval(tokens)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (n_vocab,)).argmax())

    return next_token, model.reset


def bandwidth_side(folder: Path, weights: str, cache: str | None) -> tuple[NextTokenFn, ResetFn]:
    """Return (next_token, reset) that return 0 and do nothing, for the worker that measures memory bandwidth."""
    return lambda tokens: 0, lambda: None


SIDES: dict[str, Callable[[Path, str, str | None], tuple[NextTokenFn, ResetFn]]] = {
    "tricycle": tricycle_side,
    "transformers": transformers_side,
    "llama.cpp": llama_side,
    "bandwidth": bandwidth_side,
}


# -------------------------------------------------------------------- measurements
def memory_bandwidth(n_rows: int = 65_536, n_columns: int = 1024, repeats: int = 5) -> float:
    """Return the highest bytes per second, of `repeats`, that products of a matrix and a vector read on all threads.

    The result is the highest of several repeats.
    """
    import numpy as np

    from tricycle_accelerators import threads

    matrix = np.ones((n_rows, n_columns), np.float32)
    vector = np.ones(n_columns, np.float32)
    out = np.empty(n_rows, np.float32)
    rows_per_thread = -(-n_rows // threads.n_threads())
    blocks = [slice(start, start + rows_per_thread) for start in range(0, n_rows, rows_per_thread)]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        threads.parallel_for(lambda block: np.matmul(matrix[block], vector, out=out[block]), blocks)
        times.append(time.perf_counter() - start)
    return matrix.nbytes / min(times)


def time_generation(next_token: NextTokenFn, reset: ResetFn, n_prompt: int, n_new: int, n_vocab: int) -> dict[str, Any]:
    """Return {"prompt": prefill seconds, "token": seconds per new token, "tokens": n_new + 1 tokens}."""
    reset()
    prompt = [(7 + 7919 * i) % n_vocab for i in range(n_prompt)]  # arbitrary tokens, the same for all sides
    start = time.perf_counter()
    tokens = [next_token(prompt)]
    first = time.perf_counter()
    for _ in range(n_new):
        tokens.append(next_token(tokens[-1:]))
    last = time.perf_counter()
    return {"prompt": first - start, "token": (last - first) / max(1, n_new), "tokens": tokens}


def main() -> None:
    """Load the model of sys.argv (SIDE WEIGHTS FOLDER VOCAB_SIZE CACHE), and answer each stdin line with JSON."""
    side, weights, folder, n_vocab, cache = sys.argv[1:6]
    next_token, reset = SIDES[side](Path(folder), weights, None if cache == "auto" else cache)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "generate":
            n_prompt, n_new = map(int, numbers)
            answer: Any = time_generation(next_token, reset, n_prompt, n_new, int(n_vocab))
        else:
            answer = {"memory": peak_memory_mb, "bandwidth": memory_bandwidth}[command]()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
