"""The training state, losses, held-out data and samples of fine-tuning, for `tricycle_cli/finetune.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.checkpoint import Checkpoint, load_checkpoint
from tricycle.devices import to_cpu
from tricycle.finetuning.lora import Adapter
from tricycle.finetuning.packing import IGNORED, Batch, PackedDataset, packed_forward_kwargs
from tricycle.finetuning.preferences import PairDataset, dpo_loss, preference_losses, reward_margins
from tricycle.generate import generate
from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import save_adapter
from tricycle.sampling import SamplingParams
from tricycle.system.files import append_lines
from tricycle.tensor import Tensor
from tricycle.training import BatchLossFn
from tricycle.training_state import TrainingState
from tricycle_cli.models import chat_stop_tokens
from tricycle_cli.run import Run

ADAPTER = "adapter"  # the folder in a run's folder


class _Learning(Layer):
    """The trained parameters of a model with an adapter, as `save_checkpoint` takes a model."""

    def __init__(self, adapter: Adapter, config: Any, generator: np.random.Generator) -> None:
        self.config = config
        self.generator = generator
        self.low_ranks = adapter.low_ranks


@dataclass
class TuningState(TrainingState):
    """The state of fine-tuning. With an adapter, checkpoints hold the adapter alone.

    Attributes:
        adapter: the trained adapter; None where the whole model is trained.
        loaded: the model to which the adapter is attached.
        beta: the coefficient of DPO; 0 for the cross-entropy of the tokens that count.
        margins: the reward margins of the batches of an update (DPO).
    """

    adapter: Adapter | None = None
    loaded: Pretrained | None = None
    beta: float = 0.0
    margins: list[Any] = field(default_factory=list)

    def saved_module(self) -> Any:
        """Return the module whose weights checkpoints contain: the adapter, or the whole model."""
        if self.adapter is None:
            return self.model
        return _Learning(self.adapter, self.config, self.model.generator)

    def __post_init__(self) -> None:
        """Set `batch_loss`: DPO, which appends to `margins`, if `beta` is not 0, else the cross-entropy."""
        model, beta = self.model, self.beta
        self.batch_loss = dpo_loss(model, beta, self.margins.append) if beta else loss_of_batches(model)

    def count_labels(self, batch: Any) -> Any:
        """Return the number of tokens of a batch that count in the loss."""
        return batch.n_labels

    def extra_metrics(self) -> dict[str, float]:
        """Return and clear the reward metrics of the last update (DPO); {} for cross-entropy, or at a second call."""
        margins = [to_cpu(some) for some in self.margins]
        self.margins.clear()
        return reward_metrics(np.concatenate(margins)) if margins else {}

    @property
    def n_tokens(self) -> int:
        """Return the mean number of tokens in an update."""
        dataset: Any = self.dataset
        rows = self.config.batch_size * self.config.accumulation_steps
        return int(dataset.n_tokens / dataset.n_items * rows)

    def save(self, path: Path, tokeniser: Any, memory: Any = None) -> None:
        """Save a checkpoint; with an adapter, only the adapter, and for "best" also a folder of it in PEFT format."""
        super().save(path, tokeniser if self.adapter is None else None)
        if self.adapter is not None and self.loaded is not None and path.stem == "best":
            save_adapter(self.adapter, self.loaded, path.parent / ADAPTER)

    def read(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's weights (ValueError if they do not match) and random generator state, in place.

        Raises:
            ValueError: the weights do not match this model or adapter.
        """
        prefix = "model."
        tensors = checkpoint.tensors.items()
        try:
            self.saved_module().load_state_dict({k.removeprefix(prefix): v for k, v in tensors if k.startswith(prefix)})
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from None
        self.model.generator.bit_generator.state = checkpoint.about["generator"]

    def roll_back(self, path: Path) -> None:
        """Restore weights, random generator's and training state from a checkpoint file; clear gradients."""
        checkpoint = load_checkpoint(path)
        self.read(checkpoint)
        self.model.zero_grad()
        self.restore(checkpoint)


def loss_of_batches(model: GPT) -> BatchLossFn:
    """Return a function of (batch, factor): factor times the mean cross-entropy (nats) of counted labels, a Tensor."""
    loss_fn = CrossEntropy(ignore_index=IGNORED)

    def batch_loss(batch: Batch, factor: Any) -> Tensor:
        options = packed_forward_kwargs(model, batch.tokens, batch.documents)
        return model.loss(model.place(batch.tokens), model.place(batch.labels), loss_fn, factor, **options)

    return batch_loss


def reward_metrics(margins: np.ndarray) -> dict[str, float]:
    """Return "reward_margin", the mean, and "reward_accuracy", the fraction of margins above 0 (0 counts as half)."""
    accuracy = ((margins > 0) + 0.5 * (margins == 0)).mean()
    return {"reward_margin": float(margins.mean()), "reward_accuracy": float(accuracy)}


# -------------------------------------------------------------------- held-out data
@dataclass
class HeldOutRows:
    """Held-out rows of examples.

    Attributes:
        n_rows: the number of rows that are evaluated, from the first row.
        n_bytes: the number of bytes of the text of the tokens that count; special tokens have none.
        size: the number of these tokens as text, such as "1,234 tokens".
    """

    dataset: PackedDataset
    n_rows: int
    n_bytes: int = 0
    size: str = ""

    @classmethod
    def from_dataset(cls, dataset: PackedDataset, n_rows: int, tokeniser: Any) -> HeldOutRows:
        """Return the first `n_rows` rows of a dataset, or all if there are fewer, as held-out data."""
        rows = dataset.rows[:n_rows]
        ids = [dataset.examples[item].ids[1:][dataset.examples[item].loss_mask[1:]] for row in rows for item in row]
        special = [*(getattr(tokeniser, "special_ids", ()) or [tokeniser.end_of_text])]
        n_bytes = sum(len(tokeniser.decode(part[~np.isin(part, special)]).encode("utf-8")) for part in ids)
        return cls(dataset, len(rows), n_bytes, f"{sum(map(len, ids)):,} tokens")

    def measure(self, model: GPT) -> dict[str, float]:
        """Evaluate the model on all rows; return "held_out_loss" (mean, nats per token) and "bits_per_byte"."""
        size = self.dataset.batch_size or 1
        batch_loss = loss_of_batches(model)
        total, count = 0.0, 0
        with model.evaluating(), np.errstate(all="ignore"):
            for first in range(0, self.n_rows, size):
                batch = self.dataset.collate(range(first, min(first + size, self.n_rows)))
                total += float(batch_loss(batch, 1.0)) * batch.n_labels
                count += batch.n_labels
        bits = total / math.log(2) / max(1, self.n_bytes)
        return {"held_out_loss": total / count, "bits_per_byte": bits}


@dataclass
class HeldOutPairs:
    """Held-out pairs of a chosen and a rejected answer.

    Attributes:
        beta: the coefficient of DPO.
    """

    dataset: PairDataset
    beta: float

    @property
    def size(self) -> str:
        """Return the number of pairs as text, such as "12 pairs"."""
        return f"{self.dataset.n_items:,} pairs"

    def measure(self, model: GPT) -> dict[str, float]:
        """Evaluate all pairs; return means "held_out_loss" (DPO, nats per pair), "reward_margin", "reward_accuracy"."""
        size = self.dataset.batch_size or 1
        margins = []
        with model.evaluating(), np.errstate(all="ignore"):
            for first in range(0, self.dataset.n_items, size):
                batch = self.dataset.collate(range(first, min(first + size, self.dataset.n_items)))
                hidden = model.hidden_states(model.place(batch.tokens))
                margins.append(to_cpu(reward_margins(model, hidden, batch, self.beta)))
            joined = np.concatenate(margins)
            return {"held_out_loss": float(preference_losses(joined).mean()), **reward_metrics(joined)}


# -------------------------------------------------------------------- samples
def write_samples(
    loaded: Pretrained, run: Run, title: str, prompts: Sequence[tuple[str, list[int]]], n_tokens: int
) -> None:
    """Generate a greedy continuation of each prompt, print all texts, and append them to samples.txt under `title`."""
    window = loaded.model.config.context_window
    stops = chat_stop_tokens(loaded)
    sampling = replace(SamplingParams(temperature=0.0), stop_tokens=stops, n_vocab=loaded.tokeniser.n_vocab)
    lines = []
    for prompt, ids in prompts:
        known = ids[-max(1, window - n_tokens) :]
        with loaded.model.evaluating():
            drawn = [token for token in generate(loaded.model, known, n_tokens, sampling) if token not in stops]
        lines.append(f"--- {title}\n>>> {prompt}\n{loaded.tokeniser.decode(drawn)}\n")
    text = "".join(lines)
    run.write(lambda: append_lines(run.samples, text))
    run.print_line(text.rstrip("\n"))
