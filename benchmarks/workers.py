"""Worker processes that run one side of a comparison each.

A worker builds its model once, then makes a step for each request and returns its duration. While one works, the others
wait for input: they do not disturb the measurement, and the peak memory of each is measured separately.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, answer_requests, peak_memory_mb, run_interleaved
from benchmarks.shapes import SHAPES
from tricycle import kernels
from tricycle.configs import GPTConfig
from tricycle.softmaxes import SOFTMAXES

# Some build machines pin OpenBLAS to old kernels. Users' machines do not, so workers run without these variables, but
# where a benchmark asks for the pin (`benchmarks.avx2`).
KEEP_BLAS_PINS = "TRICYCLE_KEEP_BLAS_PINS"
BLAS_PIN_VARIABLES = () if KEEP_BLAS_PINS in os.environ else ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class Worker:
    """A process `python -m MODULE ARGUMENTS` that answers each line of its input with a line of JSON.

    Args:
        side: name of the side, for reports and errors.
        threads: of BLAS and OpenMP.
        python: the interpreter.
        launcher: command that starts the interpreter, such as mpiexec with its arguments.
        variables: environment variables to add.
    """

    def __init__(
        self,
        side: str,
        threads: int,
        module: str,
        *arguments: str,
        python: str = sys.executable,
        launcher: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in BLAS_PIN_VARIABLES}
        environment.update(variables or {})
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(threads)
        self.side = side
        self.process = subprocess.Popen(
            [*launcher, python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    def request(self, command: str) -> Any:
        """Send a line to the process, wait, and return its JSON answer; RuntimeError if the process has ended.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # then there is no answer, either
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker {self.side} ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Close the input of the process, and wait for its end."""
        self.process.communicate()


def time_steps(workers: Sequence[Worker], schedule: Schedule) -> list[float]:
    """Return the median seconds of a step of each worker, measured in interleaved rounds."""
    times = run_interleaved([partial(worker.request, "step") for worker in workers], schedule)
    return [statistics.median(seconds) for seconds in times]


def time_cases(
    module: str, sides: Sequence[str], cases: Sequence[tuple[str, ...]], threads: int, schedule: Schedule
) -> list[tuple[list[float], list[float]]]:
    """Return the seconds of a step and the MB of each side for each case; print date, versions and GFLOP/s at the end.

    Args:
        module: its workers have the arguments `--serve SIDE CASE`.
    """
    results = []
    for case in cases:
        workers = [Worker(side, threads, module, "--serve", side, *case) for side in sides]
        times = time_steps(workers, schedule)
        results.append((times, [worker.request("memory") for worker in workers]))
        if case == cases[-1]:
            print(f"{date_and_processor()}, {threads} threads")
            for worker in workers:
                print(f"  {worker.side}: {worker.request('versions')}, matmul {worker.request('matmul'):,.0f} GFLOP/s")
        for worker in workers:
            worker.close()
    return results


def random_batches(config: GPTConfig):
    """Yield endless arrays (2, batch, tokens): random inputs and labels, the same for all sides."""
    generator = np.random.default_rng(0)
    while True:
        yield generator.integers(0, config.vocab_size, (2, config.batch_size, config.context_window))


def tricycle_step(config: GPTConfig, precision: str = "float32", softmax: str = "softmax"):
    """Return a function that makes a step with Tricycle (forward, loss, backward, AdamW) and returns the loss."""
    from tricycle.loss import CrossEntropy
    from tricycle.models import GPT
    from tricycle.optimisers import AdamW
    from tricycle.training import supervised_loss, train_on_batch

    model, data = GPT(replace(config, precision=precision, softmax=softmax)), random_batches(config)
    optimiser = AdamW(1e-4, weight_decay=0.1)
    batch_loss = supervised_loss(model, CrossEntropy())

    def step() -> float:
        return train_on_batch(model, optimiser, batch_loss, next(data))

    return step


def torch_gpt(config: GPTConfig) -> Any:
    """Return GPT-2 with random weights as a PyTorch module that maps token ids (B, T) to logits (B, T, V)."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, n_heads, dropout = config.embedding_dim, config.n_heads, config.dropout

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=config.bias) for _ in range(2))
            hidden = round(width * config.expansion_ratio)
            self.qkv, self.out = nn.Linear(width, 3 * width, config.bias), nn.Linear(width, width, config.bias)
            self.up, self.down = nn.Linear(width, hidden, config.bias), nn.Linear(hidden, width, config.bias)
            self.drop = nn.Dropout(dropout)

        def forward(self, x):
            """Return x (B, T, C) after causal attention and MLP, each with LayerNorm, dropout and residual."""
            n_items, n_tokens, _ = x.shape
            qkv = self.qkv(self.norms[0](x)).view(n_items, n_tokens, 3, n_heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True).transpose(1, 2).reshape(x.shape)
            x = x + self.drop(self.out(y))
            return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh")))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab_size, width)
            self.places = nn.Embedding(config.context_window, width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.n_layers))
            self.norm = nn.LayerNorm(width, bias=config.bias)
            self.head = nn.Linear(width, config.vocab_size, bias=False)
            self.drop = nn.Dropout(dropout)
            for name, parameter in self.named_parameters():
                if parameter.dim() >= 2:
                    last = name.endswith(("out.weight", "down.weight"))
                    nn.init.normal_(parameter, 0.0, 0.02 / (2 * config.n_layers) ** 0.5 if last else 0.02)
            if config.tied:
                self.head.weight = self.tokens.weight

        def forward(self, ids):
            """Return the logits (B, T, V) of token ids (B, T)."""
            places = torch.arange(ids.shape[1], device=ids.device)
            x = self.drop(self.tokens(ids) + self.places(places))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model()


def torch_step(
    config: GPTConfig, precision: str = "float32", compiled: bool = False, wrap: Callable = lambda model: model
):
    """Return a function that makes a PyTorch step of the same model and returns the loss; `wrap` may add DDP."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = torch_gpt(config)

        def forward(self, ids, labels):
            """Return the mean cross-entropy, a scalar, of labels (B, T) for token ids (B, T)."""
            return F.cross_entropy(self.gpt(ids).flatten(0, 1), labels.flatten())

    model: Any = Loss()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    if compiled:
        model = torch.compile(model)
    model = wrap(model)
    data = random_batches(config)

    def step() -> float:
        inputs, outputs = (torch.from_numpy(ids) for ids in next(data))
        with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
            loss = model(inputs, outputs)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.item()

    return step


MATMUL_SIZE = 2048  # rows and columns of both matrices


def matmul_step(config: GPTConfig | None, precision: str = "float32"):
    """Return a function that squares a (MATMUL_SIZE, MATMUL_SIZE) matrix with Tricycle; `config` is ignored."""
    a = np.random.default_rng(0).standard_normal((MATMUL_SIZE, MATMUL_SIZE), dtype=np.float32)
    operand = kernels.matmul_operand(a, precision)
    return lambda: kernels.matmul(operand, operand)


def torch_matmul_step(config: GPTConfig | None, precision: str = "float32"):
    """Return a function that squares a MATMUL_SIZE matrix with PyTorch; needs OMP_NUM_THREADS, ignores `config`."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(getattr(torch, precision))
    return lambda: a @ a


SIDES: dict[str, Callable] = {
    "tricycle": tricycle_step,
    "torch": torch_step,
    "torch-compile": partial(torch_step, compiled=True),
    "matmul": matmul_step,
    "torch-matmul": torch_matmul_step,
}
SIDES |= {name: partial(tricycle_step, softmax=name) for name in SOFTMAXES if name != "softmax"}


def matmul_rate(side: str, precision: str) -> float:
    """Return the GFLOP/s of the large matrix product with a side's library: the highest of five."""
    multiply = (torch_matmul_step if side.startswith("torch") else matmul_step)(None, precision)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / min(times) / 1e9


def library_versions(side: str) -> str:
    """Return a line with the version of PyTorch if `side` begins with "torch", else of Tricycle, NumPy and its BLAS."""
    if side.startswith("torch"):
        import torch

        return f"PyTorch {torch.__version__}"
    import tricycle

    return f"Tricycle {tricycle.__version__}, NumPy {np.__version__}, {blas_description()}"


def blas_description() -> str:
    """Return name, kernels and threads of NumPy's BLAS as text; without threadpoolctl, a text that it is unknown."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "BLAS unknown (needs threadpoolctl)"
    return ", ".join(
        f"{pool['internal_api']} {pool.get('architecture', '')} {pool['num_threads']} threads"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    )


def print_speed_ups(cases: Sequence[str], times: Sequence[Sequence[float]], peer: str) -> None:
    """Print a row for each case, from its seconds by side: Tricycle's ms, and if given the peer's and the speed-up."""
    print(f"{'':<12}{'ms Tricycle':>13}" + f"{f'ms {peer}':>17}{'speed-up':>10}" * (len(times[0]) == 2))
    for case, (seconds, *others) in zip(cases, times):
        columns = "".join(f"{other * 1e3:>17.1f}{other / seconds:>10.2f}" for other in others)
        print(f"{case:<12}{seconds * 1e3:>13.1f}{columns}")


def serve(
    side: str,
    step: Callable[[], Any],
    memory_before: float = 0.0,
    precision: str = "float32",
    answers: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> None:
    """Answer stdin lines in JSON: "step" (s), "memory" (peak MB above `memory_before`), "matmul" (GFLOP/s), "versions".

    The library runs as imported, without `tune_host`, which only programs call.

    Args:
        memory_before: MB to subtract from the peak memory.
        answers: functions that answer further lines.
    """
    usual: dict[str, Callable[[], Any]] = {
        "memory": lambda: peak_memory_mb() - memory_before,
        "matmul": lambda: matmul_rate(side, precision),
        "versions": lambda: library_versions(side),
    }
    answer_requests(step, {**answers, **usual})


def main() -> None:
    """Build a side's training step, and answer stdin requests (see `serve`): arguments SIDE SHAPE PRECISION."""
    side, shape, precision = sys.argv[1:4]
    serve(side, SIDES[side](SHAPES[shape], precision), precision=precision)


if __name__ == "__main__":
    main()
