"""Translation models with a shared vocabulary: construction, loading and text encoding.

A model is saved as a safetensors file with tensors named "mean.<parameter>". The metadata has the key "translation": a
JSON object with the fields `name` and `recipe` (see `TranslatorConfig`) and `tokeniser`; training programs such as
`experiments/translation` may store more. `tricycle look` opens such files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tricycle.checkpoint import wrap_content_errors
from tricycle.configs.validated import Rule, ValidatedConfig
from tricycle.dataset import pad
from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.sequences.attentions import AdditiveAttention, LuongAttention
from tricycle.sequences.seq2seq import EncoderDecoder, Seq2Seq, Seq2SeqAttention, Transformer
from tricycle.system.safetensors_file import read_header
from tricycle.tokeniser import BPETokeniser

SPECIAL = ("<pad>", "<begin>", "<end>")
RULES: list[Rule] = [
    ("vocab_size width n_layers n_heads context_window", lambda size: size >= 1, "1 or more"),
    ("expansion", lambda factor: 0 < factor < math.inf, "above 0"),
    ("dropout", lambda share: 0 <= share < 1, "from 0 to below 1"),
]
KEY, WEIGHTS = "translation", "mean."
MOST_PLACES = 2**26  # the largest table of positional encodings, which is not stored in the file
A_TRANSLATOR = "a saved encoder-decoder"


# -------------------------------------------------------------------- texts
class TranslationBatch(NamedTuple):
    """A padded batch of sentence pairs as token ids.

    Attributes:
        source: (B, S). lengths: (B,) of the sources.
        target: (B, T), the decoder's input: <begin> and the target.
        labels: (B, T), the decoder's labels: the target and <end>.
    """

    source: np.ndarray
    lengths: np.ndarray
    target: np.ndarray
    labels: np.ndarray


class Vocabulary:
    """A tokenizer with special tokens for padding, the beginning and the end of a sentence."""

    def __init__(self, tokeniser: BPETokeniser) -> None:
        self.tokeniser = tokeniser
        self.pad, self.begin, self.end = (tokeniser.special_tokens[name] for name in SPECIAL)

    @classmethod
    def train(cls, sentences: Sequence[str], vocab_size: int, progress: bool = True) -> Vocabulary:
        """Return a vocabulary trained by BPE on sentences of both languages, so that names and numbers share tokens."""
        text = "\n".join(f" {sentence}" for sentence in sentences)
        return cls(BPETokeniser(vocab_size, SPECIAL).train(text, progress))

    def __len__(self) -> int:
        """Return the number of ids."""
        return self.tokeniser.n_vocab

    def encode(self, sentence: str) -> np.ndarray:
        """Return int64 ids, without <begin> and <end>, of a sentence with a leading space (as within a text)."""
        return self.tokeniser.encode_plain(f" {sentence}").astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens and surrounding spaces."""
        return self.tokeniser.decode([i for i in ids if i < self.pad]).strip()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token separately, for labels of plots."""
        return [self.tokeniser.decode([i]) for i in ids]

    def batch(self, sources: Sequence[Any], targets: Sequence[Any]) -> TranslationBatch:
        """Return a padded TranslationBatch; <begin> is added before each target, <end> after its labels."""
        source, lengths = pad(sources, self.pad)
        target, _ = pad([[self.begin, *ids] for ids in targets], self.pad)
        labels, _ = pad([[*ids, self.end] for ids in targets], self.pad)
        return TranslationBatch(source, lengths, target, labels)


# -------------------------------------------------------------------- models
@dataclass(frozen=True)
class TranslatorConfig(ValidatedConfig):
    """The architecture of a translation model; source and target share one embedding.

    Attributes:
        name: "fixed" (Cho et al. 2014), "bahdanau" (Bahdanau et al. 2015), "luong" (Luong et al. 2015) or "transformer"
            (Vaswani et al. 2017).
        vocab_size: of both languages together.
        width: the number of channels of embeddings and of states.
        n_layers: of the encoder and of the decoder each.
        dropout: probability of dropping an element.
        n_heads, expansion, norm_first, context_window: of the Transformer; expansion is the ratio of the MLP's hidden
            size to width.
    """

    rules = RULES
    name: Literal["fixed", "bahdanau", "luong", "transformer"]
    vocab_size: int
    width: int
    n_layers: int
    dropout: float = 0.0
    n_heads: int = 4
    expansion: float = 2.0
    norm_first: bool = True
    context_window: int = 128

    @property
    def min_n_weights(self) -> int:
        """A lower bound of the number of weights: embedding and a width x width (Transformer: MLP) matrix per layer."""
        hidden = self.expansion if self.name == "transformer" else 1
        return int(self.vocab_size * self.width + self.n_layers * self.width**2 * max(1, hidden))


def new_translator(config: TranslatorConfig, generator: np.random.Generator) -> EncoderDecoder:
    """Return the configured Transformer or GRU Seq2Seq (Bahdanau, Luong or no attention), with shared embeddings."""
    n_vocab, width, dropout = config.vocab_size, config.width, config.dropout
    more: dict[str, Any] = {"dropout": dropout, "generator": generator}
    if config.name == "transformer":
        places = n_vocab, n_vocab, width, config.n_heads, config.n_layers, config.context_window
        more |= {"norm_first": config.norm_first, "expansion_ratio": config.expansion}
        return Transformer(*places, tied=True, **more)
    sizes = n_vocab, n_vocab, width, width, config.n_layers
    model: Seq2Seq
    if config.name == "fixed":
        model = Seq2Seq(*sizes, **more)
    elif config.name == "bahdanau":
        attention = AdditiveAttention(width, 2 * width, width, generator=generator)
        model = Seq2SeqAttention(attention, *sizes, **more)
    else:
        luong = LuongAttention(width, 2 * width, generator=generator)
        model = Seq2SeqAttention(luong, *sizes, **more, attend_before_step=False)
    model.embedding = model.encoder.embedding
    return model


# -------------------------------------------------------------------- files
def find_translators(path: str | os.PathLike[str]) -> list[Path]:
    """Return the sorted translation .safetensors of a folder, or [path] if it is one, else []; only headers read."""
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = []
    for file in files:
        with suppress(ValueError):  # a damaged file, or not a safetensors file
            if file.suffix == ".safetensors" and file.is_file() and KEY in read_header(file)[1]:
                found.append(file)
    return found


def load_translator(path: str | os.PathLike[str]) -> tuple[EncoderDecoder, Vocabulary, TranslatorConfig]:
    """Return (model in evaluation mode, vocabulary, config) of a safetensors file; ValueError if it is damaged.

    Nothing in the file is executed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or is not a translation model.
    """
    path = Path(path)
    with wrap_content_errors(path, A_TRANSLATOR):
        tensors, metadata = read_tensors(path)
        about = json.loads(metadata[KEY])
        names = [name for name in tensors if name.startswith(WEIGHTS)]
        weights = {name.removeprefix(WEIGHTS): tensors[name].read() for name in names}
        vocabulary = Vocabulary(BPETokeniser.from_dict(about["tokeniser"]))
        known = {field.name for field in fields(TranslatorConfig)}
        shape = {name: value for name, value in about["recipe"].items() if name in known}
        config = TranslatorConfig(**{**shape, "name": about["name"], "vocab_size": len(vocabulary)})
        n_numbers = sum(array.size for array in weights.values())
        if config.min_n_weights > n_numbers:  # a crafted file must not cause a huge allocation
            raise ValueError(f"expected at least {config.min_n_weights} numbers in its weights, got {n_numbers}")
        if config.context_window * config.width > MOST_PLACES:
            raise ValueError(f"expected context_window times width of at most {MOST_PLACES}")
        model = new_translator(config, np.random.default_rng(0))
        model.load_state_dict(weights)
    model.eval()
    return model, vocabulary, config
