"""BERT and RoBERTa against transformers: hidden states, gradients, and folders either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import change_config, difference, read

from tricycle.configs import EncoderConfig
from tricycle.pretrained import load
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import no_grad

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 20,
}
AGREED = 2e-5  # relative to the largest element
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", {}),
    "three types, tanh": ("Bert", {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
    "one type, ReLU": ("Bert", {"type_vocab_size": 1, "hidden_act": "relu"}),
    "one head, one layer": ("Bert", {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 7}),
    "many narrow heads": ("Bert", {"num_attention_heads": 12, "num_hidden_layers": 3}),
    "RoBERTa": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "XLM-RoBERTa": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 4, "layer_norm_eps": 1e-5}),
}
each_case = pytest.mark.parametrize(("kind", "fields"), CASES.values(), ids=CASES)


def a_model(kind: str, fields: dict[str, Any], head: str = "Model") -> Any:
    """Return one of transformers, with weights so large that all of them show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields}, attn_implementation="eager")
    model = getattr(transformers, kind + head)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def compare(folder: Path, encoder: Any) -> None:
    """Compare the hidden states of the stored model with those of transformers."""
    actual = load(folder)
    assert isinstance(actual.model, TextEncoder) and not actual.model.training
    tokens, mask, _ = a_batch(encoder)
    with torch.no_grad(), no_grad():
        expected = encoder(torch.from_numpy(tokens), torch.from_numpy(mask)).last_hidden_state.numpy()
        assert difference(actual.model(tokens, mask).array[mask], expected[mask]) < AGREED
        whole = np.array([[5], [7]])
        expected = encoder(torch.from_numpy(whole)).last_hidden_state.numpy()
        assert difference(actual.model(whole).array, expected) < AGREED


def a_batch(encoder: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, mask and types (4, T): a text, one with padding behind, one token, and padding before a text."""
    rng = np.random.default_rng(0)
    tokens, types = rng.integers(5, 61, (4, 9)), rng.integers(0, encoder.config.type_vocab_size, (4, 9))
    mask = np.ones((4, 9), bool)
    mask[1, 4:] = mask[2, 1:] = False
    mask[3, :3] = encoder.config.model_type != "bert"  # RoBERTa does not count the positions of padding
    tokens[~mask] = encoder.config.pad_token_id or 0
    return tokens, mask, types


def check_gradients(encoder: Any, agreed: float, *inputs: np.ndarray) -> None:
    """Check hidden states, and gradients of a loss of those without padding; inputs: tokens, mask and any types."""
    model, mask = read(encoder), inputs[1]
    hidden = model(*inputs)
    expected = encoder(*map(torch.from_numpy, inputs)).last_hidden_state
    assert difference(hidden.array[mask], expected.detach().numpy()[mask]) < agreed
    weights = np.random.default_rng(2).standard_normal(hidden.shape).astype(np.float32) * mask[..., None]
    (hidden * weights).sum().backward()
    (expected * torch.from_numpy(weights)).sum().backward()
    grads = read(encoder, "grad").state_dict()
    # beside those of queries and values, for of keys' biases it is 0: they add the same to all scores of a query
    differences = {name: difference(p.grad.array, grads[name]) for name, p in model.named_parameters()}
    assert max(differences.values()) < agreed, differences


@each_case
def test_hidden_states_and_gradients_agree(kind: str, fields: dict[str, Any]) -> None:
    encoder = a_model(kind, fields)
    check_gradients(encoder, AGREED, *a_batch(encoder))


@each_case
def test_saved_folder_loads_with_equal_outputs(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    model = a_model(kind, fields)
    model.save_pretrained(tmp_path)
    compare(tmp_path, model)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_heads_are_left_out(tmp_path: Path, kind: str, head: str) -> None:
    model = a_model(kind, {}, head)
    model.save_pretrained(tmp_path)
    compare(tmp_path, model.base_model)


def test_norms_by_their_old_names(tmp_path: Path) -> None:
    model = a_model("Bert", {}, "ForMaskedLM")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    assert any("LayerNorm.weight" in name for name in tensors)
    rename = lambda name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
    safetensors.save_file({rename(name): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    compare(tmp_path, model.bert)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type.*'absolute'"),
        ({"is_decoder": True}, "is_decoder.*False"),
        ({"hidden_act": "mish"}, "hidden_act.*one of"),
        ({"num_attention_heads": 5}, "n_heads.*embedding_dim 24.*got 5"),
        ({"type_vocab_size": 10**12}, "asks for at least 24,000,0"),
        ({"model_type": "roberta", "max_position_embeddings": 10**12, "pad_token_id": 10**12 - 9}, "asks for at least"),
        ({"model_type": "roberta", "pad_token_id": 19}, "context_window.*got 0"),
        ({"model_type": "roberta", "pad_token_id": -5}, "position_offset.*got -4"),
        ({"intermediate_size": 48}, r"encoder\.layer\.0\.intermediate\.dense\.weight: .*shape"),
    ],
)
def test_unsupported_fields_are_rejected(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    a_model("Bert", {}).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_the_defaults_are_those_of_transformers() -> None:
    from tricycle.pretrained.config_fields import ConfigFields
    from tricycle.pretrained.families.bert import to_config, to_fields

    assert to_config(ConfigFields({})) == EncoderConfig(hidden_size=3072)
    written = {name: value for name, value in to_fields(EncoderConfig()).items() if "dropout" not in name}
    assert written.items() <= transformers.BertConfig().to_dict().items()
