"""Reading other people's models: folders, files, and what is refused."""

import numpy as np
import pytest

from tricycle.pretrained import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_a_folder(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 20))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(ours.model(tokens).array - expected).max() < 1e-4 * np.abs(expected).max()
    assert ours.generation.stop_tokens == (2,)
