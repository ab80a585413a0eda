"""All GPU tests and benchmarks in one run (`python -m benchmarks.gpu --output FOLDER`).

The run has these parts. If one fails, the others still run; the files are written after each:
  environment  versions, driver, hardware report
  compile      every CUDA kernel for each architecture: registers, shared memory, spills
  tests        pytest -m gpu
  products     TFLOP/s of every matrix product of a GPT-2 step, with Tricycle and PyTorch
  training     tokens/s and peak memory, compared with PyTorch eager (scaled_dot_product_attention, fused AdamW) and
               compiled, in interleaved bursts of steps: GPT-2 124M, the Shakespeare preset, SmolGPT 49M, and float32
               and TF32
  timeline     milliseconds of one step by kernel, compared with the lower bound by bandwidth and arithmetic
  generation   tokens/s with batches of 1 and 32 and a KV cache, compared with Hugging Face, eager and compiled

`--device cpu --quick` runs the same with NumPy and PyTorch on the CPU with tiny models, to test this program.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import date
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tricycle.configs import GPT2Config, GPTConfig, ShakespeareConfig, SmolGPTConfig

# GPT-2's vocabulary is padded to a multiple of 64 on both sides, as is usual with PyTorch: otherwise products are slow.
GPT2 = GPT2Config(vocab_size=50_304, batch_size=32, precision="bfloat16")
CASES: dict[str, GPTConfig] = {
    "gpt2": GPT2,
    "shakespeare": ShakespeareConfig(precision="bfloat16"),
    "smol": SmolGPTConfig(vocab_size=50_304, precision="bfloat16"),
    "gpt2 float16": replace(GPT2, precision="float16"),
    "gpt2 tf32": replace(GPT2, precision="tf32", batch_size=16),
    "gpt2 float32": replace(GPT2, precision="float32", batch_size=16),
}
TINY = GPTConfig(vocab_size=256, context_window=32, embedding_dim=32, n_heads=2, n_layers=2, batch_size=2)
QUICK_CASES: dict[str, GPTConfig] = {"gpt2": TINY, "shakespeare": replace(TINY, tied=False, dropout=0.2)}
BATCHES = (1, 32)
# Lower bounds in milliseconds for a step of GPT-2 with batch 32 on an H200: matrix products at 790 TFLOP/s, attention
# at 280 (forward) and 240 TFLOP/s (backward), all else at 4.3 TB/s with each array read and written once.
LOWER_BOUNDS = {
    "matmul": 30.7,
    "attention": 2.4,
    "attention_backward": 4.4,
    "layer_norm": 1.2,
    "layer_norm_backward": 1.2,
    "gelu_with_derivative": 1.1,
    "gelu_backward": 1.7,
    "matmul_operand_and_sums": 1.3,
    "cross_entropy": 1.5,
    "add": 1.7,
    "run_independent": 0.9,  # AdamW and the norm of the gradient
}
MIN_SECONDS = 20  # a part needs at least this remaining time to start


class SideError(RuntimeError):
    """A worker could not answer a request."""


class Worker:
    """A process that runs one side.

    Args:
        deadline: on the clock `time.monotonic`; a request that takes longer kills the process.
    """

    def __init__(self, side: str, config: GPTConfig, device: str, deadline: float) -> None:
        self.side, self.deadline = side, deadline
        arguments = ["-m", "benchmarks.gpu_workers", side, device, json.dumps(config.to_dict())]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def request(self, do: str, **arguments: Any) -> Any:
        """Call the side's method `do`, and return its JSON result; SideError on failure or after the deadline.

        Raises:
            SideError: the method failed, the process ended, or the deadline has passed.
        """
        assert self.process.stdin and self.process.stdout
        if self.process.poll() is not None:
            raise SideError(f"{self.side} has ended")
        timer = threading.Timer(max(1.0, self.deadline - time.monotonic()), self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("@"):
                    reply = json.loads(line[1:])
                    if "error" in reply:
                        raise SideError(f"{self.side}: {reply['error']}")
                    return reply["answer"]
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        raise SideError(f"{self.side} ended with status {self.process.wait()} (killed if the time was up)")

    def close(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.process.kill()
        self.process.communicate()


class Report:
    """Results of all parts, written to results.json and report.md in a folder after each part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = {}
        self.sections: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, result: Any, text: str) -> None:
        """Set the part's JSON result, append and print its Markdown text, and rewrite results.json and report.md."""
        self.results[part] = result
        self.sections.append(f"## {part}\n\n{text.rstrip()}\n")
        print(f"\n{self.sections[-1]}", flush=True)
        content = json.dumps(self.results, indent=1)
        (self.folder / "results.json").write_text(content + "\n", encoding="utf-8")
        title = f"# Tricycle on a GPU, {date.today()}\n\n"
        (self.folder / "report.md").write_text(title + "\n".join(self.sections), encoding="utf-8")


def markdown_table(head: list[str], rows: list[list[Any]]) -> str:
    """Return an aligned Markdown table; floats are shown with 3 digits, from 1,000 as integers, others by str()."""
    cells = [head, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(value.rjust(width) for value, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


def _cell(value: Any) -> str:
    """Return a float with 3 digits, or from 1,000 as an integer with commas; str() of any other value."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


# -------------------------------------------------------------------- parts
# Each function of a part returns its result for results.json and its text for report.md.
def report_environment(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Return ({"python", "machine", "nvidia-smi", "commit": text}, the same as Markdown)."""
    from tricycle_cli.machine import report

    results = {"python": platform.python_version(), "machine": report()}
    for name, command in {"nvidia-smi": ["nvidia-smi"], "commit": ["git", "rev-parse", "HEAD"]}.items():
        results[name] = run_command(command, deadline)[1].strip()
    return results, "\n\n".join(f"{name}:\n```\n{text}\n```" for name, text in results.items())


def run_command(command: list[str], deadline: float) -> tuple[int, str]:
    """Run a program; return (status, stdout and stderr), or (-1, message) if missing or late (`time.monotonic`)."""
    limit = max(1.0, deadline - time.monotonic())
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit,
        )
    except FileNotFoundError:
        return -1, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired as error:
        return -1, f"stopped after {limit:.0f} s\n{(error.output or b'').decode('utf-8', 'replace')}"
    return done.returncode, done.stdout


def compile_kernels(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Compile all CUDA kernels, write compile.txt, and return ({"status", "log"}, Markdown), also on failure."""
    status, text = run_command([sys.executable, "-m", "tricycle_accelerators.cuda"], deadline)
    (arguments.output / "compile.txt").write_text(text, encoding="utf-8")
    return {"status": status, "log": text}, f"status {status}\n```\n{text[-6000:]}\n```"


def run_gpu_tests(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Run `pytest -m gpu`, write pytest.txt, and return ({"status", "last": [last line]}, Markdown of the end)."""
    selected = ["-m", "gpu"] if arguments.device == "gpu" else ["tests/test_initialisers.py"]
    status, text = run_command([sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", *selected], deadline)
    (arguments.output / "pytest.txt").write_text(text, encoding="utf-8")
    last = text.strip().splitlines()[-60:]
    return {"status": status, "last": last[-1:]}, "status {}\n```\n{}\n```".format(status, "\n".join(last))


def measure_matmuls(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Return ({case: {side: {product: TFLOP/s}}}, Markdown) of GPT-2 cases; errors of sides are in the text."""
    results, texts = {}, []
    for name, config in selected_cases(arguments).items():
        if name not in ("gpt2", "gpt2 tf32", "gpt2 float32"):
            continue
        rates: dict[str, dict[str, float]] = {}
        for side in ("tricycle", "torch"):
            with closing(Worker(side, config, arguments.device, deadline)) as worker:
                try:
                    rates[side] = dict(worker.request("rates"))
                except SideError as error:
                    texts.append(f"{name}: {error}")
        results[name] = rates
        kinds = list(next(iter(rates.values()), {}))
        rows = [[kind, *(rates[side].get(kind, "") for side in rates)] for kind in kinds]
        texts.append(f"{name}, TFLOP/s\n\n" + markdown_table(["product", *rates], rows))
    return results, "\n\n".join(texts)


def measure_training(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Return ({case: result of `train_case`}, Markdown); errors and cases without time left are in the text."""
    results, rows, notes = {}, [], []
    for case, config in selected_cases(arguments).items():
        if deadline - time.monotonic() < MIN_SECONDS:
            notes.append(f"{case}: no time left")
            continue
        names = ["tricycle", "torch"] + ["torch-compile"] * arguments.compile
        results[case] = result = train_case(config, names, arguments, deadline)
        n_tokens = config.batch_size * config.context_window
        speeds = {name: n_tokens / side["seconds"] for name, side in result.items() if "seconds" in side}
        for name, side in result.items():
            if name not in speeds:
                notes.append(f"{case}, {side['error']}")
                continue
            speed_up = speeds["tricycle"] / speeds[name] if "tricycle" in speeds else ""
            rows.append([case, name, speeds[name], speed_up, 1e3 * side["seconds"], side["memory"], side["losses"][-1]])
        notes += [f"{name}: {side['versions']}" for name, side in result.items() if "versions" in side]
    head = ["case", "side", "tokens/s", "speed-up", "ms/step", "peak GB", "last loss"]
    return results, markdown_table(head, rows) + "\n\n" + "\n".join(dict.fromkeys(notes))


def train_case(config: GPTConfig, names: list[str], arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Return {side: {"seconds" per step (median burst), "bursts", "losses", "memory" in GB, ...} or with "error"}."""
    workers = {name: Worker(name, config, arguments.device, deadline) for name in names}
    results: dict[str, Any] = {name: {"bursts": [], "losses": []} for name in names}

    def for_each_side(function: Callable[[str, Worker], None]) -> None:
        for name, worker in workers.items():
            if "error" not in results[name]:
                try:
                    function(name, worker)
                except SideError as error:
                    results[name]["error"] = str(error)

    def burst(name: str, worker: Worker) -> None:
        measured = worker.request("burst", n=arguments.steps)
        results[name]["bursts"].append(measured["seconds"])
        results[name]["losses"] += measured["losses"]

    def finish(name: str, worker: Worker) -> None:
        bursts = sorted(results[name]["bursts"])
        results[name] |= {"memory": worker.request("memory"), "versions": worker.request("versions")}
        results[name]["seconds"] = bursts[len(bursts) // 2]

    try:
        for_each_side(lambda name, worker: worker.request("burst", n=arguments.warmup))
        for _ in range(arguments.rounds):
            for_each_side(burst)
        for_each_side(finish)
    finally:
        for worker in workers.values():
            worker.close()
    return results


def measure_timeline(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Return ({"step": ms, "rows": [[kernel, calls, ms]]}, Markdown) of one training step; raise SideError."""
    cases = selected_cases(arguments)
    name = next((name for name in cases if name.startswith("gpt2")), next(iter(cases)))
    with closing(Worker("tricycle", cases[name], arguments.device, deadline)) as worker:
        worker.request("burst", n=arguments.warmup)
        times = worker.request("timeline")
    bounds = LOWER_BOUNDS if cases[name] == GPT2 else {}
    rows = [[kernel, calls, ms, bounds.get(kernel, "")] for kernel, calls, ms in times["rows"]]
    rows.append(["step", "", times["step"], sum(bounds.values()) or ""])
    return times, f"{name}\n\n" + markdown_table(["kernel", "calls", "ms", "lower bound, ms"], rows)


def measure_generation(arguments: argparse.Namespace, deadline: float) -> tuple[Any, str]:
    """Return ({side: {batch size as str: tokens/s, "error" if it failed}}, Markdown table and the errors)."""
    config = next(iter(selected_cases(arguments).values()))
    results: dict[str, Any] = {}
    sides = ["tricycle", "transformers"] + ["transformers-compile"] * arguments.compile
    for side in sides:
        results[side] = {}
        with closing(Worker(side, config, arguments.device, deadline)) as worker:
            try:
                for batch in BATCHES:
                    seconds = worker.request("generate", batch=batch, n_tokens=arguments.new_tokens)
                    results[side][str(batch)] = batch * arguments.new_tokens / seconds
            except SideError as error:
                results[side]["error"] = str(error)
    rows = [[side, *(speeds.get(str(batch), "") for batch in BATCHES)] for side, speeds in results.items()]
    text = markdown_table(["tokens/s", *(f"batch {batch}" for batch in BATCHES)], rows)
    return results, "\n\n".join([text, *(speeds["error"] for speeds in results.values() if "error" in speeds)])


def selected_cases(arguments: argparse.Namespace) -> dict[str, GPTConfig]:
    """Return {name: config} of CASES (QUICK_CASES if `quick`) in `arguments.cases`, or all if that is empty."""
    cases = QUICK_CASES if arguments.quick else CASES
    return {name: config for name, config in cases.items() if not arguments.cases or name in arguments.cases}


PARTS: dict[str, Callable[[argparse.Namespace, float], tuple[Any, str]]] = {
    "environment": report_environment,
    "compile": compile_kernels,
    "tests": run_gpu_tests,
    "products": measure_matmuls,
    "training": measure_training,
    "timeline": measure_timeline,
    "generation": measure_generation,
}


def main() -> int:
    """Run the parts of sys.argv, and write results.json and report.md to --output; return 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), help="folder of results.json and report.md")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[], help="training cases (default: all)")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps")
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of all parts together")
    parser.add_argument("--part-minutes", type=float, default=9.0, help="time limit of a part")
    parser.add_argument("--steps", type=int, default=10, help="steps of a burst")
    parser.add_argument("--rounds", "--turns", type=int, default=5, help="bursts of each side")
    parser.add_argument("--warmup", type=int, default=5, help="steps of the warm-up")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to generate in each sequence")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="omit compiled PyTorch")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = arguments.rounds = arguments.warmup = 2
        arguments.new_tokens = 8
    if arguments.device == "gpu":
        from tricycle.devices import gpu_problem

        if gpu_problem():
            parser.error(f"no GPU can be used: {gpu_problem()} (--device cpu --quick tests this program)")
    if not entry_points(group="tricycle.kernels"):
        parser.error("Tricycle is not installed, so only reference kernels would run (pip install -e .)")
    end = time.monotonic() + 60 * arguments.minutes
    report, failed = Report(arguments.output), []
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    for part in arguments.parts:
        left = end - time.monotonic()
        if left < MIN_SECONDS:
            report.add(part, {"error": "no time left"}, "no time left")
            continue
        try:
            result, text = PARTS[part](arguments, time.monotonic() + min(left, 60 * arguments.part_minutes))
        except Exception as error:
            traceback.print_exc()
            failed.append(part)
            result = {"error": f"{type(error).__name__}: {error}"}
            text = f"failed: {result['error']}"
        report.add(part, result, text)
    print(f"\nwritten to {arguments.output}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
