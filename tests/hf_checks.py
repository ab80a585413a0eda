"""Checks of a model with other blocks against its class in transformers: gradients, tokens, exports, adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers_families import difference, hf_logits

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.finetuning.lora import LoRAConfig
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.adapters import load_adapter, new_adapter, save_adapter
from tricycle.pretrained.export import export_folder

PROMPT = [3, 1, 4, 15, 9, 2, 6]


def compute_in_float64(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Let modules of transformers, which cast to float32 at any precision of the weights, cast to float64 instead."""
    import torch

    double = {**vars(torch), "float32": torch.float64, "float": torch.float64}
    for module in modules:
        monkeypatch.setattr(module, "torch", SimpleNamespace(**double))
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.is_floating_point() else x.double())


def to_float64(hf_model: Any) -> Any:
    """Return a copy of a model of transformers whose weights and constants, such as frequencies, are in float64."""
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        double = type(hf_model)(hf_model.config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    double.load_state_dict(hf_model.state_dict())
    return double


def check_in_float64(
    hf_model: Any, tokens: np.ndarray, folder: Path, monkeypatch: pytest.MonkeyPatch, by_logits: float = 1e-12
) -> None:
    """Check the logits of tokens (B, T), and the gradients of one loss to 1e-7, of the weights in float64.

    Rounding to float32 changes the logits of each library by up to 9e-6, and gradients by 2e-4.

    Args:
        by_logits: the largest difference of the logits.
    """
    import torch
    import transformers

    compute_in_float64(monkeypatch, sys.modules[type(hf_model).__module__], transformers.modeling_rope_utils)
    hf_model.save_pretrained(folder / "model")
    hf_model = to_float64(hf_model)
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
    assert difference(logits.array, theirs.detach().numpy()) < by_logits
    assert max(worst.values()) < 1e-7, worst


def check_tokens(model: GPT, hf_model: Any) -> None:
    """Check 64 greedy tokens, also without repeated pairs: random models soon repeat one token, which agrees easily."""
    import torch

    prompt = torch.tensor([PROMPT])
    options: dict[str, Any]
    for options in ({}, {"no_repeat_ngram_size": 2}):
        settings = {"attention_mask": prompt * 0 + 1, "max_new_tokens": 64, "do_sample": False, **options}
        expected = hf_model.generate(prompt, **settings)[0, len(PROMPT) :].tolist()
        assert list(generate(model, PROMPT, 64, PenalizedSamplingParams(0, **options))) == expected
    assert len(set(expected)) > 7


def check_tokens_and_export(hf_model: Any, tokens: np.ndarray, folder: Path) -> None:
    """Check greedy tokens, logits after an export, and that transformers reads equal weights from it."""
    import torch

    hf_model.save_pretrained(folder / "model")
    model = load(folder / "model").model
    check_tokens(model, hf_model)
    assert export_folder(model, None, folder / "exported") == hf_model.config.model_type
    again = load(folder / "exported").model
    np.testing.assert_array_equal(again(tokens).array, model(tokens).array)
    theirs = type(hf_model).from_pretrained(folder / "exported").state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in hf_model.state_dict().items())


def check_adapter(
    hf_model: Any,
    targets: tuple[str, ...],
    inputs: tuple[np.ndarray, ...],
    folder: Path,
    hf_outputs: Callable[..., Any] = hf_logits,
) -> None:
    """Check that PEFT computes equal outputs with a saved adapter, and that it loads again.

    Args:
        inputs: arguments of our model, and of hf_outputs after the model of transformers.
        hf_outputs: returns an array or a tensor.
    """
    import peft

    hf_model.save_pretrained(folder / "model")
    loaded = load(folder / "model")
    before = loaded.model(*inputs).array
    adapter = new_adapter(loaded, LoRAConfig(rank=2, targets=targets))
    generator = np.random.default_rng(0)
    for up in (up for low_rank in adapter.low_ranks.values() for up in low_rank.ups):
        up.array[...] = generator.normal(0, 0.2, up.shape)
    adapted = loaded.model(*inputs).array
    assert difference(adapted, before) > 0.01
    save_adapter(adapter, loaded, folder / "adapter")
    hf_model = peft.PeftModel.from_pretrained(hf_model, folder / "adapter").eval()
    expected = hf_outputs(hf_model, *inputs)
    assert difference(adapted, np.asarray(getattr(expected, "detach", lambda: expected)())) < 1e-4  # in float32
    adapter.detach()
    load_adapter(loaded, folder / "adapter")
    np.testing.assert_array_equal(loaded.model(*inputs).array, adapted)
