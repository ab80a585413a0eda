"""Write an OPT model with random weights in Hugging Face's format.

    python -m experiments.learned_statistics.random_opt runs/opt
    python -m experiments.learned_statistics --model runs/opt

Its perplexities say nothing. It shows that the experiment is ready for OPT's own weights. With `--width 768 --layers 12
--heads 12 --vocabulary 50272 --context-window 2048` it is as large as OPT-125M.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.shared.language_models import text_of
from tricycle.configs import ModelConfig
from tricycle.models import GPT
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families.opt import POSITION_OFFSET
from tricycle.tokeniser import BPETokeniser
from tricycle_cli.flags import parse, run_main


@dataclass(frozen=True)
class Settings:
    """The shape, and where to write it."""

    folder: Annotated[Path, tyro.conf.Positional]  # a new or an empty one
    width: int = 64  # channels
    layers: int = 3  # transformer blocks
    heads: int = 4  # attention heads in each
    context_window: int = 512  # the context length in tokens
    vocabulary: int = 512  # the most tokens of the tokenizer, which is trained on code
    seed: int = 0  # of the weights


def new_opt(settings: Settings) -> GPT:
    """Return a GPT of OPT's architecture with random weights: position offset 2, ReLU, biases, pre-norm."""
    config = ModelConfig(
        vocab_size=settings.vocabulary,
        context_window=settings.context_window,
        embedding_dim=settings.width,
        n_heads=settings.heads,
        n_layers=settings.layers,
        activation="relu",
        position_offset=POSITION_OFFSET,
        seed=settings.seed,
    )
    return GPT(config)


def main() -> int:
    """Parse sys.argv, train a tokenizer, write it and the model to the folder, and return 0."""
    settings = parse(Settings, description=__doc__ or "")
    tokeniser = BPETokeniser(min(settings.vocabulary, 2048))
    tokeniser.train(text_of("code", "train")[:200_000], progress=False)
    kind = export_folder(new_opt(settings).eval(), tokeniser, settings.folder)
    print(f"{settings.folder}: a model of the family {kind}, {tokeniser.n_vocab:,} tokens, random weights")
    return 0


if __name__ == "__main__":
    run_main(main)
