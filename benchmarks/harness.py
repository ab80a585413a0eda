"""Compare Tricycle with transformers in the LM Evaluation Harness, on local tasks (`python -m benchmarks.harness`).

The tasks are made of texts at hand: last words of sentences, lines of code, and facts about numbers (to choose and to
generate). The program prints the largest differences of log-likelihoods, the items with other choices or texts, and
the seconds of both. Both compute in float32 and are also compared with transformers in float64, because float32
sums of two programs differ by the errors of both. It needs the extras `evaluation` and `smollm2`; without --folder it
runs Tricycle alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
N_CHOICES = 4
CONTEXT_WORDS, CONTEXT_LINES = 24, 4
Item = dict[str, Any]


def make_items(n: int, texts: list[str], code: list[str]) -> dict[str, list[Item]]:
    """Return `n` items of each task by its name: endings, code, numbers and counting (generation)."""
    generator = random.Random(0)
    makers = {"endings": _endings(texts, generator), "code": _code(code, generator)}
    makers |= {"numbers": _numbers(generator), "counting": _counting(generator)}
    return {name: [next(items) for _ in range(n)] for name, items in makers.items()}


def _item(prompt: str, right: str, others: list[str], generator: random.Random) -> Item:
    """Return {"prompt", "choices": `right` and N_CHOICES - 1 drawn `others`, shuffled, "answer": index of `right`}."""
    choices = [right, *generator.sample(sorted({*others} - {right}), N_CHOICES - 1)]
    generator.shuffle(choices)
    return {"prompt": prompt, "choices": choices, "answer": choices.index(right)}


def _endings(texts: list[str], generator: random.Random) -> Iterator[Item]:
    """Yield endless items: words that precede a sentence's last one; the choices are that and other last words."""
    words = " ".join(texts).split()
    ends = [i for i, word in enumerate(words) if i > CONTEXT_WORDS and re.fullmatch(r"[a-z]{4,}\.", word)]
    others = [words[i].rstrip(".") for i in ends]
    while True:
        end = generator.choice(ends)
        prompt = " ".join(words[end - CONTEXT_WORDS : end])
        yield _item(prompt, words[end].rstrip("."), others, generator)


def _code(texts: list[str], generator: random.Random) -> Iterator[Item]:
    """Yield endless items: CONTEXT_LINES lines of code; the choices are the next line and random lines, stripped."""
    lines = [line for text in texts for line in text.splitlines() if 8 < len(line.strip()) < 80]
    while True:
        i = generator.randrange(CONTEXT_LINES, len(lines))
        others = [line.strip() for line in generator.sample(lines, 2 * N_CHOICES)]
        yield _item("\n".join(lines[i - CONTEXT_LINES : i]) + "\n", lines[i].strip(), others, generator)


def _numbers(generator: random.Random) -> Iterator[Item]:
    """Yield endless sums of two numbers; the wrong choices differ from the sum by 1, 2 or 10."""
    while True:
        a, b = generator.randrange(2, 90), generator.randrange(2, 9)
        right = str(a + b)
        others = [str(a + b + shift) for shift in (-10, -2, -1, 1, 2, 10)]
        yield _item(f"1 + 2 = 3, 10 + 7 = 17, {a} + {b} =", right, others, generator)


def _counting(generator: random.Random) -> Iterator[Item]:
    """Yield endless items that count six numbers at a constant step; the only choice is the next three."""
    while True:
        first, step = generator.randrange(1, 60), generator.choice([1, 1, 2, 5, 10])
        numbers = [str(first + step * i) for i in range(9)]
        yield {"prompt": f"Count: {', '.join(numbers[:6])},", "choices": [", ".join(numbers[6:])], "answer": 0}


def write_tasks(folder: Path, items: dict[str, list[Item]]) -> list[str]:
    """Write NAME.jsonl and NAME.yaml of each task of `items` to `folder`; return the harness's task names."""
    for name, rows in items.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task: dict[str, Any] = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
        }
        if name == "counting":
            task |= {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
            task["generation_kwargs"] = {"max_gen_toks": 12, "until": ["\n"], "do_sample": False}
            task["metric_list"] = [{"metric": "exact_match"}]
        else:
            task |= {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
            task["metric_list"] = [{"metric": "acc"}]
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return [f"local_{name}" for name in items]


def run(model: str, model_args: str, folder: Path, tasks: list[str]) -> tuple[dict[str, list[Any]], float]:
    """Evaluate tasks, print a model's scores, and return ({task: its items' responses}, seconds without loading)."""
    import lm_eval
    import lm_eval.models
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import tricycle_cli.lm_eval  # noqa: F401 (registers the model)

    lm = get_model(model).create_from_arg_string(model_args)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    start = time.monotonic()
    results = lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    seconds = time.monotonic() - start
    for task in tasks:
        scores = {name: value for name, value in results["results"][task].items() if isinstance(value, float)}
        print(f"{model} {task}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()), flush=True)
    samples = {task: sorted(results["samples"][task], key=lambda sample: sample["doc_id"]) for task in tasks}
    return {task: [sample["filtered_resps"] for sample in rows] for task, rows in samples.items()}, seconds


def main() -> int:
    """Parse sys.argv, run the tasks with one or both models, print scores, seconds and the comparison; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="as in `tricycle generate`")
    parser.add_argument("--folder", help="the same model in Hugging Face format, for transformers")
    parser.add_argument("--items", type=int, default=150, help="of each of the four tasks")
    options = parser.parse_args()
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    code = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tricycle").glob("*.py"))]
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        tasks = write_tasks(Path(name), make_items(options.items, texts, code))
        # Products with the blocks of a GGUF file would round activations to 8 bits.
        ours, seconds = run("tricycle", f"pretrained={options.model},weights=float32", Path(name), tasks)
        print(f"tricycle: {seconds:.1f} s")
        if options.folder:
            arguments = f"pretrained={options.folder},batch_size=8,device=cpu"
            theirs, seconds = run("hf", f"{arguments},dtype=float32", Path(name), tasks)
            print(f"transformers: {seconds:.1f} s")
            scored = [task for task in tasks if not isinstance(ours[task][0][0], str)]
            exact, _ = run("hf", f"{arguments},dtype=float64", Path(name), scored)
            print_comparison(ours, theirs, exact)
    return 0


def print_comparison(ours: dict[str, list[Any]], theirs: dict[str, list[Any]], exact: dict[str, list[Any]]) -> None:
    """Print for each task the number of different texts, or choices and differences, also from `exact` values."""
    for task, rows in ours.items():
        if task not in exact:
            n_other = sum(a != b for a, b in zip(rows, theirs[task]))
            print(f"{task}: {n_other} of {len(rows)} texts differ")
            continue
        tricycle, transformers, float64 = (rows, "Tricycle"), (theirs[task], "transformers"), (exact[task], "float64")
        for one, other in ((tricycle, transformers), (tricycle, float64), (transformers, float64)):
            largest, n_other = largest_difference(one[0], other[0])
            names = f"{one[1]} from {other[1]}"
            print(f"{task}: largest difference of {names} {largest:.1e} nats, {n_other} of {len(rows)} choices differ")


def largest_difference(rows: list[Any], others: list[Any]) -> tuple[float, int]:
    """Return the largest difference of a log-likelihood, and the number of items with another most probable choice."""
    logprobs = [[[float(choice[0]) for choice in row] for row in side] for side in (rows, others)]
    largest = max(abs(a - b) for row_a, row_b in zip(*logprobs) for a, b in zip(row_a, row_b))
    return largest, sum(a.index(max(a)) != b.index(max(b)) for a, b in zip(*logprobs))


if __name__ == "__main__":
    sys.exit(main())
