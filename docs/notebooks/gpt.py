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
# A notebook in which a GPT is put together from parts, trained on a page of text, and asked to go on. The parts
# are Tricycle's: `Dense`, `Embedding`, `LayerNorm`, and attention as one operation. What makes a GPT of them
# stands below.

# %%
import numpy as np

from tricycle import no_grad, to_tensor
from tricycle.activation import GeLU
from tricycle.attention import Attention
from tricycle.layers import Dense, Embedding, Layer, LayerNorm
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW


class Block(Layer):
    """Tokens exchange (attention), then each thinks for itself (two dense layers); both add to what was there."""

    def __init__(self, width, n_heads):
        self.n_heads = n_heads
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.query, self.key, self.value, self.out = (Dense(width, width) for _ in range(4))
        self.up, self.down, self.gelu = Dense(width, 4 * width), Dense(4 * width, width), GeLU()
        self.attention = Attention()  # causal: a token sees itself and those before it

    def forward(self, x):
        n_items, n_tokens, width = x.shape
        normed = self.norm1(x)
        heads = [
            layer(normed).reshape(n_items, n_tokens, self.n_heads, width // self.n_heads)
            for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(self.attention(*heads).reshape(n_items, n_tokens, width))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class SmallGPT(Layer):
    """Token ids (B, T) to a score for each token of the vocabulary, (B, T, V)."""

    def __init__(self, n_tokens, window, width=64, n_heads=4, n_layers=2):
        self.tokens, self.places = Embedding(n_tokens, width), Embedding(window, width)
        self.blocks = [Block(width, n_heads) for _ in range(n_layers)]
        self.norm, self.head = LayerNorm(width), Dense(width, n_tokens)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(to_tensor(np.arange(ids.shape[1]), dtype=int))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% [markdown]
# The text is "The Zen of Python". Its tokens are single characters: no tokeniser is needed.

# %%
import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()) as out:
    import this  # noqa: F401  (prints it)
text = out.getvalue()
letters = sorted(set(text))
ids = np.array([letters.index(letter) for letter in text])
print(len(text), "characters, of", len(letters), "kinds")
print(text[:80])

# %% [markdown]
# Training: take windows at random places, predict each next character, go a little against the gradient.

# %%
window, rng = 48, np.random.default_rng(0)
model = SmallGPT(len(letters), window)
optimiser, batch_loss, losses = AdamW(learning_rate=4e-3), CrossEntropy(), []
print(model.n_parameters, "parameters")
for _step in range(500):
    starts = rng.integers(0, len(ids) - window, 12)
    windows = np.stack([ids[start : start + window + 1] for start in starts])
    loss = batch_loss(to_tensor(windows[:, 1:], dtype=int), model(to_tensor(windows[:, :-1], dtype=int)))
    loss.backward()
    model.update(optimiser)
    losses.append(float(loss))
print(losses[0], losses[-1])

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.plot(losses)
axes.set(xlabel="step", ylabel="nats a character")
plt.show()


# %% [markdown]
# Writing is predicting, again and again. A text this short is soon known by heart; more steps would know all of
# it.


# %%
def write(start, n):
    known = [letters.index(letter) for letter in start]
    with no_grad():
        for _ in range(n):
            scores = model(to_tensor([known[-window:]], dtype=int)).array[0, -1]
            known.append(int(scores.argmax()))
    return "".join(letters[i] for i in known)


print(write("Simple is better than ", 150))

# %% [markdown]
# [`tricycle/models.py`](../../tricycle/models.py) is the same with rotary positions, gates, caches and the rest,
# for every family of models; [Getting started](../start.md) trains it on more text.
