"""Worker processes of `benchmarks.gpu`: they answer lines of JSON with lines of "@" and JSON.

Tricycle trains with `train_step`, as a user does. PyTorch trains the same model on the same batches with
scaled_dot_product_attention, fused AdamW, its own clipping and autocast, eager or compiled.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.interleave import peak_memory_mb
from benchmarks.workers import torch_gpt
from tricycle.configs import GPTConfig
from tricycle.dataset import CausalLMDataset

LEARNING_RATE, PROMPT = 1e-4, 16
REPEATS, GROUPS = 10, 3  # timing of a product: the median of GROUPS means of REPEATS runs


def matmul_shapes(config: GPTConfig) -> list[tuple[str, int, int, int]]:
    """Return (name, N, K, M) of each product (N, K) @ (K, M) of a step, except attention's; " dx", " dw": gradients."""
    n, c, v = config.batch_size * config.context_window, config.embedding_dim, config.vocab_size
    wide = round(c * config.expansion_ratio)
    shapes = []
    for name, k, m in (("qkv", c, 3 * c), ("projection", c, c), ("up", c, wide), ("down", wide, c), ("head", c, v)):
        shapes += [(name, n, k, m), (f"{name} dx", n, m, k), (f"{name} dw", k, n, m)]
    return shapes


def matmul_operands(name: str, n: int, k: int, m: int, draw: Callable[[int, int], Any]) -> tuple[Any, Any]:
    """Return operands (N, K) and (K, M), made by `draw(rows, columns)`, with the memory layout of a step.

    They are x and w, the gradient and w^T (" dx"), or x^T and the gradient (" dw").
    """
    if name.endswith(" dw"):
        return draw(k, n).T, draw(k, m)
    return draw(n, k), draw(m, k).T if name.endswith(" dx") else draw(k, m)


def random_tokens(config: GPTConfig) -> np.ndarray:
    """Return random token ids (4 * batch_size * context_window + 1,), the same at each call."""
    n_tokens = 4 * config.batch_size * config.context_window + 1
    return np.random.default_rng(0).integers(0, config.vocab_size, n_tokens)


class Side:
    """The interface of a side: its methods are the requests that a worker answers."""

    def __init__(self, config: GPTConfig, on_gpu: bool) -> None:
        self.config, self.on_gpu = config, on_gpu
        self.losses: list[float] = []

    def wait(self) -> None:
        """Wait until the device has completed all work; the base class does nothing."""

    def steps(self, n: int) -> list[float]:
        """Make n training updates, and return their n losses (nats per token); NotImplementedError here."""
        raise NotImplementedError

    def burst(self, n: int) -> dict[str, Any]:
        """Make n training updates; return {"seconds": per step, "losses": n}, and append to `self.losses`."""
        self.wait()
        start = time.perf_counter()
        self.losses += self.steps(n)
        self.wait()
        return {"seconds": (time.perf_counter() - start) / n, "losses": self.losses[-n:]}

    def rates(self) -> list[tuple[str, float]]:
        """Return (name, TFLOP/s) of each product of `matmul_shapes`, from the median of several timings."""
        results = []
        for name, n, k, m in matmul_shapes(self.config):
            product = self.product(name, n, k, m)
            product()
            times = []
            for _ in range(GROUPS):
                self.wait()
                start = time.perf_counter()
                for _ in range(REPEATS):
                    product()
                self.wait()
                times.append((time.perf_counter() - start) / REPEATS)
            results.append((name, 2 * n * k * m / statistics.median(times) / 1e12))
        return results

    def product(self, name: str, n: int, k: int, m: int) -> Callable[[], Any]:
        """Return a function that multiplies (n, k) by (k, m), in the layout of `name`; NotImplementedError here."""
        raise NotImplementedError

    def generate(self, batch: int, n_tokens: int) -> float:
        """Return the seconds to read `batch` prompts and decode `n_tokens` greedily, KV-cached, after a warm-up."""
        prompt = np.random.default_rng(1).integers(0, self.config.vocab_size, (batch, PROMPT))
        self.decode(prompt, min(8, n_tokens))
        self.wait()
        start = time.perf_counter()
        self.decode(prompt, n_tokens)
        self.wait()
        return time.perf_counter() - start

    def decode(self, prompt: np.ndarray, n_tokens: int) -> Any:
        """Generate `n_tokens` greedily after prompts (batch, tokens); NotImplementedError unless overridden."""
        raise NotImplementedError

    def memory(self) -> float:
        """Return the peak memory of the process in GB; subclasses return that of the GPU if it is used."""
        return peak_memory_mb() / 1e3


class Tricycle(Side):
    """Tricycle on a CPU or GPU."""

    def __init__(self, config: GPTConfig, on_gpu: bool) -> None:
        from tricycle.training_state import new_state

        super().__init__(config, on_gpu)
        self.state = new_state(config, random_tokens(config), on_gpu)

    def wait(self) -> None:
        """Wait until the GPU has completed all work; do nothing on the CPU."""
        if self.on_gpu:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    def steps(self, n: int) -> list[float]:
        """Make n training updates of the model, and return their n losses (nats per token)."""
        from tricycle.training_state import read_steps, train_step

        return [loss for loss, _ in read_steps(self.state, [train_step(self.state) for _ in range(n)])]

    def product(self, name: str, n: int, k: int, m: int) -> Callable[[], Any]:
        """Return a function that multiplies (n, k) by (k, m); `name` of `matmul_shapes` sets their layout."""
        from tricycle import kernels

        xp, precision = self._xp(), self.config.precision
        generator = xp.random.default_rng(0)
        draw = lambda *shape: kernels.matmul_operand(generator.standard_normal(shape, dtype=np.float32), precision)
        a, b = matmul_operands(name, n, k, m, draw)
        out_dtype = a.dtype if a.dtype.itemsize == 2 and "dw" not in name else None
        return lambda: kernels.matmul(a, b, None, None, out_dtype, precision)

    def decode(self, prompt: np.ndarray, n_tokens: int) -> Any:
        """Generate greedily after prompts (batch, tokens), and return a list of `n_tokens` arrays (batch, 1)."""
        from tricycle.tensor import Tensor

        model, xp, generated = self.state.model, self._xp(), []
        caches, tokens = model.new_caches(), xp.asarray(prompt)
        with model.evaluating():
            for _ in range(n_tokens):
                logits = model(Tensor(tokens, requires_grad=False), caches).array[:, -1]
                tokens = logits.astype(np.float32).argmax(axis=-1)[:, None]
                generated.append(tokens)
        return generated

    def timeline(self) -> dict[str, Any]:
        """Make 3 updates; return "step" ms, "rows" (kernel or "elsewhere", calls, ms) of the last, slowest first."""
        from tricycle.kernels.dispatch import Kernel

        kernel_class: Any = Kernel
        untimed, mark = kernel_class.__call__, self._mark
        events: list[tuple[str, Any, Any]] = []
        is_inside = False

        def timed(kernel: Any, *args: Any, **options: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return untimed(kernel, *args, **options)
            is_inside, start = True, mark()
            try:
                return untimed(kernel, *args, **options)
            finally:
                events.append((kernel.reference.__name__, start, mark()))
                is_inside = False

        self.steps(2)
        kernel_class.__call__ = timed
        try:
            start = mark()
            self.steps(1)
            end = mark()
        finally:
            kernel_class.__call__ = untimed
        self.wait()
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, first, last in events:
            by_name[name].append(self._milliseconds(first, last))
        rows = [(name, len(times), sum(times)) for name, times in by_name.items()]
        step_ms = self._milliseconds(start, end)
        rows.append(("elsewhere", 0, step_ms - sum(ms for *_, ms in rows)))
        return {"step": step_ms, "rows": sorted(rows, key=lambda row: -row[2])}

    def memory(self) -> float:
        """Return the peak memory in GB: of CuPy's pool and a recording, or of the process if no GPU is used."""
        if not self.on_gpu:
            return super().memory()
        import cupy

        recorder = self.state.recorded and self.state.recorded.recorder
        recorded = recorder.n_bytes if recorder else 0
        # pools do not return memory before a recording replaces the first updates, so this is the peak
        return (cupy.get_default_memory_pool().total_bytes() + recorded) / 1e9

    def versions(self) -> str:
        """Return a line with the versions of Tricycle and of NumPy, or on a GPU of CuPy, cuBLASLt and cuDNN."""
        import tricycle

        if not self.on_gpu:
            return f"Tricycle {tricycle.__version__}, NumPy {np.__version__}"
        import cupy

        from tricycle_accelerators.cuda import cudnn, gemm

        parts = [module.unavailable_reason() or module.version_text() for module in (gemm, cudnn)]
        return f"Tricycle {tricycle.__version__}, CuPy {cupy.__version__}, {', '.join(parts)}"

    def _xp(self) -> Any:
        """Return the array module of the model's parameters, NumPy or CuPy."""
        return next(self.state.model.parameters()).xp

    def _mark(self) -> Any:
        """Record the current time: return a CUDA event, or on the CPU the seconds of a clock."""
        if not self.on_gpu:
            return time.perf_counter()
        import cupy

        event = cupy.cuda.Event()
        event.record()
        return event

    def _milliseconds(self, first: Any, last: Any) -> float:
        """Return the milliseconds between two results of `_mark`."""
        if not self.on_gpu:
            return 1e3 * (last - first)
        import cupy

        return cupy.cuda.get_elapsed_time(first, last)


class Torch(Side):
    """PyTorch on a CPU or GPU, eager or compiled."""

    def __init__(self, config: GPTConfig, on_gpu: bool, compiled: bool = False) -> None:
        import torch

        super().__init__(config, on_gpu)
        self.device = torch.device("cuda" if on_gpu else "cpu")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
        self.autocast_dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.precision)
        self.model = torch_gpt(config).to(self.device)
        groups = [
            {"params": [p for p in self.model.parameters() if (p.dim() >= 2) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        self.optimiser = torch.optim.AdamW(groups, LEARNING_RATE, (config.beta1, config.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16" and on_gpu)
        self.forward: Any = torch.compile(self.model) if compiled else self.model
        shape = config.vocab_size, config.batch_size, config.context_window
        self.data = CausalLMDataset(random_tokens(config), *shape, config.seed).batch().shuffle()

    def wait(self) -> None:
        """Wait until the GPU has completed all work; do nothing on the CPU."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def steps(self, n: int) -> list[float]:
        """Make n training updates of the model, and return their n losses (nats per token)."""
        import torch
        from torch.nn import functional as F

        losses = []
        for _ in range(n):
            inputs, outputs = (self._place(ids) for ids in next(self.data))
            with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                loss = F.cross_entropy(self.forward(inputs).flatten(0, 1), outputs.flatten())
            self.scaler.scale(loss).backward()
            if self.config.max_gradient_norm:
                self.scaler.unscale_(self.optimiser)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
            self.scaler.step(self.optimiser)
            self.scaler.update()
            self.optimiser.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return torch.stack(losses).float().tolist()

    def _place(self, ids: np.ndarray) -> Any:
        """Return ids as an int64 tensor on the device."""
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else tensor

    def product(self, name: str, n: int, k: int, m: int) -> Callable[[], Any]:
        """Return a function that multiplies (n, k) by (k, m); `name` of `matmul_shapes` sets their layout."""
        import torch

        draw = lambda *shape: torch.randn(*shape, device=self.device, dtype=self.autocast_dtype or torch.float32)
        a, b = matmul_operands(name, n, k, m, draw)
        return lambda: a @ b

    def memory(self) -> float:
        """Return the peak memory in GB: reserved by PyTorch on the GPU, or of the process if no GPU is used."""
        if not self.on_gpu:
            return super().memory()
        import torch

        return torch.cuda.max_memory_reserved() / 1e9

    def versions(self) -> str:
        """Return one line of text with the versions of PyTorch, CUDA and cuDNN."""
        import torch

        return f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


class HuggingFace(Torch):
    """GPT-2 of the package transformers, for generation; `static` selects a static cache and a compiled step."""

    def __init__(self, config: GPTConfig, on_gpu: bool, static: bool = False) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        Side.__init__(self, config, on_gpu)
        self.device, self.static = torch.device("cuda" if on_gpu else "cpu"), static
        settings = GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_window,
            n_embd=config.embedding_dim,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            bos_token_id=0,
            eos_token_id=None,
        )
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.precision, torch.float32)
        self.model = GPT2LMHeadModel(settings).to(self.device, dtype).eval()

    def decode(self, prompt: np.ndarray, n_tokens: int) -> Any:
        """Generate greedily, and return prompts and new tokens as a tensor (batch, tokens + n_tokens)."""
        import torch

        ids = torch.from_numpy(prompt).to(self.device)
        options: dict[str, Any] = {"cache_implementation": "static"} if self.static else {}
        with torch.no_grad():
            return self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_tokens,
                min_new_tokens=n_tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )


SIDES: dict[str, Callable[[GPTConfig, bool], Side]] = {
    "tricycle": Tricycle,
    "torch": Torch,
    "torch-compile": lambda config, on_gpu: Torch(config, on_gpu, compiled=True),
    "transformers": HuggingFace,
    "transformers-compile": lambda config, on_gpu: HuggingFace(config, on_gpu, static=True),
}


def main() -> None:
    """Answer JSON lines {"do": method, ...} with "@" and {"answer"} or {"error"}: arguments SIDE DEVICE CONFIG."""
    name, device, fields = sys.argv[1:4]
    side: Side | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if side is None:
                side = SIDES[name](GPTConfig.from_dict(json.loads(fields)), device == "gpu")
            answer: Any = {"answer": getattr(side, request.pop("do"))(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
