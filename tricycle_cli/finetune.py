"""Fine-tune a pretrained model: a LoRA adapter, or all weights.

The training data are files or folders: plain text, or JSON lines (.jsonl) with "text", with "prompt" and "completion",
or with "messages" (the loss counts the answers only); for `--loss dpo` JSON lines with "prompt", "chosen" and
"rejected". The result is an adapter, for `--adapter` of the other commands and for PEFT, or with `--method full` a
checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import reprlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.checkpoint import load_checkpoint
from tricycle.configs import GPTConfig
from tricycle.configs.presets import trainable_fields
from tricycle.devices import to_cpu
from tricycle.distributed.processes import ProcessGroup
from tricycle.finetuning.lora import ALL_LINEAR, Adapter, LoRAConfig
from tricycle.finetuning.packing import PackedDataset, supports_packing
from tricycle.finetuning.preferences import PairDataset
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import new_adapter
from tricycle.system.files import read_json_object
from tricycle.training import train
from tricycle.training_state import TrainingState, activation_bytes, new_optimiser
from tricycle_cli.distributed import require_one_process
from tricycle_cli.flags import check_conditions, parse
from tricycle_cli.full_disk import OnFullDisk
from tricycle_cli.init_from import MAX_DEFAULT_WINDOW, initialize_from
from tricycle_cli.models import Device, Weights, load_model
from tricycle_cli.run import OnNaN, Run, read_metrics
from tricycle_cli.session import open_session, print_line
from tricycle_cli.task import (
    Task,
    check_command,
    claim_new_folder,
    command_name,
    read_stored_flags,
    write_run_description,
)
from tricycle_cli.trackers import TrackerName, check_trackers
from tricycle_cli.tuning import ADAPTER, HeldOutPairs, HeldOutRows, TuningState, write_samples
from tricycle_cli.updates import advise_on_memory, check_training_memory
from tricycle_datasets.examples import PREFERENCES, ExampleEncoder, ExampleSplit, Record, load_examples, read_records
from tricycle_lab.plot import plot_losses

DESCRIPTION = __doc__ or ""
LEARNING_RATES = {"lora": 2e-4, "full": 2e-5}
DPO_RATE_FACTOR = 0.1  # of the learning rate with --loss dpo
LOSSES = ("cross-entropy", "dpo")
N_FINGERPRINT_ROWS = 8  # of each matrix
# Fields of the config that are flags with the same names.
TRAINING_FIELDS = """
batch_size accumulation_steps warmup_steps weight_decay max_gradient_norm recompute precision seed eval_batches
""".split()
N_EVALUATIONS = 10  # in a run, unless --eval-interval is given


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle finetune`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = ""
    """a model, as in `tricycle generate`"""
    data: tuple[Path, ...] = ()
    """files or folders of training data: plain text, or .jsonl"""
    held_out: tuple[Path, ...] = ()
    """files or folders of held-out data; by default 5% of the training data"""
    run_folder: Path | None = None
    """the folder for the files of the run; by default a new folder in runs/"""
    method: Literal["lora", "full"] = "lora"
    """train a LoRA adapter, or all weights"""
    loss: Literal["cross-entropy", "dpo"] = "cross-entropy"
    """cross-entropy of the texts, or direct preference optimization (DPO) of the chosen answer over the rejected one"""
    beta: float = 0.1
    """DPO: strength of the penalty for differing from the base model"""
    rank: int = 16
    """LoRA: rank of the matrices"""
    alpha: float = 32.0
    """LoRA: the output of the adapter is multiplied by alpha / rank"""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """LoRA: the adapted matrices, by the ends of their names, such as q_proj v_proj; or all-linear"""
    lora_dropout: float = 0.0
    """LoRA: dropout probability of the adapter's input"""
    rslora: bool = False
    """LoRA: multiply the output by alpha / sqrt(rank) (rank-stabilized LoRA)"""
    dora: bool = False
    """LoRA: also train the norms of the matrices' columns (DoRA)"""
    weights: Weights = "auto"
    """LoRA: data type of the base model's weights, which are frozen, as in `tricycle generate`; "auto" keeps 16-bit
    weights and the quantized blocks of a GGUF file (QLoRA) where `generate` does"""
    context_window: int = 0
    """maximum length of an example in tokens; 0 for the model's context window, but at most 512"""
    truncate_answers: bool = False
    """truncate examples whose answer exceeds the context window; by default they are an error"""
    pack: bool = True
    """pack several short texts into one row; attention stays within each text (not with --loss dpo)"""
    epochs: float = 2.0
    """passes over the training data"""
    steps: int = 0
    """number of updates, in place of --epochs"""
    batch_size: int = 4
    """rows in one forward and backward pass; pairs with --loss dpo"""
    accumulation_steps: int = 1
    """passes whose gradients are accumulated for one update"""
    learning_rate: float = 0.0
    """learning rate after the warm-up; 0 for 2e-4 (LoRA) or 2e-5 (all weights), a tenth of that with --loss dpo"""
    warmup_steps: int = 10
    """updates over which the learning rate rises; at most a tenth of all updates"""
    weight_decay: float = 0.0
    """decoupled weight decay of the matrices (AdamW)"""
    max_gradient_norm: float = 1.0
    """gradients are clipped to this global norm; 0 for no clipping"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """data type of matrix products"""
    recompute: bool = False
    """activation checkpointing: compute each block again in the backward pass; needs less memory and more time"""
    eval_interval: int = 0
    """updates between two evaluations, each with a checkpoint; 0 for a tenth of all updates"""
    eval_batches: int = 20
    """held-out batches of an evaluation"""
    patience: int = 3
    """stop after this many evaluations without a lower held-out loss; 0 for no early stopping"""
    prompts: tuple[str, ...] = ()
    """prompts of the samples before and after training; by default three of the held-out data"""
    sample_tokens: int = 60
    """the maximum number of tokens of a sample; 0 for no samples"""
    seed: int = 0
    """seed of the adapter's initial weights and of the order of the data"""
    on_nan: OnNaN = "skip"
    """when a loss or gradient is NaN or infinite: "stop" the run, "skip" the update, or "rollback" to the checkpoint"""
    device: Device = "cpu"
    """where to compute"""
    on_full_disk: OnFullDisk = "wait"
    """when the disk is full: wait for free space, or stop"""
    track: tuple[TrackerName, ...] = ()
    """experiment trackers that get the content of metrics.jsonl; with --resume they replace the run's trackers for this
    session"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN-FOLDER")] = None
    """resume a run from its last checkpoint, with the settings of the run; only --track can be combined with it"""


# -------------------------------------------------------------------- the command
def main(args: Sequence[str] | None = None) -> int:
    """Run `tricycle finetune`: start or resume a run in a run folder; `args` defaults to sys.argv[1:]; return 0."""
    require_one_process("finetune")
    with open_session(partial(new_task, sys.argv[1:] if args is None else list(args))) as session:
        session.finished = train(**session.state.train_arguments(), session=session)
    return 0


def new_task(words: Sequence[str], processes: ProcessGroup) -> FinetuneTask:
    """Parse a command line into the task that starts or resumes a run, and load nothing yet; ValueError if wrong."""
    arguments = parse(Arguments, args=words, description=DESCRIPTION)
    if arguments.resume is None:
        if not arguments.model or not arguments.data:
            raise ValueError("expected a model and --data, or --resume with a run folder")
        check_arguments(arguments)
        check_trackers(arguments.track)
    else:
        flags = [word.split("=")[0] for word in words if word.startswith("--")]
        others = [arguments.model] * bool(arguments.model) + [f for f in flags if f not in ("--resume", "--track")]
        if others:
            raise ValueError(f"expected only --track with --resume, got {' '.join(others)}")
    return FinetuneTask(arguments, arguments.resume or arguments.run_folder)


def check_arguments(arguments: Arguments) -> None:
    """Raise ValueError for a flag without effect, as --rank with --method full, or a number out of range."""
    is_lora, is_dpo = arguments.method == "lora", arguments.loss == "dpo"
    conditions = {
        "--method lora": (is_lora, "rank alpha targets lora_dropout rslora dora"),
        "--loss dpo": (is_dpo, "beta"),
        "--loss cross-entropy": (not is_dpo, "pack"),
        "no --steps": (not arguments.steps, "epochs"),
        "--sample-tokens above 0": (arguments.sample_tokens, "prompts"),
    }
    check_conditions(arguments, conditions)
    if not is_lora and arguments.weights not in ("auto", "float32"):
        raise ValueError(f"expected --weights float32 with --method full, got {arguments.weights}")
    for name in ("beta", "epochs"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise ValueError(f"expected --{name} above 0, got {value}")
    least = {"steps": 0, "learning_rate": 0, "patience": 0, "sample_tokens": 0, "accumulation_steps": 1}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if not lowest <= value < math.inf:
            raise ValueError(f"expected --{name.replace('_', '-')} of {lowest} or more, got {value}")


def read_arguments(folder: Path) -> Arguments:
    """Read the flags of a run from data.json; FileNotFoundError if absent, ValueError if not `tricycle finetune`."""
    path = folder / "data.json"
    if not path.is_file() or not (folder / "config.json").is_file():
        expected = "a run folder of `tricycle finetune`, with config.json and data.json"
        raise FileNotFoundError(f"{folder}: expected {expected}")
    check_command(folder, read_json_object(path), "finetune")
    known = {field.name for field in dataclasses.fields(Arguments)} - {"run_folder", "resume"}
    stated = read_stored_flags(path, "arguments", Arguments(), known)
    if stated.get("method") not in tuple(LEARNING_RATES) or stated.get("loss", LOSSES[0]) not in LOSSES:
        raise ValueError(f"{path}: expected the arguments of a run of `tricycle finetune`, got others")
    paths = {name: tuple(Path(part) for part in stated.get(name, ())) for name in ("data", "held_out")}
    texts = {name: tuple(stated.get(name, ())) for name in ("targets", "prompts", "track")}
    return Arguments(**{**stated, **paths, **texts, "run_folder": folder})


def _as_json(arguments: Arguments) -> dict[str, Any]:
    """Return the flags as `read_arguments` reads them; paths are absolute, so that the run resumes in any folder."""
    values = dataclasses.asdict(arguments)
    for name in ("data", "held_out"):
        values[name] = [str(path.resolve()) for path in values[name]]
    if Path(arguments.model).exists():
        values["model"] = str(Path(arguments.model).resolve())
    return {name: value for name, value in values.items() if name not in ("run_folder", "resume")}


# -------------------------------------------------------------------- the task
class FinetuneTask(Task):
    """Fine-tuning of a pretrained model on examples or preferences.

    Attributes:
        loaded: the model with its tokenizer.
        base: the `fingerprint` of the model before training.
        dataset: the training examples.
        held_out: the held-out examples.
        before: the results of `measure` before training.
        prompts: text and token ids of the prompts of the samples.
    """

    command = "finetune"
    learning_rate_flag = "--learning-rate"
    loaded: Pretrained
    base: str
    dataset: PackedDataset
    held_out: HeldOutRows | HeldOutPairs
    before: dict[str, float]
    prompts: list[tuple[str, list[int]]]

    @property
    def name(self) -> str:
        """Return the first part of a new run folder's name, the model's name and "-finetuned"."""
        return f"{Path(self.arguments.model).stem}-finetuned"

    def claim_folder(self, folder: Path, processes: ProcessGroup) -> None:
        """Raise ValueError if a new run's folder has a run; if resumed, load its `arguments`, but keep new --track."""
        if self.arguments.resume is None:
            claim_new_folder(folder)
            return
        stored = read_arguments(folder)
        self.arguments = dataclasses.replace(stored, track=self.arguments.track or stored.track)
        check_trackers(self.arguments.track)

    def prepare(self, run: Run) -> TuningState:
        """Load data and model, add a LoRA adapter unless --method is full; return the state; ValueError if unfit."""
        arguments, lora = self.arguments, None
        if arguments.method == "lora":
            flags: dict[str, Any] = {"rank_stabilised": arguments.rslora, "dora": arguments.dora}
            lora = LoRAConfig(arguments.rank, arguments.alpha, arguments.targets, arguments.lora_dropout, **flags)
        records = read_records(arguments.data)
        held_out = read_records(arguments.held_out) if arguments.held_out else []
        check_record_kinds(arguments.loss, [*records, *held_out])
        weights = "float32" if lora is None else arguments.weights
        self.loaded = loaded = load_model(arguments.model, None, None, arguments.device, weights)
        run.tokeniser = loaded.tokeniser
        longest = loaded.model.config.context_window
        window = arguments.context_window or min(longest, MAX_DEFAULT_WINDOW)
        if not 2 <= window <= longest:
            raise ValueError(f"expected --context-window from 2 to {longest}, the model's, got {window}")
        encoder = ExampleEncoder(loaded.tokeniser, window, arguments.truncate_answers)
        examples = load_examples(records, encoder, held_out)
        self._split(examples, window)
        config = training_config(arguments, loaded, self.dataset)
        self.base = fingerprint(loaded.model)
        adapter = None if lora is None else new_adapter(loaded, lora, arguments.seed, arguments.model)
        on_gpu = next(loaded.model.parameters()).on_gpu
        with advise_on_memory(on_gpu, self.memory_advice(config, on_gpu)):
            check_training_memory(finetuning_bytes(config, self.dataset, adapter or loaded.model), on_gpu)
        if adapter is None:
            loaded.model = initialize_from(loaded.model, config)
        loaded.model.use_precision(config.precision)
        if isinstance(self.held_out, HeldOutPairs):  # a new adapter does not change the model's outputs
            compute_reference_logprobs(loaded.model, [self.dataset, self.held_out.dataset])
        state = self._new_state(config, adapter)
        print_summary(examples, self.dataset, state, arguments)
        self._begin_or_resume(state, run, examples)
        self.patience = arguments.patience
        return state

    def _split(self, examples: ExampleSplit, window: int) -> None:
        """Set `dataset` (training) and `held_out` from the examples: packed rows, or pairs with --loss dpo."""
        arguments, loaded = self.arguments, self.loaded
        order = arguments.batch_size, window, arguments.seed
        n_held = arguments.eval_batches * arguments.batch_size
        if arguments.loss == "dpo":
            pairs = PairDataset(examples.held_out[: 2 * n_held], *order)
            self.dataset, self.held_out = PairDataset(examples.train, *order), HeldOutPairs(pairs, arguments.beta)
            return
        pack = arguments.pack and supports_packing(loaded.model, window)
        rows = PackedDataset(examples.held_out, *order, pack)
        self.dataset = PackedDataset(examples.train, *order, pack)
        self.held_out = HeldOutRows.from_dataset(rows, n_held, loaded.tokeniser)

    def _new_state(self, config: GPTConfig, adapter: Adapter | None) -> TuningState:
        """Return the initial training state, the model in training mode; `beta` is 0 without DPO."""
        arguments, model = self.arguments, self.loaded.model
        model.recompute = checkpoint_activations if config.recompute else None
        model.train()
        dataset: Any = self.dataset
        beta = arguments.beta if arguments.loss == "dpo" else 0.0
        parts: dict[str, Any] = {"adapter": adapter, "loaded": self.loaded, "beta": beta}
        return TuningState(config, model, new_optimiser(config), dataset, total_steps=config.steps, **parts)

    def _begin_or_resume(self, state: TuningState, run: Run, examples: ExampleSplit) -> None:
        """Resume the last checkpoint (ValueError: data or model changed); or measure and sample the base, write files.

        Raises:
            ValueError: the data or the model has changed since the run started.
        """
        path = run.folder / "data.json"
        if path.is_file() and run.last.exists():
            description = read_json_object(path)
            expected = "that the run was started with, got"
            if description.get("corpus") != examples.digest:
                raise ValueError(f"{run.folder}: expected the data {expected} changed data")
            if description.get("base", self.base) != self.base:
                raise ValueError(f"{run.folder}: expected the model {expected} a changed {self.arguments.model}")
            before = description.get("before", {})
            self.before = {"held_out_loss": before.get("loss", math.nan), **before}
            self.prompts = read_prompts(path, description)
            checkpoint = load_checkpoint(run.last)
            if checkpoint.config != state.config:
                raise ValueError(f"{run.last}: expected a checkpoint with this run's settings, got other settings")
            state.read(checkpoint)
            state.restore(checkpoint)
            print(f"run folder: {run.folder} (resuming after step {state.step})")
            return
        print(f"run folder: {run.folder}")
        run.samples.unlink(missing_ok=True)  # of a session that ended before there was a checkpoint
        self.before = self.measure(state)
        print(f"before training: held-out loss {self.format_metrics(self.before)} ({self.held_out.size})")
        self.prompts = _prompts(self.arguments, examples)
        self._write_samples(run, "before")
        description = {"data": "finetune", "files": [], "tokeniser": "own", "corpus": examples.digest}
        description |= {"base": self.base, "arguments": _as_json(self.arguments)}
        description |= {"before": {"loss": self.before["held_out_loss"], **self.before}}
        description["prompts"] = [[text, ids] for text, ids in self.prompts]
        write_run_description(run.folder, state.config, description, run.tokeniser)

    def tracked_settings(self, state: TrainingState) -> dict[str, Any]:
        """Return the flags except `track` and the config's fields in one dict by name, which trackers record."""
        flags = {name: value for name, value in _as_json(self.arguments).items() if name != "track"}
        return {**flags, **state.config.to_dict()}

    def memory_advice(self, config: GPTConfig, on_gpu: bool) -> str:
        """Return which of the run's flags to change for less memory, with present values."""
        arguments = self.arguments
        advice = [] if arguments.recompute else ["use --recompute"]
        if arguments.batch_size > 1:
            advice.append(f"lower --batch-size (now {arguments.batch_size}; raise --accumulation-steps to compensate)")
        advice.append(f"lower --context-window (now {self.dataset.window})")
        if arguments.method == "full":
            advice.append("use --method lora")
        elif arguments.weights in ("auto", "float32"):
            advice.append("use --weights bfloat16 or int8")
        return ", or ".join(advice)

    def measure(self, state: TrainingState) -> dict[str, float]:
        """Return held_out_loss (nats) of held-out data, and bits_per_byte or (DPO) reward_margin, reward_accuracy."""
        return self.held_out.measure(state.model)

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the results of `measure` (DPO: nats per pair, reward margin and accuracy); a missing one is "nan"."""
        if self.arguments.loss != "dpo":
            return super().format_metrics(metrics)
        names = ("held_out_loss", "reward_margin", "reward_accuracy")
        loss, margin, accuracy = (metrics.get(name, math.nan) for name in names)
        return f"{loss:.4f} nats/pair, reward margin {margin:.3f}, reward accuracy {accuracy:.0%}"

    def _write_samples(self, run: Run, title: str) -> None:
        """Append samples of the prompts to samples.txt and print them; skip it without prompts or --sample-tokens 0."""
        if self.prompts and self.arguments.sample_tokens:
            write_samples(self.loaded, run, title, self.prompts, self.arguments.sample_tokens)

    def report(self, state: Any, run: Run) -> None:
        """Load the best checkpoint into `state`, write samples and loss.png, print losses before and after training."""
        checkpoint = load_checkpoint(run.best)
        state.read(checkpoint)
        best_step = checkpoint.about["progress"]["step"]
        metrics = read_metrics(run.metrics)
        after = next((line for line in metrics if "held_out_loss" in line and line["step"] == best_step), {})
        self._write_samples(run, "after")
        path, is_dpo = run.folder / "loss.png", isinstance(self.held_out, HeldOutPairs)
        bits_per_nat = 1.0 if is_dpo else after.get("bits_per_byte", math.nan) / (state.best_loss or math.nan)
        unit = "nats per pair (DPO)" if is_dpo else "bits per byte"
        title = f"{sum(parameter.size for parameter in state.saved_module().parameters()):,} trained parameters"
        picture = run.write(lambda: plot_losses(metrics, path, bits_per_nat, {}, title, unit))
        print(f"\n{state.total_steps} updates in {state.seconds / 60:.1f} minutes; best checkpoint: step {best_step}")
        text = self.format_metrics({**after, "held_out_loss": state.best_loss})
        print(f"held-out loss before training: {self.format_metrics(self.before)}; after: {text}")
        print(f"loss curve: {picture}; samples: {run.samples}")
        self._print_next_commands(run.folder)

    def _print_next_commands(self, folder: Path) -> None:
        """Print the commands that chat or generate with the result, and for an adapter that export it."""
        name = "chat" if self.loaded.tokeniser.chat_template else "generate"
        verb = command_name(name, self.command)
        if self.arguments.method == "full":
            print(f"{name} with the fine-tuned model:\n  {verb} {shlex.quote(folder.as_posix())}")
            return
        adapter = shlex.quote((folder / ADAPTER).as_posix())
        model = shlex.quote(self.arguments.model)
        print(f"{name} with the fine-tuned model:\n  {verb} {model} --adapter {adapter}")
        export = command_name("export", self.command)
        print(f"merge the adapter and export the model:\n  {export} {model} FOLDER --adapter {adapter}")


def check_record_kinds(loss: str, records: Sequence[Record]) -> None:
    """Raise ValueError unless all records (loss "dpo") or none of them (other losses) are preference pairs."""
    for record in records:
        if loss == "dpo" and record.kind not in PREFERENCES:
            raise ValueError(f'{record.source}: expected "chosen" and "rejected" with --loss dpo, got other fields')
        if loss != "dpo" and record.kind in PREFERENCES:
            raise ValueError(f'{record.source}: expected --loss dpo with "chosen" and "rejected", got --loss {loss}')


def compute_reference_logprobs(model: GPT, datasets: Sequence[Any]) -> None:
    """Compute the base model's log-probabilities of all answers, and store them in the DPO `datasets`; print a note."""
    n_answers = sum(2 * pairs.n_items for pairs in datasets)
    print_line(f"computing the reference log-probabilities of {n_answers:,} answers")
    for pairs in datasets:
        pairs.compute_reference_log_probs(model)


def fingerprint(model: GPT) -> str:
    """Return a hex SHA-256 of the name, shape and some rows of each weight, by which a run detects a changed model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        array: Any = parameter.array
        for values in array.arrays if isinstance(array, QuantizedMatrix) else [to_cpu(array)]:
            rows = np.ascontiguousarray(values[:: max(1, len(values) // N_FINGERPRINT_ROWS)])
            digest.update(f"{name} {values.shape} {values.dtype}".encode() + rows.tobytes())
    return digest.hexdigest()


def finetuning_bytes(config: GPTConfig, dataset: PackedDataset, trained: Layer) -> int:
    """Return the bytes of training besides the model: 12 per parameter of `trained`, and a batch's activations.

    The sum of gradients, optimizer state, and the activations of a batch of the longest rows.
    """
    n_rows = config.batch_size * (2 if isinstance(dataset, PairDataset) else 1)
    n_learning = sum(parameter.size for parameter in trained.parameters())
    return 3 * 4 * n_learning + activation_bytes(config, n_rows * dataset.max_row_length)


def training_config(arguments: Arguments, loaded: Pretrained, dataset: PackedDataset) -> GPTConfig:
    """Return the model's config with the flags' training settings, and defaults for steps, rate and evaluation."""
    steps_per_epoch = dataset.n_items / (arguments.batch_size * arguments.accumulation_steps)
    steps = arguments.steps or max(1, math.ceil(steps_per_epoch * arguments.epochs))
    factor = DPO_RATE_FACTOR if arguments.loss == "dpo" else 1
    rate = arguments.learning_rate or LEARNING_RATES[arguments.method] * factor
    own: dict[str, Any] = trainable_fields(loaded.model.config)
    own |= {name: getattr(arguments, name) for name in TRAINING_FIELDS}
    own |= {"optimiser": "adamw", "beta2": 0.999, "steps": steps, "minutes": 0.0, "sample_interval": 0}
    own |= {"max_learning_rate": rate, "min_learning_rate": 0.0}
    own["eval_interval"] = arguments.eval_interval or max(1, steps // N_EVALUATIONS)
    return GPTConfig.from_dict(own)


def print_summary(examples: ExampleSplit, dataset: PackedDataset, state: TuningState, arguments: Arguments) -> None:
    """Print the numbers of examples, tokens, parameters and updates before training."""
    encoder = examples.encoder
    rows = "pairs" if isinstance(dataset, PairDataset) else "rows"
    print(
        f"data: {examples.n_records:,} records; {len(examples.train):,} training examples of "
        f"{dataset.n_tokens:,} tokens ({dataset.n_labels:,} count in the loss), in {dataset.n_items:,} {rows} "
        f"of at most {dataset.window:,} tokens; {len(examples.held_out):,} held-out examples"
    )
    if encoder.n_cut or encoder.n_left_out:
        print(
            f"truncated: {encoder.n_cut_tokens:,} tokens of {encoder.n_cut:,} examples (--context-window "
            f"{dataset.window:,}); skipped: {encoder.n_left_out:,} examples without a token that counts in the loss"
        )
    n_learning = sum(parameter.size for parameter in state.saved_module().parameters())
    n_all = sum(parameter.size for name, parameter in state.model.named_parameters() if ".low_rank." not in name)
    trained = f"{n_learning:,} of them trained ({arguments.method})"
    print(f"model: {n_all:,} parameters, {trained}; {state.total_steps:,} updates")


def _prompts(arguments: Arguments, examples: ExampleSplit) -> list[tuple[str, list[int]]]:
    """Return (text, ids) of --prompts, else of up to three examples; [] if no samples are written."""
    if not arguments.sample_tokens:
        return []
    if not arguments.prompts:
        return examples.prompts[:3]
    tokeniser = examples.encoder.tokeniser
    if examples.kinds <= {"messages", "chat preference"}:
        return [(text, tokeniser.chat([{"role": "user", "content": text}])) for text in arguments.prompts]
    return [(text, examples.encoder.encode_prompt(text)) for text in arguments.prompts]


def read_prompts(path: Path, description: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Return the (text, token ids) pairs of "prompts" in data.json, [] if absent; ValueError, with `path`, if wrong."""
    prompts, stored = [], description.get("prompts", [])
    for pair in stored if isinstance(stored, list) else [stored]:
        sound = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], list)
        if not sound or not all(type(token) is int for token in pair[1]):
            raise ValueError(f"{path}: expected prompts of a text and ids, got {reprlib.repr(pair)}")
        prompts.append((pair[0], pair[1]))
    return prompts
