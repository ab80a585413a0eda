"""Forward passes and training of model families and of transformers (`python -m benchmarks.families --threads 2`).

Models of transformers with random weights are written to a folder, from which both sides load them in float32. An
encoder processes a batch of texts, a decoder a prompt, whose last logits and KV caches it returns. With `--training`,
decoders make updates of all parameters with AdamW. Each side runs in a separate process for each family; the sides are
interleaved.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import finetuning_workers
from benchmarks.interleave import Schedule, add_comparison_flags
from benchmarks.workers import print_speed_ups, serve, time_cases

WIDTH = {"hidden_size": 768, "num_attention_heads": 12}
SMALL = {"vocab_size": 32_000, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
TRAINING_SHAPE = 4, 256  # sequences and tokens of an update


class Family(NamedTuple):
    """A model: its classes in transformers, the options of its config, and the shape of its token ids (B, T)."""

    model: str
    config: str
    options: dict[str, Any]
    shape: tuple[int, int]

    @property
    def is_decoder(self) -> bool:
        """Whether the model predicts the next token."""
        return self.model.endswith("ForCausalLM")


FAMILIES = {
    "bert": Family("BertModel", "BertConfig", {"num_hidden_layers": 6}, (16, 128)),
    "modernbert": Family(
        "ModernBertModel",
        "ModernBertConfig",
        {**WIDTH, "num_hidden_layers": 6, "intermediate_size": 1152},
        (16, 128),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**WIDTH, "num_hidden_layers": 12, "intermediate_size": 3072},
        (1, 256),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **SMALL,
            **{"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128},
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
        },
        (1, 256),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **{"vocab_size": 64_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 96},
        },
        (1, 256),
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            **{"vocab_size": 50_288, "hidden_size": 768, "num_hidden_layers": 12, "tie_word_embeddings": True},
            **{"num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1},
        },
        (1, 256),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **SMALL,
            **{"intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 64},
            **{"linear_num_key_heads": 8, "linear_num_value_heads": 16},
            **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
            **{"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
            **{"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
        },
        (1, 256),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **SMALL,
            **{"intermediate_size": 1536, "moe_intermediate_size": 256, "num_key_value_heads": 8},
            **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
            **{"q_lora_rank": 128, "kv_lora_rank": 128},
            **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
        },
        (1, 256),
    ),
}

Step = Callable[[], np.ndarray]  # returns hidden states (B, T, C) of an encoder, or the last logits (B, 1, V)


def token_ids(shape: tuple[int, int]) -> np.ndarray:
    """Return random ids (B, T) without those of special tokens."""
    return np.random.default_rng(0).integers(1000, 2000, shape)


def write_model(family: Family, folder: Path) -> None:
    """Write a model with random weights, seed 0, to a folder in Hugging Face format."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.options)
    getattr(transformers, family.model)(config).save_pretrained(folder)


def tricycle_step(family: Family, folder: Path) -> Step:
    """Return a function that makes a forward pass with Tricycle."""
    from tricycle.pretrained import load
    from tricycle.tensor import no_grad

    model, ids = load(folder, weights="float32").model.eval(), token_ids(family.shape)

    def step() -> np.ndarray:
        with no_grad():
            result: np.ndarray = model(ids, *([model.new_caches(), True] if family.is_decoder else [])).numpy()
            return result

    return step


def torch_step(family: Family, folder: Path) -> Step:
    """Return a function that makes a forward pass with transformers."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = getattr(transformers, family.model).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(token_ids(family.shape))

    def step() -> np.ndarray:
        with torch.no_grad():
            options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1} if family.is_decoder else {}
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            result: np.ndarray = (output.logits if family.is_decoder else output.last_hidden_state).numpy()
            return result

    return step


SIDES: dict[str, Callable[[Family, Path], Step]] = {"tricycle": tricycle_step, "torch": torch_step}


def main() -> None:
    """Parse sys.argv, and print each family's milliseconds by side, and the speed-up; with --serve, run as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", choices=FAMILIES, nargs="+", default=list(FAMILIES), help="models to measure")
    parser.add_argument("--training", action="store_true", help="time updates; of the decoders among the families")
    add_comparison_flags(parser)
    parser.add_argument("--serve", nargs=4, metavar=("SIDE", "FAMILY", "FOLDER", "WORK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        side, name, folder, work = arguments.serve
        if work == "training":
            serve(side, finetuning_workers.STEPS[side](Path(folder), "all", "float32", TRAINING_SHAPE, False))
        else:
            serve(side, SIDES[side](FAMILIES[name], Path(folder)))
        return
    sides = ["tricycle"] + ["torch"] * (arguments.peer == "torch")
    schedule, work = Schedule.from_arguments(arguments), "training" if arguments.training else "forward pass"
    names = [name for name in arguments.families if FAMILIES[name].is_decoder or not arguments.training]
    with tempfile.TemporaryDirectory() as place:
        cases = [(name, str(Path(place) / name), work) for name in names]
        for name, folder, _ in cases:
            write_model(FAMILIES[name], Path(folder))
        results = time_cases("benchmarks.families", sides, cases, arguments.threads, schedule)
    print(f"{work} in float32: medians of {schedule}")
    print_speed_ups(names, [times for times, _ in results], "transformers")


if __name__ == "__main__":
    main()
