"""ModernBERT against transformers: hidden states, gradients, masks, and folders either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_pretrained_bert
from hf_checks import check_adapter
from transformers_families import difference

from tricycle.configs import EncoderConfig
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder
from tricycle.sequences.text_encoder import TextEncoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    **test_pretrained_bert.SIZES,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
CASES: dict[str, dict[str, Any]] = {
    "usual": {"local_attention": 6},
    "biases": {
        "local_attention": 4,
        "global_attn_every_n_layers": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "norm_eps": 1e-3,
        "hidden_activation": "silu",
        "global_rope_theta": 500.0,
        "local_rope_theta": 50.0,
    },
}
each_case = pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
AGREED = 3e-6


def a_model(fields: dict[str, Any]) -> Any:
    return test_pretrained_bert.a_model("ModernBert", {**SIZES, **fields})


TOKENS = np.random.default_rng(0).integers(0, 61, (3, 20))
MASK = np.arange(20) < np.array([[20], [13], [2]])


def hidden_states(encoder: Any, tokens: np.ndarray = TOKENS) -> np.ndarray:
    with torch.no_grad():
        return encoder(torch.from_numpy(tokens)).last_hidden_state.numpy()


@each_case
def test_hidden_states_and_gradients_agree(fields: dict[str, Any]) -> None:
    test_pretrained_bert.check_gradients(a_model(fields), AGREED, TOKENS, MASK)


@each_case
def test_folders(fields: dict[str, Any], tmp_path: Path) -> None:
    encoder = a_model(fields)
    encoder.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs").model
    expected = hidden_states(encoder)
    assert difference(model(TOKENS).array, expected) < AGREED
    assert export_folder(model, None, tmp_path / "ours") == "modernbert"
    hf_model, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert difference(hidden_states(hf_model.eval()), expected) < AGREED


@pytest.mark.parametrize("targets", [("Wqkv", "Wi"), ("all-linear",)], ids=str)
def test_adapters_have_the_names_of_peft(targets: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check_adapter(a_model(CASES["usual"]), targets, (TOKENS,), tmp_path, hidden_states)


def test_head_is_passed_over(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**SIZES)).eval()
    whole.save_pretrained(tmp_path)
    assert difference(load(tmp_path).model(TOKENS).array, hidden_states(whole.model)) < AGREED


def test_a_first_block_without_a_norm_needs_norms_before() -> None:
    with pytest.raises(ValueError, match="first_norm to be True unless norm_placement is before"):
        EncoderConfig(first_norm=False)


def test_local_attention_sees_half_a_window_on_each_side() -> None:
    config = EncoderConfig(
        vocab_size=9,
        embedding_dim=8,
        n_heads=2,
        n_layers=1,
        context_window=12,
        window=4,
        positions="rotary",
        token_types=0,
    )
    model = TextEncoder(config).eval()
    tokens = np.arange(12)[None] % 9
    changed = tokens.copy()
    changed[0, 6] = (changed[0, 6] + 1) % 9
    moved = np.abs(model(tokens).array - model(changed).array).max(axis=-1)[0] > 0
    assert moved.nonzero()[0].tolist() == [4, 5, 6, 7, 8]
