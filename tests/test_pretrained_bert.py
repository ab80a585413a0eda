"""BERT and RoBERTa out of folders that transformers wrote, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tricycle.configs import EncoderConfig
from tricycle.pretrained import load
from tricycle.pretrained.export import export_tensors
from tricycle.pretrained.families import FAMILIES
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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", {}),
    "three types, tanh": ("Bert", {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
    "RoBERTa": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "XLM-RoBERTa": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 4, "layer_norm_eps": 1e-5}),
}
each_case = pytest.mark.parametrize(("kind", "fields"), CASES.values(), ids=CASES)


def a_model(kind: str, fields: dict[str, Any], head: str = "Model") -> Any:
    """Of transformers, with weights so large that all of them show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **fields, attn_implementation="eager")
    model = getattr(transformers, kind + head)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def compare(folder: Path, encoder: Any) -> None:
    """Return the hidden states of the stored model and of transformers."""
    actual = load(folder)
    assert isinstance(actual.model, TextEncoder) and not actual.model.training
    tokens = np.random.default_rng(0).integers(5, 61, (3, 9))
    mask = np.ones((3, 9), bool)
    mask[1, 4:] = False
    pad = encoder.config.pad_token_id or 0
    tokens[~mask] = pad
    with torch.no_grad(), no_grad():
        expected = encoder(torch.from_numpy(tokens), torch.from_numpy(mask)).last_hidden_state.numpy()
        hidden = actual.model(tokens, mask).array
    assert np.abs(hidden - expected)[mask].max() < 2e-5 * np.abs(expected).max()


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
    words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in tensors.items():
        for new, word in words.items():
            name = name.replace(new, word)
        old[name] = tensor
    safetensors.save_file(old, path, {"format": "pt"})
    compare(tmp_path, model.bert)


@each_case
def test_exported_weights_give_equal_outputs_in_transformers(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    """Our config as their fields, our weights as their tensors: transformers gives the same again."""
    model = a_model(kind, fields)
    model.save_pretrained(tmp_path)
    tricycle_model = load(tmp_path).model
    family = FAMILIES[model.config.model_type]
    again = type(model.config)(**family.to_fields(tricycle_model.config), attn_implementation="eager")
    hf_model = type(model)(again, add_pooling_layer=False).eval()
    hf_model.load_state_dict(
        {
            name: torch.from_numpy(array)
            for name, array in export_tensors(tricycle_model, family, tricycle_model.config)[1]
        }
    )
    tokens = torch.arange(5, 13)[None]
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        assert torch.allclose(hf_model(tokens).last_hidden_state, expected, atol=1e-6)


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
    import json

    a_model("Bert", {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_the_defaults_are_those_of_transformers() -> None:
    from tricycle.pretrained.config_fields import ConfigFields
    from tricycle.pretrained.families.bert import to_config, to_fields

    assert to_config(ConfigFields({})) == EncoderConfig(hidden_size=3072)
    expected = transformers.BertConfig().to_dict()
    assert {name: expected[name] for name in to_fields(EncoderConfig()) if "dropout" not in name} == {
        name: value for name, value in to_fields(EncoderConfig()).items() if "dropout" not in name
    }
