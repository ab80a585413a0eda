"""Tensor names of llama.cpp and of transformers, and how the values of tensors differ between the two.

N stands for the number of a block, M for that of an expert; `.weight` and `.bias` follow a name. Where one tensor of
llama.cpp has several names in transformers, its rows are the rows of those tensors, one tensor after the other. The
matrices of all experts are one tensor of three dimensions in llama.cpp.
(Sources: llama.cpp's `gguf-py/gguf/tensor_mapping.py`, and `convert_hf_to_gguf.py` for the values.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tricycle.pretrained.families.bert import BERT
from tricycle.pretrained.families.cohere import COHERE
from tricycle.pretrained.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, join_expansion, split_expansion
from tricycle.pretrained.families.falcon import FALCON, FALCON_TWO_NORMS
from tricycle.pretrained.families.family import Family, TensorNames, fill_numbers
from tricycle.pretrained.families.gemma import GEMMA2, GEMMA3
from tricycle.pretrained.families.gemma3n import GEMMA3N, LAYER
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.gpt_oss import GPT_OSS
from tricycle.pretrained.families.granite import GRANITE, GRANITE_MOE
from tricycle.pretrained.families.granite_hybrid import GRANITE_HYBRID
from tricycle.pretrained.families.llama import LLAMA, OLMO2, QWEN2, QWEN3
from tricycle.pretrained.families.mamba2 import MAMBA2
from tricycle.pretrained.families.mixtures import MIXTRAL, OLMOE, QWEN3_MOE
from tricycle.pretrained.families.modernbert import MODERNBERT
from tricycle.pretrained.families.neox import NEOX
from tricycle.pretrained.families.phi import PHI
from tricycle.pretrained.families.phi3 import PHI3
from tricycle.pretrained.families.qwen3_next import LINEAR, QWEN3_NEXT
from tricycle.pretrained.families.smollm3 import SMOLLM3
from tricycle.pretrained.families.stablelm import STABLELM
from tricycle.pretrained.families.t5 import T5, T5_GATED
from tricycle.pretrained.stored_model import StoredTensor

Shape = tuple[int, ...]


class AttentionHeads(NamedTuple):
    """The numbers of query heads, key and value heads, channels of a head, groups of a Mamba layer, and all tokens."""

    n_heads: int
    n_key_heads: int
    head_size: int
    n_groups: int = 1
    vocab_size: int = 0

    @property
    def n_rows(self) -> tuple[int, int, int]:
        """The numbers of rows of the query, key and value matrices, in this order."""
        n_key_rows = self.n_key_heads * self.head_size
        return self.n_heads * self.head_size, n_key_rows, n_key_rows


def _unchanged(values: np.ndarray, heads: AttentionHeads) -> np.ndarray:
    """Return `values` themselves: the transform of weights that are stored alike."""
    return values


@dataclass(frozen=True)
class WeightTransform:
    """The conversion of a layer's values between transformers and llama.cpp; by default the values are equal.

    Attributes:
        to_hf: converts values of a GGUF file to those of transformers.
        to_gguf: the inverse of `to_hf`.
        transposes: whether the matrix is transposed.
        hf_shape: returns the shape in transformers for that in a GGUF file.
        gguf_shape: the inverse of `hf_shape`.
        n_rows: for permutations of rows that depend on the heads, returns the expected number of rows.
    """

    to_hf: Callable[[np.ndarray, AttentionHeads], np.ndarray] = _unchanged
    to_gguf: Callable[[np.ndarray, AttentionHeads], np.ndarray] = _unchanged
    transposes: bool = False
    hf_shape: Callable[[Shape], Shape] = lambda shape: shape
    gguf_shape: Callable[[Shape, AttentionHeads], Shape] = lambda shape, heads: shape
    n_rows: Callable[[AttentionHeads], int] | None = None


class TensorSplit(NamedTuple):
    """A tensor of transformers that is several tensors in llama.cpp.

    Attributes:
        parts: the names of the parts, which transformers does not have, but `GGUFTensorMapping.names` has.
        split: returns the values of the parts, from a config and the values of the whole tensor.
        join: returns the whole tensor from the parts; ValueError if their shapes do not match.
    """

    parts: tuple[str, ...]
    split: Callable[[Any, np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[..., StoredTensor]


@dataclass(frozen=True)
class GGUFTensorMapping:
    """The layers of an architecture.

    Attributes:
        families: whose models it has, in transformers.
        names: from each name in llama.cpp to one or several names in transformers.
        transforms: by the name in llama.cpp; other layers have equal values.
        aliases: other names in transformers, of layers that have two, and those in `names`.
        family_changes: attributes of the `Family` that files of llama.cpp have otherwise than checkpoints.
        splits: by the name in transformers of the whole tensor.
        without_adapters: names in llama.cpp of layers for which it ignores LoRA adapters.
        eight_bit_output: whether llama.cpp's quantizer stores the output matrix in Q8_0, but ffn_down in fewer bits.
        unused: returns for a config, by name in transformers, the shapes of tensors that llama.cpp requires although no
            computation uses them; they are written as zeros.
    """

    families: tuple[Family, ...]
    names: dict[str, tuple[str, ...]]
    transforms: dict[str, WeightTransform] = field(default_factory=dict)
    family_changes: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    splits: dict[str, TensorSplit] = field(default_factory=dict)
    without_adapters: tuple[str, ...] = ()
    eight_bit_output: bool = False
    unused: Callable[[Any], dict[str, Shape]] = lambda config: {}

    def gguf_layer(self, hf_layer: str) -> tuple[str, WeightTransform]:
        """Return llama.cpp's name and the transform of a layer of transformers; raise KeyError if there is none."""
        to_gguf = {names[0]: gguf_name for gguf_name, names in self.names.items() if len(names) == 1}
        to_gguf |= {alias: to_gguf[name] for alias, name in self.aliases.items()}
        hf_template, number = _template(hf_layer)
        template = to_gguf[hf_template]
        return template.replace(".N.", f".{number}."), self.transforms.get(template, WeightTransform())

    def gguf_tensor(self, hf_name: str) -> tuple[str, WeightTransform]:
        """Return llama.cpp's name and the transform of a tensor of transformers; raise KeyError if there is none."""
        with contextlib.suppress(KeyError):
            return self.gguf_layer(hf_name)  # of a tensor that no layer has
        layer, _, suffix = hf_name.rpartition(".")
        gguf_name, transform = self.gguf_layer(layer)
        return f"{gguf_name}.{suffix}", transform

    def split(self, config: Any, hf_name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, values) of each part of a tensor of transformers, or of the tensor itself if it is not split."""
        template, number = _template(hf_name)
        if template not in self.splits:
            yield hf_name, values
            return
        parts, split, _ = self.splits[template]
        yield from zip((fill_numbers(part, [number]) for part in parts), split(config, values), strict=True)

    def join(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors with each split one in place of its parts; incomplete parts stay."""
        joined = dict(tensors)
        for whole, (parts, _, join) in self.splits.items():
            for name in tensors:
                template, number = _template(name)
                names = [fill_numbers(part, [number]) for part in parts]
                hf_name = fill_numbers(whole, [number])
                if template == parts[0] and hf_name not in tensors and all(part in tensors for part in names):
                    joined[hf_name] = join(*(joined.pop(part) for part in names))
        return joined


def _template(hf_name: str) -> tuple[str, str]:
    """Return a name with N in place of its first number, and the number; ("NAME", "") without one."""
    number = next((component for component in hf_name.split(".") if component.isdigit()), "")
    return (hf_name.replace(f".{number}.", ".N.", 1) if number else hf_name), number


# -------------------------------------------------------------------- values
def _permute_rows(dimensions: Callable[[AttentionHeads], tuple[int, int, int, int]]) -> WeightTransform:
    """Return a WeightTransform for rows that are (a, b, c, d) in llama.cpp and (a, c, b, d) in transformers."""

    def to_hf(values: np.ndarray, heads: AttentionHeads) -> np.ndarray:
        return values.reshape(*dimensions(heads), -1).swapaxes(1, 2).reshape(values.shape)

    def to_gguf(values: np.ndarray, heads: AttentionHeads) -> np.ndarray:
        a, b, c, d = dimensions(heads)
        return values.reshape(a, c, b, d, -1).swapaxes(1, 2).reshape(values.shape)

    return WeightTransform(to_hf, to_gguf, n_rows=lambda heads: math.prod(dimensions(heads)))


# The RoPE channels i and i + head_size / 2, which are rotated together, are neighbors in llama.cpp's llama.
_QUERIES = _permute_rows(lambda heads: (heads.n_heads, heads.head_size // 2, 2, 1))
_KEYS = _permute_rows(lambda heads: (heads.n_key_heads, heads.head_size // 2, 2, 1))
# llama.cpp stores all queries, all keys, all values; GPT-NeoX in transformers interleaves them by head.
_INTERLEAVED = _permute_rows(lambda heads: (1, 3, heads.n_heads, heads.head_size))
_CONV1D = WeightTransform(
    lambda values, heads: values.T,
    lambda values, heads: values.T,
    transposes=True,
    hf_shape=lambda shape: shape[::-1],
    gguf_shape=lambda shape, heads: shape[::-1],
)
# Gemma multiplies by 1 + gain, and llama.cpp stores this sum.
_GAIN_PLUS_ONE = WeightTransform(
    lambda values, heads: values - np.float32(1), lambda values, heads: values + np.float32(1)
)
# Kernels of a convolution of single channels: (channels, width) in llama.cpp, (channels, 1, width) in transformers.
_CHANNEL_KERNELS = WeightTransform(
    lambda values, heads: values.reshape(len(values), 1, -1),
    lambda values, heads: values.reshape(len(values), -1),
    hf_shape=lambda shape: (*shape[:1], 1, *shape[1:]),
    gguf_shape=lambda shape, heads: (shape[0], shape[2]),
)


# Tokens without a row of the table of per-layer inputs have its first row; llama.cpp has a row for each token.
_PADDED_ROWS = WeightTransform(
    to_gguf=lambda values, heads: np.concatenate(
        [values[: heads.vocab_size], np.repeat(values[:1], max(0, heads.vocab_size - len(values)), axis=0)]
    ),
    gguf_shape=lambda shape, heads: (heads.vocab_size, *shape[1:]),
)


def _vector(gguf_shape: Callable[[Shape, AttentionHeads], Shape]) -> WeightTransform:
    """Return the transform of a matrix of llama.cpp that is a vector in transformers."""
    return WeightTransform(
        lambda values, heads: values.reshape(-1),
        lambda values, heads: values.reshape(gguf_shape(values.shape, heads)),
        hf_shape=lambda shape: (math.prod(shape),),
        gguf_shape=gguf_shape,
    )


def _log_rates(values: np.ndarray, heads: AttentionHeads) -> np.ndarray:
    """Return the logarithms (H,) of the rates of Mamba's decay from their negatives (H, 1); ValueError unless < 0."""
    if not (np.isfinite(values).all() and np.all(values < 0)):
        raise ValueError("expected the rates of decay, ssm_a, to be finite and below 0")
    return np.log(-values.astype(np.float64)).astype(np.float32).reshape(-1)


def _rates(values: np.ndarray, heads: AttentionHeads) -> np.ndarray:
    """Return the negative rates (H,) of a decay from their logarithms."""
    return (-np.exp(values.astype(np.float64))).astype(np.float32)


_HEAD_VECTOR = _vector(lambda shape, heads: (*shape, 1))
_GROUP_GAINS = _vector(lambda shape, heads: (heads.n_groups, shape[0] // heads.n_groups))
_ROW = WeightTransform(  # a matrix of one row in transformers
    lambda values, heads: values.reshape(1, -1),
    lambda values, heads: values.reshape(-1),
    hf_shape=lambda shape: (1, math.prod(shape)),
    gguf_shape=lambda shape, heads: shape[1:],
)
_DECAY = replace(
    _HEAD_VECTOR,
    to_hf=_log_rates,
    to_gguf=lambda values, heads: _rates(values, heads).reshape(-1, 1),
)


# -------------------------------------------------------------------- names
# From parameter names of Tricycle to names in llama.cpp; some layers are several tensors.
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "type_embedding": "token_types",
    "embedding_norm": "token_embd_norm",
    "blocks.N.attention_norm": "blk.N.attn_norm",
    "blocks.N.attention.qkv": "blk.N.attn_q blk.N.attn_k blk.N.attn_v",
    "blocks.N.attention.query_norm": "blk.N.attn_q_norm",
    "blocks.N.attention.key_norm": "blk.N.attn_k_norm",
    "blocks.N.attention.projection": "blk.N.attn_output",
    "blocks.N.attention_post_norm": "blk.N.post_attention_norm",
    "blocks.N.mlp_norm": "blk.N.ffn_norm",
    "blocks.N.mlp.up": "blk.N.ffn_up blk.N.ffn_gate",
    "blocks.N.mlp.projection": "blk.N.ffn_down",
    "blocks.N.mlp.router": "blk.N.ffn_gate_inp",
    "blocks.N.mlp.experts.M.up": "blk.N.ffn_up_exps blk.N.ffn_gate_exps",
    "blocks.N.mlp.experts.M.projection": "blk.N.ffn_down_exps",
    "blocks.N.mlp_post_norm": "blk.N.post_ffw_norm",
    "norm": "output_norm",
    "head": "output",
}
_FUSED = "blk.N.attn_qkv"  # queries, keys and values in one matrix
_OLMO2 = {"blocks.N.attention_norm": "blk.N.post_attention_norm", "blocks.N.mlp_norm": "blk.N.post_ffw_norm"}
_MAMBA = {
    "blocks.N.norm": "blk.N.attn_norm",
    "blocks.N.mixer.input": "blk.N.ssm_in",
    "blocks.N.mixer.conv_weights": "blk.N.ssm_conv1d.weight",
    "blocks.N.mixer.conv_bias": "blk.N.ssm_conv1d.bias",
    "blocks.N.mixer.step_bias": "blk.N.ssm_dt.bias",
    "blocks.N.mixer.log_rates": "blk.N.ssm_a",
    "blocks.N.mixer.skip": "blk.N.ssm_d",
    "blocks.N.mixer.norm_gain": "blk.N.ssm_norm.weight",
    "blocks.N.mixer.projection": "blk.N.ssm_out",
    "blocks.N.mlp.shared.up": "blk.N.ffn_up_shexp blk.N.ffn_gate_shexp",
    "blocks.N.mlp.shared.projection": "blk.N.ffn_down_shexp",
}
_MAMBA_TRANSFORMS = {
    "blk.N.ssm_conv1d.weight": _CHANNEL_KERNELS,
    "blk.N.ssm_a": _DECAY,
    "blk.N.ssm_d": _HEAD_VECTOR,
    "blk.N.ssm_norm.weight": _GROUP_GAINS,
}
_QWEN3_NEXT = {
    "blocks.N.mlp_norm": "blk.N.post_attention_norm",
    "blocks.N.attention.input": "blk.N.attn_qkv blk.N.attn_gate",
    "blocks.N.attention.rates": "blk.N.ssm_ba",
    "blocks.N.attention.conv_weights": "blk.N.ssm_conv1d.weight",
    "blocks.N.attention.step_bias": "blk.N.ssm_dt.bias",
    "blocks.N.attention.log_rates": "blk.N.ssm_a",
    "blocks.N.attention.output.norm": "blk.N.ssm_norm",
    "blocks.N.attention.output.projection": "blk.N.ssm_out",
    "blocks.N.mlp.shared.up": "blk.N.ffn_up_shexp blk.N.ffn_gate_shexp",
    "blocks.N.mlp.shared.projection": "blk.N.ffn_down_shexp",
    "blocks.N.mlp.shared_gate": "blk.N.ffn_gate_inp_shexp",
}
_GEMMA3N = {
    "blocks.N.attention.query": "blk.N.attn_q",
    "blocks.N.attention.key_value": "blk.N.attn_k blk.N.attn_v",
    "blocks.N.altup.router_norm": "blk.N.altup_router_norm",
    "blocks.N.altup.router": "blk.N.altup_router",
    "blocks.N.altup.prediction": "blk.N.altup_predict_coef",
    "blocks.N.altup.correction": "blk.N.altup_correct_coef",
    "blocks.N.laurel.down": "blk.N.laurel_l",
    "blocks.N.laurel.projection": "blk.N.laurel_r",
    "blocks.N.laurel.norm": "blk.N.laurel_post_norm",
    "blocks.N.per_layer.scale": "blk.N.altup_correct_scale.weight",
    "blocks.N.per_layer.gate": "blk.N.inp_gate",
    "blocks.N.per_layer.projection": "blk.N.proj",
    "blocks.N.per_layer.norm": "blk.N.post_norm",
    "streams.projections.inputs.N": "altup_proj",  # all in one tensor
    "streams.projections.outputs.N": "altup_unembd_proj",
    "streams.per_layer.embedding": "per_layer_token_embd",
    "streams.per_layer.projection": "per_layer_model_proj",
    "streams.per_layer.norm": "per_layer_proj_norm",
}
_BERT = {"blocks.N.attention_norm": "blk.N.attn_output_norm", "blocks.N.mlp_norm": "blk.N.layer_output_norm"}
# Of ModernBERT, whose family ignores them.
_UNUSED_HEADS = {"cls": ("head.dense",), "cls.norm": ("head.norm",), "cls.output": ("classifier",)}


def _map_tensors(
    family: Family,
    transforms: dict[str, WeightTransform] | None = None,
    table: dict[str, str] = _NAMES,
    changes: dict[str, Any] | None = None,
) -> GGUFTensorMapping:
    """Return a GGUFTensorMapping from llama.cpp's tensor names in `table` to those of a family with `changes`."""
    names: dict[str, tuple[str, ...]] = {}
    for name, hf_names in replace(family, **changes or {}).names.items():
        gguf_names = _FUSED if name.endswith(".qkv") and len(hf_names) == 1 else table[name]
        names |= {gguf_name: (hf_name,) for gguf_name, hf_name in zip(gguf_names.split(), hf_names)}
    return GGUFTensorMapping((family,), names, transforms or {}, changes or {})


def _separate_gates(names: TensorNames) -> dict[str, Any]:
    """Return changes that separate up and gate of a mixture's experts, MLP and shared MLP; no layouts or stacks.

    Where checkpoints have the same names for an MLP without experts and one beside them, llama.cpp has different ones.
    """
    up, expert = "blocks.N.mlp.experts.M.up", names["blocks.N.mlp.experts.M.up"][0].rpartition(".")[0]
    separate = {**names, up: [f"{expert}.up_proj", f"{expert}.gate_proj"]}
    for ours, theirs in (("mlp", "mlp"), ("mlp.shared", "shared_mlp")):
        if f"blocks.N.{ours}.up" in names:
            layer = f"model.layers.N.{theirs}"
            separate[f"blocks.N.{ours}.up"] = [f"{layer}.up_proj", f"{layer}.gate_proj"]
            separate[f"blocks.N.{ours}.projection"] = [f"{layer}.down_proj"]
    return {"names": separate, "layouts": {}, "stacks": {}}


_GEMMA_NORMS = {name: _GAIN_PLUS_ONE for name in _NAMES.values() if name.endswith("_norm")}
_QWEN3_NEXT_TRANSFORMS = _GEMMA_NORMS | {
    "blk.N.ssm_conv1d.weight": _CHANNEL_KERNELS,
    "blk.N.ssm_a": WeightTransform(_log_rates, _rates),
    "blk.N.ffn_gate_inp_shexp": _ROW,
}
# Linear attention has all queries, all keys and all values in one matrix, and the gates in another one.
_QWEN3_NEXT_INPUT = "blocks.N.attention.input"
_QWEN3_NEXT_CHANGES: dict[str, Any] = {
    "names": QWEN3_NEXT.names | {_QWEN3_NEXT_INPUT: [f"{LINEAR}.in_proj_qkv", f"{LINEAR}.in_proj_z"]},
    "layouts": {name: layout for name, layout in QWEN3_NEXT.layouts.items() if name != "in_proj_qkvz"},
    "part_sizes": {_QWEN3_NEXT_INPUT: lambda config: [2 * config.keys_size + config.inner_size, config.inner_size]},
}
_GPT2_MATRICES = (_FUSED, "blk.N.attn_output", "blk.N.ffn_up", "blk.N.ffn_down")
# Some files have one fused matrix, and some have three.
_PHI = _map_tensors(PHI).names | {_FUSED: tuple(PHI.names["blocks.N.attention.qkv"])}

_LLAMA = _map_tensors(LLAMA).names | _map_tensors(MIXTRAL).names
_NO_LAYOUTS: dict[str, Any] = {"layouts": {}}  # all queries, all keys, all values, as in Tricycle
# The norm before the MLP, which is also that before attention unless attn_norm_2 exists.
_FALCON_NORMS = {"blk.N.attn_norm": "input_layernorm", "blk.N.attn_norm_2": "ln_attn"}
_FALCON_NAMES = {name: hf_names for name, hf_names in _map_tensors(FALCON).names.items() if name != "blk.N.ffn_norm"}
_FALCON = _FALCON_NAMES | {name: (f"transformer.h.N.{hf_name}",) for name, hf_name in _FALCON_NORMS.items()}
_PERMUTED = {"blk.N.attn_q": _QUERIES, "blk.N.attn_k": _KEYS}
_GPT_OSS = {
    "blocks.N.attention.softmax_scales": "blk.N.attn_sinks.weight",
    "blocks.N.mlp_norm": "blk.N.post_attention_norm",
}

_DEEPSEEK = {
    "blocks.N.attention.query": "blk.N.attn_q",
    "blocks.N.attention.query_latent": "blk.N.attn_q_a",
    "blocks.N.attention.query_norm": "blk.N.attn_q_a_norm",
    "blocks.N.attention.query_expansion": "blk.N.attn_q_b",
    "blocks.N.attention.latent": "blk.N.attn_kv_a_mqa",
    "blocks.N.attention.latent_norm": "blk.N.attn_kv_a_norm",
    "blocks.N.attention.expansion": "blk.N.attn_kv_b",  # in older files; newer ones have two parts
    "blocks.N.mlp.shared.up": "blk.N.ffn_up_shexp blk.N.ffn_gate_shexp",
    "blocks.N.mlp.shared.projection": "blk.N.ffn_down_shexp",
    "blocks.N.mlp.correction": "blk.N.exp_probs_b.bias",
}
_LATENT_INPUTS = ("q", "q_a", "q_b", "kv_a_mqa", "kv_b", "k_b", "v_b")
_EXPANSION = DEEPSEEK_V3.names["blocks.N.attention.expansion"][0]
_PARTS = {f"blk.N.attn_{part}_b": _EXPANSION.replace("kv_b_proj", f"{part}_b_proj") for part in "kv"}

_T5_STACK = {
    "norm": ["output_norm"],
    "blocks.N.attention.softmax_scales": ["blk.N.attn_rel_b.weight"],
    "blocks.N.attention.qkv": ["blk.N.attn_q", "blk.N.attn_k", "blk.N.attn_v"],
    "blocks.N.attention.projection": ["blk.N.attn_o"],
    "blocks.N.attention_norm": ["blk.N.attn_norm"],
    "blocks.N.cross.query": ["blk.N.cross_attn_q"],
    "blocks.N.cross.key": ["blk.N.cross_attn_k"],
    "blocks.N.cross.value": ["blk.N.cross_attn_v"],
    "blocks.N.cross.projection": ["blk.N.cross_attn_o"],
    "blocks.N.cross_norm": ["blk.N.cross_attn_norm"],
    "blocks.N.mlp.up": ["blk.N.ffn_up", "blk.N.ffn_gate"],
    "blocks.N.mlp.projection": ["blk.N.ffn_down"],
    "blocks.N.mlp_norm": ["blk.N.ffn_norm"],
}
_T5 = {
    "encoder.embedding": "token_embd",
    "head": "output",
    **{
        f"{stack}.{layer}": " ".join(f"{stack[:3]}.{part}" for part in parts)
        for stack in ("encoder", "decoder")
        for layer, parts in _T5_STACK.items()
    },
}
# A table of some files that no computation uses.
_UNUSED = "decoder.block.N.layer.1.EncDecAttention.relative_attention_bias.weight"


def _keys_of_shared_layers(config: Any) -> dict[str, Shape]:
    """Return the shapes of the matrices and norms of keys and values in layers that use those of earlier layers."""
    rows = config.key_heads * config.channels_per_head
    shapes: dict[str, Shape] = {}
    for layer in range(config.n_layers - config.n_shared_layers, config.n_layers):
        prefix = f"{fill_numbers(LAYER, [str(layer)])}.self_attn"
        shapes |= {f"{prefix}.{part}_proj.weight": (rows, config.embedding_dim) for part in "kv"}
        shapes[f"{prefix}.k_norm.weight"] = (config.channels_per_head,)
    return shapes


# By `general.architecture`, which is llama for Mistral, Mixtral and SmolLM2.
TENSOR_MAPPINGS: dict[str, GGUFTensorMapping] = {
    "llama": GGUFTensorMapping((LLAMA, MIXTRAL), _LLAMA, _PERMUTED),
    "smollm3": _map_tensors(SMOLLM3, _PERMUTED),
    "granite": _map_tensors(GRANITE, _PERMUTED),
    "granitemoe": _map_tensors(GRANITE_MOE, _PERMUTED, changes=_separate_gates(GRANITE_MOE.names)),
    "granitehybrid": _map_tensors(
        GRANITE_HYBRID, _PERMUTED | _MAMBA_TRANSFORMS, _NAMES | _MAMBA, _separate_gates(GRANITE_HYBRID.names)
    ),
    "mamba2": _map_tensors(MAMBA2, _MAMBA_TRANSFORMS, _NAMES | _MAMBA),
    "qwen2": _map_tensors(QWEN2),
    "qwen3": _map_tensors(QWEN3),
    "qwen3moe": _map_tensors(QWEN3_MOE),
    "qwen3next": _map_tensors(QWEN3_NEXT, _QWEN3_NEXT_TRANSFORMS, _NAMES | _QWEN3_NEXT, _QWEN3_NEXT_CHANGES),
    "olmoe": _map_tensors(OLMOE),
    "gpt-oss": _map_tensors(GPT_OSS, table=_NAMES | _GPT_OSS, changes=_separate_gates(GPT_OSS.names)),
    "olmo2": _map_tensors(OLMO2, table=_NAMES | _OLMO2),
    "gemma2": _map_tensors(GEMMA2, _GEMMA_NORMS),
    "gemma3": _map_tensors(GEMMA3, _GEMMA_NORMS),
    "gemma3n": replace(
        _map_tensors(GEMMA3N, {"per_layer_token_embd": _PADDED_ROWS}, _NAMES | _GEMMA3N),
        without_adapters=("altup_proj", "altup_unembd_proj", "per_layer_model_proj", "blk.N.altup_router"),
        unused=_keys_of_shared_layers,
    ),
    "gpt2": _map_tensors(GPT2, dict.fromkeys(_GPT2_MATRICES, _CONV1D)),
    "gptneox": _map_tensors(NEOX, {_FUSED: _INTERLEAVED}),
    "phi2": GGUFTensorMapping((PHI,), _PHI),
    "phi3": _map_tensors(PHI3),
    "stablelm": _map_tensors(STABLELM),
    "command-r": _map_tensors(COHERE),
    "falcon": GGUFTensorMapping(
        (FALCON, FALCON_TWO_NORMS),
        _FALCON,
        family_changes=_NO_LAYOUTS,
        aliases={"transformer.h.N.ln_mlp": "transformer.h.N.input_layernorm"},
        eight_bit_output=True,
    ),
    "bert": _map_tensors(BERT, table=_NAMES | _BERT),
    "modern-bert": GGUFTensorMapping((MODERNBERT,), _map_tensors(MODERNBERT).names | _UNUSED_HEADS),
    "t5": GGUFTensorMapping(
        (T5, T5_GATED),
        _map_tensors(T5_GATED, table=_T5).names | {"dec.blk.N.cross_attn_rel_b.weight": (_UNUSED,)},
        aliases={names[0]: T5_GATED.names[name][0] for name, names in T5.names.items() if name.endswith("mlp.up")},
    ),
    "deepseek2": GGUFTensorMapping(
        (DEEPSEEK_V2, DEEPSEEK_V3),
        _map_tensors(DEEPSEEK_V3, table=_NAMES | _DEEPSEEK).names | {name: (part,) for name, part in _PARTS.items()},
        splits={
            f"{_EXPANSION}.weight": TensorSplit(
                tuple(f"{part}.weight" for part in _PARTS.values()), split_expansion, join_expansion
            )
        },
        without_adapters=tuple(f"blk.N.attn_{name}" for name in _LATENT_INPUTS),
    ),
}
