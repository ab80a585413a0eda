"""Small models and default configs of all families against a file, so that no PyTorch is needed.

The file contains outputs of transformers, and the default configs, which test_pretrained_families.py and others compare
with those of transformers.

`python tests/test_stored_outputs.py` writes the file again, with PyTorch and transformers: after a new family, or a new
case of the modules that `hf_models` names.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import FAMILIES as SMALL
from transformers_families import difference, new_hf_model

from tricycle.pretrained import load
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families import FAMILIES, build_model
from tricycle.pretrained.stored_model import StoredModel, StoredTensor
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import no_grad

FILE = Path(__file__).with_name("stored_outputs.json")
STORED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
MODELS = STORED["models"]
LONG = np.random.default_rng(0).integers(5, 61, (2, 28))
SHORT, SOURCE = LONG[:, :14], LONG[:, 9:20]


def draw_tensors(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return random tensors, large enough that each of them affects the outputs."""
    generator, tensors = np.random.default_rng(1), {}
    for name, shape in shapes.items():
        noise = generator.standard_normal(shape, np.float32)
        tensors[name] = noise * np.float32(shape[-1] ** -0.5) if len(shape) > 1 else 0.5 + noise / 4
    return tensors


def sample(outputs: np.ndarray) -> np.ndarray:
    """Return 48 of the outputs, drawn without replacement."""
    return outputs.ravel()[np.random.default_rng(2).choice(outputs.size, 48, replace=False)]


def our_outputs(stated: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    stored = {name: StoredTensor(array.shape, "F32", partial(np.asarray, array)) for name, array in tensors.items()}
    model: Any = build_model(StoredModel(Path("memory"), stated, stored)).eval()
    with no_grad():
        if isinstance(model, EncoderDecoderTransformer):
            return model(SOURCE, SHORT).array
        return model(SHORT if isinstance(model, TextEncoder) else LONG).array


def hf_outputs(stated: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    import torch
    import transformers
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        Path(folder, "config.json").write_text(json.dumps(stated), encoding="utf-8")
        save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
        kind = getattr(transformers, stated["architectures"][0])
        hf_model = kind.from_pretrained(folder, attn_implementation="eager").eval()
        long, short, source = map(torch.from_numpy, (LONG, SHORT.copy(), SOURCE.copy()))
        if hf_model.config.is_encoder_decoder:
            return hf_model(input_ids=source, decoder_input_ids=short).logits.numpy()
        is_encoder = hf_model.get_output_embeddings() is None
        return (hf_model(short).last_hidden_state if is_encoder else hf_model(long).logits).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_transformers(name: str) -> None:
    case = MODELS[name]
    outputs = our_outputs(case["fields"], draw_tensors(case["shapes"]))
    assert difference(sample(outputs), np.array(case["outputs"])) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_exported_fields_give_an_equal_config_without_dropout(name: str) -> None:
    stated = MODELS[name]["fields"]
    family = FAMILIES[stated["model_type"]]
    config = family.to_config(ConfigFields(stated))
    exported = family.to_fields(config)
    read_again = family.to_config(ConfigFields({"model_type": stated["model_type"], **exported}))
    assert differing_fields(config, read_again) == []
    assert not any(value for key, value in exported.items() if "drop" in key)


def default_config(kind: str) -> dict[str, Any]:
    """Return the fields, of the config for a config.json with only a model_type, that are not the class's defaults."""
    stated: dict[str, Any] = {"model_type": kind}
    stated |= {"text_config": {}} if kind in ("gemma3", "gemma3n") else {}
    stated |= {"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}  # it has no default
    config = FAMILIES[kind].to_config(ConfigFields(stated))
    changed = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    return json.loads(json.dumps(changed))


@pytest.mark.parametrize("kind", FAMILIES)
def test_default_config_equals_the_stored_one(kind: str) -> None:
    assert default_config(kind) == STORED["defaults"][kind]


def test_all_families_have_stored_outputs() -> None:
    stored = [FAMILIES[case["fields"]["model_type"]] for case in MODELS.values()]
    assert all(family in stored for family in FAMILIES.values())
    assert MODELS.keys() >= SMALL.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_still_computes_the_stored_outputs(name: str) -> None:
    pytest.importorskip("transformers")
    case = MODELS[name]
    outputs = hf_outputs(case["fields"], draw_tensors(case["shapes"]))
    assert difference(sample(outputs), np.array(case["outputs"])) < 1e-4


def hf_models() -> Iterator[tuple[str, Any]]:
    """Yield a name and a model of transformers for each small model in the tests of families."""
    import test_delta_net
    import test_gemma3n
    import test_mamba
    import test_modernbert
    import test_pretrained_bert
    import test_pretrained_encoder_decoders

    yield from ((name, new_hf_model(family.model_type, family.hf_fields)) for name, family in SMALL.items())
    modules = {"Qwen3-Next": test_delta_net, "Gemma 3n": test_gemma3n, "Mamba-2": test_mamba}
    modules |= {"encoder-decoder": test_pretrained_encoder_decoders}
    for family, module in modules.items():
        yield from ((f"{family}: {name}", module.new_hf_model(name)) for name in module.CASES)
    yield from ((f"ModernBERT: {name}", test_modernbert.a_model(case)) for name, case in test_modernbert.CASES.items())
    yield from ((name, test_pretrained_bert.a_model(*case)) for name, case in test_pretrained_bert.CASES.items())


def main() -> None:
    """Write the file: the config of each model, the shapes of its tensors, the outputs for drawn tensors; defaults."""
    models = {}
    for name, hf_model in hf_models():
        with tempfile.TemporaryDirectory() as folder:
            hf_model.save_pretrained(folder)
            source: Any = load(folder).source
        shapes = {name: [*tensor.shape] for name, tensor in source.tensors.items()}
        stated = {name: value for name, value in source.fields.items() if name != "transformers_version"}
        outputs = [float(f"{x:.6g}") for x in sample(hf_outputs(stated, draw_tensors(shapes)))]
        models[name] = {"fields": stated, "shapes": shapes, "outputs": outputs}
    parts = {"models": models, "defaults": {kind: default_config(kind) for kind in FAMILIES}}
    text = json.dumps(parts).replace('}, "', '},\n"')
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
