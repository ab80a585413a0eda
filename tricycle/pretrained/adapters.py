"""Adapters in the form of the library `peft`: adapter_config.json and adapter_model.safetensors.

    loaded = load("smollm2")
    adapter = new_adapter(loaded, LoRAConfig(rank=8))       # and train the model, or
    adapter = load_adapter(loaded, "folder")
    save_adapter(adapter, "folder")

The tensors have the names that Hugging Face's model of that family gives its layers. A model of Tricycle's own that no
family there can express has its own names, and nobody but Tricycle reads its adapters.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle.finetuning.lora import ALL_LINEAR, Adapter, LoRAConfig, LoRATarget, LowRankUpdate
from tricycle.layers import Dense
from tricycle.pretrained import Pretrained
from tricycle.pretrained.export import family_of_config, write_json
from tricycle.pretrained.families import find_family
from tricycle.pretrained.families.family import Family, TensorMapping, abbreviate_names
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.pretrained.stored_model import StoredTensor, error_prefix
from tricycle.system.files import atomic_write, read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B|magnitude_vector)(?:\.weight)?")
# Of adapter_config.json: what changes how an adapter computes, and what it must be to be read here.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base's own matrices
}


class Place(NamedTuple):
    """A layer that can have an adapter: its name as others call it, the layer of ours that contains it, its columns."""

    name: str
    layer: str
    start: int
    stop: int


# -------------------------------------------------------------------- places
class Places:
    """The layers of a model that adapters can stand on, by other people's names.

    Args:
        loaded: the model; where its files say what family it is, their names are used, else those of the family of
            `transformers` that computes the same, else our own.
    """

    def __init__(self, loaded: Pretrained) -> None:
        self.model = loaded.model
        self.family: Family | None = None
        if loaded.source is not None:
            self.family = find_family(loaded.source)
        else:
            with suppress(ValueError):  # no family computes the same
                self.family = family_of_config(loaded.model.config)[0]
        self.layout = None if self.family is None else TensorMapping(self.family, loaded.model)
        self.all: list[Place] = []
        for name, layer in self.model.named_layers():
            if isinstance(layer, Dense):
                try:
                    hf_tensors = [] if self.layout is None else self.layout.hf_tensors(f"{name}.weights")
                except KeyError:  # the family has no name for it
                    hf_tensors = []
                places = [(p.name.removesuffix(".weight"), p.columns.start, p.columns.stop) for p in hf_tensors]
                for theirs, start, stop in places or [(name, 0, layer.to_size)]:
                    self.all.append(Place(theirs, name, start, stop))
        self.by_name = {place.name: place for place in self.all}

    def chosen(self, targets: Iterable[str]) -> list[Place]:
        """Those that names mean, which are whole names or their ends.

        Raises:
            ValueError: a name that means none.
        """
        chosen: set[str] = set()
        for target in targets:
            if target == ALL_LINEAR:
                meant = [place.name for place in self.all if place.layer.startswith("blocks.")]
            else:
                meant = [place.name for place in self.all if f".{place.name}".endswith(f".{target}")]
            if not meant:
                known = sorted({place.name.rpartition(".")[2] for place in self.all})
                raise ValueError(f"expected targets among {ALL_LINEAR}, {', '.join(known)}, got {target!r}")
            chosen.update(meant)
        return [place for place in self.all if place.name in chosen]

    def to_theirs(self, place: Place, up: np.ndarray) -> np.ndarray:
        """A matrix B of ours (r, out) as theirs (out, r)."""
        theirs = np.empty(up.shape[::-1], up.dtype)
        views, ours = self._views(place, theirs, up)
        views[...] = ours
        return theirs

    def to_ours(self, place: Place, theirs: np.ndarray) -> np.ndarray:
        """The way back."""
        up = np.empty(theirs.shape[::-1], np.float32)
        parts, ours = self._views(place, theirs, up)
        ours[...] = parts
        return up

    def _views(self, place: Place, theirs: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the same shape and the same meaning."""
        if self.layout is None or not self.layout.is_interleaved(place.layer + ".weights"):
            return theirs, up.T
        ours, parts = self.layout.views_by_head(up, theirs)
        return parts, ours


# -------------------------------------------------------------------- new ones
def new_adapter(loaded: Pretrained, config: LoRAConfig | None = None, seed: int = 0, base_name: str = "") -> Adapter:
    """A fresh adapter, on the model, which computes as before until it has learnt something.

    Args:
        seed: decides A.
        base_name: what the files are to say about where the model comes from.

    Raises:
        ValueError: targets that the model has not got; or there is an adapter on it.
    """
    config = config or LoRAConfig()
    scale = _scale(config.alpha, config.rank, config.rank_stabilised)
    with error_prefix("new_adapter: "):
        places = Places(loaded).chosen(config.targets)
    parts = [(place, LoRATarget(place.name, place.start, place.stop, config.rank, scale)) for place in places]
    return Adapter(loaded.model, _low_ranks(loaded.model, parts, config, seed), config, base_name).attach()


def _scale(alpha: float, rank: int, rank_stabilised: bool) -> float:
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def _low_ranks(
    model: Any, parts: list[tuple[Place, LoRATarget]], config: LoRAConfig, seed: int
) -> dict[str, LowRankUpdate]:
    """By our layers' names. Dropout is drawn by the model's own generator, which checkpoints keep."""
    by_layer: dict[str, list[LoRATarget]] = {}
    for place, part in parts:
        by_layer.setdefault(place.layer, []).append(part)
    layers = dict(model.named_layers())
    generator = np.random.default_rng(seed)
    low_ranks = {}
    for name, own in by_layer.items():
        own.sort(key=lambda part: part.start)
        base = layers[name]
        low_ranks[name] = LowRankUpdate(base.from_size, base.to_size, own, config.dropout, generator)
        if config.dora:
            low_ranks[name].init_dora_magnitudes(base)
        low_ranks[name].dropout.generator = model.generator
    return low_ranks


# -------------------------------------------------------------------- writing
def save_adapter(adapter: Adapter, loaded: Pretrained, folder: str | os.PathLike[str]) -> None:
    """Write its two files, each whole or not at all.

    Raises:
        ValueError: a number that is not finite; nothing is written then.
    """
    folder = Path(folder)
    places = Places(loaded)
    tensors = _tensors(adapter, places)
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise ValueError(f"save_adapter: expected finite numbers, {name} has NaN or infinity")
    with atomic_write(folder / WEIGHTS) as file:
        write_tensors(file, {name: array.shape for name, array in tensors.items()}, tensors.items(), "F32")
    write_json(folder / CONFIG, _fields(adapter, places))


def _tensors(adapter: Adapter, places: Places) -> dict[str, np.ndarray]:
    tensors = {}
    for low_rank in adapter.low_ranks.values():
        for part, ranks, up in low_rank.factors():
            name = f"{PREFIX}{part.name}"
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(low_rank.down.numpy()[:, ranks].T)
            theirs = places.to_theirs(places.by_name[part.name], up.numpy())
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(theirs)
        for part, magnitude in zip(low_rank.targets, low_rank.magnitudes):
            theirs = places.to_theirs(places.by_name[part.name], magnitude.numpy()[None])
            tensors[f"{PREFIX}{part.name}.lora_magnitude_vector"] = np.ascontiguousarray(theirs[:, 0])
    return tensors


def _fields(adapter: Adapter, places: Places) -> dict[str, Any]:
    """Of adapter_config.json."""
    config = adapter.config
    parts = [part for low_rank in adapter.low_ranks.values() for part in low_rank.targets]
    names = {part.name for part in parts}
    ends = sorted({name.rpartition(".")[2] for name in names})  # the shortest names, if they mean no others
    meant = {place.name for place in places.all if place.name.rpartition(".")[2] in ends}
    alphas = {p.name: p.scale * (math.sqrt(p.rank) if config.rank_stabilised else p.rank) for p in parts}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_name or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": ends if meant == names else sorted(names),
        "use_rslora": config.rank_stabilised,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": places.family is not None and places.family.fan_in_fan_out,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
        "rank_pattern": {part.name: part.rank for part in parts if part.rank != config.rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if not math.isclose(a, config.alpha, rel_tol=1e-6)},
    }


# -------------------------------------------------------------------- reading
def load_adapter(loaded: Pretrained, folder: str | os.PathLike[str]) -> Adapter:
    """An adapter from files in PEFT's form, on the model. Nothing in them is executed.

    Args:
        folder: of the two files, or a run folder that holds one called adapter.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: one line about what is wrong: a kind that is not known here, tensors that do not fit the model, or
            an adapter that is on it already.
    """
    folder = adapter_folder(Path(folder))
    fields = read_json_object(folder / CONFIG)
    tensors, _ = read_tensors(folder / WEIGHTS)
    places = Places(loaded)
    with error_prefix(f"{folder}: "):
        config = _config_of(fields)
        pairs = _pairs(tensors, config.dora)
        parts = _parts(pairs, places, config, fields)
    low_ranks = _low_ranks(loaded.model, parts, config, 0)
    for low_rank in low_ranks.values():
        for number, (part, ranks, up) in enumerate(low_rank.factors()):
            down, theirs, *lengths = (np.asarray(tensor.read(), np.float32) for tensor in pairs[part.name])
            if not all(np.isfinite(array).all() for array in (down, theirs, *lengths)):
                raise ValueError(f"{folder}: {part.name}: expected finite numbers, got NaN or infinity")
            place = places.by_name[part.name]
            low_rank.down.array[:, ranks] = down.T
            up.array[...] = places.to_ours(place, theirs)
            if lengths:
                low_rank.magnitudes[number].array[...] = places.to_ours(place, lengths[0][:, None])[0]
    name = fields.get("base_model_name_or_path")
    return Adapter(loaded.model, low_ranks, config, name if isinstance(name, str) else "").attach()


def adapter_folder(folder: Path) -> Path:
    """Where the files lie: in a folder, or in the one called adapter in it.

    Raises:
        FileNotFoundError: in neither.
    """
    for place in (folder, folder / "adapter"):
        if (place / CONFIG).is_file() and (place / WEIGHTS).is_file():
            return place
    raise FileNotFoundError(f"{folder}: expected an adapter, a folder with {CONFIG} and {WEIGHTS}")


def _config_of(fields: Mapping[str, Any]) -> LoRAConfig:
    """Return what the fields describe; raise ValueError for a kind of adapter that is not known here."""
    for name, allowed in MUST_BE.items():
        if name in fields and not any(fields[name] == value and type(fields[name]) is type(value) for value in allowed):
            raise ValueError(f"{CONFIG}: expected {name} to be {allowed[0]!r}, got {fields[name]!r:.60}")
    if "peft_type" not in fields:
        raise ValueError(f"{CONFIG}: expected peft_type to be 'LORA', it is not there")
    targets = fields.get("target_modules")
    names = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    dropout = fields.get("lora_dropout", 0.0)
    values = {"rank": fields.get("r", 8), "alpha": fields.get("lora_alpha", 8), "dropout": dropout}
    kinds = {"rank_stabilised": fields.get("use_rslora") or False, "dora": fields.get("use_dora") or False}
    return LoRAConfig(**values, **kinds, targets=tuple(names) or (ALL_LINEAR,))


def _pairs(tensors: Mapping[str, StoredTensor], dora: bool) -> dict[str, tuple[StoredTensor, ...]]:
    """A and B, and of DoRA the lengths, by the names of their layers.

    Raises:
        ValueError: a tensor of another name, or one that is missing.
    """
    kinds = ("A", "B", "magnitude_vector") if dora else ("A", "B")
    sets: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None or match[2] not in kinds:
            wanted = f"{PREFIX}*.lora_A.weight and lora_B.weight{' and lora_magnitude_vector' if dora else ''}"
            raise ValueError(f"{WEIGHTS}: expected tensors {wanted}, got {name:.120}")
        sets.setdefault(match[1], {})[match[2]] = tensor
    for name, own in sets.items():
        if len(own) < len(kinds):
            raise ValueError(f"{WEIGHTS}: expected {', '.join(kinds)} of {name}, got {', '.join(sorted(own))} alone")
    if not sets:
        raise ValueError(f"{WEIGHTS}: expected tensors, got none")
    return {name: tuple(own[kind] for kind in kinds) for name, own in sets.items()}


def _parts(
    pairs: Mapping[str, tuple[StoredTensor, ...]], places: Places, config: LoRAConfig, fields: dict[str, Any]
) -> list[tuple[Place, LoRATarget]]:
    """Return where each pair belongs; raise ValueError for layers that the model has not got, or of other sizes."""
    strange = [name for name in pairs if name not in places.by_name]
    if strange:
        some = abbreviate_names(strange)
        raise ValueError(f"expected an adapter of this model, got one for layers that it has not got: {some}")
    layers = dict(places.model.named_layers())
    parts = []
    for name, (down, up, *lengths) in pairs.items():
        place = places.by_name[name]
        size = layers[place.layer].from_size
        rank = down.shape[0] if len(down.shape) == 2 else 0
        wanted = (rank, size), (place.stop - place.start, rank)
        if rank < 1 or (down.shape, up.shape) != wanted:
            shapes = f"(r, {size}) and ({place.stop - place.start}, r)"
            raise ValueError(
                f"expected an adapter of this model, {name} of shapes {shapes}, got {down.shape} and {up.shape}"
            )
        if lengths and lengths[0].shape != up.shape[:1]:
            raise ValueError(f"expected lengths of {name} of shape {up.shape[:1]}, got {lengths[0].shape}")
        alpha = _of_pattern(fields.get("alpha_pattern"), name, config.alpha)
        parts.append(
            (place, LoRATarget(name, place.start, place.stop, rank, _scale(alpha, rank, config.rank_stabilised)))
        )
    return parts


def _of_pattern(patterns: Any, name: str, otherwise: float) -> float:
    """What a layer has of its own. Patterns are names or their ends here: a stranger's regular expressions may take for
    ever.

    Raises:
        ValueError: one that is more than a name, or stands for no number.
    """
    for pattern, value in (patterns or {}).items() if isinstance(patterns, dict) else ():
        if not re.fullmatch(r"[\w.]+", pattern) or type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(
                f"{CONFIG}: expected names and numbers as alpha_pattern, got {pattern!r:.50}: {value!r:.50}"
            )
        if f".{name}".endswith(f".{pattern}"):
            return float(value)
    return otherwise
