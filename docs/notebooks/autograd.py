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
# # Automatic differentiation from nothing
#
# A notebook for whoever wants to see how little it takes: forty lines of plain Python that differentiate, the
# same in Tricycle, and a curve fitted with it.
#
# A number that remembers two things is enough: which numbers it was made of, and the slope with respect to each.

# %%
import math


class Number:
    def __init__(self, value, made_of=()):
        self.value = value
        self.made_of = made_of  # pairs: another Number, and the slope with respect to it
        self.grad = 0.0

    def __add__(self, other):
        return Number(self.value + other.value, [(self, 1.0), (other, 1.0)])

    def __mul__(self, other):
        return Number(self.value * other.value, [(self, other.value), (other, self.value)])

    def tanh(self):
        t = math.tanh(self.value)
        return Number(t, [(self, 1 - t * t)])


# %% [markdown]
# To go back, every number must wait until all that was computed from it is done. So the numbers are sorted first;
# then each hands its gradient on, times the slope. That is the chain rule. Where a number was used twice, two
# gradients arrive, and they add up.


# %%
def backward(result):
    order, seen = [], set()

    def visit(number):
        if id(number) not in seen:
            seen.add(id(number))
            for other, _ in number.made_of:
                visit(other)
            order.append(number)

    visit(result)
    result.grad = 1.0
    for number in reversed(order):
        for other, slope in number.made_of:
            other.grad += slope * number.grad


x, w, b = Number(0.5), Number(2.0), Number(-0.3)
y = (w * x + b).tanh() * x  # x is used twice
backward(y)
print(y.value, x.grad, w.grad, b.grad)

# %% [markdown]
# Is it right? Move x a little, and see what becomes of y.


# %%
def f(x):
    return math.tanh(2.0 * x - 0.3) * x


print((f(0.5 + 1e-6) - f(0.5 - 1e-6)) / 2e-6)

# %% [markdown]
# Tricycle is this with arrays in the place of numbers: a `Tensor` records its inputs (`args`) and a backward function,
# which computes their gradients from the gradient of the result (`back_fns` shows it as one function for each input).

# %%
from tricycle import to_tensor
from tricycle.ops import tanh

x, w, b = to_tensor(0.5), to_tensor(2.0), to_tensor(-0.3)
y = tanh(w * x + b) * x
y.backward()
print(y, x.grad, w.grad, b.grad)

# %% [markdown]
# With arrays, two layers and a loss, gradients fit a curve: each step goes a little against the gradient.

# %%
import numpy as np

from tricycle.functions import Tanh
from tricycle.layers import Dense, Sequential
from tricycle.loss import MeanSquaredError
from tricycle.optimisers import AdamW

points = np.linspace(-3, 3, 60).reshape(-1, 1)
heights = np.sin(2 * points) * np.exp(-(points**2) / 4)
model = Sequential(Dense(1, 32, generator=0), Tanh(), Dense(32, 1, generator=1))
optimiser = AdamW(learning_rate=1e-2, weight_decay=0)
losses, loss_of = [], MeanSquaredError()
for _step in range(600):
    loss = loss_of(heights, model(to_tensor(points)))
    loss.backward()
    model.update(optimiser)
    losses.append(float(loss))
print(losses[0], losses[-1])

# %%
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(points, heights, ".", label="points")
left.plot(points, model(to_tensor(points)).numpy(), label="network")
left.legend()
right.semilogy(losses)
right.set(xlabel="step", ylabel="mean squared error")
plt.show()

# %% [markdown]
# From here: [the tutorial](../tutorial.md) goes on to attention and a GPT, and [the exercises](../exercises.md)
# let you write gradients yourself.
