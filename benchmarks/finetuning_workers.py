"""The sides of `benchmarks.finetuning`, each in a process of its own.

A worker loads the model, makes what learns, and then makes a step of training when it is asked. It imports its own
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

import numpy as np

from benchmarks.generation_workers import peak_memory_mb

RANK, ALPHA, RATE = 16, 32, 1e-4
LINEAR = "all-linear"  # all but the head
IGNORED = -100  # the label of what does not count, in PyTorch's words

Step = Callable[[], float]


def random_batches(n_vocab: int, n_rows: int, n_tokens: int):
    """The same random tokens for every side, as inputs and labels."""
    generator = np.random.default_rng(0)
    while True:
        tokens = generator.integers(0, n_vocab, (n_rows, n_tokens + 1))
        yield tokens[:, :-1], tokens[:, 1:]


def tricycle_step(
    folder: Path, what: str, precision: str, shape: tuple[int, int], recompute: bool, weights: str = "float32"
) -> Step:
    from tricycle.activation_checkpointing import checkpoint_activations
    from tricycle.loss import CrossEntropy
    from tricycle.optimisers import AdamW
    from tricycle.pretrained import load
    from tricycle.training import supervised_loss, train_on_batch
    from tricycle.weights import set_memory_order

    loaded = load(folder, weights=weights)
    model = loaded.model
    model.use_precision(precision)
    model.recompute = recompute and checkpoint_activations
    if what == "lora":
        from tricycle.finetuning.lora import LoRAConfig
        from tricycle.pretrained.adapters import new_adapter

        new_adapter(loaded, LoRAConfig(rank=RANK, alpha=ALPHA))
    else:
        set_memory_order(model.unfreeze(), "C")
    model.train()
    optimiser = AdamW(RATE, weight_decay=0.0)
    batch_loss = supervised_loss(model, CrossEntropy(ignore_index=IGNORED))
    data = random_batches(model.config.vocab_size, *shape)

    def step() -> float:
        return train_on_batch(model, optimiser, batch_loss, next(data))

    return step


def torch_step(
    folder: Path, what: str, precision: str, shape: tuple[int, int], recompute: bool, weights: str = "float32"
) -> Step:
    """`transformers` and `peft`, eagerly, as their guides have it: autocast for bfloat16, a fused AdamW."""
    assert weights == "float32" or what == "lora"  # which ours alone can have
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if what == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR))
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0, fused=True)
    data = random_batches(model.config.vocab_size, *shape)

    def step() -> float:
        inputs, labels = (torch.from_numpy(ids.copy()) for ids in next(data))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.item()

    return step


STEPS: dict[str, Callable[..., Step]] = {"tricycle": tricycle_step, "torch": torch_step}


def main() -> None:
    side, folder, what, precision, n_rows, n_tokens, weights, *flags = sys.argv[1:]
    arguments = Path(folder), what, precision, (int(n_rows), int(n_tokens)), "recompute" in flags
    step = STEPS[side](*arguments, weights)
    losses = []

    def timed() -> float:
        start = time.perf_counter()
        losses.append(float(step()))
        return time.perf_counter() - start

    answers: dict[str, Callable[[], Any]] = {"step": timed, "memory": peak_memory_mb, "losses": lambda: losses}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
