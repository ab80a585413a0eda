"""File types of GGUF files, such as Q4_K_M, and the format of each tensor in them, as llama.cpp's quantizer chooses it.

In a mixture, most matrices have one format, and those whose rounding increases the loss most have more bits.
(Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` in llama.cpp's `src/llama-quant.cpp`.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from tricycle.configs.model import ModelConfig
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS


class FileType(NamedTuple):
    """The value of `general.file_type`, and the format of most matrices."""

    number: int
    format_name: str


FILE_TYPES = {
    "F32": FileType(0, "F32"),
    "F16": FileType(1, "F16"),
    "BF16": FileType(32, "BF16"),
    "Q8_0": FileType(7, "Q8_0"),
    "Q6_K": FileType(18, "Q6_K"),
    "Q5_K_M": FileType(17, "Q5_K"),
    "Q5_K_S": FileType(16, "Q5_K"),
    "Q5_1": FileType(9, "Q5_1"),
    "Q5_0": FileType(8, "Q5_0"),
    "Q4_K_M": FileType(15, "Q4_K"),
    "Q4_K_S": FileType(14, "Q4_K"),
    "Q4_1": FileType(3, "Q4_1"),
    "Q4_0": FileType(2, "Q4_0"),
}

# Parts of names, with all tensors that are not matrices; ffn_gate_inp is a router, attn_rel_b a table of relative
# positions, and those of ssm, altup and laurel are small.
_ALWAYS_F32 = re.compile(
    r"^(position_embd|token_types|per_layer_model_proj)\.|(ffn_gate_inp|attn_rel_b)\.weight|\.bias$"
    r"|ssm_(conv1d|norm)\.weight|ssm_[ad]$|altup|laurel"
)
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are not whole blocks of 256 values
_LAYERS_OF_70B = 80  # llama.cpp recognizes models of 70B parameters by their layers and grouped-query attention


@dataclass(frozen=True)
class Mixture:
    """The choice of a format for each tensor of a model.

    Attributes:
        file_type: one of FILE_TYPES.
        config: of the model.
        has_importance: whether the model is quantized with the importance of input channels.
    """

    file_type: str
    config: ModelConfig
    has_importance: bool = False

    def format_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Return a tensor's format by llama.cpp's rules for a file type: F32, F16, BF16 or one of BLOCK_FORMATS.

        Args:
            name: in llama.cpp, such as "blk.3.attn_v.weight".
            shape: slowest dimension first; the last one is the row size.
        """
        format_name = FILE_TYPES[self.file_type].format_name
        if len(shape) == 1 or _ALWAYS_F32.search(name):
            return "F32"
        if format_name not in BLOCK_FORMATS:
            return format_name
        if name == "output.weight" or (name.endswith("token_embd.weight") and self.config.tied):
            is_whole = shape[-1] % BLOCK_FORMATS[format_name].n_values == 0
            format_name = "Q6_K" if is_whole and format_name != "Q8_0" else "Q8_0"
        elif match := re.fullmatch(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down)(?:_exps|_shexp)?\.weight", name):
            format_name = self._format_in_block(int(match[1]), match[2])
        for fallback in (_FALLBACKS.get(format_name, "F16"), "F16"):
            if format_name in BLOCK_FORMATS and shape[-1] % BLOCK_FORMATS[format_name].n_values:
                format_name = fallback
        return format_name

    def _format_in_block(self, layer: int, matrix: str) -> str:
        """Return the format of a block's value, QKV or second MLP matrix: finer in some layers, by the file type."""
        format_name, n_layers = FILE_TYPES[self.file_type].format_name, self.config.n_layers
        is_down, attention_layers = matrix == "ffn_down", sorted(set(getattr(self.config, "attention_layers", ())))
        if not is_down and attention_layers:  # in a hybrid, only these are counted
            layer, n_layers = attention_layers.index(layer), len(attention_layers)
        eighth = n_layers // 8
        if self.file_type in ("Q4_K_M", "Q5_K_M"):
            if layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2:
                return "Q6_K"
        elif self.file_type == "Q4_K_S" and layer < (eighth if is_down else 4):
            return "Q5_K"
        elif self.file_type in ("Q4_0", "Q5_0") and is_down and self.has_importance and layer < eighth:
            return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[self.file_type]
        is_70b = self.config.n_layers == _LAYERS_OF_70B and self.config.key_heads < self.config.n_heads
        return "Q5_K" if is_70b and not is_down and format_name == "Q4_K" else format_name
