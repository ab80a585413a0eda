"""File types of GGUF files, such as Q4_K_M, and the format of each tensor in them, as llama.cpp's quantizer chooses it.

In a mixture, most matrices have one format, and those whose rounding increases the loss most have more bits.
(Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` in llama.cpp's `src/llama-quant.cpp`.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from tricycle.configs.encoder_decoder import EncoderDecoderConfig
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
# Matrices of a block whose format can differ from that of most, also of all or of shared experts.
_IN_BLOCK = re.compile(
    r"((?:enc\.|dec\.)?blk\.\d+)\.((?:cross_)?attn_v|attn_qkv|attn_k|attn_output|ffn_down)(?:_exps|_shexp)?\.weight"
)
_EXPERTS_OF_MIXTRAL = 8  # with which attention has more bits, as it has few parameters
_LAYERS_OF_70B = 80  # llama.cpp recognizes models of 70B parameters by their layers and grouped-query attention


@dataclass(frozen=True)
class Mixture:
    """The choice of a format for each tensor of a model.

    Attributes:
        file_type: one of FILE_TYPES.
        config: of the model.
        has_importance: whether the model is quantized with the importance of input channels.
        eight_bit_output: whether the output matrix is in Q8_0, but ffn_down in fewer bits, by the architecture.
    """

    file_type: str
    config: ModelConfig
    has_importance: bool = False
    eight_bit_output: bool = False

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
            is_whole = shape[-1] % BLOCK_FORMATS[format_name].n_values == 0 and not self.eight_bit_output
            format_name = "Q6_K" if is_whole and format_name != "Q8_0" else "Q8_0"
        elif match := _IN_BLOCK.fullmatch(name):
            format_name = self._format_in_block(match[1], match[2])
        for fallback in (_FALLBACKS.get(format_name, "F16"), "F16"):
            if format_name in BLOCK_FORMATS and shape[-1] % BLOCK_FORMATS[format_name].n_values:
                format_name = fallback
        return format_name

    def _format_in_block(self, block: str, matrix: str) -> str:
        """Return the format of a matrix of a block such as "blk.3": finer in some blocks, by the file type."""
        format_name, is_down = FILE_TYPES[self.file_type].format_name, matrix == "ffn_down"
        if self.config.n_experts == _EXPERTS_OF_MIXTRAL and not is_down:
            is_coarse = self.file_type in ("Q4_K_M", "Q4_K_S")
            return "Q8_0" if matrix != "attn_output" else "Q5_K" if is_coarse else format_name
        if matrix in ("attn_k", "attn_output"):
            return format_name
        counted = self._counted_matrices(matrix)
        i, n = counted.index(f"{block}.{matrix}"), self.config.n_layers if is_down else len(counted)
        has_more_bits = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        if self.eight_bit_output and is_down and format_name == "Q4_K":
            more_bits = "Q6_K" if i < n // 16 else "Q5_K"
            return more_bits if has_more_bits and self.file_type == "Q4_K_M" else format_name
        if self.file_type in ("Q4_K_M", "Q5_K_M") and has_more_bits:
            return "Q6_K"
        if self.file_type == "Q4_K_S" and i < (n // 8 if is_down else 4):
            return "Q5_K"
        if self.file_type in ("Q4_0", "Q5_0") and is_down and self.has_importance and i < n // 8:
            return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[self.file_type]
        is_70b = self.config.n_layers == _LAYERS_OF_70B and self.config.key_heads < self.config.n_heads
        return "Q5_K" if is_70b and not is_down and format_name == "Q4_K" else format_name

    def _counted_matrices(self, matrix: str) -> list[str]:
        """Return the names, such as "blk.3.attn_v", of a kind's matrices, in the order in which llama.cpp counts them.

        Those of an encoder-decoder are in alphabetical order, with the decoder's first and its layer 10 before 2.
        """
        layers = range(self.config.n_layers)
        if isinstance(self.config, EncoderDecoderConfig):
            matrix = matrix.removeprefix("cross_")
            own = [matrix] if matrix == "ffn_down" else [matrix, f"cross_{matrix}"]
            decoder = range(self.config.n_decoder_layers or self.config.n_layers)
            names = [f"dec.blk.{layer}.{name}" for layer in decoder for name in own]
            return sorted([f"enc.blk.{layer}.{matrix}" for layer in layers] + names)
        attention_layers = sorted({*getattr(self.config, "attention_layers", ())}) or layers
        if matrix == "ffn_down":
            return [f"blk.{layer}.{matrix}" for layer in layers]
        if hasattr(self.config, "n_linear_heads"):  # whose other layers have queries, keys and values, too
            kinds = {layer: "attn_v" if layer in attention_layers else "attn_qkv" for layer in layers}
            return [f"blk.{layer}.{kind}" for layer, kind in kinds.items()]
        return [f"blk.{layer}.{matrix}" for layer in attention_layers]
