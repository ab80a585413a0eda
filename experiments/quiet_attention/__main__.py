"""Train the same GPT with softmax and with softmax1: python -m experiments.quiet_attention.

From the same first weights, on the same batches, with the same dropout masks: along the run, the kurtosis of every
matrix and of the activations, the largest activations, and the perplexity on held-out text. Each run leaves its
measurements and a checkpoint in the folder, so that a run that was cut off goes on where it was.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.quiet_attention.pretrained import Settings
from experiments.quiet_attention.pretrained import measure as measure_model
from experiments.quiet_attention.pretrained_report import report as report_model
from experiments.quiet_attention.report import report
from experiments.shared.program import check_minimum
from experiments.shared.results import read, write_json
from experiments.shared.texts import held_out
from tricycle import devices
from tricycle.configs import GPTConfig
from tricycle.evaluation import HeldOut, evaluate
from tricycle.training_state import TrainingState, new_state, resume_state, train_step
from tricycle_cli.flags import parse, run_main
from tricycle_datasets.shakespeare import Shakespeare
from tricycle_lab.probe import Probe, excess_kurtosis, unassigned_weight, weight_kurtosis

VARIANTS = ("softmax", "softmax1")
BYTES = 257  # the vocabulary: single bytes and the end of a text


@dataclass(frozen=True)
class Arguments:
    """The settings of the runs, and the output folder."""

    quick: bool = False  # a small model for 3 minutes on two CPU cores, instead of the seed document's
    steps: int = 0  # updates a run; 0 for 5000 on a GPU, 1000 on a CPU, 200 with --quick
    batch_size: int = 0  # sequences a batch; 0 for 64 on a GPU, 6 on a CPU
    seeds: int = 3  # pairs of runs
    measurements: int = 10  # how often along a run to measure, besides its beginning
    output: Path = Path("runs/quiet_attention")  # the output folder
    device: str = "auto"  # "auto" uses a GPU if there is one; "cpu" does not
    model: str = ""  # ask a model that others trained instead, such as smollm2: with softmax1 and a learned sink


def main() -> None:
    """Parse `sys.argv`; train, measure and report all variants and seeds, resuming, or the model of --model."""
    arguments = parse(Arguments, description=__doc__ or "")
    check_minimum(arguments, seeds=1, measurements=1, steps=0, batch_size=0)
    if arguments.model:
        study_pretrained_model(arguments)
        return
    on_gpu = arguments.device != "cpu" and devices.gpu_problem() is None
    corpus = Shakespeare(BYTES)
    scored = held_out(corpus)
    for seed in range(arguments.seeds):
        for variant in VARIANTS:
            config = new_config(arguments, on_gpu, seed, variant)
            run(config, corpus.train, scored, arguments.output / f"{variant}-{seed}", arguments.measurements, on_gpu)
    report(arguments.output, VARIANTS, arguments.seeds, corpus.tokeniser, scored.tokens)


def study_pretrained_model(arguments: Arguments) -> None:
    """Measure 20 variants (5 if quick) of `arguments.model`, except those with stored results, and report."""
    sizes = {"tokens": 128, "tested": 2, "rounded": 1, "inside": 1, "survey": 4} if arguments.quick else {}
    settings = Settings(
        model=arguments.model,
        seeds=1 if arguments.quick else arguments.seeds,
        steps=arguments.steps or (4 if arguments.quick else 32),
        output=arguments.output / f"{Path(arguments.model).name}{'-quick' * arguments.quick}",
        **sizes,
    )
    results = measure_model(settings, arguments.quick)
    report_model(settings, results)


def new_config(arguments: Arguments, on_gpu: bool, seed: int, variant: str) -> GPTConfig:
    """Return the config of nanoGPT's character model (6 layers, width 384), or if quick of 2 layers, width 128."""
    width, depth = (128, 2) if arguments.quick else (384, 6)
    return GPTConfig(
        vocab_size=BYTES,
        context_window=256,
        embedding_dim=width,
        n_heads=depth,
        n_layers=depth,
        bias=False,
        dropout=0.2,
        softmax=variant,
        batch_size=arguments.batch_size or (64 if on_gpu else 6),
        steps=arguments.steps or (200 if arguments.quick else 5000 if on_gpu else 1000),
        max_learning_rate=1e-3,
        min_learning_rate=1e-4,
        warmup_steps=100,
        beta2=0.99,
        seed=seed,
    )


def run(config: GPTConfig, tokens: Any, held_out: HeldOut, folder: Path, n_measurements: int, on_gpu: bool) -> None:
    """Train in `folder` from its last checkpoint, if any, and save measurements; ValueError if configs differ."""
    checkpoint, measured = folder / "last.safetensors", folder / "measurements.json"
    state = resume_state(checkpoint, tokens, on_gpu) if checkpoint.exists() else new_state(config, tokens, on_gpu)
    if state.config != config:
        raise ValueError(f"{folder}: expected a run with these settings, found another; name another --output")
    interval = max(1, config.steps // n_measurements)
    rows = read(measured) if measured.exists() else []
    bar = tqdm(total=config.steps, initial=state.step, desc=folder.name, unit="step", file=sys.stdout)
    with bar:
        while True:
            due = state.step % interval == 0 or state.step == config.steps
            if due and state.step not in [row["step"] for row in rows]:
                rows.append(measure(state, held_out))
                bar.set_postfix(perplexity=f"{rows[-1]['perplexity']:.2f}")
                write_json(measured, rows)
                state.save(checkpoint, None)
            if state.step == config.steps:
                return
            train_step(state)
            bar.update()


def measure(state: TrainingState, held_out: HeldOut) -> dict[str, Any]:
    """Return "step", "loss", "perplexity", "bits_per_byte", and kurtosis and such by layer, without dropout.

    Returns:
        "loss" is in nats per token. "weight_kurtosis" is by parameter; "activation_kurtosis", "largest_activation" and
        "nothing", the mean weight on no token, are by layer.
    """
    model = state.model
    loss, _ = evaluate(model, held_out.tokens, state.config.batch_size, n_batches=-(-96 // state.config.batch_size))
    window = state.config.context_window
    tokens = np.asarray(held_out.tokens[: 8 * window], np.int64).reshape(8, window)
    with model.evaluating(), Probe(model, "blocks.*") as probe:
        model(model.place(tokens))
    return {
        "step": state.step,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": held_out.bits_per_byte(loss),
        "weight_kurtosis": weight_kurtosis(model),
        "activation_kurtosis": {name: excess_kurtosis(x) for name, x in probe.activations.items()},
        "largest_activation": {name: float(abs(x).max()) for name, x in probe.activations.items()},
        "nothing": {name: float(unassigned_weight(weights).mean()) for name, weights in probe.weights.items()},
    }


if __name__ == "__main__":
    run_main(main)
