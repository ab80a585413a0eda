"""Measure the pretrained model, fine-tune it on each task with each method, and measure again; runs are resumable."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetuning import shakespeare
from experiments.finetuning.tasks import TASKS, Question, Task, write_records
from experiments.shared.program import check_choices, check_minimum
from experiments.shared.results import Record, rounded, select
from tricycle.checkpoint import load_checkpoint
from tricycle.decoding.batch import generate_batch
from tricycle.finetuning.packing import Example, PackedDataset, supports_packing
from tricycle.pretrained import Pretrained
from tricycle.sampling import SamplingParams
from tricycle_cli import clock
from tricycle_cli.finetune import main as finetune
from tricycle_cli.models import load_model, stop_tokens
from tricycle_cli.tuning import HeldOutRows
from tricycle_datasets.examples import ExampleEncoder, read_records
from tricycle_datasets.multi30k import load_multi30k
from tricycle_datasets.rt_polarity import load_rt_polarity

METHODS = {  # flags of `tricycle finetune` by method; "qlora" keeps the blocks of a quantized GGUF file
    "lora": ["--method", "lora", "--weights", "float32"],
    "qlora": ["--method", "lora", "--weights", "auto"],
    "all": ["--method", "full"],
}
ROWS = 8  # that are looked at together
AT_ONCE = 64  # questions that are answered together
N_SHOWN = 3  # answers of a task that are kept
ANSWER_TOKENS = 60  # the most of an answer to GENERAL
OWN_ANSWERS = "own answers"
# general questions; the answers of the model before fine-tuning are one of the other texts
GENERAL = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a thank-you note to a neighbour who watered my plants.",
    "Give me three tips for learning to cook.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the story of Cinderella in three sentences.",
    "Name five animals that live in a forest.",
    "How do I boil an egg?",
    "What does a doctor do?",
    "Explain photosynthesis to a child.",
    "Write a short poem about the sea.",
    "What should I pack for a week in the mountains?",
)


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the fine-tuning study: tasks, methods and seeds."""

    model: str = "smollm2"  # a model with a chat template, as `tricycle finetune` takes it
    tasks: tuple[str, ...] = tuple(TASKS)  # sums, docstrings, voice
    methods: tuple[str, ...] = tuple(METHODS)  # lora, qlora, all
    seeds: int = 3  # trainings on sums, with other initial adapters and order; the other tasks once
    updates: int = 0  # of each training; 0 for the task's own number
    batch_size: int = 4  # rows of an update
    context_window: int = 256  # tokens of a row
    precision: str = "bfloat16"  # of matrix products in training, bfloat16 or float32; all is measured in float32
    tested: int = 210  # the most test questions of a task
    keep: bool = False  # keep checkpoints with all weights, 1.6 GB each, not only adapters
    quick: bool = False  # at most three minutes: only sums with LoRA, one seed, twenty updates, few questions
    output: Path = Path("runs/finetuning")
    """the folder of results.json, the chart, the page and the runs; finished runs there are not repeated"""


FREE = ("tasks", "methods", "seeds", "keep", "quick")  # results do not depend on these
QUICK: dict[str, Any] = {"tasks": ("sums",), "methods": ("lora",), "seeds": 1, "updates": 20, "tested": 30}


def check(settings: Settings) -> None:
    """Raise ValueError for a count below its minimum, or an unknown task, method or precision."""
    check_minimum(settings, seeds=1, updates=0, batch_size=1, context_window=128, tested=1)
    check_choices(settings, tasks=TASKS, methods=METHODS, precision=("bfloat16", "float32"))


# -------------------------------------------------------------------- all of it
def measure(settings: Settings) -> Record:
    """Measure and fine-tune as the settings say, resuming stored work; return {"before": results, "runs": list}.

    Raises:
        ValueError: the folder holds results of other settings.
        KeyboardInterrupt: a training was stopped; the next call resumes it.
    """
    results = Record(settings, FREE, runs=[])
    folder = settings.output / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS.values():
        for part in ("train", "validation", "test"):
            write_records(task, part, folder)
    if "before" not in results:
        loaded = load_model(settings.model, device="cpu")
        results["before"] = measure_model(loaded, settings, list(TASKS.values()), None)
        results.save()
    for task, method, seed in trainings(settings):
        about = {"task": task.name, "method": method, "seed": seed}
        if not select(results["runs"], **about):
            print(f"\n=== {task.title}, {method}, seed {seed}", flush=True)
            measured = finetune_and_measure(task, method, seed, settings, results["before"]["answers"])
            results.append("runs", about | measured)
    return results


def trainings(settings: Settings) -> list[tuple[Task, str, int]]:
    """Return all (task, method, seed) to train, ordered by seed; only sums have further seeds."""
    every = []
    for seed in range(settings.seeds):
        for name in settings.tasks:
            if seed == 0 or name == "sums":
                every += [(TASKS[name], method, seed) for method in settings.methods]
    return every


# -------------------------------------------------------------------- training
def finetune_and_measure(task: Task, method: str, seed: int, settings: Settings, own: list[Any]) -> dict[str, Any]:
    """Fine-tune into a run folder, return costs and measures; unless `keep`, delete all its weights but the adapter."""
    folder = settings.output / "runs" / f"{task.name}-{method}-{seed}"
    about = run_finetuning(task, method, seed, settings, folder)
    if method != "all":
        weights = "auto" if method == "qlora" else "float32"
        loaded = load_model(settings.model, device="cpu", weights=weights, adapter=folder / "adapter")
    else:
        loaded = load_model(str(folder), device="cpu")
    results = measure_model(loaded, settings, [task], own)
    if not settings.keep:
        for path in folder.glob("*.safetensors"):
            path.unlink()
    return about | results


def run_finetuning(task: Task, method: str, seed: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """Run or resume `tricycle finetune` in `folder`, return its costs; KeyboardInterrupt if it was stopped.

    "seconds" of the command by the clock, "cpu_seconds" of all its threads, "training_seconds" of the updates alone,
    without times in which the process stood still.
    """
    words = command(task, method, seed, settings, folder)
    print(f"tricycle finetune {' '.join(words)}", flush=True)
    started, cpu_started = clock.awake_seconds(), time.process_time()
    finetune(words)
    seconds, cpu_seconds = clock.awake_seconds() - started, time.process_time() - cpu_started
    if not (folder / "loss.png").is_file():
        raise KeyboardInterrupt
    checkpoint = load_checkpoint(folder / "last.safetensors")
    progress = checkpoint.about["progress"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [(line["step"], round(line["held_out_loss"], 5)) for line in lines if "held_out_loss" in line]
    best = min(losses, key=lambda pair: pair[1])[0]
    return {
        "command": words,
        "updates": progress["step"],
        "best_update": best,
        "validation": losses,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "training_seconds": round(progress["seconds"], 1),
        "resumed": words[0] == "--resume",
    }


def command(task: Task, method: str, seed: int, settings: Settings, folder: Path) -> list[str]:
    """Return the arguments of `tricycle finetune`; only --resume if `folder` has a checkpoint."""
    if (folder / "last.safetensors").is_file():
        return ["--resume", str(folder)]
    data = settings.output / "data"
    updates = settings.updates or task.updates
    words = [settings.model, "--data", f"{data / task.name}-train{task.suffix}"]
    words += ["--held-out", f"{data / task.name}-validation{task.suffix}", "--run-folder", str(folder)]
    words += [*METHODS[method], "--learning-rate", f"{task.rates[method]:g}", "--steps", str(updates)]
    words += ["--batch-size", str(settings.batch_size), "--context-window", str(settings.context_window)]
    words += ["--precision", settings.precision, "--eval-interval", str(max(1, updates // 4)), "--eval-batches", "6"]
    return [*words, "--sample-tokens", "0", "--seed", str(seed)]


# -------------------------------------------------------------------- looking
def measure_model(
    loaded: Pretrained, settings: Settings, tasks: Sequence[Task], own: list[Any] | None
) -> dict[str, Any]:
    """Return "bits" per byte by text, "scores" and "samples" by task, and "answers" if `own` is None.

    Args:
        own: prompts and answers of the model as it was before, in tokens; None for that model itself.
    """
    results: dict[str, Any] = {}
    general = [Question(text, True, "") for text in GENERAL]
    spoken = generate_answers(loaded, general, ANSWER_TOKENS, settings)
    if own is None:
        own = results["answers"] = [[ids, drawn] for ids, drawn in spoken]
    texts = texts_to_score(loaded, settings, own)
    results["bits"] = {name: bits(loaded, examples, settings) for name, examples in texts.items()}
    results["scores"], results["samples"] = {}, {}
    for task in tasks:
        questions = chosen(task.questions(), settings.tested)
        answers = decode_answers(loaded, generate_answers(loaded, questions, task.n_tokens, settings, task.temperature))
        results["scores"][task.name] = rounded(task.judge(questions, answers))
        if task.name == "voice":
            questions = [Question(text, False, "") for text in shakespeare.OPENINGS]
            answers = decode_answers(
                loaded, generate_answers(loaded, questions, task.n_tokens, settings, task.temperature)
            )
        results["samples"][task.name] = sample_rows(questions, answers)
    results["samples"]["general"] = sample_rows(general, decode_answers(loaded, spoken))
    return results


def sample_rows(questions: Sequence[Question], answers: Sequence[str]) -> list[list[str]]:
    """Return the first N_SHOWN rows [question, reference, answer]."""
    return [[question.text, question.reference, answer] for question, answer in zip(questions, answers)][:N_SHOWN]


def texts_to_score(loaded: Pretrained, settings: Settings, own: list[Any]) -> dict[str, list[Example]]:
    """Return {name: examples} of the tasks, captions, reviews and own answers, whose bits per byte are measured."""
    window = settings.context_window
    encoder = ExampleEncoder(loaded.tokeniser, window, cut_answers=True)
    texts = {name: examples_of(settings, task, encoder) for name, task in TASKS.items()}
    texts["captions"] = list(encoder.split_windows(encoder.encode_text(captions())))
    texts["reviews"] = list(encoder.split_windows(encoder.encode_text(reviews())))
    texts[OWN_ANSWERS] = [answer_example(ids, drawn, window) for ids, drawn in own]
    return texts


def chosen(questions: list[Question], n: int) -> list[Question]:
    """Return at most n items of a list, evenly spaced."""
    places = np.linspace(0, len(questions) - 1, min(n, len(questions))).round().astype(int)
    return [questions[place] for place in places]


# -------------------------------------------------------------------- answers
def generate_answers(
    loaded: Pretrained, questions: Sequence[Question], n_tokens: int, settings: Settings, temperature: float = 0.0
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, new ids) for each question; a complete answer ends with its end token."""
    encoder = ExampleEncoder(loaded.tokeniser, settings.context_window)
    stops = end_tokens(loaded)
    seed = 0 if temperature else None
    sampling = SamplingParams(temperature, top_p=0.95 if temperature else 1.0, seed=seed, stop_tokens=stops)
    sampling = replace(sampling, n_vocab=loaded.tokeniser.n_vocab)
    prompts = [prompt_ids(loaded, encoder, question) for question in questions]
    drawn: list[list[int]] = []
    with loaded.model.evaluating():
        for first in range(0, len(prompts), AT_ONCE):
            methods = [sampling.for_text(first + i) for i in range(len(prompts[first : first + AT_ONCE]))]
            drawn += generate_batch(loaded.model, prompts[first : first + AT_ONCE], n_tokens, methods)
    return list(zip(prompts, drawn))


def end_tokens(loaded: Pretrained) -> list[int]:
    """Return the sorted ids of the tokens that end an answer."""
    end = loaded.tokeniser.end_of_answer()
    return sorted({*stop_tokens(loaded), loaded.tokeniser.end_of_text, *([] if end is None else [end])})


def prompt_ids(loaded: Pretrained, encoder: ExampleEncoder, question: Question) -> list[int]:
    """Return the prompt of a question as token ids, in the chat template if `question.is_chat`."""
    if question.is_chat:
        ids = loaded.tokeniser.chat([{"role": "user", "content": question.text}], allowed_special=False)
        return [int(token) for token in ids]
    return encoder.encode_prompt(question.text)


def decode_answers(loaded: Pretrained, answers: Sequence[tuple[list[int], list[int]]]) -> list[str]:
    """Return the second token list of each pair, the generated answer, as text without end tokens."""
    stops = set(end_tokens(loaded))
    return [loaded.tokeniser.decode([token for token in drawn if token not in stops]) for _, drawn in answers]


# -------------------------------------------------------------------- bits per byte
def bits(loaded: Pretrained, examples: list[Example], settings: Settings) -> float:
    """Return the mean bits per byte over all tokens of the examples that have a loss."""
    window = settings.context_window
    dataset = PackedDataset(examples, ROWS, window, 0, supports_packing(loaded.model, window))
    rows = HeldOutRows.from_dataset(dataset, dataset.n_items, loaded.tokeniser)
    return rounded(rows.measure(loaded.model)["bits_per_byte"])


def examples_of(settings: Settings, task: Task, encoder: ExampleEncoder) -> list[Example]:
    """Return the encoded examples of a task's test file; ValueError unless `write_records` has written it."""
    records = read_records([settings.output / "data" / f"{task.name}-test{task.suffix}"])
    return [example for record in records for example in encoder.encode(record)]


def answer_example(prompt: list[int], drawn: list[int], window: int) -> Example:
    """Return an example of prompt and answer, cut to `window` + 1 tokens, whose loss counts only the answer."""
    ids = np.array([*prompt, *drawn], np.int64)
    counts = np.arange(len(ids)) >= len(prompt)
    return Example(ids[: window + 1], counts[: window + 1])


def captions() -> str:
    """Return the first 150 captions of Multi30k's validation part as one text, a sentence per line."""
    return "\n".join(load_multi30k("val", "en")[:150])


def reviews() -> str:
    """Return every 90th sentence of the RT polarity film reviews as one text, a sentence per line."""
    return "\n".join(load_rt_polarity()[0][::90])
