"""Files that earlier versions wrote load, say what they said then, and training goes on from them as it would have."""

import json
from pathlib import Path

import numpy as np
import pytest

from tricycle.checkpoint import load_checkpoint
from tricycle.optimiser_rules.muon import is_hidden_matrix
from tricycle.tokeniser import BPETokeniser
from tricycle.training_state import read_steps, resume_state, train_step
from tricycle_cli.pickles import load_pickled_model

FOLDER = Path(__file__).parent / "written_before"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))["runs"]
LOOKED_AT = np.arange(12)[None] * 7


@pytest.fixture(scope="module")
def tokens():
    text = (FOLDER.parent.parent / "LICENSE").read_text(encoding="utf-8") * 3
    tokeniser = BPETokeniser(280)
    tokeniser.train(text)
    return tokeniser.encode(text)


def logits_of(model) -> np.ndarray:
    with model.evaluating():
        return model(LOOKED_AT)[0, -1, :6].numpy()


@pytest.mark.parametrize("file", [*(f"{name}.safetensors" for name in EXPECTED), "plain.pkl", "recipe.pkl"])
def test_a_checkpoint_or_pickle_gives_the_same_logits(file):
    path = FOLDER / file
    model = load_pickled_model(path) if path.suffix == ".pkl" else load_checkpoint(path).model()
    np.testing.assert_allclose(logits_of(model), EXPECTED[path.stem]["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXPECTED)
def test_former_checkpoint_resumes_training_with_equal_losses(name, tokens):
    state = resume_state(FOLDER / f"{name}.safetensors", tokens)
    results = read_steps(state, [train_step(state) for _ in range(4)])
    np.testing.assert_allclose([loss for loss, _ in results], EXPECTED[name]["losses"], rtol=1e-5)
    assert state.step == state.optimiser.n_steps == 9


def test_loading_drops_second_moments_of_muon_matrices(tokens):
    state = resume_state(FOLDER / "recipe.safetensors", tokens)
    for parameter in state.model.parameters():
        n_updates, moments = state.optimiser.state_of(parameter)
        assert n_updates == 5
        assert list(moments) == (["first"] if is_hidden_matrix(parameter) else ["first", "second"])
