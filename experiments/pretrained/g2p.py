"""English grapheme-to-phoneme conversion: the network of g2p-en in Tricycle's GRU with beam search.

    python -m experiments.pretrained.g2p                               as below
    python -m experiments.pretrained.g2p --words tricycle gradient     words of your own
    python -m experiments.pretrained.g2p --quick                       these words alone

The file is found by itself (`packages.py`), or named by --path. It belongs to g2p-en 2.1.0 by Kyubyong Park and
Jongseok Kim (Apache License 2.0).
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pretrained.packages import DAMAGED, G2P
from experiments.shared.program import check_minimum
from tricycle.dataset import pad
from tricycle.layers import Dense, Embedding, Generator, new_generator
from tricycle.ops import as_tensor
from tricycle.sequences.beam_search import beam_search
from tricycle.sequences.recurrent import GRU
from tricycle.sequences.seq2seq import EncoderDecoder, State
from tricycle.tensor import Operand, Tensor
from tricycle_cli.flags import parse, run_main

VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW"  # each with a stress of 0, 1 or 2
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
SOUNDS = [
    *("<pad>", "<unk>", "<s>", "</s>"),
    *sorted([f"{vowel}{stress}" for vowel in VOWELS.split() for stress in "012"] + ["UW"] + CONSONANTS.split()),
]
MOST_SOUNDS = 20  # of a word, as g2p-en has it


class Speller(EncoderDecoder):
    """A GRU encoder of letters and a GRU decoder of phonemes that starts from its last state (Cho et al. 2014).

    Args:
        size: of embeddings and of both states.
    """

    def __init__(self, size: int = 256, generator: Generator = None) -> None:
        generator = new_generator(generator)
        self.letters = Embedding(len(LETTERS), size, generator=generator)
        self.encoder = GRU(size, size, generator=generator)
        self.sounds = Embedding(len(SOUNDS), size, generator=generator)
        self.decoder = GRU(size, size, generator=generator)
        self.output = Dense(size, len(SOUNDS), generator=generator, role="head")

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode letter ids (B, S); return the decoder's state {"hidden": (B, H)}; ignores `capacity`."""
        _, final = self.encoder(self.letters(as_tensor(source)), lengths)
        return {"hidden": final[0]}

    def decode(self, target: Operand, state: State) -> Tensor:
        """Return the logits (B, T, V) after each phoneme id (B, T), and advance `state` in place."""
        outputs, final = self.decoder(self.sounds(as_tensor(target)), initial=state["hidden"][None])
        state["hidden"] = final[0]
        return self.output(outputs)


def load(path: Path | None = None) -> Speller:
    """Return a Speller with g2p-en's weights, in evaluation mode, downloaded if missing; ValueError if damaged.

    Args:
        path: as of `Package.read`.

    Raises:
        ValueError: the arrays are not those of g2p-en.
    """
    content = io.BytesIO(G2P.read("checkpoint20.npz", path))
    try:
        with np.load(content, allow_pickle=False) as arrays:
            source = {name: arrays[name] for name in arrays.files}
    except DAMAGED as error:
        raise ValueError(f"checkpoint20.npz of {G2P.requirement}: damaged ({error})") from error
    model = Speller(source["enc_emb"].shape[-1] if "enc_emb" in source else 1)
    model.load_state_dict(
        {target: array for name, array in source.items() for target, array in _converted_arrays(name, array)}
    )
    model.eval()
    return model


def _converted_arrays(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return [(Tricycle's name, array in its layout)] for an array of g2p-en; ValueError for an unknown name."""
    names = {"enc_emb": "letters.weights", "dec_emb": "sounds.weights", "fc_w": "output.weights", "fc_b": "output.bias"}
    parts = {"w_ih": "input_weights", "w_hh": "hidden_weights", "b_ih": "input_bias", "b_hh": "hidden_bias"}
    layer, _, part = name.partition("_")
    if name in names:
        return [(names[name], array.T if name == "fc_w" else array)]
    layers = {"enc": "encoder", "dec": "decoder"}
    if layer not in layers or part not in parts:
        raise ValueError(f"expected arrays of g2p-en, got {name}")
    return [(f"{layers[layer]}.runs.0.0.{parts[part]}", array.T)]


def ids_of(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return zero-padded letter ids (B, S), </s> after each word, and lengths (B,); other characters are <unk>."""
    unknown = LETTERS.index("<unk>")
    known = {letter: i for i, letter in enumerate(LETTERS) if len(letter) == 1}
    rows = [[*(known.get(letter, unknown) for letter in word.lower()), LETTERS.index("</s>")] for word in words]
    return pad(rows)


def pronounce(model: Speller, words: list[str], beam_size: int = 1) -> list[list[str]]:
    """Return the phonemes of each word, at most 20, as in the CMU dictionary (AH0: digits mark stress)."""
    tokens, lengths = ids_of(words)
    limits = {"begin": SOUNDS.index("<s>"), "end": SOUNDS.index("</s>"), "max_length": MOST_SOUNDS}
    targets = beam_search(model, tokens, lengths, beam_size=beam_size, **limits)
    return [[SOUNDS[sound] for sound in sounds] for sounds in targets]


# -------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Settings:
    """The command-line settings: the words to pronounce, and the search."""

    words: tuple[str, ...] = ("transformer", "tricycle", "gradient", "softmax", "backpropagation")  # words to pronounce
    path: Path | None = None  # the wheel of g2p-en, or its folder g2p_en; found automatically if not given
    beam_size: int = 1  # the beam size
    quick: bool = False  # skip the accuracy on the package's word list


def heteronyms(path: Path | None = None) -> dict[str, set[str]]:
    """Return {word: its two pronunciations, each one text of phonemes and spaces} of g2p-en's word list."""
    words = {}
    for line in G2P.read("homographs.en", path).decode("utf-8").splitlines():
        if not line.startswith("#") and line.count("|") == 3:
            word, first, second, _ = line.split("|")
            words[word.lower()] = {first, second}
    return words


def main() -> int:
    """Print words' pronunciations, and the heteronyms' accuracy unless --quick; return 0; ValueError without words."""
    settings = parse(Settings, description=__doc__ or "")
    check_minimum(settings, beam_size=1)
    if not settings.words:
        raise ValueError("expected --words with a word or more")
    model = load(settings.path)
    for word, sounds in zip(settings.words, pronounce(model, list(settings.words), settings.beam_size)):
        print(f"{word:<20}{' '.join(sounds)}")
    if settings.quick:
        return 0
    both = heteronyms(settings.path)
    spoken = pronounce(model, list(both), settings.beam_size)
    right = sum(" ".join(sounds) in both[word] for word, sounds in zip(both, spoken))
    print(f"\nof {len(both)} words with two pronunciations, {right} match one of them ({right / len(both):.1%})")
    return 0


if __name__ == "__main__":
    run_main(main)
