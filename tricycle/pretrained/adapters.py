"""LoRA adapters in the format of the library `peft`: adapter_config.json and adapter_model.safetensors.

    loaded = load("smollm2")
    adapter = new_adapter(loaded, LoRAConfig(rank=8))       # and train the model, or
    adapter = load_adapter(loaded, "folder")                # or "adapter.gguf"
    save_adapter(adapter, loaded, "folder")
    save_gguf_adapter(adapter, loaded, "adapter.gguf")      # for llama.cpp

Tensors are named after the layers of the Hugging Face model of the same family. If no family computes what a model
does, they have Tricycle's names, and only Tricycle can read them.
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

from tricycle.experts import MixtureOfExperts
from tricycle.finetuning.lora import ALL_LINEAR, Adapter, LoRAConfig, LoRATarget, LowRankUpdate
from tricycle.layers import Dense
from tricycle.pretrained import Pretrained
from tricycle.pretrained.export import find_export_family, write_json
from tricycle.pretrained.families import find_family
from tricycle.pretrained.families.family import Family, TensorMapping, abbreviate_names
from tricycle.pretrained.gguf_adapters import LowRankFactors, find_architecture, read_gguf_adapter, write_gguf_adapter
from tricycle.pretrained.gguf_names import AttentionHeads
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.pretrained.stored_model import StoredTensor, error_prefix
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.system.files import atomic_write, read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B|magnitude_vector)(?:\.weight)?")
# Of PEFT, which expects methods of a text generator unless the model is an encoder.
TASK_TYPES: dict[type, str] = {TextEncoder: "FEATURE_EXTRACTION", EncoderDecoderTransformer: "SEQ_2_SEQ_LM"}
# Fields of adapter_config.json that change what an adapter computes, and their supported values.
REQUIRED_FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base weights
}


class TargetModule(NamedTuple):
    """A linear layer of a Hugging Face model: its name, the Tricycle layer that contains it, its columns there."""

    name: str
    layer: str
    start: int
    stop: int


# -------------------------------------------------------------------- target modules
class TargetModules:
    """The linear layers of a model that can have adapters, by their names in the Hugging Face model.

    Args:
        loaded: the model. The names are those of its family, else of a family of `transformers` that computes the
            same, else Tricycle's.

    Attributes:
        all: the target modules in the order of the model.
        by_name: the target modules by name.
        stacked: prefixes of Tricycle's names of routers and experts whose matrices are one tensor in checkpoints, which
            PEFT does not count as linear layers.
    """

    def __init__(self, loaded: Pretrained) -> None:
        self.model = loaded.model
        self.source = loaded.source
        self.family: Family | None = None
        if loaded.source is not None:
            self.family = find_family(loaded.source)
        else:
            with suppress(ValueError):  # no family computes the same
                self.family = find_export_family(loaded.model.config)[0]
        self.mapping = None if self.family is None else TensorMapping(self.family, loaded.model)
        mixtures = [name for name, layer in self.model.named_layers() if isinstance(layer, MixtureOfExperts)]
        self.stacked: tuple[str, ...] = ()
        if self.family is not None and self.family.stacks:
            self.stacked = tuple(f"{name}.{part}" for name in mixtures for part in ("router", "experts."))
        self.all: list[TargetModule] = []
        for name, layer in self.model.named_layers():
            if isinstance(layer, Dense):
                try:
                    hf_tensors = [] if self.mapping is None else self.mapping.hf_tensors(f"{name}.weights")
                except KeyError:  # the family has no such layer
                    hf_tensors = []
                ranges = [(t.name.removesuffix(".weight"), t.columns.start, t.columns.stop) for t in hf_tensors]
                for hf_name, start, stop in ranges or [(name, 0, layer.to_size)]:
                    self.all.append(TargetModule(hf_name, name, start, stop))
        self.by_name = {module.name: module for module in self.all}

    def select(self, targets: Iterable[str]) -> list[TargetModule]:
        """Return, in model order, modules whose names end with a target, or those of "all-linear", else ValueError.

        A target begins at a component of a dotted name: "q_proj" matches "model.layers.0.self_attn.q_proj".
        "all-linear" matches, as in PEFT, all modules in blocks, without stacked experts and their routers.
        """
        selected: set[str] = set()
        for target in targets:
            if target == ALL_LINEAR:
                in_blocks = [module for module in self.all if ".blocks." in f".{module.layer}"]
                matches = [module.name for module in in_blocks if not module.layer.startswith(self.stacked)]
            else:
                matches = [module.name for module in self.all if f".{module.name}".endswith(f".{target}")]
            if not matches:
                known = sorted({module.name.rpartition(".")[2] for module in self.all})
                raise ValueError(f"expected targets among {ALL_LINEAR}, {', '.join(known)}, got {target!r}")
            selected.update(matches)
        return [module for module in self.all if module.name in selected]

    def gguf_layout(self) -> tuple[str, AttentionHeads]:
        """Return what GGUF adapters depend on: general.architecture and heads; ValueError without an architecture."""
        config = self.model.config
        heads = AttentionHeads(config.n_heads, config.key_heads, config.channels_per_head)
        return find_architecture(self.source, config), heads

    def to_peft(self, module: TargetModule, up: np.ndarray) -> np.ndarray:
        """Return a copy of a module's matrix B (r, out) in PEFT's layout (out, r), with the same dtype."""
        theirs = np.empty(up.shape[::-1], up.dtype)
        for ours, their_part in self._views(module, up, theirs):
            their_part[...] = ours
        return theirs

    def from_peft(self, module: TargetModule, theirs: np.ndarray) -> np.ndarray:
        """Convert a matrix B (out, r) in PEFT's layout to Tricycle's (r, out), in float32."""
        up = np.empty(theirs.shape[::-1], np.float32)
        for ours, their_part in self._views(module, up, theirs):
            ours[...] = their_part
        return up

    def _views(self, module: TargetModule, up: np.ndarray, theirs: np.ndarray) -> Iterable[tuple[Any, Any]]:
        """Return pairs of views (Tricycle's transposed, PEFT's) of a matrix B with equal elements in both layouts."""
        return [(up.T, theirs)] if self.mapping is None else self.mapping.reordered_views(module.name, up.T, theirs)


# -------------------------------------------------------------------- new adapters
def new_adapter(loaded: Pretrained, config: LoRAConfig | None = None, seed: int = 0, base_name: str = "") -> Adapter:
    """Create a LoRA adapter, attach it to the model and freeze all else; results stay the same until training.

    Args:
        config: by default that of `LoRAConfig()`.
        seed: the seed of the random initialization of A.
        base_name: the name of the base model for adapter_config.json.

    Raises:
        ValueError: the model has no such targets, or already has an adapter.
    """
    config = config or LoRAConfig()
    scale = _lora_scale(config.alpha, config.rank, config.rank_stabilised)
    with error_prefix("new_adapter: "):
        modules = TargetModules(loaded).select(config.targets)
    targets = [(module, LoRATarget(module.name, module.start, module.stop, config.rank, scale)) for module in modules]
    return Adapter(loaded.model, _new_low_ranks(loaded.model, targets, config, seed), config, base_name).attach()


def _lora_scale(alpha: float, rank: int, rank_stabilised: bool) -> float:
    """Return the factor of the low-rank update: alpha / r, or alpha / sqrt(r) if rank-stabilized."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def _new_low_ranks(
    model: Any, targets: list[tuple[TargetModule, LoRATarget]], config: LoRAConfig, seed: int
) -> dict[str, LowRankUpdate]:
    """Create a LowRankUpdate per layer, by its name, drawn by `seed`; dropout uses the model's generator."""
    by_layer: dict[str, list[LoRATarget]] = {}
    for module, target in targets:
        by_layer.setdefault(module.layer, []).append(target)
    layers = dict(model.named_layers())
    generator = np.random.default_rng(seed)
    low_ranks = {}
    for name, group in by_layer.items():
        group.sort(key=lambda target: target.start)
        base = layers[name]
        low_ranks[name] = LowRankUpdate(base.from_size, base.to_size, group, config.dropout, generator)
        if config.dora:
            low_ranks[name].init_dora_magnitudes(base)
        low_ranks[name].dropout.generator = model.generator
    return low_ranks


# -------------------------------------------------------------------- writing
def save_adapter(adapter: Adapter, loaded: Pretrained, folder: str | os.PathLike[str]) -> None:
    """Write or replace adapter_config.json and adapter_model.safetensors (PEFT) in a folder; ValueError for NaN or inf.

    Each file is written atomically.

    Raises:
        ValueError: a weight is not finite; nothing is written.
    """
    folder = Path(folder)
    modules = TargetModules(loaded)
    with error_prefix("save_adapter: "):
        tensors = _peft_tensors(adapter, modules)
    with atomic_write(folder / WEIGHTS) as file:
        write_tensors(file, {name: array.shape for name, array in tensors.items()}, tensors.items(), "F32")
    write_json(folder / CONFIG, _adapter_config_fields(adapter, modules))


def save_gguf_adapter(adapter: Adapter, loaded: Pretrained, path: str | os.PathLike[str]) -> str:
    """Write or replace a LoRA adapter (DoRA: ValueError) as a GGUF file in F32 atomically; return general.architecture.

    Scales that differ between matrices are multiplied into B, because the file has one alpha.

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: a DoRA adapter, a model without an architecture of llama.cpp, or a weight that is not finite.
            Nothing is written.
    """
    with error_prefix("save_gguf_adapter: "):
        if any(low_rank.magnitudes for low_rank in adapter.low_ranks.values()):
            advice = "merge it into the model and export that one"
            raise ValueError(f"expected LoRA, got DoRA, which llama.cpp does not support: {advice}")
        modules = TargetModules(loaded)
        architecture, heads = modules.gguf_layout()
        tensors = _peft_tensors(adapter, modules)
        factors = {}
        for target in (target for low_rank in adapter.low_ranks.values() for target in low_rank.targets):
            down, up = (tensors[f"{PREFIX}{target.name}.lora_{letter}.weight"] for letter in "AB")
            factors[target.name] = LowRankFactors(down, up, target.scale)
        write_gguf_adapter(path, architecture, heads, factors)
    return architecture


def _peft_tensors(adapter: Adapter, modules: TargetModules) -> dict[str, np.ndarray]:
    """Return adapter_model.safetensors' tensors by name, in PEFT's layout; ValueError if a value is not finite."""
    tensors = {}
    for low_rank in adapter.low_ranks.values():
        for target, ranks, up in low_rank.factors():
            name = f"{PREFIX}{target.name}"
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(low_rank.down.numpy()[:, ranks].T)
            theirs = modules.to_peft(modules.by_name[target.name], up.numpy())
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(theirs)
        for target, magnitude in zip(low_rank.targets, low_rank.magnitudes):
            theirs = modules.to_peft(modules.by_name[target.name], magnitude.numpy()[None])
            tensors[f"{PREFIX}{target.name}.lora_magnitude_vector"] = np.ascontiguousarray(theirs[:, 0])
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise ValueError(f"expected finite weights, {name} has NaN or infinity")
    return tensors


def _adapter_config_fields(adapter: Adapter, modules: TargetModules) -> dict[str, Any]:
    """Return the fields of PEFT's adapter_config.json for an adapter, with patterns for other ranks and alphas."""
    config = adapter.config
    targets = [target for low_rank in adapter.low_ranks.values() for target in low_rank.targets]
    names = {target.name for target in targets}
    # Short names are used if they match no other modules.
    ends = sorted({name.rpartition(".")[2] for name in names})
    matches = {module.name for module in modules.all if module.name.rpartition(".")[2] in ends}
    alphas = {t.name: t.scale * (math.sqrt(t.rank) if config.rank_stabilised else t.rank) for t in targets}
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(type(modules.model), "CAUSAL_LM"),
        "base_model_name_or_path": adapter.base_name or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": ends if matches == names else sorted(names),
        "use_rslora": config.rank_stabilised,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": modules.family is not None and modules.family.fan_in_fan_out,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
        "rank_pattern": {target.name: target.rank for target in targets if target.rank != config.rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if not math.isclose(a, config.alpha, rel_tol=1e-6)},
    }


# -------------------------------------------------------------------- reading
def load_adapter(loaded: Pretrained, folder: str | os.PathLike[str]) -> Adapter:
    """Load an adapter of PEFT or llama.cpp, attach it to the model, freeze all else; ValueError if it does not fit.

    No code in the files is executed.

    Args:
        folder: the folder of PEFT's two files, a run folder that contains it under the name adapter, or a GGUF file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapter is of an unsupported kind, its tensors do not fit the model, or the model already has an
            adapter.
    """
    folder = Path(folder)
    if not folder.is_file():
        folder = find_adapter_folder(folder)
    modules = TargetModules(loaded)
    with error_prefix(f"{folder}: "):
        if folder.is_file():
            fields, factors = read_gguf_adapter(folder, *modules.gguf_layout())
            config = _read_config(fields)
        else:
            fields = read_json_object(folder / CONFIG)
            config = _read_config(fields)
            factors = _group_tensors(read_tensors(folder / WEIGHTS)[0], config.dora)
        targets = _match_tensors(factors, modules, config, fields)
    low_ranks = _new_low_ranks(loaded.model, targets, config, 0)
    for low_rank in low_ranks.values():
        for number, (target, ranks, up) in enumerate(low_rank.factors()):
            down, theirs, *magnitudes = (np.asarray(tensor.read(), np.float32) for tensor in factors[target.name])
            if not all(np.isfinite(array).all() for array in (down, theirs, *magnitudes)):
                raise ValueError(f"{folder}: {target.name}: expected finite weights, got NaN or infinity")
            module = modules.by_name[target.name]
            low_rank.down.array[:, ranks] = down.T
            up.array[...] = modules.from_peft(module, theirs)
            if magnitudes:
                low_rank.magnitudes[number].array[...] = modules.from_peft(module, magnitudes[0][:, None])[0]
    name = fields.get("base_model_name_or_path")
    return Adapter(loaded.model, low_ranks, config, name if isinstance(name, str) else "").attach()


def find_adapter_folder(folder: Path) -> Path:
    """Return `folder` or its subfolder adapter, whichever has an adapter's files; FileNotFoundError if neither."""
    for candidate in (folder, folder / "adapter"):
        if (candidate / CONFIG).is_file() and (candidate / WEIGHTS).is_file():
            return candidate
    raise FileNotFoundError(f"{folder}: expected an adapter, a GGUF file or a folder with {CONFIG} and {WEIGHTS}")


def _read_config(fields: Mapping[str, Any]) -> LoRAConfig:
    """Convert the fields of adapter_config.json to a LoRAConfig; ValueError if the adapter is not supported."""
    for name, allowed in REQUIRED_FIELDS.items():
        if name in fields and not any(fields[name] == value and type(fields[name]) is type(value) for value in allowed):
            raise ValueError(f"{CONFIG}: expected {name} to be {allowed[0]!r}, got {fields[name]!r:.60}")
    if "peft_type" not in fields:
        raise ValueError(f"{CONFIG}: expected peft_type to be 'LORA', got none")
    targets = fields.get("target_modules")
    names = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    dropout = fields.get("lora_dropout", 0.0)
    values = {"rank": fields.get("r", 8), "alpha": fields.get("lora_alpha", 8), "dropout": dropout}
    variants = {"rank_stabilised": fields.get("use_rslora") or False, "dora": fields.get("use_dora") or False}
    return LoRAConfig(**values, **variants, targets=tuple(names) or (ALL_LINEAR,))


def _group_tensors(tensors: Mapping[str, StoredTensor], dora: bool) -> dict[str, tuple[StoredTensor, ...]]:
    """Group tensors to (A, B), for DoRA also magnitudes, by module name; ValueError for missing or unknown tensors.

    Raises:
        ValueError: a tensor has an unexpected name, or is missing.
    """
    suffixes = ("A", "B", "magnitude_vector") if dora else ("A", "B")
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in suffixes:
            expected = f"{PREFIX}*.lora_A.weight and lora_B.weight{' and lora_magnitude_vector' if dora else ''}"
            raise ValueError(f"{WEIGHTS}: expected tensors {expected}, got {name:.120}")
        groups.setdefault(match[1], {})[match[2]] = tensor
    for name, group in groups.items():
        if len(group) < len(suffixes):
            raise ValueError(
                f"{WEIGHTS}: expected {', '.join(suffixes)} of {name}, got only {', '.join(sorted(group))}"
            )
    if not groups:
        raise ValueError(f"{WEIGHTS}: expected tensors, got none")
    return {name: tuple(group[suffix] for suffix in suffixes) for name, group in groups.items()}


def _match_tensors(
    factors: Mapping[str, tuple[StoredTensor, ...]], modules: TargetModules, config: LoRAConfig, fields: dict[str, Any]
) -> list[tuple[TargetModule, LoRATarget]]:
    """Return (module, LoRA target with its scale) for each module's tensors; ValueError if names or shapes misfit."""
    unknown = [name for name in factors if name not in modules.by_name]
    if unknown:
        names = abbreviate_names(unknown)
        raise ValueError(f"expected an adapter of this model, got one for layers that do not exist in it: {names}")
    layers = dict(modules.model.named_layers())
    targets = []
    for name, (down, up, *magnitudes) in factors.items():
        module = modules.by_name[name]
        size = layers[module.layer].from_size
        rank = down.shape[0] if len(down.shape) == 2 else 0
        expected = (rank, size), (module.stop - module.start, rank)
        if rank < 1 or (down.shape, up.shape) != expected:
            shapes = f"(r, {size}) and ({module.stop - module.start}, r)"
            raise ValueError(
                f"expected an adapter of this model, {name} of shapes {shapes}, got {down.shape} and {up.shape}"
            )
        if magnitudes and magnitudes[0].shape != up.shape[:1]:
            raise ValueError(f"expected magnitudes of {name} of shape {up.shape[:1]}, got {magnitudes[0].shape}")
        alpha = _find_alpha(fields.get("alpha_pattern"), name, config.alpha)
        scale = _lora_scale(alpha, rank, config.rank_stabilised)
        targets.append((module, LoRATarget(name, module.start, module.stop, rank, scale)))
    return targets


def _find_alpha(patterns: Any, name: str, default: float) -> float:
    """Return the alpha of the first pattern that is the end of `name`, else `default`; ValueError if one is invalid.

    A pattern must be a name or the end of one, because a malicious regular expression could run without end.

    Raises:
        ValueError: a pattern is not a name, or its value is not a positive number.
    """
    for pattern, value in (patterns or {}).items() if isinstance(patterns, dict) else ():
        if not re.fullmatch(r"[\w.]+", pattern) or type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(
                f"{CONFIG}: expected names and positive numbers in alpha_pattern, got {pattern!r:.50}: {value!r:.50}"
            )
        if f".{name}".endswith(f".{pattern}"):
            return float(value)
    return default
