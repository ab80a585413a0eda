"""Continue the training of a pretrained model, with softmax or with another softmax variant."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle.finetuning.lora import Adapter
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import new_adapter
from tricycle.scheduler import WarmupCosine
from tricycle.softmaxes import SinkSoftmax
from tricycle.tensor import Tensor
from tricycle.training import apply_gradients, compute_gradients

RATES = {"lora": 5e-4, "all": 5e-5}
SINK_RATE = 0.2  # of the learned numbers in the denominator, whatever else learns
WARMUP = 4
MAX_NORM = 1.0


class Variant(NamedTuple):
    """A training run: a softmax variant and a training method.

    Attributes:
        softmax: "softmax", "softmax1" or "sink".
        method: what learns: "" for nothing, "sinks" for the numbers in the denominator alone, "lora", or "all" weights;
            with the sink its numbers always do.
        seed: of the order of the texts and of LoRA's small matrices.
        initial: the sink's numbers at first: 0 is softmax1, -5 nearly softmax.
    """

    softmax: str
    method: str = ""
    seed: int = 0
    initial: float = 0.0

    @property
    def title(self) -> str:
        """Return a title such as "softmax1, LoRA", without the seed."""
        names = {"": "no training", "sinks": "sinks learned", "lora": "LoRA", "all": "all weights"}
        begins = f" from {self.initial:g}" if self.method == "sinks" else ""
        return f"{self.softmax}, {names[self.method]}{begins}"

    @property
    def key(self) -> str:
        """Return the key in the results: the title, and the seed if the variant is trained."""
        return f"{self.title}, seed {self.seed}" if self.method else self.title


class TrainingPlan(NamedTuple):
    """The settings of the training.

    Attributes:
        texts: ids of some texts, from which pieces are drawn in turn.
        steps: updates.
        n_rows: pieces an update. n_tokens: of each.
    """

    texts: Sequence[np.ndarray]
    steps: int
    n_rows: int
    n_tokens: int

    def batch(self, generator: np.random.Generator, step: int) -> np.ndarray:
        """Return ids (n_rows, n_tokens + 1) at random places of the texts, which take turns by row."""
        rows = []
        for i in range(self.n_rows):
            text = self.texts[(step * self.n_rows + i) % len(self.texts)]
            start = int(generator.integers(0, len(text) - self.n_tokens))
            rows.append(text[start : start + self.n_tokens + 1])
        return np.stack(rows)


def use_softmax(model: GPT, variant: Variant) -> list[tuple[str, Tensor]]:
    """Install a variant's softmax in the model in place; return (name, sink) pairs, empty without a sink."""
    for block in model.blocks:
        softmax: Any = SinkSoftmax(variant.initial) if variant.softmax == "sink" else variant.softmax
        block.attention.use_softmax(softmax)
    return [(name, p) for name, p in model.named_parameters() if name.endswith("softmax_scales")]


def train_variant(loaded: Pretrained, variant: Variant, plan: TrainingPlan) -> list[float]:
    """Train the model in place, merge its adapter; return each update's loss in nats; [] without a method."""
    model = loaded.model
    sinks = use_softmax(model, variant)
    if not variant.method:
        return []
    adapter: Adapter | None = None
    if variant.method == "all":
        model.unfreeze()
    else:
        model.freeze()
    if variant.method == "lora":
        adapter = new_adapter(loaded, seed=variant.seed)
    for _, sink in sinks:
        sink.requires_grad = True
    losses = _train(model.train(), sinks, variant, plan)
    if adapter is not None:
        adapter.merge()
    model.eval()
    return losses


def _train(model: Any, sinks: list[tuple[str, Tensor]], variant: Variant, plan: TrainingPlan) -> list[float]:
    """Update sinks and the weights of the variant's method in place, by the plan; return each update's loss in nats."""
    generator = np.random.default_rng((variant.seed, 23))
    optimiser = AdamW(_schedule(RATES.get(variant.method, 0.0), plan.steps), weight_decay=0.0)
    of_sinks = AdamW(_schedule(SINK_RATE, plan.steps), weight_decay=0.0)

    def batch_loss(rows: np.ndarray, scale: Any) -> Tensor:
        loss: Tensor = model.loss(model.place(rows[:, :-1]), model.place(rows[:, 1:]), None, scale)
        return loss

    losses = []
    for step in range(plan.steps):
        grads = compute_gradients(model, batch_loss, [plan.batch(generator, step)])
        losses.append(float(grads.loss))
        of_sinks.update(sinks)
        for _, sink in sinks:
            sink.zero_grad()
        if variant.method == "sinks":
            model.zero_grad()
        else:
            apply_gradients(model, optimiser, grads, MAX_NORM)
        if step % 8 == 0:
            print(f"  step {step}: {losses[-1]:.3f}", flush=True)
    return losses


def _schedule(rate: float, steps: int) -> WarmupCosine:
    """Return a cosine schedule with a warm-up of up to WARMUP steps from 0 to `rate`, then to 0."""
    return WarmupCosine(rate, 0.0, min(WARMUP, steps - 1), steps)
