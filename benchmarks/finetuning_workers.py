"""Worker processes of `benchmarks.finetuning`, one for each side.

A worker loads the model, prepares its trainable parameters, and makes a training step for each request. It imports only
its own library, because its memory is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.interleave import answer_requests, peak_memory_mb

RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-4
ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the output layer
IGNORE_INDEX = -100  # the label that PyTorch's losses ignore

Step = Callable[[], float]


def random_batches(n_vocab: int, n_rows: int, n_tokens: int):
    """Yield endless (inputs, labels) of random tokens (n_rows, n_tokens), seed 0; labels are inputs one token on."""
    generator = np.random.default_rng(0)
    while True:
        tokens = generator.integers(0, n_vocab, (n_rows, n_tokens + 1))
        yield tokens[:, :-1], tokens[:, 1:]


def tricycle_step(
    folder: Path, method: str, precision: str, shape: tuple[int, int], recompute: bool, weights: str = "float32"
) -> Step:
    """Return a function that makes one fine-tuning update with Tricycle and returns the loss (nats per token).

    Args:
        folder: model in Hugging Face format.
        method: "lora", or "all" to train all parameters.
        shape: sequences and tokens of a batch.
        recompute: use activation checkpointing.
        weights: dtype of frozen weights.
    """
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
    if method == "lora":
        from tricycle.finetuning.lora import LoRAConfig
        from tricycle.pretrained.adapters import new_adapter

        new_adapter(loaded, LoRAConfig(rank=RANK, alpha=ALPHA))
    else:
        set_memory_order(model.unfreeze(), "C")
    model.train()
    optimiser = AdamW(LEARNING_RATE, weight_decay=0.0)
    batch_loss = supervised_loss(model, CrossEntropy(ignore_index=IGNORE_INDEX))
    data = random_batches(model.config.vocab_size, *shape)

    def step() -> float:
        return train_on_batch(model, optimiser, batch_loss, next(data))

    return step


def torch_step(
    folder: Path, method: str, precision: str, shape: tuple[int, int], recompute: bool, weights: str = "float32"
) -> Step:
    """Return a function that makes an update by transformers, peft on float32 weights and returns nats per token.

    It follows their guides: eager mode, autocast for bfloat16, fused AdamW. Arguments as in `tricycle_step`.
    """
    assert weights == "float32" or method == "lora"  # only Tricycle's frozen weights change their dtype
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
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=ALL_LINEAR))
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
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
    """Prepare a side; answer stdin lines "step" (seconds), "memory" (peak MB) and "losses" (of all steps) as JSON."""
    side, folder, method, precision, n_rows, n_tokens, weights, *flags = sys.argv[1:]
    arguments = Path(folder), method, precision, (int(n_rows), int(n_tokens)), "recompute" in flags
    step, losses = STEPS[side](*arguments, weights), list[float]()
    answer_requests(lambda: losses.append(float(step())), {"memory": peak_memory_mb, "losses": lambda: losses})


if __name__ == "__main__":
    main()
