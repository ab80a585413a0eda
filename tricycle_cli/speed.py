"""Measure the fraction of peak of a training step and the time of its parts, for `tricycle machine --speed`.

Peak is the rate of a large matrix product. Matrix products and steps are interleaved, because the clock rate of a
processor changes under load.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.configs import GPTConfig
from tricycle.kernels.dispatch import Kernel
from tricycle_accelerators import threads
from tricycle_accelerators.onednn import library as onednn

SMALL_GPT = GPTConfig(
    vocab_size=1024, context_window=256, embedding_dim=384, n_heads=6, n_layers=2, batch_size=4, tied=False
)
CONFIG = replace(SMALL_GPT, n_layers=6, batch_size=8)
PRODUCT_SIZE = 2048  # rows and columns of the large product's matrices
N_ROUNDS, MAX_ROUNDS = 3, 7
SECONDS = 9.0  # after which no further round starts, once there were N_ROUNDS
MIN_TURN = 0.5  # minimum seconds of training steps in a round; matrix products take half of it
MATMUL, REST = "matmul", "rest"
# The kernels of each group. REST is all other kernels and the time outside of kernels.
GROUPS = {
    MATMUL: "matmul batched_matmul".split(),
    "attention": """attention attention_backward attention_scores row_attention row_attention_backward softmax
        softmax_backward run_over_batch apply_rope""".split(),
    "norms + activations": """layer_norm layer_norm_backward gelu gelu_with_derivative gelu_backward swiglu
        swiglu_backward exact_gelu exact_gelu_backward relu_squared sigmoid multiply""".split(),
    "optimizer": "adamw run_independent sum_squares".split(),
}
SLOW = 100e9  # FLOP/s of the product below which a smaller batch keeps the measurement short
MIN_SPEED_UP = 1.05  # of bfloat16 for a suggestion; less is within the noise of a short run


class Speed(NamedTuple):
    """The measured speed in one precision."""

    precision: str  # "float32" or "bfloat16"
    product_rate: float  # FLOP/s of the large matrix product
    provider: str  # of the kernel that computed the product
    tokens_per_second: float  # of training steps
    fraction: float  # FLOP/s of a step's matrix products and attention, divided by `product_rate`
    shares: dict[str, float]  # the fraction of a step's time by group


@dataclass
class PrecisionTiming:
    """The functions to time in one precision, and the measured seconds."""

    precision: str
    provider: str
    multiply: Callable[[], object]
    step: Callable[[], object]
    product_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    kernel_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # sums over all steps


@contextmanager
def timed_kernels(clock: Callable[[], float] = time.perf_counter) -> Iterator[defaultdict[str, float]]:
    """Yield a dict of seconds by kernel name, to which this thread's outermost kernel calls add within the context.

    A kernel that another kernel calls counts as part of the caller, so that the sum is at most the elapsed time. Calls
    of other threads do not count, because they run within a call of this thread.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    kernel_class: Any = Kernel
    owner, untimed = threading.get_ident(), kernel_class.__call__
    inside = False

    def call(kernel: Kernel[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal inside
        if inside or threading.get_ident() != owner:
            return untimed(kernel, *args, **options)
        inside = True
        start = clock()
        try:
            return untimed(kernel, *args, **options)
        finally:
            seconds[kernel.reference.__name__] += clock() - start
            inside = False

    kernel_class.__call__ = call
    try:
        yield seconds
    finally:
        kernel_class.__call__ = untimed


def flops_per_token(config: GPTConfig) -> int:
    """Return the matmul FLOPs per token, forward and backward: 6 per weight, and attention without causal savings.

    The rest of a step (norms, softmax, optimizer) is limited by memory bandwidth and does not count, so that the
    fraction of peak is always below 1.
    """
    width = config.embedding_dim
    mlp = (3 if config.is_gated else 2) * width * config.mlp_width
    if config.n_experts:
        mlp = config.n_active_experts * mlp + config.n_experts * width
    weights = config.n_layers * (4 * width**2 + mlp) + config.vocab_size * width
    attention = 2 * config.n_layers * config.context_window * width  # scores, and weighted sums of values
    return 3 * 2 * (weights + attention)


def product_benchmark(precision: str = "float32") -> tuple[Callable[[], object], str]:
    """Return a function that multiplies a large matrix by itself at each call, and its kernel's provider by name."""
    numbers = np.random.default_rng(0).standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    operand = kernels.matmul_operand(numbers, precision)
    provider = kernels.explain(kernels.matmul, operand, operand, precision=precision).provider
    return lambda: kernels.matmul(operand, operand, precision=precision), provider


def product_rate() -> float:
    """Measure the FLOP/s of a large float32 matrix product, after one product for warm-up."""
    multiply, _ = product_benchmark()
    multiply()
    return 2 * PRODUCT_SIZE**3 / time_repeatedly(multiply, 0.0, time.perf_counter)[0]


def training_step(config: GPTConfig, precision: str = "float32") -> Callable[[], object]:
    """Build a GPT; return a function that runs a training step with AdamW on the same random tokens at each call."""
    from tricycle.loss import CrossEntropy
    from tricycle.models import GPT
    from tricycle.optimisers import AdamW
    from tricycle.training import supervised_loss, train_on_batch

    model, optimiser = GPT(config).use_precision(precision), AdamW(1e-4)
    batch_loss = supervised_loss(model, CrossEntropy())
    shape = (2, config.batch_size, config.context_window)
    batch = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    return lambda: train_on_batch(model, optimiser, batch_loss, batch)


def config_for(product_rate: float) -> GPTConfig:
    """Return the config of the measured GPT; slow processors, by their FLOP/s, get a smaller batch."""
    return replace(CONFIG, batch_size=4) if product_rate < SLOW else CONFIG


def measure(
    timings: Sequence[PrecisionTiming],
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    min_turn: float = MIN_TURN,
) -> None:
    """Time products and training steps, and add up kernel times within the steps, in rounds until `seconds`.

    Args:
        timings: the precisions; the measured seconds are appended to them.
        seconds: the time after which no further round starts, once there were enough rounds.
        clock: a function that returns the time in seconds.
        min_turn: the minimum seconds of training steps in a round. Matrix products take half of it, and the first
            product of a round does not count.
    """
    for timing in timings:
        show_progress(f"loading and compiling kernels for {timing.precision}")
        timing.multiply()
        timing.step()
    start = clock()
    for number in range(1, MAX_ROUNDS + 1):
        if number > N_ROUNDS and clock() - start >= seconds:
            break
        for timing in timings:
            show_progress(f"round {number}: products in {timing.precision}")
            timing.multiply()
            timing.product_seconds += time_repeatedly(timing.multiply, min_turn / 2, clock)
            show_progress(f"round {number}: training steps in {timing.precision}")
            with timed_kernels(clock) as kernel_seconds:
                timing.step_seconds += time_repeatedly(timing.step, min_turn, clock)
            for name, kernel_time in kernel_seconds.items():
                timing.kernel_seconds[name] += kernel_time


def time_repeatedly(work: Callable[[], object], min_seconds: float, clock: Callable[[], float]) -> list[float]:
    """Call a function at least once, until the calls have taken `min_seconds`; return the seconds of each call."""
    times: list[float] = []
    while not times or sum(times) < min_seconds:
        start = clock()
        work()
        times.append(clock() - start)
    return times


def summarize(timing: PrecisionTiming, config: GPTConfig) -> Speed:
    """Return `Speed` from the medians of the measured times."""
    product_rate = 2 * PRODUCT_SIZE**3 / statistics.median(timing.product_seconds)
    n_tokens = config.batch_size * config.context_window
    tokens_per_second = n_tokens / statistics.median(timing.step_seconds)
    total = sum(timing.step_seconds)
    shares = {group: sum(timing.kernel_seconds[name] for name in names) / total for group, names in GROUPS.items()}
    shares[REST] = 1 - sum(shares.values())
    fraction = flops_per_token(config) * tokens_per_second / product_rate
    return Speed(timing.precision, product_rate, timing.provider, tokens_per_second, fraction, shares)


def tables(speeds: Sequence[Speed]) -> str:
    """Format two tables by precision: matmul GFLOP/s, tokens/s, fraction of peak; time share of each kernel group."""
    lines = [f"{'precision':<10}{'matmul GFLOP/s':>17}{'provider':>10}{'step tokens/s':>15}{'fraction of peak':>18}"]
    for speed in speeds:
        rates = f"{speed.product_rate / 1e9:>17,.0f}{speed.provider:>10}{speed.tokens_per_second:>15,.0f}"
        lines.append(f"{speed.precision:<10}{rates}{speed.fraction:>18.0%}")
    heads = {name: f"   {name}" for name in [*GROUPS, REST]}
    lines += ["", "Time of a training step by group of kernels:", f"{'precision':<10}" + "".join(heads.values())]
    for speed in speeds:
        shares = [f"{share:>{len(heads[name])}.0%}" for name, share in speed.shares.items()]
        lines.append(f"{speed.precision:<10}" + "".join(shares))
    return "\n".join(lines)


def advice(speeds: Sequence[Speed]) -> list[str]:
    """Return suggestions: bfloat16 if 5% faster; per precision the kernel group with most time, if not matmul."""
    found = []
    rates = {speed.precision: speed.tokens_per_second for speed in speeds}
    gain = rates.get("bfloat16", 0.0) / rates["float32"]
    if gain >= MIN_SPEED_UP:
        found.append(f"train with --precision bfloat16: {gain:.1f} times the tokens/s of float32")
    for speed in speeds:
        largest = max(speed.shares, key=lambda group: speed.shares[group])
        if largest != MATMUL:
            shares = f"{speed.shares[largest]:.0%} of a step, matrix products {speed.shares[MATMUL]:.0%}"
            found.append(f"reduce the time of {largest} in {speed.precision}: {shares}")
    return found


def show_progress(message: str) -> None:
    """Overwrite the progress line on stderr if it is a terminal; else print nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def measure_precisions(config: GPTConfig, seconds: float = SECONDS) -> list[Speed]:
    """Measure matmul and training speed, with a progress line; return a `Speed` for float32, and bfloat16 if supported.

    Args:
        config: the config of the GPT that is trained.
        seconds: the time after which no further round starts; 0 for a quick measurement.
    """
    precisions = ["float32"] + ["bfloat16"] * (onednn.unavailable_reason() is None)
    timings = []
    try:
        for precision in precisions:
            multiply, provider = product_benchmark(precision)
            timings.append(PrecisionTiming(precision, provider, multiply, training_step(config, precision)))
        measure(timings, seconds, min_turn=MIN_TURN if seconds else 0.0)
    finally:
        show_progress("")
    return [summarize(timing, config) for timing in timings]


def report(speeds: Sequence[Speed], config: GPTConfig) -> str:
    """Format the measured speeds as text: threads, sizes, two tables, and the reason if there is no bfloat16."""
    problem, n_threads = onednn.unavailable_reason(), threads.n_threads()
    size = f"width {config.embedding_dim}, {config.n_layers} layers, {config.context_window} tokens"
    lines = [
        f"CPU, {n_threads} thread{'s' * (n_threads > 1)}; medians of {N_ROUNDS} or more interleaved rounds",
        f"matmul: matrices of {PRODUCT_SIZE:,} x {PRODUCT_SIZE:,}",
        f"step: forward, loss, backward and AdamW of a GPT ({size}, batch {config.batch_size})",
        "",
        tables(speeds),
        f"{REST}: loss, embeddings, bias gradients, conversions to 16 bits, additions, and Python outside of kernels",
    ]
    return "\n".join([*lines, f"no bfloat16: {problem}"] if problem else lines)
