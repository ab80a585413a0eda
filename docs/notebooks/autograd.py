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
# # Automatic differentiation from scratch
#
# This notebook implements automatic differentiation in forty lines of Python, repeats the computation with
# Tricycle, and fits a curve.
#
# Each number stores its inputs and the derivatives with respect to them.

# %%
import math


class Number:
    def __init__(self, value, inputs=()):
        self.value = value
        self.inputs = inputs  # pairs: an input Number, and the derivative with respect to it
        self.grad = 0.0

    def __add__(self, other):
        return Number(self.value + other.value, [(self, 1.0), (other, 1.0)])

    def __mul__(self, other):
        return Number(self.value * other.value, [(self, other.value), (other, self.value)])

    def tanh(self):
        t = math.tanh(self.value)
        return Number(t, [(self, 1 - t * t)])


# %% [markdown]
# The backward pass visits the numbers in reverse topological order: each number after all numbers that were computed
# from it. Each number passes its gradient, multiplied by the derivative, to its inputs. This is the chain rule. The
# gradients of a number that is used several times are added.


# %%
def backward(result):
    order, seen = [], set()

    def visit(number):
        if id(number) not in seen:
            seen.add(id(number))
            for source, _ in number.inputs:
                visit(source)
            order.append(number)

    visit(result)
    result.grad = 1.0
    for number in reversed(order):
        for source, derivative in number.inputs:
            source.grad += derivative * number.grad


x, w, b = Number(0.5), Number(2.0), Number(-0.3)
y = (w * x + b).tanh() * x  # x is used twice
backward(y)
print(y.value, x.grad, w.grad, b.grad)

# %% [markdown]
# Finite differences confirm the gradient of x.


# %%
def f(x):
    return math.tanh(2.0 * x - 0.3) * x


print((f(0.5 + 1e-6) - f(0.5 - 1e-6)) / 2e-6)

# %% [markdown]
# Tricycle does the same with arrays: a `Tensor` records its inputs (`args`) and a backward function, which computes
# their gradients from the gradient of the result (`back_fns` contains one function for each input).

# %%
from tricycle import to_tensor
from tricycle.ops import tanh

x, w, b = to_tensor(0.5), to_tensor(2.0), to_tensor(-0.3)
y = tanh(w * x + b) * x
y.backward()
print(y, x.grad, w.grad, b.grad)

# %% [markdown]
# A network of two layers is trained to fit a curve: each step moves the parameters against the gradient of the loss.

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
losses, loss_fn = [], MeanSquaredError()
for _step in range(600):
    loss = loss_fn(heights, model(to_tensor(points)))
    loss.backward()
    model.update(optimiser)
    losses.append(float(loss))
print(losses[0], losses[-1])

# %%
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(points, heights, ".", label="data")
left.plot(points, model(to_tensor(points)).numpy(), label="network")
left.legend()
right.semilogy(losses)
right.set(xlabel="step", ylabel="mean squared error")
plt.show()

# %% [markdown]
# Next: [the tutorial](../tutorial.md) continues with attention and a GPT. In [the exercises](../exercises.md) you write
# gradients yourself.
