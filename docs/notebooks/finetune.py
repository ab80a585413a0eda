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
# # Teach a model that exists
#
# A notebook about fine-tuning with LoRA, small enough for a minute on one core: a tiny model learns to copy
# words, an adapter teaches it to write them backwards, and without the adapter it copies again.
#
# First the model "that exists": a small Llama that continues `word>` with the same word.

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
END = LETTERS  # stands for ">"
rng = np.random.default_rng(0)


def batch(backwards, n=32):
    """Token ids of `word>answer`, and labels that count in the answer alone (-1 does not)."""
    words = rng.integers(0, LETTERS, (n, LENGTH))
    rows = np.concatenate([words, np.full((n, 1), END), words[:, ::-1] if backwards else words], axis=1)
    labels = rows[:, 1:].copy()
    labels[:, :LENGTH] = -1
    return rows[:, :-1], labels


shape = {"vocab_size": LETTERS + 1, "context_window": 16, "embedding_dim": 64, "n_heads": 4, "n_layers": 2}
model = GPT(ModelConfig(**shape, norm="rms_norm", activation="swish", gated=True, positions="rotary", bias=False))


def teach(rate, steps, backwards):
    optimiser = AdamW(rate, weight_decay=0)
    batch_loss = supervised_loss(model, CrossEntropy(ignore_index=-1))
    return [float(train_on_batch(model, optimiser, batch_loss, batch(backwards))) for _ in range(steps)]


def share_right(backwards):
    """How many letters of the answers are the likeliest ones, of words that were drawn anew."""
    tokens, labels = batch(backwards, 200)
    with no_grad():
        guesses = model(tokens).numpy().argmax(-1)
    return float((guesses == labels)[labels >= 0].mean())


before = teach(4e-3, 250, backwards=False)
print("copies:", share_right(False), "backwards:", share_right(True))

# %% [markdown]
# Now the adapter: beside the matrices of the model, which stay as they are, two thin ones learn. Only the other
# answers are shown.

# %%
loaded = Pretrained(model, None, GenerationSettings())
adapter = new_adapter(loaded, LoRAConfig(rank=8, alpha=16))
print(adapter.n_parameters, "of", model.n_parameters, "parameters learn")
after = teach(5e-3, 350, backwards=True)
print("copies:", share_right(False), "backwards:", share_right(True))

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.plot(before, label="all weights: copy")
axes.plot(range(len(before), len(before) + len(after)), after, label="adapter: backwards")
axes.set(xlabel="step", ylabel="nats a letter")
axes.legend()
plt.show()

# %% [markdown]
# Taken off, the model is what it was.

# %%
adapter.detach()
print("copies:", share_right(False), "backwards:", share_right(True))

# %% [markdown]
# `tricycle finetune` does this with models of other people, on conversations, questions with answers, or pairs of
# answers: [fine-tuning](../finetuning.md).
