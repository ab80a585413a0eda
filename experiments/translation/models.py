"""The four models, and what each is trained with. They differ in how the decoder learns of the source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tricycle.sequences.seq2seq import EncoderDecoder
from tricycle.sequences.translators import TranslatorConfig, new_translator

CONTEXT_WINDOW = 128  # tokens of a sentence, more than any in the data


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        width: channels of embeddings and of states.
        n_layers: of the encoder and of the decoder each.
        expansion: how many times wider than that the hidden layer of the Transformer's MLP is.
        learning_rate: the highest.
        dropout: probability of dropping an element.
        max_tokens: of a batch, both sides and padding included.
    """

    title: str
    width: int
    n_layers: int
    learning_rate: float
    dropout: float
    max_tokens: int
    n_heads: int = 4
    expansion: float = 2
    norm_first: bool = True

    def config(self, name: str, n_vocab: int) -> TranslatorConfig:
        """What of it is the model's."""
        shape = (self.width, self.n_layers, self.dropout, self.n_heads, self.expansion, self.norm_first)
        return TranslatorConfig(name, n_vocab, *shape, CONTEXT_WINDOW)


RECIPES = {
    "fixed": Recipe("fixed context (Cho et al. 2014)", 256, 1, 3e-3, 0.2, 2048),
    "bahdanau": Recipe("additive attention (Bahdanau et al. 2015)", 256, 1, 3e-3, 0.2, 2048),
    "luong": Recipe("general attention (Luong et al. 2015)", 256, 1, 3e-3, 0.2, 2048),
    "transformer": Recipe("Transformer (Vaswani et al. 2017)", 192, 3, 2e-3, 0.2, 3072),
}


def new_model(name: str, recipe: Recipe, n_vocab: int, generator: np.random.Generator) -> EncoderDecoder:
    """A model whose source and target embeddings are one table, for both languages share a vocabulary."""
    return new_translator(recipe.config(name, n_vocab), generator)
