"""Checks of a model with other blocks against its class in transformers: gradients, tokens, exports, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers_families import difference, hf_logits

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.finetuning.lora import LoRAConfig
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.pretrained import load
from tricycle.pretrained.adapters import load_adapter, new_adapter, save_adapter
from tricycle.pretrained.export import export_folder

PROMPT = [3, 1, 4, 15, 9, 2, 6]


def differences_in_float64(folder: Path, hf_model: Any, tokens: np.ndarray) -> tuple[float, dict[str, float]]:
    """Return the differences of the logits, and of the gradients of all parameters by name, of one loss.

    Args:
        folder: with "model", the exported weights in float32, which our model has in float64.
        hf_model: the model of transformers with these weights in float64; its gradients replace them.
        tokens: ids (B, T).
    """
    import torch

    model = load(folder / "model").model
    for parameter in model.parameters():
        parameter.array = parameter.array.astype(np.float64)
    inputs, labels = (torch.from_numpy(x.copy()) for x in (tokens[:, :-1], tokens[:, 1:]))
    logits, theirs = model(tokens[:, :-1]), hf_model(inputs).logits
    CrossEntropy()(tokens[:, 1:], logits).backward()
    torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.copy_(parameter.grad)
    hf_model.save_pretrained(folder / "gradients")
    grads = load(folder / "gradients").model.state_dict()  # in float32
    worst = {name: difference(p.grad.array, grads[name]) for name, p in model.named_parameters()}
    return difference(logits.array, theirs.detach().numpy()), worst


def check_tokens_and_export(hf_model: Any, tokens: np.ndarray, folder: Path) -> None:
    """Check 64 greedy tokens, logits after an export, and that transformers reads equal weights from it."""
    import torch

    hf_model.save_pretrained(folder / "model")
    model = load(folder / "model").model
    prompt = torch.tensor([PROMPT])
    for options in ({}, {"no_repeat_ngram_size": 2}):
        expected = hf_model.generate(prompt, max_new_tokens=64, do_sample=False, **options)[0, len(PROMPT) :].tolist()
        assert list(generate(model, PROMPT, 64, PenalizedSamplingParams(0, **options))) == expected

    assert export_folder(model, None, folder / "exported") == hf_model.config.model_type
    again = load(folder / "exported").model
    np.testing.assert_array_equal(again(tokens).array, model(tokens).array)
    theirs = type(hf_model).from_pretrained(folder / "exported").state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in hf_model.state_dict().items())


def check_adapter(hf_model: Any, targets: tuple[str, ...], tokens: np.ndarray, folder: Path) -> None:
    """Check that PEFT computes equal logits with a saved adapter, and that it loads again."""
    import peft

    hf_model.save_pretrained(folder / "model")
    loaded = load(folder / "model")
    before = loaded.model(tokens).array
    adapter = new_adapter(loaded, LoRAConfig(rank=2, targets=targets))
    generator = np.random.default_rng(0)
    for up in (up for low_rank in adapter.low_ranks.values() for up in low_rank.ups):
        up.array[...] = generator.normal(0, 0.2, up.shape)
    adapted = loaded.model(tokens).array
    assert difference(adapted, before) > 0.01
    save_adapter(adapter, loaded, folder / "adapter")
    hf_model = peft.PeftModel.from_pretrained(hf_model, folder / "adapter").eval()
    assert difference(adapted, hf_logits(hf_model, tokens)) < 1e-4  # in float32
    adapter.detach()
    load_adapter(loaded, folder / "adapter")
    np.testing.assert_array_equal(loaded.model(tokens).array, adapted)
