"""Run one training in a separate process, which shares neither memory nor threads with others.

    python -m experiments.ten_minutes.trial '{"config": ..., "seconds": ..., ...}'

It prints a line of JSON now and then, and the result as the last. `study.py` starts it.
"""

import json
import os
import sys
import time
from typing import Any

from tricycle_accelerators.host import tune_host

LINES = 200  # progress reports during a training


def main() -> int:
    """Run the training that the JSON of `sys.argv[1]` describes, print reports and the result as JSON; return 0."""
    task = json.loads(sys.argv[1])
    if task["core"] is not None and hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {task["core"]})
    tune_host()
    print(json.dumps({"result": run(task, lambda **values: print(json.dumps(values), flush=True))}), flush=True)
    return 0


def run(task: dict[str, Any], report: Any = lambda **values: None) -> dict[str, Any]:
    """Train for task["seconds"] of CPU time, score the text, and return the results as a dict for JSON.

    Args:
        task: "config" (a dict), "seconds", "data", "files", "part", "batches" (to be scored on; 0 for all).
        report: called with the seconds used, the loss and the step, LINES times.

    Returns:
        "bits" (per byte of the scored text), "loss" (nats per token), "train_loss" (nats per token, of the last tenth
        of the updates), "steps", "tokens_per_second", "seconds" (used), "parameters", and "compressed": bits per byte
        of standard compressors.
    """
    import numpy as np  # after the cores are chosen

    from experiments.shared.results import rounded
    from experiments.shared.texts import held_out
    from experiments.ten_minutes.data import load
    from experiments.ten_minutes.time_budget import Budget
    from tricycle.configs import GPTConfig
    from tricycle.evaluation import evaluate
    from tricycle.training_state import new_state, train_step
    from tricycle_cli.text_task import OVERLAP, compressor_bits_per_byte

    config = GPTConfig.from_dict(task["config"])
    corpus = load(task["data"], task["part"], config.vocab_size, task["files"])
    state = new_state(config, corpus.train)
    state.total_steps = 0
    losses, last_report = [], 0.0
    budget = Budget(task["seconds"], time.process_time)
    while state.step != state.total_steps or not state.step:
        losses.append(float(train_step(state)[0]))
        state.total_steps = budget.total_steps()
        used = budget.used
        if used - last_report > task["seconds"] / LINES:
            report(used=used, loss=losses[-1], step=state.step)
            last_report = used
    used = budget.used
    text = held_out(corpus)
    stride = 0 if task["batches"] else max(1, config.context_window // OVERLAP)
    loss, _ = evaluate(state.model, text.tokens, config.batch_size, task["batches"], stride)
    lately = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    n_tokens = config.batch_size * config.accumulation_steps * config.context_window * state.step
    return {
        "bits": rounded(text.bits_per_byte(loss)),
        "loss": rounded(loss),
        "train_loss": rounded(lately),
        "steps": state.step,
        "tokens_per_second": round(n_tokens / used),
        "seconds": rounded(used),
        "parameters": state.model.n_parameters,
        "compressed": compressor_bits_per_byte(corpus.validation_bytes),
    }


if __name__ == "__main__":
    raise SystemExit(main())
