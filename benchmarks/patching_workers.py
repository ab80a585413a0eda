"""Worker process for benchmarks/patching.py: patches heads by position, with Tricycle or with PyTorch's hooks.

`python -m benchmarks.patching_workers SIDE FOLDER LAYERS CELLS BATCH_SIZE`: in a step, Tricycle computes the whole grid
and PyTorch the sample of cells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.interleave import answer_requests
from tricycle.pretrained import load
from tricycle_lab.patching import Prompts, patch_activations

TEXT = (
    "When {first} and {second} went to the old market near the river on a cold and rainy day to look for some fresh "
    "bread, {second} gave a small paper bag to"
)
CLEAN, CORRUPTED = ("Mary", "John"), ("Anna", "Tom")
Cell = tuple[int, int, int]  # layer, head, position


def make_prompts(tokeniser: Any) -> Prompts:
    """Return clean and corrupted prompts' tokens, and both answers' tokens; ValueError if the lengths differ.

    Raises:
        ValueError: a tokenizer with which the prompts differ in length.
    """
    encode = lambda text: [int(token) for token in tokeniser.encode_plain(text)]
    clean, corrupted = (encode(TEXT.format(first=names[0], second=names[1])) for names in (CLEAN, CORRUPTED))
    if len(clean) != len(corrupted):
        raise ValueError(f"expected prompts of equally many tokens, got {len(clean)} and {len(corrupted)}")
    return Prompts(clean, corrupted, (encode(f" {CLEAN[0]}")[0], encode(f" {CORRUPTED[0]}")[0]))


def all_cells(prompts: Prompts, n_layers: int, n_heads: int) -> list[Cell]:
    """Return all (layer, head, position) of the grid from the first position on at which the prompts differ."""
    first = next(i for i, pair in enumerate(zip(prompts.clean, prompts.corrupted)) if pair[0] != pair[1])
    return list(product(range(n_layers), range(n_heads), range(first, len(prompts.clean))))


def sample_cells(cells: list[Cell], n_layers: int, n_cells: int) -> list[Cell]:
    """Return at most `n_cells` cells of each of `n_layers` evenly spaced layers, each layer's at a constant stride."""
    chosen = set(np.linspace(0, cells[-1][0], n_layers).astype(int))
    rows = [[cell for cell in cells if cell[0] == layer] for layer in sorted(chosen)]
    return [cell for row in rows for cell in row[:: max(1, len(row) // n_cells)][:n_cells]]


def torch_effects(folder: Path, prompts: Prompts, batch_size: int) -> Callable[[list[Cell]], np.ndarray]:
    """Return a function from cells to effects (0: corrupted, 1: clean); transformers with a forward hook per patch.

    Args:
        batch_size: the number of patches of a layer in a forward pass; 1 for a plain loop.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    projections = [layer.self_attn.o_proj for layer in model.model.layers]
    head_size = projections[0].in_features // model.config.num_attention_heads
    clean, corrupted = (torch.tensor([ids]) for ids in prompts[:2])
    stored: dict[int, Any] = {}

    def metric(ids: Any) -> np.ndarray:
        with torch.inference_mode():
            logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        return (logits[:, prompts.answers[0]] - logits[:, prompts.answers[1]]).numpy().astype(np.float64)

    def store(layer: int) -> Callable[[Any, Any], None]:
        return lambda module, args: stored.update({layer: args[0].clone()})

    handles = [module.register_forward_pre_hook(store(layer)) for layer, module in enumerate(projections)]
    end = metric(clean)
    for handle in handles:
        handle.remove()
    start = metric(corrupted)

    def patched(batch: list[Cell]) -> np.ndarray:
        layer = batch[0][0]

        def replace(module: Any, args: Any) -> Any:
            x = args[0].clone()
            for row, (_, head, position) in enumerate(batch):
                channels = slice(head * head_size, (head + 1) * head_size)
                x[row, position, channels] = stored[layer][0, position, channels]
            return (x,)

        handle = projections[layer].register_forward_pre_hook(replace)
        values = metric(corrupted.expand(len(batch), -1))
        handle.remove()
        return (values - start) / (end - start)

    def effects(cells: list[Cell]) -> np.ndarray:
        layers = sorted({layer for layer, _, _ in cells})
        by_layer = [[cell for cell in cells if cell[0] == layer] for layer in layers]
        batches = [row[i : i + batch_size] for row in by_layer for i in range(0, len(row), batch_size)]
        return np.concatenate([patched(batch) for batch in batches])

    return effects


def main() -> None:
    """Answer lines of standard input: "step" with seconds, "values" with the effects of the sample of cells."""
    side, folder, sizes = sys.argv[1], Path(sys.argv[2]), [int(size) for size in sys.argv[3:]]
    loaded, latest = load(folder, weights="float32"), dict[str, np.ndarray]()
    config, prompts = loaded.model.config, make_prompts(loaded.tokeniser)
    sample = sample_cells(all_cells(prompts, config.n_layers, config.n_heads), *sizes[:2])
    if side == "tricycle":
        grid = lambda: patch_activations(loaded.model, prompts, "heads_by_position", sizes[2])
        compute = lambda: grid()[tuple(np.transpose(sample))]
    else:
        del loaded
        compute = partial(torch_effects(folder, prompts, sizes[2]), sample)

    answer_requests(lambda: latest.update(values=compute()), {"values": lambda: latest["values"].tolist()})


if __name__ == "__main__":
    main()
