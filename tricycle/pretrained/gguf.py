"""GGUF models (the files of llama.cpp) with the fields and tensors of transformers, for `tricycle.pretrained.load`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, BlockRows
from tricycle.pretrained.families.family import fill_numbers
from tricycle.pretrained.gguf_config import CONFIG_READERS, WITH_FUSED_GATES
from tricycle.pretrained.gguf_file import GGUFFile, GGUFTensorInfo, read_gguf_header, short_repr
from tricycle.pretrained.gguf_model_metadata import LONGROPE_DIVISORS, ROPE_DIVISORS, Fields, ModelMetadata
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS, AttentionHeads, GGUFTensorMapping, WeightTransform
from tricycle.pretrained.stored_model import StoredModel, StoredTensor, error_prefix

_BLOCK = re.compile(r"^((?:enc\.|dec\.)?blk)\.(0|[1-9][0-9]{0,8})\.")  # of a decoder, or of one after an encoder
_STACKED = r"\.[NM](?=\.)"  # in a name: the number of a matrix in a tensor of several ones
_MAX_EXPERT_TENSORS = 2**17  # the largest models have 2**16
# From fields of a generation_config.json to keys of general.sampling; others have the same name.
_SAMPLING = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


@dataclass(frozen=True)
class GGUFModel(StoredModel):
    """A model in a GGUF file.

    Attributes:
        metadata: all keys and values of the file; `tricycle.pretrained.load` removes the tokenizer's lists.
    """

    metadata: dict[str, Any] = field(default_factory=dict)


def read_gguf(path: str | os.PathLike[str]) -> GGUFModel:
    """Open a GGUF model with fields and tensors as in transformers, values read on request; ValueError if unsupported.

    Quantized values are dequantized to float32 by a tensor's `read`.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: not a GGUF file, a damaged file, an unknown architecture, data type or RoPE scaling, or metadata and
            tensors that contradict each other.
    """
    file = read_gguf_header(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in TENSOR_MAPPINGS:
        raise ValueError(
            f"{file.path}: expected general.architecture to be one of {', '.join(TENSOR_MAPPINGS)}, "
            f"got {short_repr(architecture)}"
        )
    metadata = ModelMetadata(file, architecture)
    _check_sizes(file, metadata)
    divisors = file.read(file.tensors[ROPE_DIVISORS]) if ROPE_DIVISORS in file.tensors else None
    if all(name in file.tensors for name in LONGROPE_DIVISORS):
        divisors = np.stack(
            [file.read(file.tensors[name]).reshape(metadata.rotary_size() // 2) for name in LONGROPE_DIVISORS]
        )
    fields = CONFIG_READERS[architecture](metadata, divisors) | metadata.special_tokens()
    heads = AttentionHeads(0, 0, 0)
    if metadata.get("attention.head_count") != 0:  # as in models without attention
        heads = AttentionHeads(
            metadata.positive_int("attention.head_count"), metadata.n_key_heads(), metadata.head_size()
        )
    mapping = TENSOR_MAPPINGS[architecture]
    tensors = TensorConversion(file, metadata, mapping, heads).tensors()
    output, embedding = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    have_same_type = output and (output.dtype_name, output.shape) == (embedding.dtype_name, embedding.shape)
    if architecture == "gpt2" and output and have_same_type and np.array_equal(file.read(output), file.read(embedding)):
        fields["tie_word_embeddings"] = True  # older converters write the embedding of GPT-2 twice
        del tensors["lm_head.weight"]
    generation = _generation_fields(file.metadata, fields)
    return GGUFModel(file.path, fields, tensors, generation, file.metadata, family_changes=mapping.family_changes)


def _check_sizes(file: GGUFFile, metadata: ModelMetadata) -> None:
    """Raise ValueError unless the file is one complete model whose metadata state the sizes of its tensors.

    So no key can request more memory than the tensors of the file need.
    """
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise metadata.error(f"expected a model, got general.type {short_repr(kind)}")
    n_files = file.metadata.get("split.count", 0)
    if n_files not in (0, 1):
        raise metadata.error(f"is one of {short_repr(n_files)} files of a model: join them (llama-gguf-split --merge)")
    blocks = [(match[1], int(match[2])) for name in file.tensors if (match := _BLOCK.match(name))]
    n_blocks = 1 + max((number for kind, number in blocks if kind != "dec.blk"), default=-1)
    n_decoder_blocks = 1 + max((number for kind, number in blocks if kind == "dec.blk"), default=-1)
    sizes = {"block_count": n_blocks, "embedding_length": metadata.shape("token_embd")[1]}
    n_dense = metadata.n_dense_layers() if metadata.n_experts() else n_blocks
    if n_dense < n_blocks:
        sizes |= {"expert_count": metadata.shape(f"blk.{n_dense}.ffn_up_exps", 3)[0]}
        sizes |= {metadata.expert_width_key(): metadata.shape(f"blk.{n_dense}.ffn_up_exps", 3)[1]}
    if n_decoder_blocks and (n_decoder_blocks != n_blocks or metadata.get("decoder_block_count") is not None):
        sizes |= {"decoder_block_count": n_decoder_blocks}
    if n_dense > 0 and metadata.get("feed_forward_length") != 0:  # 0 in models without MLPs
        n_parts = 2 if metadata.architecture in WITH_FUSED_GATES else 1
        sizes |= {
            "feed_forward_length": metadata.shape(f"{'enc.' if n_decoder_blocks else ''}blk.0.ffn_up")[0] // n_parts
        }
    n_expert_tensors = sum(info.shape[0] for info in file.tensors.values() if len(info.shape) == 3)
    if n_expert_tensors > _MAX_EXPERT_TENSORS:
        raise metadata.error(f"expected at most {_MAX_EXPERT_TENSORS} matrices of experts, got {n_expert_tensors}")
    for key, size in sizes.items():
        if metadata.positive_int(key) != size:
            stated = metadata.positive_int(key)
            raise metadata.error(f"{metadata.architecture}.{key} is {stated}, but the tensors have {size}")


@dataclass(frozen=True)
class TensorConversion:
    """Converts the tensors of a GGUF file to the names and values of transformers."""

    file: GGUFFile
    metadata: ModelMetadata
    mapping: GGUFTensorMapping
    heads: AttentionHeads

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors of layers, and others, by Hugging Face name, read lazily; ValueError for a second one.

        RoPE divisors and blocks that predict further tokens are left out.
        """
        tensors: dict[str, StoredTensor] = {}
        n_layers = self.metadata.n_layers()
        for name, info in self.file.tensors.items():
            match = _BLOCK.match(name)
            is_further = match is not None and match[1] == "blk" and int(match[2]) >= n_layers
            if name in (ROPE_DIVISORS, *LONGROPE_DIVISORS) or is_further:
                continue
            for hf_name, tensor in self.convert(name, info):
                if hf_name in tensors:
                    raise self.metadata.error(f"tensor {short_repr(name)} is a second {short_repr(hf_name)}")
                tensors[hf_name] = tensor
        with error_prefix(f"{self.file.path}: "):
            return self.mapping.join(tensors)

    def convert(self, name: str, info: GGUFTensorInfo) -> list[tuple[str, StoredTensor]]:
        """Return transformers' [(name, tensor)] for one tensor of the file; ValueError if unknown or misshapen."""
        match = _BLOCK.match(name)
        template, suffix = f"{match[1]}.N.{name[match.end() :]}" if match else name, ""
        if template not in self.mapping.names:  # which has some whole names of tensors, and the names of layers
            template, _, suffix = template.rpartition(".")
        hf_templates = self.mapping.names.get(template)
        if hf_templates is None or suffix not in ("", "weight", "bias"):
            architecture = self.metadata.architecture
            raise self.metadata.error(f"tensor {short_repr(name)} is unknown in the architecture {architecture}")
        ending = f".{suffix}" if suffix else ""
        hf_names = [fill_numbers(hf_name + ending, [match[2]] if match else []) for hf_name in hf_templates]
        if re.search(_STACKED, hf_names[0]):
            return self._split_stack(info, hf_names[0])
        transform = self.mapping.transforms.get(template, WeightTransform())
        if len(hf_names) == 1:
            return [(hf_names[0], self._stored_tensor(info, slice(None), info.shape, transform))]
        if info.shape[0] != sum(self.heads.n_rows):
            raise self.metadata.error(
                f"expected {sum(self.heads.n_rows)} rows of tensor {short_repr(name)}, got {info.shape[0]}"
            )
        tensors, start = [], 0
        for hf_name, n_rows in zip(hf_names, self.heads.n_rows):
            rows, start = slice(start, start + n_rows), start + n_rows
            tensors.append((hf_name, self._stored_tensor(info, rows, (n_rows, *info.shape[1:]), transform)))
        return tensors

    def _split_stack(self, info: GGUFTensorInfo, template: str) -> list[tuple[str, StoredTensor]]:
        """Return (name, tensor) of each expert in a tensor (E, out, in), or bias (E, out), of all; else ValueError.

        Args:
            template: the name in transformers, with M for the number of an expert, or N for that of another matrix.
        """
        is_matrix = not template.endswith(".bias")
        n_experts = self.metadata.n_experts() if ".M." in template else info.shape[0]
        if len(info.shape) != 2 + is_matrix or info.shape[0] != n_experts:
            expected = (
                f"expected a tensor {short_repr(info.name)} of {n_experts} {'matrices' if is_matrix else 'biases'}"
            )
            raise self.metadata.error(f"{expected}, got shape {info.shape}")
        n_bytes, transform = (info.shape[1] if is_matrix else 1) * info.row_bytes, WeightTransform()
        parts = [replace(info, shape=info.shape[1:], start=info.start + e * n_bytes) for e in range(n_experts)]
        tensors = [self._stored_tensor(part, slice(None), part.shape, transform) for part in parts]
        return [(re.sub(_STACKED, f".{e}", template), tensor) for e, tensor in enumerate(tensors)]

    def _stored_tensor(
        self, info: GGUFTensorInfo, rows: slice, shape: tuple[int, ...], transform: WeightTransform
    ) -> StoredTensor:
        """Return `rows` as a lazily read tensor in transformers' layout; ValueError if the heads do not fit."""
        heads = self.heads
        # The shape is checked now, so that errors are raised when the file is opened and not when values are read.
        if transform.n_rows and (info.shape[0] != transform.n_rows(heads) or heads.head_size % 2):
            layout = f"{heads.n_heads} query heads and {heads.n_key_heads} key heads of {heads.head_size} channels"
            raise self.metadata.error(f"tensor {short_repr(info.name)} of shape {info.shape} does not fit {layout}")

        def read() -> np.ndarray:
            return transform.to_hf(self.file.read(info, rows), heads)

        def read_blocks() -> BlockRows:
            blocks = self.file.read_blocks(info, rows)
            if transform.transposes:
                return blocks
            return blocks._replace(packed=transform.to_hf(blocks.packed, heads))

        hf_shape = transform.hf_shape(shape)
        has_blocks = info.dtype_name in BLOCK_FORMATS and len(shape) == 2
        return StoredTensor(hf_shape, info.dtype_name, read, read_blocks if has_blocks else None)


def _generation_fields(metadata: dict[str, Any], fields: Fields) -> Fields:
    """Return the fields of a generation_config.json: end tokens, and any sampling parameters that the file has."""
    generation: Fields = {}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stop = [end for end in ends if isinstance(end, int) and 0 <= end < fields["vocab_size"]]
    if stop:
        generation["eos_token_id"] = list(dict.fromkeys(stop))
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = metadata.get(f"general.sampling.{_SAMPLING.get(name, name)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            generation[name] = value
    if "temperature" in generation:
        generation["do_sample"] = generation["temperature"] > 0
    return generation
