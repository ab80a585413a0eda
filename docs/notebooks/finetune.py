# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tuning with LoRA
#
# This notebook fine-tunes a tiny model in a minute on one core: the model is pretrained to copy words, a LoRA adapter
# is trained to reverse them, and without the adapter the model copies again.
#
# The pretrained model is a small Llama that continues `word>` with the same word.

# %%
import numpy as np

from tricycle.configs import ModelConfig
from tricycle.finetuning.lora import LoRAConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import new_adapter
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.tensor import no_grad
from tricycle.training import supervised_loss, train_on_batch

LETTERS, LENGTH = 12, 4
SEPARATOR = LETTERS  # the token of ">"
rng = np.random.default_rng(0)


def batch(reverse, n=32):
    """Return the token ids of `word>answer`, and the labels: -1, which the loss ignores, outside the answer."""
    words = rng.integers(0, LETTERS, (n, LENGTH))
    rows = np.concatenate([words, np.full((n, 1), SEPARATOR), words[:, ::-1] if reverse else words], axis=1)
    labels = rows[:, 1:].copy()
    labels[:, :LENGTH] = -1
    return rows[:, :-1], labels


shape = {"vocab_size": LETTERS + 1, "context_window": 16, "embedding_dim": 64, "n_heads": 4, "n_layers": 2}
model = GPT(ModelConfig(**shape, norm="rms_norm", activation="swish", gated=True, positions="rotary", bias=False))


def train(learning_rate, steps, reverse):
    optimiser = AdamW(learning_rate, weight_decay=0)
    batch_loss = supervised_loss(model, CrossEntropy(ignore_index=-1))
    return [float(train_on_batch(model, optimiser, batch_loss, batch(reverse))) for _ in range(steps)]


def accuracy(reverse):
    """Return the fraction of the answers' letters that the model predicts correctly, for new random words."""
    tokens, labels = batch(reverse, 200)
    with no_grad():
        predictions = model(tokens).numpy().argmax(-1)
    return float((predictions == labels)[labels >= 0].mean())


before = train(4e-3, 250, reverse=False)
print("accuracy, copy:", accuracy(False), "reverse:", accuracy(True))

# %% [markdown]
# The adapter adds two small trainable matrices to each weight matrix, which is frozen. It is trained on reversed words
# only.

# %%
loaded = Pretrained(model, None, GenerationSettings())
adapter = new_adapter(loaded, LoRAConfig(rank=8, alpha=16))
print(adapter.n_parameters, "of", model.n_parameters, "parameters are trained")
after = train(5e-3, 350, reverse=True)
print("accuracy, copy:", accuracy(False), "reverse:", accuracy(True))

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.plot(before, label="all weights (copy)")
axes.plot(range(len(before), len(before) + len(after)), after, label="LoRA adapter (reverse)")
axes.set(xlabel="step", ylabel="loss (nats per letter)")
axes.legend()
plt.show()

# %% [markdown]
# Without the adapter, the model is unchanged.

# %%
adapter.detach()
print("accuracy, copy:", accuracy(False), "reverse:", accuracy(True))

# %% [markdown]
# `tricycle finetune` trains adapters for pretrained models on conversations, prompts with answers, or preference pairs:
# see [fine-tuning](../finetuning.md).
