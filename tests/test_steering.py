"""Steering vectors are differences of means, move the residual stream, and change a score monotonically."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from programs import good, run_here
from tables import bad_input
from test_look import TOKENISER
from test_models import GEMMA, TINY, lively
from tiny_models import lively_model, smollm2_file, write_folder

from tricycle.checkpoint import save_checkpoint
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.pretrained.gguf_control_vectors import read_control_vectors
from tricycle.tensor import no_grad
from tricycle_cli import generate as generate_command
from tricycle_cli.inspect import main
from tricycle_cli.models import load_model
from tricycle_lab.probe import Probe
from tricycle_lab.steering import contrast_prompts, score_steering, steer

POSITIVE, NEGATIVE = [[1, 2, 3], [4, 2]], [[5, 2, 9]]


def test_vectors_are_differences_of_means() -> None:
    model = lively(GEMMA).eval()
    expected = []
    for prompts in (POSITIVE, NEGATIVE):
        streams = []
        for tokens in prompts:
            with Probe(model, "blocks.?") as probe, no_grad():
                model(np.array([tokens]))
            streams.append([probe.activations[f"blocks.{i}"][0, -1] for i in range(2)])
        expected.append(np.mean(streams, axis=0))
    vectors = contrast_prompts(model, POSITIVE, NEGATIVE)
    np.testing.assert_allclose(vectors, expected[0] - expected[1], rtol=1e-5, atol=1e-5)


def test_stream_moves_by_the_vector_and_returns() -> None:
    model = lively(TINY).eval()
    tokens, vector = np.array([[1, 2, 3]]), np.arange(8.0)

    def streams() -> list[np.ndarray]:
        with Probe(model, "blocks.?") as probe, no_grad():
            model(tokens)
        return [probe.activations[f"blocks.{i}"].copy() for i in range(2)]

    before = streams()
    with steer(model, {0: vector}, -0.5):
        first, second = streams()
    np.testing.assert_allclose(first - before[0], np.broadcast_to(-0.5 * vector, (1, 3, 8)), atol=1e-5)
    assert abs(second - before[1]).max() > 0.1
    np.testing.assert_array_equal(streams()[0], before[0])
    assert not any("forward" in vars(layer) for layer in model.layers())


def test_generation_with_a_cache_equals_a_loop_without() -> None:
    model, vectors = lively_model(), {1: np.random.default_rng(0).normal(0, 1, 32)}
    plain = [int(token) for token in generate(model, [1, 2], 10, temperature=0)]
    with steer(model, vectors, 2.0):
        generated = [int(token) for token in generate(model, [1, 2], 10, temperature=0)]
        text = [1, 2]
        with no_grad():
            for _ in range(10):
                text.append(int(model(np.array([text])).array[0, -1].argmax()))
    assert generated[-10:] == text[2:] != plain[-10:]


def test_scores_rise_with_the_strength() -> None:
    """A vector along the difference of two rows of the tied embedding raises one answer against the other."""
    model = lively(TINY).eval()
    table = model.token_embedding.weights.array
    vectors = {1: model.norm.gain.array * (table[3] - table[7])}
    scores = score_steering(model, vectors, POSITIVE, (3, 7), [-1, -0.5, 0, 0.5, 1])
    assert (np.diff(scores) > 0).all() and np.ptp(scores) > 0.5
    with no_grad():
        logits = [model(np.array([tokens])).array[0, -1] for tokens in POSITIVE]
    assert scores[2] == pytest.approx(np.mean([row[3] - row[7] for row in logits]), abs=1e-5)


MODEL = GPT(TINY)
test_invalid_arguments = bad_input(
    {
        "no prompts": (lambda: contrast_prompts(MODEL, POSITIVE, []), "positive and negative prompts, got 2 and 0"),
        "id": (lambda: contrast_prompts(MODEL, [[99]], NEGATIVE), "ids from 0 to 10"),
        "layer": (lambda: steer(MODEL, {2: np.ones(8)}), "blocks 0 to 1"),
        "size": (lambda: steer(MODEL, {1: np.ones(9)}), r"\(8,\).*\(9,\)"),
        "nothing to score": (lambda: score_steering(MODEL, {}, [], (1, 2), [1.0]), "at least one prompt, got none"),
        "answer": (lambda: score_steering(MODEL, {}, [[1]], (1, -1), [1.0]), "ids from 0 to 10"),
        "strength": (lambda: steer(MODEL, {1: np.ones(8)}, float("nan")), "finite strength"),
    }
)


# -------------------------------------------------------------------- commands
WORDS = ("--positive", "the quick", "quick fox", "--negative", "the lazy")
SCORE = ("--score", "the", "--answers", " the", " dogs")


def test_commands_write_and_use_a_vector(tmp_path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("jinja2")
    folder = write_folder(tmp_path / "tiny")
    words = ("steer", folder, *WORDS, *SCORE, "--strengths", "0", "3", "--vector", "v.gguf", "--out", "scores.png")
    out = good(run_here(main, "tricycle inspect", words, tmp_path))
    loaded = load_model(str(folder))
    encode = lambda text: [int(token) for token in loaded.tokeniser.encode_plain(text)]
    vectors = contrast_prompts(loaded.model, [encode("the quick"), encode("quick fox")], [encode("the lazy")])
    assert out.startswith(f"layer 1: a vector of norm {np.linalg.norm(vectors[1]):.4g}\n")
    answers = encode(" the")[0], encode(" dogs")[0]
    for strength, score in zip((0, 3), score_steering(loaded.model, {1: vectors[1]}, [encode("the")], answers, (0, 3))):
        assert f"{strength:9g}  {score:16.4f}\n" in out
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")

    def text(*words: str) -> str:
        words = (folder, "the quick", "--length", "12", "--temperature", "0", *words)
        return good(run_here(generate_command.main, "tricycle generate", words, tmp_path))

    assert text() == text("--steer", "v.gguf", "--strength", "0") != text("--steer", "v.gguf", "--strength", "4")


def test_a_run_that_llama_cpp_cannot_compute_is_steered_too(tmp_path) -> None:
    pytest.importorskip("gguf")
    model = lively(replace(TINY, vocab_size=TOKENISER.n_vocab, token_shift=True))
    save_checkpoint(tmp_path / "run" / "best.safetensors", model, TOKENISER)
    words = ("steer", "run", "--positive", "the cat", "--negative", "a dog", "--vector", "v.gguf")
    out = good(run_here(main, "tricycle inspect", words, tmp_path))
    assert out.splitlines()[-1].startswith("v.gguf (llama.cpp cannot run this model: ")
    assert list(read_control_vectors(tmp_path / "v.gguf", TINY.n_layers, TINY.embedding_dim)) == [1]


def test_weights_with_nan_are_rejected(tmp_path) -> None:
    pytest.importorskip("jinja2")
    path = write_folder(tmp_path / "tiny") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\xc0\x7f")  # NaN, the last value of the last weight
    done = run_here(main, "tricycle inspect", ("tiny", "--heads"), tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"tricycle inspect: tiny: expected finite weights, \S+ has NaN or infinity\n", done.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*WORDS, "--score", "the"), "--score with two --answers"),
        ((*WORDS, "--answers", " a"), "--score with two --answers, or neither, got 0 prompts and 1 answers"),
        ((*WORDS, "--out", "a.png"), "--score with --out"),
        ((*WORDS, "--strengths", "3"), "--score with --strengths"),
        ((*WORDS, "--layers", "0"), "layers from 1 to 1"),
        ((*WORDS, *SCORE[:-1], "zqzq"), "answers of one token each"),
    ],
)
def test_wrong_flags_fail_with_one_line(words, message, tmp_path) -> None:
    pytest.importorskip("jinja2")
    done = run_here(main, "tricycle inspect", ("steer", write_folder(tmp_path / "tiny"), *words), tmp_path)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_strength_needs_a_vector() -> None:
    with pytest.raises(ValueError, match="--steer with --strength, which has no effect"):
        generate_command.main(["MODEL", "the", "--strength", "2"])


@pytest.mark.slow
def test_smollm2_is_steered_monotonically() -> None:
    loaded = load_model(str(smollm2_file()), weights="float32")
    encode = lambda text: [int(token) for token in loaded.tokeniser.encode_plain(text)]
    groups = [
        [encode(f"{text} {word}") for text in ("The film was", "The food is", "My day was") for word in words]
        for words in (("great", "wonderful"), ("terrible", "awful"))
    ]
    vectors = {15: contrast_prompts(loaded.model, *groups)[15]}
    prompts = [encode(text) for text in ("I think the book is", "Their new song sounds")]
    answers = encode(" good")[0], encode(" bad")[0]
    scores = score_steering(loaded.model, vectors, prompts, answers, (-2, -1, 0, 1, 2))
    assert (np.diff(scores) > 0.1).all()
