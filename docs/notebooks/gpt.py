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
# # A GPT in fifty lines
#
# This notebook builds a GPT from Tricycle's layers (`Dense`, `Embedding`, `LayerNorm`) and its attention operation,
# trains it on a page of text, and generates a continuation.

# %%
import numpy as np

from tricycle import no_grad, to_tensor
from tricycle.activation import GeLU
from tricycle.attention import Attention
from tricycle.layers import Dense, Embedding, Layer, LayerNorm
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW


class Block(Layer):
    """A transformer block: attention, then an MLP, each with a layer norm and a residual connection."""

    def __init__(self, width, n_heads):
        self.n_heads = n_heads
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.query, self.key, self.value, self.out = (Dense(width, width) for _ in range(4))
        self.up, self.down, self.gelu = Dense(width, 4 * width), Dense(4 * width, width), GeLU()
        self.attention = Attention()  # causal: a token attends to itself and to earlier tokens

    def forward(self, x):
        batch_size, n_tokens, width = x.shape
        normed = self.norm1(x)
        heads = [
            layer(normed).reshape(batch_size, n_tokens, self.n_heads, width // self.n_heads)
            for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(self.attention(*heads).reshape(batch_size, n_tokens, width))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class SmallGPT(Layer):
    """A GPT that maps token ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocab_size, context_window, width=64, n_heads=4, n_layers=2):
        self.token_embedding = Embedding(vocab_size, width)
        self.position_embedding = Embedding(context_window, width)
        self.blocks = [Block(width, n_heads) for _ in range(n_layers)]
        self.norm, self.head = LayerNorm(width), Dense(width, vocab_size)

    def forward(self, ids):
        positions = to_tensor(np.arange(ids.shape[1]), dtype=int)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% [markdown]
# The text is "The Zen of Python". Each character is a token, so no tokenizer is needed.

# %%
import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()) as out:
    import this  # noqa: F401  (prints it)
text = out.getvalue()
characters = sorted(set(text))
ids = np.array([characters.index(character) for character in text])
print(len(text), "characters; vocabulary size", len(characters))
print(text[:80])

# %% [markdown]
# Each training step draws random windows of the text, predicts every next character, and updates the parameters.

# %%
window, rng = 48, np.random.default_rng(0)
model = SmallGPT(len(characters), window)
optimiser, loss_fn, losses = AdamW(learning_rate=4e-3), CrossEntropy(), []
print(model.n_parameters, "parameters")
for _step in range(500):
    starts = rng.integers(0, len(ids) - window, 12)
    windows = np.stack([ids[start : start + window + 1] for start in starts])
    loss = loss_fn(to_tensor(windows[:, 1:], dtype=int), model(to_tensor(windows[:, :-1], dtype=int)))
    loss.backward()
    model.update(optimiser)
    losses.append(float(loss))
print(losses[0], losses[-1])

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss (nats per character)")
plt.show()


# %% [markdown]
# Generation repeats the prediction of the next character. The model has memorized much of this short text; with more
# steps it would memorize all of it.


# %%
def generate(prompt, n):
    ids = [characters.index(character) for character in prompt]
    with no_grad():
        for _ in range(n):
            logits = model(to_tensor([ids[-window:]], dtype=int)).array[0, -1]
            ids.append(int(logits.argmax()))
    return "".join(characters[i] for i in ids)


print(generate("Simple is better than ", 150))

# %% [markdown]
# [`tricycle/models.py`](../../tricycle/models.py) contains Tricycle's GPT, with RoPE, gated MLPs and KV caches.
# [Getting started](../start.md) trains it on more text.
