"""Adapters beside `peft`: the same logits either way, and the same gradients over twenty updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import enliven_adapter
from transformers_families import FAMILIES, VOCABULARY, difference, hf_logits, new_hf_model

from tricycle.finetuning.lora import ALL_LINEAR, AdaptedDense, LoRAConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import Pretrained, load
from tricycle.pretrained.adapters import load_adapter, new_adapter, save_adapter
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.training import apply_gradients, compute_gradients, supervised_loss
from tricycle.weights import set_memory_order

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
F = torch.nn.functional

pytestmark = pytest.mark.usefixtures("one_torch_thread")
AGREED = 2e-5
TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, (2, 12))
N_STEPS = 20
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS: dict[str, str | tuple[str, ...]] = {
    "Llama": ("q_proj", "v_proj", "gate_proj"),
    "Mistral": ("k_proj", "down_proj"),
    "Qwen2": "all-linear",
    "Qwen3": ("q_proj", "v_proj", "o_proj"),
    "OLMo 2": ("k_proj", "up_proj"),
    "Gemma 2": "all-linear",
    "Gemma 3": "all-linear",
    "SmolLM3": "all-linear",
    "StableLM": ("q_proj", "gate_proj", "down_proj"),
    "Pythia": ("query_key_value", "dense_4h_to_h"),
    "OPT-350m": ("k_proj", "out_proj", "fc1"),
    "GPT-2": ("c_attn", "c_proj"),
    "Phi": ("dense", "q_proj", "fc2"),
    # fused or stacked matrices, and other orders of outputs
    "Phi-3": ("qkv_proj", "gate_up_proj"),
    "Granite": "all-linear",
    "Cohere": "all-linear",
    "Falcon, 40B": ("query_key_value", "dense_4h_to_h"),
    "GPT-J": ("k_proj", "q_proj", "v_proj", "fc_in"),
    "Granite-MoE": "all-linear",
    "gpt-oss": "all-linear",
    "DeepSeek-V2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "DeepSeek-V3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "Mixtral": ATTENTION,
    "Qwen3-MoE": ATTENTION,
    "OLMoE": ATTENTION,
}
# PEFT takes the MLPs of DeepSeek's dense layers and of its shared experts for routed experts, and has no DoRA of these.
ATTENTION_ONLY = ("DeepSeek-V2", "DeepSeek-V3", "Mixtral", "Qwen3-MoE", "OLMoE")
each_family = pytest.mark.parametrize("name", TARGETS)


def new_base(name: str) -> Any:
    return new_hf_model(FAMILIES[name].model_type, FAMILIES[name].hf_fields)


def both(name: str, folder: Path) -> tuple[Any, Pretrained]:
    """A model of transformers, and the model that Tricycle loads from its files."""
    hf_model = new_base(name)
    hf_model.save_pretrained(folder)
    return hf_model, load(folder)


def gradients(model: GPT, tokens: np.ndarray) -> Any:
    return compute_gradients(model, supervised_loss(model, CrossEntropy()), [(tokens[:, :-1], tokens[:, 1:])])


# -------------------------------------------------------------------- adapter files of PEFT and Tricycle
@pytest.mark.nightly_except(2)
@each_family
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_saved_adapter_gives_equal_logits_in_peft(name, dora, tmp_path):
    hf_model, loaded = both(name, tmp_path / "base")
    before = loaded.model(TOKENS).numpy()
    targets = TARGETS[name] if name in ATTENTION_ONLY else (ALL_LINEAR,)
    adapter = new_adapter(loaded, LoRAConfig(3, 5, targets, dora=dora), seed=1)
    np.testing.assert_array_equal(loaded.model(TOKENS).numpy(), before)  # B is 0
    enliven_adapter(adapter)
    actual = loaded.model(TOKENS).numpy()
    assert difference(actual, before) > 0.01
    save_adapter(adapter, loaded, tmp_path / "adapter")
    peft_model = peft.PeftModel.from_pretrained(hf_model, tmp_path / "adapter").eval()
    assert difference(actual, hf_logits(peft_model, TOKENS)) < AGREED
    adapter.detach()
    np.testing.assert_array_equal(loaded.model(TOKENS).numpy(), before)
    again = load_adapter(loaded, tmp_path / "adapter")
    with pytest.raises(ValueError, match="without an adapter"):
        export_folder(loaded.model, None, tmp_path / "whole")
    np.testing.assert_array_equal(loaded.model(TOKENS).numpy(), actual)
    again.merge()
    assert difference(loaded.model(TOKENS).numpy(), actual) < AGREED
    assert not any(isinstance(layer, AdaptedDense) for layer in loaded.model.layers())
    export_folder(loaded.model, None, tmp_path / "whole")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", attn_implementation="eager")
    assert difference(actual, hf_logits(whole.eval(), TOKENS)) < AGREED


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "OLMoE"])
def test_experts_and_routers_have_adapters_as_in_peft(name, tmp_path):
    hf_model, loaded = both(name, tmp_path / "base")
    adapter = enliven_adapter(new_adapter(loaded, LoRAConfig(3, 5), seed=1))
    assert all(any(part in layer for layer in adapter.low_ranks) for part in (".experts.", "router"))
    save_adapter(adapter, loaded, tmp_path / "adapter")
    peft_model = peft.PeftModel.from_pretrained(hf_model, tmp_path / "adapter").eval()
    assert difference(loaded.model(TOKENS).numpy(), hf_logits(peft_model, TOKENS)) < AGREED


@pytest.mark.nightly_except(2)
@each_family
@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["LoRA", "rsLoRA", "DoRA"])
def test_peft_adapters_load(name, kind, tmp_path):
    hf_model, loaded = both(name, tmp_path / "base")
    targets = TARGETS[name] if isinstance(TARGETS[name], str) else list(TARGETS[name])
    patterns = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3}} if name == "Llama" else {}
    config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=targets, **kind, **patterns)
    model = peft.get_peft_model(hf_model, config).eval()
    for path, parameter in model.named_parameters():
        if "magnitude" in path:
            parameter.data *= torch.linspace(0.7, 1.4, parameter.numel())
    model.save_pretrained(tmp_path / "adapter")
    adapter = load_adapter(loaded, tmp_path / "adapter")
    expected = hf_logits(model, TOKENS)
    assert difference(loaded.model(TOKENS).numpy(), expected) < AGREED
    save_adapter(adapter, loaded, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(new_base(name), tmp_path / "again").eval()
    assert difference(hf_logits(again, TOKENS), expected) < AGREED


def test_switching_adapters_restores_their_logits(tmp_path):
    loaded = both("Llama", tmp_path)[1]
    first = enliven_adapter(new_adapter(loaded, LoRAConfig(rank=2), seed=1))
    logits = loaded.model(TOKENS).numpy()
    with pytest.raises(ValueError, match="without an adapter"):
        new_adapter(loaded, LoRAConfig(rank=2), seed=2)
    first.detach()
    second = enliven_adapter(new_adapter(loaded, LoRAConfig(rank=5, targets=("q_proj",)), seed=2))
    assert difference(loaded.model(TOKENS).numpy(), logits) > 0.01
    second.detach()
    first.attach()
    np.testing.assert_array_equal(loaded.model(TOKENS).numpy(), logits)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_gradients_over_low_precision_weights_match_float32(kind, dora, tmp_path):
    new_base("Llama").save_pretrained(tmp_path)
    loaded = load(tmp_path, weights=kind)
    loaded.model.use_precision("float32")
    config = LoRAConfig(rank=2, targets=("q_proj", "down_proj"), dora=dora)
    adapter = enliven_adapter(new_adapter(loaded, config))
    state = {name: tensor.numpy() for name, tensor in loaded.model.named_parameters() if "low_rank" not in name}
    gradients(loaded.model, TOKENS)
    got = {name: tensor.grad.numpy() for name, tensor in adapter.named_parameters()}
    other = GPT(loaded.model.config, draw_weights=False)  # with the same values in 32 bits
    other.load_state_dict(state)
    twin = Pretrained(other, None, GenerationSettings(), loaded.source)
    with_twin = new_adapter(twin, config)
    with_twin.load_state_dict(adapter.state_dict())
    gradients(other, TOKENS)
    for name, tensor in with_twin.named_parameters():
        assert difference(got[name], tensor.grad.numpy()) < 2e-3  # products with int8 weights round the activations
    assert loaded.model.blocks[0].attention.qkv.weights.array.dtype.itemsize < 4


# -------------------------------------------------------------------- twenty updates
def labelled_loss(model: Any, tokens: np.ndarray) -> Any:
    logits = model(torch.tensor(tokens[:, :-1])).logits
    return F.cross_entropy(logits.flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten())


def tricycle_gradients(loaded: Pretrained, adapter: Any, folder: Path) -> dict[str, np.ndarray]:
    """By their names: written to files as if they were weights."""
    parameters = list((adapter or loaded.model).parameters())
    weights = [parameter.array for parameter in parameters]
    for parameter in parameters:
        parameter.array = parameter.grad.array
    if adapter is None:
        export_folder(loaded.model, None, folder)
    else:
        save_adapter(adapter, loaded, folder)
    for parameter, array in zip(parameters, weights):
        parameter.array = array
    return pytest.importorskip("safetensors.numpy").load_file(
        folder / ("model.safetensors" if adapter is None else "adapter_model.safetensors")
    )


def peft_gradients(model: Any) -> dict[str, np.ndarray]:
    names = {name: name.replace(".default", "") for name, p in model.named_parameters() if p.requires_grad}
    names = {name: file.replace("vector.weight", "vector") for name, file in names.items()}
    return {names[name]: p.grad.numpy() for name, p in model.named_parameters() if name in names}


TRAINED = [("Llama", "LoRA"), ("Llama", "DoRA"), ("Llama", "all weights"), ("Qwen2", "LoRA"), ("Pythia", "LoRA")]


@pytest.mark.parametrize(("name", "kind"), [*TRAINED, ("GPT-2", "LoRA"), ("GPT-2", "DoRA")])
def test_all_gradients_match_peft(name, kind, tmp_path):
    """Compare the largest difference of each tensor with its largest gradient, after 0, 1, 5 and 20 updates."""
    hf_model, loaded = both(name, tmp_path / "base")
    adapter, rate = None, 1e-3
    if kind == "all weights":
        set_memory_order(loaded.model.unfreeze(), "C")
    else:
        adapter, rate = new_adapter(loaded, LoRAConfig(rank=4, alpha=8, dora=kind == "DoRA"), seed=1), 1e-2
        enliven_adapter(adapter)  # else the first gradients of A are 0
        save_adapter(adapter, loaded, tmp_path / "adapter")
        hf_model = peft.PeftModel.from_pretrained(hf_model, tmp_path / "adapter", is_trainable=True).eval()
    optimiser = torch.optim.AdamW([p for p in hf_model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    tricycle_optimiser = AdamW(rate, weight_decay=0.0)
    generator = np.random.default_rng(9)
    for step in range(N_STEPS + 1):
        tokens = generator.integers(0, VOCABULARY, (3, 17))
        loss = labelled_loss(hf_model, tokens)
        optimiser.zero_grad()
        loss.backward()
        grads = gradients(loaded.model, tokens)
        assert grads.loss == pytest.approx(loss.item(), rel=1e-3)
        if step in (0, 1, 5, N_STEPS):
            expected = peft_gradients(hf_model)
            got = tricycle_gradients(loaded, adapter, tmp_path / f"gradients {step}")
            assert got.keys() == expected.keys()
            worst = max(difference(got[name], grad) for name, grad in expected.items())
            assert worst < (1e-5 if step == 0 else 1e-3), step
        apply_gradients(loaded.model, tricycle_optimiser, grads)
        optimiser.step()


# -------------------------------------------------------------------- rejected input
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type.*'LORA'.*'IA3'"),
        ({"use_dora": True}, r"magnitude_vector.*model\.layers\.0"),
        ({"bias": "all"}, "bias.*'none'.*'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*None"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens.*None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights.*True.*'pissa'"),
        ({"r": "four"}, "rank.*whole number"),
        ({"lora_alpha": -1}, "alpha.*above 0"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern"),
    ],
)
def test_unsupported_adapter_configs_are_rejected(fields, message, tmp_path):
    loaded = both("Llama", tmp_path / "base")[1]
    adapter = new_adapter(loaded)
    save_adapter(adapter, loaded, tmp_path / "adapter")
    adapter.detach()
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message) as error:
        load_adapter(loaded, tmp_path / "adapter")
    assert "\n" not in str(error.value)
    assert not any(isinstance(layer, AdaptedDense) for layer in loaded.model.layers())


def test_adapter_of_another_model_is_rejected(tmp_path):
    loaded = both("Llama", tmp_path / "llama")[1]
    save_adapter(new_adapter(loaded), loaded, tmp_path / "adapter")
    other = both("GPT-2", tmp_path / "gpt2")[1]
    with pytest.raises(ValueError, match=r"model\.layers\.0"):
        load_adapter(other, tmp_path / "adapter")
    deeper = both("Phi", tmp_path / "phi")[1]
    with pytest.raises(ValueError, match="adapter of this model"):
        load_adapter(deeper, tmp_path / "adapter")


def test_bad_targets_rank_and_missing_file_raise(tmp_path):
    loaded = both("Llama", tmp_path / "llama")[1]
    with pytest.raises(ValueError, match=r"targets.*q_proj.*'c_attn'"):
        new_adapter(loaded, LoRAConfig(targets=("c_attn",)))
    with pytest.raises(ValueError, match=r"rank.*got 0"):
        LoRAConfig(rank=0)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        load_adapter(loaded, tmp_path / "nothing")


def test_dropout_is_applied_only_in_training(tmp_path):
    loaded = both("Llama", tmp_path)[1]
    enliven_adapter(new_adapter(loaded, LoRAConfig(dropout=0.5)))
    model = loaded.model
    still = model(TOKENS).numpy()
    np.testing.assert_array_equal(model(TOKENS).numpy(), still)
    model.train()
    first, second = model(TOKENS).numpy(), model(TOKENS).numpy()
    assert difference(first, second) > 1e-3
