"""Evaluate adaptive attention temperature in a pretrained language model, without training it.

    python -m experiments.max_retrieval --model smollm2            the tables of the README
    python -m experiments.max_retrieval --model smollm2 --quick    three minutes

How the entropy of each head grows with the length of a text; how well answers are looked up in texts of growing length,
and how well each token is predicted by its position, with one temperature after another in attention. Each part leaves
its numbers in the folder, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.max_retrieval import fits, pretrained_report
from experiments.max_retrieval.prompts import TASKS, Prompt, Prompter
from experiments.max_retrieval.temperatures import Betas, LogN, Temperature, use_temperature
from experiments.shared.language_models import TEXTS, load_model, set_context_window, text_of, token_losses, windows
from experiments.shared.program import Outcome, check_minimum, run_study
from experiments.shared.results import check_same_settings, read, save, settings_without_paths, write_json
from tricycle.attention import Attention, scores_and_weights
from tricycle.models import GPT
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle.tensor import Tensor, no_grad
from tricycle.weights import set_memory_order
from tricycle_lab.hooks import add_hook
from tricycle_lab.probe import entropy

FITTING, EVALUATION, CHOICE = 11, 12, 13  # streams that share no number
FIT_SIZES = {"largest": (2, 4, 8, 16), "name": (4, 8, 16, 32, 64), "table": (4, 8, 16, 32, 64)}
SIZES = {"largest": (2, 4, 8, 16, 32), "name": (4, 16, 64, 256, 512), "table": (4, 16, 64, 256, 512)}
STARTS = (16, 32, 64, 128, 256)  # of ln n, to choose from
GROUPS, TOGETHER = 8, 4  # queries in the last quarter before each length whose entropy is measured
TOKENS_AT_ONCE = 2048  # of prompts together
BEST = 10  # heads
PLAIN = "softmax"
CONTROL = "heads with ln n, other tasks"  # fitted without the task of names, to see what that gains all the same
NAMES = (
    PLAIN,
    "paper's polynomial",
    "fitted polynomial",
    "ln n",
    "heads, text",
    "heads, tasks",
    f"{BEST} heads",
    "heads with ln n, tasks",
    CONTROL,
)


@dataclass(frozen=True)
class PretrainedSettings:
    """The command-line settings of the study: the model, the sizes of tasks and texts, and the fits."""

    model: str = "smollm2"  # a model for `tricycle.pretrained.load`
    quick: bool = False  # three minutes: one seed, small lists, short texts, few updates
    seeds: int = 3  # sets of tasks with different names, words and numbers
    texts: int = 1  # texts of a set for each size, more of the small ones
    largest_size: int = 512  # lines of the longest task
    steps: int = 24  # updates of each fit by gradient
    length: int = 8192  # tokens of the longest text
    beyond: int = 16_384  # tokens of a text longer than the model's window; 0 for none
    report: bool = False  # compute nothing; only report the stored parts
    output: Path = Path("runs/max_retrieval_smollm2")  # the output folder


QUICK: dict[str, Any] = {"seeds": 1, "largest_size": 16, "steps": 3, "length": 512, "beyond": 0}


def main() -> int:
    """Parse `sys.argv`, run the study and print its tables; return 0, or raise ValueError for invalid settings."""
    return run_study(PretrainedSettings, study, __doc__, QUICK, check)


def check(settings: PretrainedSettings) -> None:
    """Raise ValueError for the first setting below its minimum, such as `seeds` < 1 or `length` < 64."""
    check_minimum(settings, seeds=1, texts=1, largest_size=4, steps=1, length=64, beyond=0)


def study(settings: PretrainedSettings) -> Outcome:
    """Compute missing parts unless `settings.report`, write reports; return (Markdown tables by title, file names)."""
    if not settings.report:
        Study(settings).run()
    results = results_in(settings.output / "parts")
    save(settings.output / "results.json", settings, **results)
    return pretrained_report.report(settings.output, results)


class Study:
    """The experiment in parts, each computed once and stored in a file."""

    def __init__(self, settings: PretrainedSettings) -> None:
        self.settings = settings
        self.folder = settings.output / "parts"
        loaded = load_model(settings.model)
        self.model: GPT = loaded.model.freeze()
        set_memory_order(self.model, "F")
        self.tokeniser = loaded.tokeniser
        self.prompter = Prompter(loaded.tokeniser)

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Return part `name` from its JSON file; else store `work()`; ValueError if the settings differ."""
        path = self.folder / f"{name.replace(' ', '-').replace(',', '')}.json"
        about = {
            key: value for key, value in settings_without_paths(self.settings).items() if key not in ("model", "report")
        }
        if path.exists():
            kept = read(path)
            check_same_settings(path, kept["settings"], about)
        else:
            started = time.perf_counter()
            kept = {"name": name, "settings": about, "value": work(), "seconds": 0.0}
            kept["seconds"] = round(time.perf_counter() - started, 1)
            write_json(path, kept)
            print(f"{name}: {kept['seconds']:.0f} s", flush=True)
        return kept["value"]

    def run(self) -> None:
        """Compute and store each part without a file; if `settings.beyond`, extend the model's context window."""
        temperatures = self.temperatures()
        # of the plays all, of the others a quarter, for the time goes with the square of the length
        quarter = max(64, self.settings.length // 4)
        lengths = {"shakespeare": self.settings.length, "code": quarter, "captions": quarter}
        for text, length in lengths.items():
            self.part(f"text, {PLAIN}, {text}", partial(self.measure_text, None, text, length))
        for seed in range(self.settings.seeds):
            for name, temperature in temperatures.items():
                self.part(f"tasks, {name}, {seed}", partial(self.grade_tasks, temperature, seed))
        for text, length in reversed(lengths.items()):
            for name, temperature in temperatures.items():
                if name != CONTROL:
                    self.part(f"text, {name}, {text}", partial(self.measure_text, temperature, text, length))
        if self.settings.beyond:
            set_context_window(self.model, max(self.settings.beyond, self.model.config.context_window))
            for name in (PLAIN, "ln n"):
                work = partial(self.measure_text, temperatures[name], "shakespeare", self.settings.beyond)
                self.part(f"beyond, {name}, shakespeare", work)

    # ---------------------------------------------------------------- temperatures
    def temperatures(self) -> dict[str, Temperature]:
        """Return the temperatures to compare, by the names of NAMES; fit and store those without a file."""
        shape = self.model.config.n_layers, self.model.config.n_heads
        gains = np.array(self.part("fit, slopes", self.head_slopes)["tasks"]).mean(axis=0)
        start = self.part("fit, ln n", self.choose_start)["start"]
        coefficients = self.part("fit, polynomial", self.fit_polynomial)
        fitted = {
            name: Betas.from_table(self.part(f"fit, {name}", partial(self.fit_betas, betas, batches)))
            for name, betas, batches in (
                ("heads, tasks", Betas(np.zeros(shape)), self.task_batches()),
                ("heads, text", Betas(np.zeros(shape)), self.text_batches()),
                ("heads with ln n, tasks", Betas(np.zeros(shape), np.zeros(shape)), self.task_batches()),
                (CONTROL, Betas(np.zeros(shape), np.zeros(shape)), self.task_batches(tasks=("largest", "table"))),
            )
        }
        return {
            PLAIN: None,
            "paper's polynomial": AdaptiveSoftmax(),
            "fitted polynomial": AdaptiveSoftmax(coefficients),
            "ln n": LogN(start),
            f"{BEST} heads": keep_best_heads(fitted["heads, tasks"], gains, BEST),
            **fitted,
        }

    def task_batches(self, stream: int = FITTING, tasks: Sequence[str] = tuple(TASKS)) -> Iterator[list[Prompt]]:
        """Yield `settings.steps` lists with one Prompt per task, whose sizes cycle through FIT_SIZES."""
        for step in range(self.settings.steps):
            batch = []
            for task in tasks:
                sizes = [n for n in FIT_SIZES[task] if n <= self.settings.largest_size]
                batch += self.prompter.prompts(task, sizes[step % len(sizes)], 1, (stream, step))
            yield batch

    def text_batches(self) -> Iterator[np.ndarray]:
        """Yield `settings.steps` training id arrays (1, min(1024, length) + 1), from each text in turn."""
        n_tokens = min(1024, self.settings.length)
        parts = [
            windows(self.tokeniser, text_of(text, "train"), -(-self.settings.steps // len(TEXTS)), n_tokens).ids
            for text in TEXTS
        ]
        for step in range(self.settings.steps):
            yield parts[step % len(TEXTS)][step // len(TEXTS)][None]

    def fit_betas(self, betas: Betas, batches: Iterator[Any]) -> dict[str, Any]:
        """Fit `betas` in place on all batches; return lists "levels", "growth" and "losses" (nats)."""
        chosen = list(batches)
        loss_of: Any = fits.loss_of_answers if isinstance(chosen[0], list) else fits.loss_of_text
        losses = fits.fit_betas(self.model, betas, chosen, loss_of)
        return {**betas.table(), "losses": np.round(losses, 4).tolist()}

    def head_slopes(self) -> dict[str, Any]:
        """Return lists "tasks" and "text" (batches, L, H): loss gradients by log inverse temperature."""
        count = min(9, self.settings.steps)
        tasks = list(self.task_batches(CHOICE))[:count]
        texts = list(self.text_batches())[:count]
        found = {
            "tasks": fits.beta_gradients(self.model, tasks, fits.loss_of_answers),
            "text": fits.beta_gradients(self.model, texts, fits.loss_of_text),
        }
        return {name: np.round(rows, 5).tolist() for name, rows in found.items()}

    def choose_start(self) -> dict[str, Any]:
        """Return "start", the start of ln n with lowest of "losses" (by start), and "softmax", the plain loss."""
        batches = list(self.task_batches(CHOICE))[:8]

        def mean_loss(temperature: Temperature) -> float:
            with use_temperature(self.model, temperature), no_grad():
                return float(np.mean([fits.loss_of_answers(self.model, batch).array for batch in batches]))

        losses = {start: mean_loss(LogN(start)) for start in STARTS}
        return {"start": min(losses, key=losses.__getitem__), "losses": losses, "softmax": mean_loss(None)}

    def fit_polynomial(self) -> list[float]:
        """Fit the polynomial temperature on task prompts; return its coefficients, highest power first."""
        batches = list(self.task_batches(CHOICE))[: max(1, min(5, self.settings.steps // 8))]
        prompts = [prompt for batch in batches for prompt in batch]
        return list(fits.fit_polynomial(self.model, prompts).coefficients)

    # ---------------------------------------------------------------- measuring
    def grade_tasks(self, temperature: Temperature, seed: int) -> dict[str, Any]:
        """Return {task: {n: {"accuracy", "nats" per answer, "questions", mean "tokens" per prompt}}}."""
        result: dict[str, Any] = {}
        for task in TASKS:
            for n in SIZES[task]:
                if n > self.settings.largest_size:
                    continue
                prompts = self.prompter.prompts(task, n, self.n_texts(task, n), (EVALUATION, seed))
                right: list[bool] = []
                nats: list[float] = []
                with use_temperature(self.model, temperature):
                    together = max(1, TOKENS_AT_ONCE // max(len(prompt.ids) for prompt in prompts))
                    for start in range(0, len(prompts), together):
                        graded = fits.grade_answers(self.model, prompts[start : start + together])
                        right += graded[0]
                        nats += graded[1]
                numbers = {"accuracy": float(np.mean(right)), "nats": round(float(np.mean(nats)), 4)}
                size = round(float(np.mean([len(prompt.ids) for prompt in prompts])))
                result.setdefault(task, {})[n] = {**numbers, "questions": len(right), "tokens": size}
        return result

    def n_texts(self, task: str, n: int) -> int:
        """Return how many prompts of a task and size to measure: a multiple (1 to 10) of `settings.texts`."""
        if task == "largest":
            return (4 if self.settings.quick else 10) * self.settings.texts
        return self.settings.texts if n > 64 or self.settings.quick else 2 * self.settings.texts

    def measure_text(self, temperature: Temperature, text: str, n_tokens: int) -> dict[str, Any]:
        """Return "lengths", "nats", "mean entropy"; if `temperature` is None also "entropy" and "first".

        The text is held out. "nats" is the mean loss per token between two lengths. Entropies are in nats; "entropy"
        and "first", the weight on the first token, are (lengths, L, H).
        """
        ids = windows(self.tokeniser, text_of(text, "test"), 1, n_tokens).ids
        lengths = [2**i for i in range(6, 20) if 2**i <= n_tokens]
        with use_temperature(self.model, temperature), record_entropies(self.model, lengths) as heads:
            losses = token_losses(self.model, ids)[0]
        nats = [float(losses[low:high].mean()) for low, high in pairwise([0, *lengths])]
        mean = [round(float(np.mean(rows)), 3) for rows in heads["entropy"]]
        of_heads = heads if temperature is None else {}  # of other temperatures the mean says enough
        return {"lengths": lengths, "nats": np.round(nats, 4).tolist(), "mean entropy": mean, **of_heads}


def results_in(folder: Path) -> dict[str, Any]:
    """Return "seconds", the sum, and {kind of part: {rest of its name: value}} of all part files in a folder."""
    parts = {part["name"]: part for part in map(read, sorted(folder.glob("*.json")))}
    kinds: dict[str, Any] = {"seconds": round(sum(part["seconds"] for part in parts.values()))}
    # longer names of temperatures first, where one is the beginning of another
    known = sorted(NAMES, key=len, reverse=True)
    place = lambda name: next((NAMES.index(one) for one in known if f", {one}" in name), 0)
    for name in sorted(parts, key=lambda name: (place(name), name)):
        kind, _, rest = name.partition(", ")
        kinds.setdefault(kind, {})[rest] = parts[name]["value"]
    return kinds


def keep_best_heads(betas: Betas, gains: np.ndarray, count: int) -> Betas:
    """Return new Betas with the levels of the `count` heads with the largest expected gain, and 0 for the others.

    Args:
        gains: (L, H), the slope of the loss by the log of each inverse temperature.
    """
    levels = np.array([row.array for row in betas.levels])
    promise = gains * levels  # to first order, what the loss changes by
    chosen = promise <= np.sort(promise, axis=None)[min(count, promise.size) - 1]
    return Betas(np.where(chosen, levels, 0))


@contextmanager
def record_entropies(model: GPT, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a dict that gets "entropy" (nats) and "first" (weight on the first token), lists (lengths, L, H).

    They are means over the queries in the last quarter before each length, recorded when the block ends.
    """
    found: dict[str, Any] = {"entropy": [], "first": []}

    def record(op: Attention, out: Tensor, query: Tensor, key: Tensor, *rest: Any) -> None:
        entropies, first = [], []
        for n in lengths:
            ends = np.linspace(3 * n // 4 + TOGETHER, n, GROUPS).astype(int)
            # (H, TOGETHER, end)
            rows = [scores_and_weights(op, query[:, end - TOGETHER : end], key[:, :end])[1][0] for end in ends]
            entropies.append(np.mean([entropy(weights).mean(axis=-1) for weights in rows], axis=0))
            first.append(np.mean([weights[..., 0].mean(axis=-1) for weights in rows], axis=0))
        found["entropy"].append(np.array(entropies))
        found["first"].append(np.array(first))

    with ExitStack() as undo:
        for block in model.blocks:
            undo.callback(add_hook(block.attention.attention, "observers", record))
        yield found
    found |= {name: np.round(np.stack(rows, axis=1).astype(float), 3).tolist() for name, rows in found.items()}
