"""Teach a model that somebody has trained: LoRA, or all its weights.

The data are files or folders: plain text, or lines of JSON (.jsonl) with "text", with "prompt" and "completion", or
with "messages", of which only the answers count; or, for `--loss dpo`, with "prompt", "chosen" and "rejected". The
result is an adapter of a few small files, for `--adapter` of the other commands and for PEFT, or with `--method all` a
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
from tricycle.configs.presets import model_fields
from tricycle.devices import to_cpu
from tricycle.distributed.processes import ProcessGroup
from tricycle.finetuning.lora import ALL_LINEAR, Adapter, LoRAConfig
from tricycle.finetuning.packing import PackedDataset, packs
from tricycle.finetuning.preferences import PairDataset
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import new_adapter
from tricycle.system.files import read_json_object
from tricycle.training import train
from tricycle.training_state import TrainingState, activation_bytes, new_optimiser
from tricycle_cli.distributed import expect_one_process
from tricycle_cli.flags import parse
from tricycle_cli.full_disk import OnFullDisk
from tricycle_cli.init_from import initialize_from
from tricycle_cli.models import Device, Weights, load_model
from tricycle_cli.run import OnNaN, Run, read_metrics
from tricycle_cli.session import open_session, say
from tricycle_cli.task import Task, claim_new_folder, command_name, read_stored_flags, write_run_description
from tricycle_cli.trackers import TrackerName, expect_trackers
from tricycle_cli.tuning import ADAPTER, HeldOutPairs, HeldOutRows, TuningState, write_samples
from tricycle_cli.updates import advise_on_memory, check_training_memory, estimate
from tricycle_datasets.examples import PREFERENCES, ExampleEncoder, ExampleSplit, Record, load_examples, read_records
from tricycle_lab.plot import plot_losses

DESCRIPTION = __doc__ or ""
LONGEST_WINDOW = 512  # unless a longer one is asked for: memory grows with it
RATES = {"lora": 2e-4, "all": 2e-5}  # what a whole model knows is soon forgotten
RATE_OF_DPO = 0.1  # times these: it needs little to turn a preference round
LOSSES = ("likelihood", "dpo")
ROWS_LOOKED_AT = 8  # of a matrix, to know it again
ESTIMATES = 10  # in a run, unless --eval-interval says otherwise


@dataclass(frozen=True)
class Arguments:
    """What to teach, and what with."""

    model: tyro.conf.Positional[str] = ""
    """a model, as `tricycle generate` takes it"""
    data: tuple[Path, ...] = ()
    """files or folders: plain text, or .jsonl"""
    held_out: tuple[Path, ...] = ()
    """files or folders of which nothing is learnt; without, a twentieth of the data"""
    run_folder: Path | None = None
    """where the run leaves its files; without it a new folder in runs/"""
    method: Literal["lora", "all"] = "lora"
    """small matrices beside the model's own, or all of its weights"""
    loss: Literal["likelihood", "dpo"] = "likelihood"
    """what is learnt: to write what the data say; or of two answers to prefer the chosen one to the rejected one"""
    beta: float = 0.1
    """DPO: how much it costs to go away from what the model was; the smaller, the farther it goes"""
    rank: int = 16
    """LoRA: the width of the small matrices"""
    alpha: float = 32.0
    """LoRA: what they give is multiplied by alpha / rank"""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """LoRA: which matrices get them: ends of names, such as q_proj v_proj; or all-linear"""
    lora_dropout: float = 0.0
    """LoRA: probability of dropping an element of what they get"""
    rank_stabilised: bool = False
    """LoRA: multiply by alpha / sqrt(rank) instead"""
    dora: bool = False
    """LoRA: let the lengths of the matrices' columns learn, too (DoRA)"""
    weights: Weights = "float32"
    """LoRA: how many bits the model's own weights have, which stay as they are"""
    context_window: int = 0
    """tokens that are read at once; 0 for the model's, but at most 512"""
    cut_answers: bool = False
    """cut answers that are longer than that, where otherwise they are refused"""
    pack: bool = True
    """put several short texts side by side, where none sees another (not with --loss dpo)"""
    epochs: float = 2.0
    """how often all is read"""
    steps: int = 0
    """updates to make, in place of --epochs"""
    batch_size: int = 4
    """rows in one forward and backward pass; pairs with --loss dpo"""
    accumulation_steps: int = 1
    """passes whose gradients make one update"""
    learning_rate: float = 0.0
    """after the warm-up; 0 for 2e-4 with LoRA and 2e-5 for all weights, and a tenth of these with --loss dpo"""
    warmup_steps: int = 10
    """updates over which the learning rate rises; at most a tenth of all"""
    weight_decay: float = 0.0
    """decoupled decay of the matrices (AdamW)"""
    max_gradient_norm: float = 1.0
    """gradients are scaled down to this common norm; 0 leaves them"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """of matrix products"""
    recompute: bool = False
    """compute each block again in the backward pass: less memory, more time, the same gradients"""
    eval_interval: int = 0
    """updates between estimates of the held-out loss, with a checkpoint before each; 0 for a tenth of all"""
    eval_batches: int = 20
    """batches of what is held out in an estimate"""
    patience: int = 3
    """end after so many estimates that were not better; 0 for never"""
    prompts: tuple[str, ...] = ()
    """what samples before and after begin with; without, three of what is held out"""
    sample_tokens: int = 60
    """the most tokens of a sample; 0 for no samples"""
    seed: int = 0
    """decides the small matrices and the order of what is read"""
    on_nan: OnNaN = "skip"
    """where a loss or a gradient is NaN or infinite: "stop", "skip" that update, or "rollback" """
    device: Device = "cpu"
    """where to compute"""
    on_full_disk: OnFullDisk = "wait"
    """what to do when the disk is full: wait until there is room, or stop"""
    track: tuple[TrackerName, ...] = ()
    """trackers of experiments that are told what metrics.jsonl is told; with --resume in place of the run's own, for
    this time"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN-FOLDER")] = None
    """go on with a run where its last checkpoint stands; all settings are the run's own"""


# -------------------------------------------------------------------- the command
def main(args: Sequence[str] | None = None) -> int:
    expect_one_process("finetune")
    with open_session(partial(new_task, sys.argv[1:] if args is None else list(args))) as session:
        session.finished = train(**session.state.train_arguments(), session=session)
    return 0


def new_task(words: Sequence[str], processes: ProcessGroup) -> FinetuneTask:
    """Return the run that a command line begins or resumes.

    Raises:
        ValueError: one line about what is wrong, before anything is written.
    """
    arguments = parse(Arguments, args=words, description=DESCRIPTION)
    if arguments.resume is None:
        if not arguments.model or not arguments.data:
            raise ValueError("expected a model and --data, or --resume with a run folder")
        check_arguments(arguments)
        expect_trackers(arguments.track)
    return FinetuneTask(arguments, arguments.resume or arguments.run_folder)


def check_arguments(arguments: Arguments) -> None:
    """
    Raises:
        ValueError: flags that contradict each other, or a number out of range; others are looked at where they count.
    """
    if arguments.method == "all" and arguments.weights != "float32":
        raise ValueError(f"expected --weights float32 with --method all, got {arguments.weights}")
    for name in ("dora", "rank_stabilised"):
        if arguments.method == "all" and getattr(arguments, name):
            raise ValueError(f"expected --method lora with --{name.replace('_', '-')}, got all")
    if not 0 < arguments.beta < math.inf:
        raise ValueError(f"expected --beta above 0, got {arguments.beta}")
    least = {"epochs": 0, "steps": 0, "learning_rate": 0, "patience": 0, "sample_tokens": 0, "accumulation_steps": 1}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if not lowest <= value < math.inf:
            raise ValueError(f"expected --{name.replace('_', '-')} of {lowest} or more, got {value}")


def read_arguments(folder: Path) -> Arguments:
    """Return the flags that a run was started with.

    Raises:
        FileNotFoundError, ValueError: it is no run of this command.
    """
    path = folder / "data.json"
    if not path.is_file() or not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: expected a run folder of `tricycle finetune`, with config.json and data.json"
        )
    known = {field.name for field in dataclasses.fields(Arguments)} - {"run_folder", "resume"}
    stated = read_stored_flags(path, "arguments", Arguments(), known)
    if stated.get("method") not in tuple(RATES) or stated.get("loss", LOSSES[0]) not in LOSSES:
        raise ValueError(f"{path}: expected the arguments of a run of `tricycle finetune`, it has no such")
    paths = {name: tuple(Path(part) for part in stated.get(name, ())) for name in ("data", "held_out")}
    texts = {name: tuple(stated.get(name, ())) for name in ("targets", "prompts", "track")}
    return Arguments(**{**stated, **paths, **texts, "run_folder": folder})


def _as_json(arguments: Arguments) -> dict[str, Any]:
    """Return the flags for `read_arguments`; paths are absolute, because a run may be resumed from another folder."""
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
        loaded: the model with its tokeniser.
        dataset: what is learnt from.
        held_out: what is held out.
        before: the figures of the model before training, by the names of `measure`.
        prompts: texts and ids that the samples begin with.
    """

    command = "finetune"
    learning_rate_flag = "--learning-rate"
    loaded: Pretrained
    dataset: PackedDataset
    held_out: HeldOutRows | HeldOutPairs
    before: dict[str, float]
    prompts: list[tuple[str, list[int]]]

    @property
    def name(self) -> str:
        return f"{Path(self.arguments.model).stem}-finetuned"

    def claim(self, folder: Path, processes: ProcessGroup) -> None:
        if self.arguments.resume is None:
            claim_new_folder(folder)
            return
        stored = read_arguments(folder)
        self.arguments = dataclasses.replace(stored, track=self.arguments.track or stored.track)
        expect_trackers(self.arguments.track)

    def prepare(self, run: Run) -> TuningState:
        arguments, lora = self.arguments, _lora_config(self.arguments)
        records = read_records(arguments.data)
        held_out = read_records(arguments.held_out) if arguments.held_out else []
        check_record_kinds(arguments.loss, [*records, *held_out])
        self.loaded = loaded = load_model(arguments.model, None, None, arguments.device, arguments.weights)
        run.tokeniser = loaded.tokeniser
        longest = loaded.model.config.context_window
        window = arguments.context_window or min(longest, LONGEST_WINDOW)
        if not 2 <= window <= longest:
            raise ValueError(f"expected --context-window from 2 to {longest}, as the model has it, got {window}")
        examples = load_examples(records, ExampleEncoder(loaded.tokeniser, window, arguments.cut_answers), held_out)
        self._split(examples, window)
        config = config_of(arguments, loaded, self.dataset)
        base, adapter = fingerprint(loaded.model), None
        if lora is not None:
            adapter = new_adapter(loaded, lora, arguments.seed, arguments.model)
        on_gpu = next(loaded.model.parameters()).on_gpu
        with advise_on_memory(on_gpu, self.memory_advice(config, on_gpu)):
            check_training_memory(finetuning_bytes(config, self.dataset, adapter or loaded.model), on_gpu)
        if adapter is None:
            loaded.model = initialize_from(loaded.model, config)
        loaded.model.use_precision(config.precision)
        if isinstance(self.held_out, HeldOutPairs):  # an adapter that has learnt nothing yet changes nothing
            compute_reference_logprobs(loaded.model, [self.dataset, self.held_out.dataset])
        state = self._new_state(config, adapter, base)
        print_summary(examples, self.dataset, state, arguments)
        self._begin_or_resume(state, run, examples)
        self.patience = arguments.patience
        return state

    def _split(self, examples: ExampleSplit, window: int) -> None:
        """Make the datasets of what is learnt from, and of what is held out."""
        arguments, loaded = self.arguments, self.loaded
        order = arguments.batch_size, window, arguments.seed
        n_held = arguments.eval_batches * arguments.batch_size
        if arguments.loss == "dpo":
            pairs = PairDataset(examples.held_out[: 2 * n_held], *order)
            self.dataset, self.held_out = PairDataset(examples.train, *order), HeldOutPairs(pairs, arguments.beta)
            return
        joined_view = arguments.pack and packs(loaded.model)
        rows = PackedDataset(examples.held_out, *order, joined_view)
        self.dataset = PackedDataset(examples.train, *order, joined_view)
        self.held_out = HeldOutRows.of(rows, n_held, loaded.tokeniser)

    def _new_state(self, config: GPTConfig, adapter: Adapter | None, base: str) -> TuningState:
        arguments, model = self.arguments, self.loaded.model
        model.recompute = checkpoint_activations if config.recompute else None
        model.train()
        dataset: Any = self.dataset
        beta = arguments.beta if arguments.loss == "dpo" else 0.0
        state = TuningState(
            config, model, new_optimiser(config), dataset, adapter=adapter, loaded=self.loaded, base=base, beta=beta
        )
        state.total_steps = config.steps
        return state

    def _begin_or_resume(self, state: TuningState, run: Run, examples: ExampleSplit) -> None:
        """Resume from the last checkpoint; or measure and sample the model as it is, and write the first files.

        Raises:
            ValueError: the data or the model have changed since the run began.
        """
        path = run.folder / "data.json"
        if path.is_file() and run.last.exists():
            description = read_json_object(path)
            self._check_unchanged(description, state, run, examples)
            before = description.get("before", {})
            self.before = {"held_out_loss": before.get("loss", math.nan), **before}
            self.prompts = read_prompts(path, description)
            checkpoint = load_checkpoint(run.last)
            if checkpoint.config != state.config:
                raise ValueError(f"{run.last}: expected a checkpoint of this run's settings, got another's")
            state.read(checkpoint)
            state.restore(checkpoint)
            print(f"run folder: {run.folder}, going on after step {state.step}")
            return
        print(f"run folder: {run.folder}")
        run.samples.unlink(missing_ok=True)  # of a session that ended before there was a checkpoint
        self.before = self.measure(state)
        print(f"before: held-out loss {self.figures_text(self.before)} ({self.held_out.size})")
        self.prompts = _prompts(self.arguments, examples)
        self._write_samples(run, "before")
        description = {"data": "finetune", "files": [], "tokeniser": "own", "corpus": examples.digest}
        description |= {"base": state.base, "arguments": _as_json(self.arguments)}
        description |= {"before": {"loss": self.before["held_out_loss"], **self.before}}
        description["prompts"] = [[text, ids] for text, ids in self.prompts]
        write_run_description(run.folder, state.config, description, run.tokeniser)

    def _check_unchanged(
        self, description: Mapping[str, Any], state: TuningState, run: Run, examples: ExampleSplit
    ) -> None:
        if description.get("corpus") != examples.digest:
            raise ValueError(f"{run.folder}: expected the data that it was trained on, which have changed since")
        if description.get("base", state.base) != state.base:
            raise ValueError(
                f"{run.folder}: expected the model that it began with, {self.arguments.model} has changed since"
            )

    def facts(self, state: TrainingState) -> dict[str, Any]:
        flags = {name: value for name, value in _as_json(self.arguments).items() if name != "track"}
        return {**flags, **state.config.to_dict()}

    def memory_advice(self, config: GPTConfig, on_gpu: bool) -> str:
        arguments = self.arguments
        ways = [] if arguments.recompute else ["take --recompute"]
        if arguments.batch_size > 1:
            ways.append(f"lower --batch-size (now {arguments.batch_size}; --accumulation-steps makes up for it)")
        ways.append(f"lower --context-window (now {self.dataset.window})")
        if arguments.method == "all":
            ways.append("take --method lora")
        elif arguments.weights == "float32":
            ways.append("take --weights bfloat16 or int8")
        return ", or ".join(ways)

    def measure(self, state: TrainingState) -> dict[str, float]:
        return self.held_out.measure(state.model)

    def figures_text(self, figures: Mapping[str, float]) -> str:
        return self.held_out.figures_text(figures)

    def _write_samples(self, run: Run, title: str) -> None:
        if self.prompts and self.arguments.sample_tokens:
            write_samples(self.loaded, run, title, self.prompts, self.arguments.sample_tokens)

    def report(self, state: Any, run: Run) -> None:
        if state.evaluated_step != state.step:
            estimate(state, run, self)
        checkpoint = load_checkpoint(run.best)
        state.read(checkpoint)
        best_step = checkpoint.about["progress"]["step"]
        metrics = read_metrics(run.metrics)
        after = next((line for line in metrics if "held_out_loss" in line and line["step"] == best_step), {})
        self._write_samples(run, "after")
        path, is_dpo = run.folder / "loss.png", isinstance(self.held_out, HeldOutPairs)
        bits_per_nat = 1.0 if is_dpo else after.get("bits_per_byte", math.nan) / (state.best_loss or math.nan)
        unit = "nats a pair (DPO)" if is_dpo else "bits a byte"
        title = f"{sum(parameter.size for parameter in state.saved_module().parameters()):,} parameters learn"
        picture = run.write(lambda: plot_losses(metrics, path, bits_per_nat, {}, title, unit))
        print(
            f"\n{state.total_steps} updates, {state.seconds / 60:.1f} minutes of training; the best: step {best_step}"
        )
        text = self.figures_text({**after, "held_out_loss": state.best_loss})
        print(f"held-out loss before: {self.figures_text(self.before)}; after: {text}")
        print(f"loss curve: {picture}; samples: {run.samples}")
        self._print_next_commands(run.folder)

    def _print_next_commands(self, folder: Path) -> None:
        talks = bool(self.loaded.tokeniser.chat_template)
        verb = command_name("chat" if talks else "generate", self.command)
        if self.arguments.method == "all":
            print(f"{'talk' if talks else 'generate'} with\n  {verb} {shlex.quote(folder.as_posix())}")
            return
        adapter = shlex.quote((folder / ADAPTER).as_posix())
        model = shlex.quote(self.arguments.model)
        print(f"{'talk' if talks else 'generate'} with\n  {verb} {model} --adapter {adapter}")
        export = command_name("export", self.command)
        print(f"write a whole model with\n  {export} {model} FOLDER --adapter {adapter}")


def _lora_config(arguments: Arguments) -> LoRAConfig | None:
    if arguments.method != "lora":
        return None
    flags = {"rank_stabilised": arguments.rank_stabilised, "dora": arguments.dora}
    return LoRAConfig(arguments.rank, arguments.alpha, arguments.targets, arguments.lora_dropout, **flags)


def check_record_kinds(loss: str, records: Sequence[Record]) -> None:
    """
    Raises:
        ValueError: records that the loss does not learn from; names the first.
    """
    for record in records:
        if loss == "dpo" and record.kind not in PREFERENCES:
            raise ValueError(f'{record.source}: expected "chosen" and "rejected" with --loss dpo, got another shape')
        if loss != "dpo" and record.kind in PREFERENCES:
            raise ValueError(
                f'{record.source}: "chosen" and "rejected" are learnt from with --loss dpo, got --loss {loss}'
            )


def compute_reference_logprobs(model: GPT, datasets: Sequence[Any]) -> None:
    """Measure the reference log-probabilities of all answers, once, before training."""
    say(f"reference: how likely the model takes {sum(2 * pairs.n_items for pairs in datasets):,} answers for, as it is")
    for pairs in datasets:
        pairs.measure_reference(model)


def fingerprint(model: GPT) -> str:
    """Return a digest of some rows of each weight, which tells a changed or another model apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        array: Any = parameter.array
        parts = [array.values, array.scales] if isinstance(array, QuantizedMatrix) else [to_cpu(array)]
        for values in parts:
            if values is not None:
                rows = np.ascontiguousarray(values[:: max(1, len(values) // ROWS_LOOKED_AT)])
                digest.update(f"{name} {values.shape} {values.dtype}".encode() + rows.tobytes())
    return digest.hexdigest()


def finetuning_bytes(config: GPTConfig, dataset: PackedDataset, learning: Layer) -> int:
    """Return the bytes of training besides the model: gradients, optimizer state, and a pass over the longest rows."""
    n_rows = config.batch_size * (2 if isinstance(dataset, PairDataset) else 1)
    n_learning = sum(parameter.size for parameter in learning.parameters())
    return 3 * 4 * n_learning + activation_bytes(config, n_rows * dataset.longest_row)


def config_of(arguments: Arguments, loaded: Pretrained, dataset: PackedDataset) -> GPTConfig:
    """Return the config of the run: the shape of the model, and how it is trained."""
    an_epoch = dataset.n_items / (arguments.batch_size * arguments.accumulation_steps)
    steps = arguments.steps or max(1, math.ceil(an_epoch * arguments.epochs))
    rate = arguments.learning_rate or RATES[arguments.method] * (RATE_OF_DPO if arguments.loss == "dpo" else 1)
    own: dict[str, Any] = model_fields(loaded.model.config.to_dict())
    own |= {"precision": arguments.precision, "seed": arguments.seed}
    names = ("batch_size", "accumulation_steps", "warmup_steps", "weight_decay", "max_gradient_norm", "recompute")
    own |= {name: getattr(arguments, name) for name in names}
    return GPTConfig.from_dict(
        {
            **own,
            "optimiser": "adamw",
            "steps": steps,
            "minutes": 0.0,
            "max_learning_rate": rate,
            "min_learning_rate": 0.0,
            "beta2": 0.999,
            "eval_interval": arguments.eval_interval or max(1, steps // ESTIMATES),
            "eval_batches": arguments.eval_batches,
            "sample_interval": 0,
        }
    )


def print_summary(examples: ExampleSplit, dataset: PackedDataset, state: TuningState, arguments: Arguments) -> None:
    encoder = examples.encoder
    rows = "pairs" if isinstance(dataset, PairDataset) else "rows"
    print(
        f"data: {examples.n_records:,} records; {len(examples.train):,} examples to learn from, "
        f"{dataset.n_tokens:,} tokens of which {dataset.n_labels:,} count, in {dataset.n_items:,} {rows} of at most "
        f"{dataset.window:,}; {len(examples.held_out):,} examples held out"
    )
    if encoder.n_cut or encoder.n_left_out:
        print(
            f"cut off: {encoder.n_cut_tokens:,} tokens of {encoder.n_cut:,} examples (--context-window "
            f"{dataset.window:,}); left out: {encoder.n_left_out:,} with nothing left to learn"
        )
    n_learning = sum(parameter.size for parameter in state.saved_module().parameters())
    n_all = sum(parameter.size for name, parameter in state.model.named_parameters() if ".low_rank." not in name)
    print(f"model: {n_all:,} parameters; {n_learning:,} learn ({arguments.method}), for {state.total_steps:,} updates")


def _prompts(arguments: Arguments, examples: ExampleSplit) -> list[tuple[str, list[int]]]:
    if not arguments.sample_tokens:
        return []
    if not arguments.prompts:
        return examples.prompts[:3]
    tokeniser = examples.encoder.tokeniser
    if examples.kinds <= {"messages", "chat preference"}:
        return [(text, tokeniser.chat([{"role": "user", "content": text}])) for text in arguments.prompts]
    return [(text, examples.encoder.encode_prompt(text)) for text in arguments.prompts]


def read_prompts(path: Path, description: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Return the prompts of the samples that were drawn before training.

    Raises:
        ValueError: data.json does not say them as a run writes it.
    """
    prompts = []
    for pair in description.get("prompts", []):
        sound = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], list)
        if not sound or not all(type(token) is int for token in pair[1]):
            raise ValueError(f"{path}: expected prompts of a text and ids, got {reprlib.repr(pair)}")
        prompts.append((pair[0], pair[1]))
    return prompts
