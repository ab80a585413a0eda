"""Generate titles of posts by character: the network of textgenrnn in Tricycle's LSTM with attention.

    python -m experiments.pretrained.textgenrnn                            as below
    python -m experiments.pretrained.textgenrnn --begin "My cat" --temperatures 0 0.5
    python -m experiments.pretrained.textgenrnn --quick                    one title at one temperature

The file is found by itself (`packages.py`), or named by --path. It belongs to textgenrnn 2.0.0 by Max Woolf (MIT
License). Reading it needs h5py, which is one of the extras "experiments".
"""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pretrained.packages import TEXTGENRNN
from experiments.shared.program import check_minimum
from tricycle import kernels
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.extra_ops import concatenate
from tricycle.layers import Dense, Embedding, Layer
from tricycle.ops import as_tensor
from tricycle.parameter import Parameter
from tricycle.sequences.attentions import LuongAttention
from tricycle.sequences.recurrent import LSTM
from tricycle.tensor import Operand, Tensor
from tricycle_cli.flags import parse, run_main

WINDOW = 40  # characters that it looks at; before a beginning stand zeros, which it reads, too
MARK = "<s>"  # stands before a text and after it
TITLES = (  # how well does it know what people ask?
    "What is the best way to learn how to play the guitar?",
    "My dog is the best thing that ever happened to me",
    "Scientists have found a new way to make batteries last longer",
)


class CharacterModel(Layer):
    """Two stacked LSTMs, then attention with one learned query over embeddings and outputs of all characters.

    Args:
        n_characters: V.
        embedding_dim, hidden_size: of a character, and of each LSTM.
    """

    def __init__(self, n_characters: int, embedding_dim: int = 100, hidden_size: int = 128) -> None:
        width = embedding_dim + 2 * hidden_size
        self.embedding = Embedding(n_characters, embedding_dim)
        self.first = LSTM(embedding_dim, hidden_size)
        self.second = LSTM(hidden_size, hidden_size)
        self.attention = LuongAttention(width, width, "dot")
        self.query = Parameter(np.zeros(width, np.float32), "embedding")
        self.output = Dense(width, n_characters, role="head")

    def states(self, embedded: Operand) -> Tensor:
        """Return (B, T, W): embeddings (B, T, E) concatenated with the outputs of both LSTMs."""
        embedded = as_tensor(embedded)
        first, _ = self.first(embedded)
        second, _ = self.second(first)
        return concatenate([embedded, first, second], axis=-1)

    def attend(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted means (B, W) of the states, and the attention weights (B, T)."""
        query = self.query + states.xp.zeros((len(states), 1, 1), states.dtype)
        context, weights = self.attention(query, states, return_weights=True)
        return context[:, 0], weights[:, 0]

    def forward(self, tokens: Operand) -> Tensor:
        """Return the logits (B, V) of the next character for tokens (B, T)."""
        return self.output(self.attend(self.states(self.embedding(as_tensor(tokens))))[0])


# -------------------------------------------------------------------- out of the package
def load(path: Path | None = None) -> tuple[CharacterModel, dict[str, int]]:
    """Return the network in evaluation mode, and {character: id}; download the package if it is missing.

    Args:
        path: as of `Package.read`.

    Raises:
        ValueError: the file is damaged, or is of another network.
        ImportError: there is no h5py.
    """
    vocabulary = json.loads(TEXTGENRNN.read("textgenrnn_vocab.json", path))
    arrays = read_arrays(TEXTGENRNN.read("textgenrnn_weights.hdf5", path))
    n_characters, embedding_dim = arrays["embedding/embeddings"].shape
    model = CharacterModel(n_characters, embedding_dim, len(arrays["rnn_1/recurrent_kernel"]))
    state = {
        "embedding.weights": arrays["embedding/embeddings"],
        "query": arrays["attention/attention_W"][:, 0],
        "output.weights": arrays["output/kernel"],
        "output.bias": arrays["output/bias"],
    }
    for layer, source_layer in {"first": "rnn_1", "second": "rnn_2"}.items():
        kernel, recurrent, bias = (arrays[f"{source_layer}/{part}"] for part in ("kernel", "recurrent_kernel", "bias"))
        input_bias, hidden_bias = np.split(bias, 2)
        state |= {
            f"{layer}.runs.0.0.input_weights": from_cudnn(kernel),
            f"{layer}.runs.0.0.hidden_weights": from_cudnn(recurrent),
            f"{layer}.runs.0.0.input_bias": input_bias,
            f"{layer}.runs.0.0.hidden_bias": hidden_bias,
        }
    model.load_state_dict(state)
    model.eval()
    return model, vocabulary


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return textgenrnn's float32 arrays of a Keras HDF5 file by "layer/weight"; ValueError for another file."""
    import h5py

    names = ["embedding/embeddings", "attention/attention_W", "output/kernel", "output/bias"]
    names += [f"rnn_{i}/{part}" for i in (1, 2) for part in ("kernel", "recurrent_kernel", "bias")]
    places = {name: f"{name.partition('/')[0]}/{name}:0" for name in names}
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            absent = [place for place in places.values() if place not in file]
            if absent:
                raise ValueError(f"there is no {absent[0]}")
            return {name: np.asarray(file[place], np.float32) for name, place in places.items()}
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"textgenrnn_weights.hdf5: expected the weights of textgenrnn: {reason}") from error


def from_cudnn(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix (in, 4 H) of four gates in plain memory order, from one in cuDNN's layout.

    There each gate's numbers lie in memory as (H, in), under a shape that says (in, H). Two biases tell such a file.
    """
    n_inputs, n_columns = matrix.shape
    size = n_columns // 4
    gates = [gate.reshape(size, n_inputs).T for gate in np.split(matrix, 4, axis=1)]
    return np.concatenate(gates, axis=1)


# -------------------------------------------------------------------- characters
def windows(vocabulary: dict[str, int], characters: list[str]) -> np.ndarray:
    """Return ids (T + 1, WINDOW): row t has those before character t, left-padded; 0 for unknown characters."""
    ids = [0] * WINDOW + [vocabulary[MARK]] + [vocabulary.get(character, 0) for character in characters]
    return np.array([ids[i + 1 : i + 1 + WINDOW] for i in range(len(characters) + 1)])


def bits(model: CharacterModel, vocabulary: dict[str, int], texts: tuple[str, ...]) -> float:
    """Return the mean bits per character, including the end of each text."""
    lost = []
    for text in texts:
        with model.evaluating():
            logits = model(windows(vocabulary, list(text))).numpy().astype(np.float64)
        ids = [*(vocabulary.get(character, 0) for character in text), vocabulary[MARK]]
        lost.append(-kernels.log_softmax(logits)[np.arange(len(ids)), ids])
    return float(np.concatenate(lost).mean() / np.log(2))


def write(
    model: CharacterModel, vocabulary: dict[str, int], begin: str, temperature: float, longest: int, generator: Any
) -> str:
    """Return `begin` and sampled characters, up to an end mark or `longest` in all; temperature 0 is greedy."""
    characters = {number: character for character, number in vocabulary.items()}
    text = list(begin)
    while len(text) < longest:
        with model.evaluating():
            logits = model(windows(vocabulary, text)[-1:]).numpy()[0]
        character = characters[PenalizedSamplingParams(temperature, suppress_tokens=[0]).sample(logits, generator)]
        if character == MARK:
            break
        text.append(character)
    return "".join(text)


# -------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Settings:
    """The command-line settings: how to generate."""

    begin: str = ""  # the beginning of generated texts
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)  # of sampling; 0 for greedy decoding
    texts: int = 2  # at each temperature above 0
    longest: int = 140  # characters of a text
    titles: tuple[str, ...] = TITLES  # titles to score
    path: Path | None = None  # the source archive of textgenrnn, or the folder textgenrnn out of it
    seed: int = 0  # of sampling
    quick: bool = False  # one text at one temperature


def main() -> int:
    """Print texts for each temperature, and the bits per character of --titles; return 0."""
    quick = Settings(temperatures=(0.5,), texts=1) if "--quick" in sys.argv[1:] else None
    settings = parse(Settings, quick, description=__doc__ or "")
    check_minimum(settings, texts=1, longest=1, seed=0)
    model, vocabulary = load(settings.path)
    generator = np.random.default_rng(settings.seed)
    for temperature in settings.temperatures:
        for _ in range(settings.texts if temperature else 1):
            text = write(model, vocabulary, settings.begin, temperature, settings.longest, generator)
            print(f"{temperature:<6g}{text}")
    if settings.titles:
        n_titles = len(settings.titles)
        print(f"\n{bits(model, vocabulary, settings.titles):.3f} bits per character of {n_titles} titles")
    return 0


if __name__ == "__main__":
    run_main(main)
