"""Small models of all families against outputs of transformers that a file keeps, so that no PyTorch is needed.

`python tests/test_stored_outputs.py` writes the file again, with PyTorch and transformers: after a new family, or a new
case of the modules that `hf_models` names.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
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
STORED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
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


def our_outputs(fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    stored = {name: StoredTensor(array.shape, "F32", partial(np.asarray, array)) for name, array in tensors.items()}
    model: Any = build_model(StoredModel(Path("memory"), fields, stored)).eval()
    with no_grad():
        if isinstance(model, EncoderDecoderTransformer):
            return model(SOURCE, SHORT).array
        return model(SHORT if isinstance(model, TextEncoder) else LONG).array


def hf_outputs(fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    import torch
    import transformers
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
        kind = getattr(transformers, fields["architectures"][0])
        hf_model = kind.from_pretrained(folder, attn_implementation="eager").eval()
        long, short, source = map(torch.from_numpy, (LONG, SHORT.copy(), SOURCE.copy()))
        if hf_model.config.is_encoder_decoder:
            return hf_model(input_ids=source, decoder_input_ids=short).logits.numpy()
        is_encoder = hf_model.get_output_embeddings() is None
        return (hf_model(short).last_hidden_state if is_encoder else hf_model(long).logits).numpy()


@pytest.mark.parametrize("name", STORED)
def test_outputs_are_those_of_transformers(name: str) -> None:
    case = STORED[name]
    outputs = our_outputs(case["fields"], draw_tensors(case["shapes"]))
    assert difference(sample(outputs), np.array(case["outputs"])) < 1e-4


@pytest.mark.parametrize("name", STORED)
def test_exported_fields_give_an_equal_config_without_dropout(name: str) -> None:
    fields = STORED[name]["fields"]
    family = FAMILIES[fields["model_type"]]
    config = family.to_config(ConfigFields(fields))
    exported = family.to_fields(config)
    read_again = family.to_config(ConfigFields({"model_type": fields["model_type"], **exported}))
    assert differing_fields(config, read_again) == []
    assert not any(value for key, value in exported.items() if "drop" in key)


def test_all_families_have_stored_outputs() -> None:
    stored = [FAMILIES[case["fields"]["model_type"]] for case in STORED.values()]
    assert all(family in stored for family in FAMILIES.values())
    assert STORED.keys() >= SMALL.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", STORED)
def test_transformers_still_computes_the_stored_outputs(name: str) -> None:
    pytest.importorskip("transformers")
    case = STORED[name]
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
    for name, fields in test_modernbert.CASES.items():
        yield f"ModernBERT: {name}", test_modernbert.a_model(fields)
    for name, (kind, fields) in test_pretrained_bert.CASES.items():
        yield name, test_pretrained_bert.a_model(kind, fields)


def main() -> None:
    """Write the file: the config of each model, the shapes of its tensors, and the outputs for drawn tensors."""
    lines = []
    for name, hf_model in hf_models():
        with tempfile.TemporaryDirectory() as folder:
            hf_model.save_pretrained(folder)
            source: Any = load(folder).source
        shapes = {name: [*tensor.shape] for name, tensor in source.tensors.items()}
        fields = {name: value for name, value in source.fields.items() if name != "transformers_version"}
        outputs = [float(f"{x:.6g}") for x in sample(hf_outputs(fields, draw_tensors(shapes)))]
        case = {"fields": fields, "shapes": shapes, "outputs": outputs}
        lines.append(f"{json.dumps(name)}: {json.dumps(case)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
