"""Encoder-decoders that were saved are opened as they were, by whatever names them; and what is none is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from tricycle.sequences.translators import (
    TranslatorConfig,
    Vocabulary,
    find_translators,
    load_translator,
    new_translator,
)
from tricycle.tensor import no_grad
from tricycle_cli import look

VOCABULARY = Vocabulary.train(["the cat sees the dog", "die Katze sieht den Hund"], 270, progress=False)
CONFIG = TranslatorConfig("transformer", len(VOCABULARY), width=8, n_layers=2, n_heads=2)
KINDS = get_args(get_type_hints(TranslatorConfig)["name"])


def write(path: Path, config: TranslatorConfig = CONFIG, **changed: Any) -> Any:
    """A model in a file, maybe with other metadata than its own."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    model = new_translator(config, np.random.default_rng(0)).eval()
    recipe = {**asdict(config), "learning_rate": 1e-3, "title": "of the experiment alone"}
    about = {"name": config.name, "recipe": recipe, "tokeniser": VOCABULARY.tokeniser.to_dict(), **changed}
    weights = {f"mean.{name}": np.ascontiguousarray(array) for name, array in model.state_dict().items()}
    save_file({**weights, "step.0": np.zeros(3)}, path, {"translation": json.dumps(about)})
    return model


@pytest.mark.parametrize("name", KINDS)
def test_save_and_load(tmp_path: Path, name: str) -> None:
    config = TranslatorConfig(name, len(VOCABULARY), 8, 2, dropout=0.1, n_heads=2)
    model = write(tmp_path / "a.safetensors", config)
    loaded, vocabulary, shape = load_translator(tmp_path / "a.safetensors")
    assert shape == config
    batch = vocabulary.batch([vocabulary.encode("the cat")], [vocabulary.encode("die Katze")])
    with no_grad():
        one, two = (each(batch.source, batch.target, batch.lengths).array for each in (model, loaded))
    np.testing.assert_array_equal(one, two)
    assert vocabulary.decode(batch.source[0]) == "the cat"


def test_translator_files_are_recognized(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    assert find_translators(tmp_path) == find_translators(tmp_path / "none.safetensors") == []
    save_file({"a": np.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 20)
    write(tmp_path / "one.safetensors")
    assert find_translators(tmp_path) == find_translators(tmp_path / "one.safetensors") != []
    assert find_translators("smollm2") == []


HARM = {
    "another kind": ({"name": "cnn"}, "name.*one of fixed"),
    "no recipe": ({"recipe": {}}, "missing 2 required"),
    "a list": ({"recipe": [1]}, "no attribute"),
    "huge": ({"recipe": {**asdict(CONFIG), "width": 10**6}}, "numbers in its weights"),
    "many layers": ({"recipe": {**asdict(CONFIG), "n_layers": 10**9}}, "numbers in its weights"),
    "a wide MLP": ({"recipe": {**asdict(CONFIG), "expansion": 1e12}}, "numbers in its weights"),
    "another width": ({"recipe": {**asdict(CONFIG), "n_layers": 1}}, "blocks.1"),
    "many places": ({"recipe": {**asdict(CONFIG), "context_window": 10**12}}, "context_window"),
    "a text for a number": ({"recipe": {**asdict(CONFIG), "width": "8"}}, "width.*whole number"),
    "no tokeniser": ({"tokeniser": None}, "BPETokeniser: expected a dict"),
}


@pytest.mark.parametrize("case", HARM)
def test_damaged_files_fail_with_one_line(tmp_path: Path, case: str) -> None:
    path, (changed, message) = tmp_path / "odd.safetensors", HARM[case]
    write(path, **changed)
    with pytest.raises(ValueError, match=message) as caught:
        load_translator(path)
    assert str(caught.value).startswith(f"{path}: expected a saved encoder-decoder")
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------- the command
@pytest.mark.parametrize("name", ["transformer", "luong", "bahdanau"])
def test_look_opens_a_translator(tmp_path: Path, name: str) -> None:
    write(tmp_path / "mine.safetensors", TranslatorConfig(name, len(VOCABULARY), 8, 1, n_heads=2))
    for source in (tmp_path, tmp_path / "mine.safetensors"):
        out = tmp_path / "look.html"
        look.main([str(source), "the cat => die Katze", "--out", str(out)])
        text = out.read_text(encoding="utf-8")
        assert '"kind":"cross"' in text
        assert '"title":"mine"' in text
        out.unlink()


def test_look_rejects_files_that_it_cannot_open(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", TranslatorConfig("fixed", len(VOCABULARY), 8, 1))
    with pytest.raises(ValueError, match=r"one: .*attention.*Seq2Seq"):
        look.main([str(tmp_path), "the cat"])
    write(tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"one.safetensors, .*two"):
        look.main([str(tmp_path), "the cat"])
    with pytest.raises(ValueError, match=r"--softmax: .*encoder-decoder.*two.safetensors"):
        look.main([str(tmp_path / "two.safetensors"), "the cat", "--softmax", "softmax1"])
    with pytest.raises(ValueError, match="1 to 128 tokens"):
        look.main([str(tmp_path / "two.safetensors"), "the cat " * 200])
