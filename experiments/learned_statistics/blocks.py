"""A model with block softmax, and the kinds of scales that combine the blocks.

Shapes: N rows, T tokens, W window, L layers, H heads, n blocks.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.shared.results import Record
from tricycle.devices import to_cpu
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.softmaxes import BlockSoftmax
from tricycle.system.files import atomic_write
from tricycle.tensor import Tensor, no_grad
from tricycle.training import BatchLossFn, train_on_batch
from tricycle_lab.probe import Probe

# Which scales there are in each layer: whether each head has its own, and whether each position has.
GRAINS = {"layer": (False, False), "head": (True, False), "position": (False, True), "head and position": (True, True)}
STARTS = ("1", "1 / k", "mean")  # of the exact shares


class Job(NamedTuple):
    """A softmax variant, and the origin of its scales."""

    kind: str  # "whole", "none", "exact", "1 / k", "mean" or "learned"
    blocks: int = 1
    grain: str = ""  # in GRAINS, of those with scales ("mean" and "learned")
    text: str = ""
    start: str = ""  # for "learned": in STARTS; `text`, `rate` and `seed` are those of its training
    rate: float = 0.0
    seed: int = 0

    @property
    def file_name(self) -> str:
        """Return the name of the job's scale file, without its suffix."""
        return "-".join(str(value) for value in self if value not in ("", 0.0)).replace(" / ", "_").replace(" ", "_")


def job_of(row: dict[str, Any]) -> Job:
    """Return the job of a result row, which must have all fields of Job."""
    return Job(**{name: row[name] for name in Job._fields})


class ResultRows(Record):
    """The content of results.json, with a row for each finished job."""

    def row(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return the first row that has all these values; None if there is none."""
        return next((row for row in self["rows"] if values.items() <= row.items()), None)

    def add(self, values: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
        """Append a row {**values, **measured}, save the file, and return the row."""
        self.append("rows", values | measured)
        return self["rows"][-1]


class FrozenModel(NamedTuple):
    """A frozen model and its texts.

    Attributes:
        rows: returns windows (N, W + 1), evenly spread, of a text by its name, "train" or "test", and N.
    """

    model: GPT
    tokeniser: Any
    window: int
    rows: Callable[[str, str, int], np.ndarray]


def digest(model: GPT) -> str:
    """Return the SHA-256 of the names and bytes of all parameters but the scales, as hexadecimal digits."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not name.endswith("softmax_scales"):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(to_cpu(parameter.array)).data)
    return sha.hexdigest()


# -------------------------------------------------------------------- blocks and their scales
def use_block_softmax(model: GPT, job: Job, arrays: Sequence[np.ndarray] = ()) -> list[Tensor]:
    """Install a job's softmax in every attention layer, in place; return the scales' parameters, [] if no arrays.

    Args:
        arrays: the scales of each layer, if the job has scales.
    """
    per_head, per_position = GRAINS[job.grain or "position"]
    correction = job.kind if job.kind in ("none", "exact") else "learned"
    for block in model.blocks:
        softmax = BlockSoftmax(job.blocks, correction, per_head, per_position=per_position)
        block.attention.use_softmax("softmax" if job.kind == "whole" else softmax)
    scales = [block.attention.softmax_scales for block in model.blocks]
    for parameter, array in zip(scales, arrays, strict=bool(arrays)):
        parameter.array[...] = parameter.xp.asarray(array)
    return scales if arrays else []


def block_starts(n_blocks: int, window: int) -> np.ndarray:
    """Return the first key of each block, as `BlockSoftmax` divides the keys; it may be fewer than `n_blocks`."""
    return np.arange(0, window, max(1, -(-window // n_blocks)))


def equal_shares(n_blocks: int, window: int) -> np.ndarray:
    """Return float32 scales (n_blocks, W) of 1 / k at each position, where k blocks are visible to it."""
    n_seen = np.searchsorted(block_starts(n_blocks, window), np.arange(window), side="right")
    return np.tile(1 / n_seen, (n_blocks, 1)).astype(np.float32)


def first_scales(job: Job, n_layers: int, n_heads: int, window: int) -> list[np.ndarray]:
    """Return initial scales of each layer, ([H,] n, W or n): all 1 if `job.start` is "1", else 1 / k."""
    per_head, per_position = GRAINS[job.grain or "position"]
    array = equal_shares(job.blocks, window if per_position else job.blocks)
    if job.start == "1":
        array = np.ones_like(array)
    return [np.tile(array, (n_heads, 1, 1)) if per_head else array] * n_layers


def train_scales(
    frozen: FrozenModel, job: Job, steps: int, batch_size: int, first: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[float]]:
    """Train only block softmax's scales; return (them by layer, losses by batch); RuntimeError if other weights change.

    Args:
        first: the first scales of each layer.

    Raises:
        RuntimeError: anything but scales changed.
    """
    model = frozen.model
    before = digest(model)
    scales = use_block_softmax(model, job, first)
    rows = frozen.rows(job.text, "train", 4 * steps * batch_size)
    chosen = np.random.default_rng(job.seed).permutation(len(rows))[: steps * batch_size].reshape(steps, -1)
    optimiser = AdamW(WarmupCosine(job.rate, 0.0, 0, steps), weight_decay=0.0)
    losses = []
    with tqdm(chosen, desc=job.file_name, unit="step", position=1, leave=False, dynamic_ncols=True) as bar:
        for index in bar:
            losses.append(float(train_on_batch(model, optimiser, batch_loss(model), rows[index])))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    if digest(model) != before:
        raise RuntimeError(f"{job.file_name}: expected the model's own weights to stay as they are; some changed")
    return [np.array(to_cpu(parameter.array)) for parameter in scales], losses


def batch_loss(model: GPT) -> BatchLossFn:
    """Return a function (rows (B, T + 1), factor) that computes the next-token loss times the factor."""

    def loss(rows: Any, factor: Any) -> Tensor:
        return model.loss(model.place(rows[:, :-1]), model.place(rows[:, 1:]), None, factor)

    return loss


# -------------------------------------------------------------------- exact shares
class Shares(NamedTuple):
    """The exact softmax share of each block: sums and means over windows of a text."""

    mean: dict[int, np.ndarray]  # by the number of blocks, (L, H, n, W)
    square: dict[int, np.ndarray]  # the mean of their squares


def exact_shares(frozen: FrozenModel, rows: np.ndarray, blocks: Sequence[int]) -> Shares:
    """Return means and mean squares of each block's softmax share over rows (N, W + 1); install full softmax."""
    use_block_softmax(frozen.model, Job("whole"))
    mean: dict[int, Any] = dict.fromkeys(blocks, 0.0)
    square: dict[int, Any] = dict.fromkeys(blocks, 0.0)
    for row in tqdm(rows, desc="exact shares", unit="window", position=1, leave=False, dynamic_ncols=True):
        weights = attention_of(frozen.model, row[None, :-1]).values()
        for n in blocks:
            edges = block_starts(n, frozen.window)
            here = np.stack([np.add.reduceat(array[0], edges, axis=-1) for array in weights])
            shares = np.zeros((*here.shape[:2], n, frozen.window))  # some blocks may have no keys
            shares[:, :, : len(edges)] = here.swapaxes(2, 3)
            mean[n] = mean[n] + shares / len(rows)
            square[n] = square[n] + shares**2 / len(rows)
    return Shares({n: value.astype(np.float32) for n, value in mean.items()}, square)


def attention_of(model: GPT, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return {layer: attention weights (B, H, T, T) on the CPU} for tokens (B, T)."""
    with model.evaluating(), Probe(model, "blocks.*.attention") as probe, no_grad():
        model.hidden_states(model.place(rows))
    return {name: to_cpu(weights) for name, weights in probe.weights.items()}


def average_scales(mean: np.ndarray, grain: str) -> np.ndarray:
    """Return shares (L, H, n, W) as the scales of a grain: (L, [H,] n, W or n)."""
    per_head, per_position = GRAINS[grain]
    n, window = mean.shape[2:]
    if not per_position:
        edges = block_starts(n, window)
        sizes = np.diff([*edges, window])
        of_blocks = np.zeros((*mean.shape[:2], n, n), mean.dtype)
        of_blocks[..., : len(edges)] = np.add.reduceat(mean, edges, axis=-1) / sizes
        mean = of_blocks
    return mean if per_head else mean.mean(axis=1)


# -------------------------------------------------------------------- the evaluator
class VariantEvaluator:
    """A model and its softmax in all variants. Scales are stored in files once they are found.

    Args:
        folder: of the files.
        steps, batch_size: of the learning of scales.
        n_measured: windows of the training text, for the mean of the exact shares.
        blocks: numbers of blocks for which shares are measured.
    """

    def __init__(
        self, frozen: FrozenModel, folder: Path, steps: int, batch_size: int, n_measured: int, blocks: Sequence[int]
    ) -> None:
        self.frozen, self.folder, self.blocks = frozen, folder, tuple(dict.fromkeys(blocks))
        self.steps, self.batch_size, self.n_measured = steps, batch_size, n_measured
        self._shares: dict[str, Shares] = {}

    def prepare(self, job: Job) -> list[float]:
        """Install a job's softmax with its scales in the model; return the losses of training the scales."""
        arrays, losses = self.scales(job)
        use_block_softmax(self.frozen.model, job, arrays)
        return losses

    def scales(self, job: Job) -> tuple[list[np.ndarray], list[float]]:
        """Return (scales by layer, training losses), trained unless stored in a file; ([], []) without scales."""
        if job.kind in ("whole", "none", "exact"):
            return [], []
        if job.kind == "1 / k":
            return self.first(job._replace(start="1 / k")), []
        if job.kind == "mean":
            return list(average_scales(self.shares(job.text).mean[job.blocks], job.grain)), []
        path = self.folder / f"{job.file_name}.npz"
        if not path.exists():
            arrays, losses = train_scales(self.frozen, job, self.steps, self.batch_size, self.first(job))
            with atomic_write(path) as file:
                np.savez(file, np.array(losses), *arrays)
        with np.load(path, allow_pickle=False) as file:
            losses, *arrays = file.values()
        return arrays, losses.tolist()

    def first(self, job: Job) -> list[np.ndarray]:
        """Return the initial scales of each layer, which `job.start` selects."""
        if job.start == "mean":
            return self.scales(Job("mean", job.blocks, job.grain, job.text))[0]
        config = self.frozen.model.config
        return first_scales(job, config.n_layers, config.n_heads, self.frozen.window)

    def shares(self, text: str) -> Shares:
        """Return the exact block shares of a training text, computed and stored unless their file exists."""
        if text not in self._shares:
            path = self.folder / f"shares-{text}-{'-'.join(map(str, self.blocks))}.npz"
            if not path.exists():
                rows = self.frozen.rows(text, "train", self.n_measured)
                shares = exact_shares(self.frozen, rows, self.blocks)._asdict()
                with atomic_write(path) as file:
                    np.savez(file, **{f"{part}-{n}": array for part in shares for n, array in shares[part].items()})
            with np.load(path, allow_pickle=False) as file:
                self._shares[text] = Shares(*({n: file[f"{p}-{n}"] for n in self.blocks} for p in Shares._fields))
        return self._shares[text]
