"""Configurations: what they refuse, that they do not change, and what the presets promise."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from tricycle.activation import ACTIVATIONS
from tricycle.checkpoint import new_model
from tricycle.configs import (
    PRESETS,
    ContinuationConfig,
    DebugConfig,
    GPT2Config,
    GPTConfig,
    HybridConfig,
    LaptopConfig,
    MixtureConfig,
    PortableConfig,
    ShakespeareConfig,
    SmolGPTConfig,
)
from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.configs.mamba import MambaConfig
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import EncoderDecoderTrainingConfig, MambaTrainingConfig, trainable_fields
from tricycle.latent_attention import LatentConfig
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimiser_rules.schedules import SCHEDULES
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.softmaxes import SOFTMAXES
from tricycle.state_spaces.delta_net import DeltaNetConfig

FIELDS = {field.name: field for field in dataclasses.fields(GPTConfig)}

AT_LEAST_1 = """
vocab_size context_window embedding_dim n_heads n_layers batch_size accumulation_steps eval_interval eval_batches
softmax_blocks
""".split()
AT_LEAST_0 = """
steps warmup_steps sample_interval seed n_key_heads head_size hidden_size embedding_size position_offset window
n_experts
""".split()
RULES = {
    "above 0": "expansion_ratio max_learning_rate matrix_rate rotary_base rotary_factor rotary_low_frequency "
    "rotary_high_frequency rotary_attention_factor norm_eps qk_norm_eps embedding_scale residual_scale logit_scale",
    "from 0 to below 1": "dropout beta1 beta2",
    "0 or more": "minutes min_learning_rate weight_decay max_gradient_norm score_scale score_cap logit_cap "
    "rotary_local_base router_loss",
    "above 0 and at most 1": "rotary_fraction",
}
NUMBERS = {name: rule for rule, names in RULES.items() for name in names.split()}
CHOICES = {
    "activation": f"one of {', '.join(ACTIVATIONS)}",
    "norm": "one of layer_norm, rms_norm",
    "norm_placement": "one of before, after, both, output",
    "positions": "one of learned, rotary, none",
    "rotary_scaling": "one of none, linear, llama3, yarn, longrope",
    "softmax": f"one of {', '.join(SOFTMAXES)}",
    "optimiser": f"one of {', '.join(OPTIMISERS)}",
    "schedule": f"one of {', '.join(SCHEDULES)}",
    "precision": "one of float32, tf32, bfloat16, float16",
}
SWITCHES = """
bias tied qk_norm qk_norm_gain qk_norm_per_head token_shift key_shift zero_projections gated norm_unit_offset parallel
shared_norm head_bias recompute normalize_experts rotary_rounded router_bias
""".split()
THREE_WAYS = ("qkv_bias", "output_bias", "mlp_bias")  # also None: as bias is


def bad_values() -> list[tuple[str, Any, str]]:
    """For every field: values that it may not have, and the rule that the error states."""
    table: list[tuple[str, Any, str]] = []
    for name in AT_LEAST_1 + AT_LEAST_0:
        lowest = int(name in AT_LEAST_1)
        rule = "at least 1" if lowest else "0 or more"
        table += [(name, value, rule) for value in (lowest - 1, -7)]
        table += [(name, value, "a whole number") for value in (1.5, 2.0, "2", None, True, [1], math.nan)]
    for name, rule in NUMBERS.items():
        table += [(name, -0.5, rule), (name, -1, rule)]
        table += [
            (name, value, "a finite number") for value in (math.nan, math.inf, -math.inf, "0.1", None, True, [0.1])
        ]
        if rule == "above 0":
            table += [(name, 0, rule), (name, 0.0, rule)]
        if "below 1" in rule:
            table += [(name, 1, rule), (name, 1.0, rule)]
    for name, rule in CHOICES.items():
        table += [(name, value, rule) for value in ("", "GELU", "unknown", None, 3, ["gelu"])]
    for name in SWITCHES:
        table += [(name, value, "True or False") for value in (0, 1, "yes", None)]
    for name in THREE_WAYS:
        table += [(name, value, "True or False") for value in (0, 1, "yes")]
    for name in ("full_layers", "unrotated_layers"):
        table += [(name, value, "whole numbers") for value in ([1], (1.5,), ("1",), 1, None)]
        table += [(name, value, "layers from 0 to 11") for value in ((12,), (0, -1))]
    table += [("rotary_divisors", value, "finite numbers") for value in ([1.0], ("1",), (math.inf,), 1.0, None)]
    table += [("n_active_experts", value, "from 1 to n_experts") for value in (0, -7)]
    table += [("n_active_experts", value, "a whole number") for value in (1.5, "2", None, True)]
    table += [("rotary_original_window", value, "above 0") for value in (0, -1)]
    return table


@pytest.mark.parametrize("name, value, rule", bad_values())
def test_bad_values_are_rejected_with_field_and_rule(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as caught:
        GPTConfig(**{name: value})
    assert str(caught.value) == f"GPTConfig: expected {name} to be {rule}, got {value!r}"


def test_bad_values_cover_every_field() -> None:
    assert {name for name, _, _ in bad_values()} == set(FIELDS)


ROTARY = {"positions": "rotary"}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"embedding_dim": 32, "n_heads": 5}, "n_heads.*embedding_dim 32.*got 5"),
        ({"max_learning_rate": 1e-3, "min_learning_rate": 1e-2}, r"min_.*max_learning_rate 0\.001.*got 0\.01"),
        ({"qk_norm": True}, "qk_norm .*False.*rotary.*got True"),
        ({"steps": 0, "minutes": 0.0}, "steps.*minutes.*got 0"),
        ({"n_key_heads": 5}, "n_key_heads.*n_heads 12.*got 5"),
        ({"qk_norm_per_head": False}, "qk_norm_per_head.*True.*qk_norm.*got False"),
        ({"qk_norm_gain": True}, "qk_norm_gain.*False.*qk_norm.*got True"),
        ({"parallel": True, "norm_placement": "both"}, "parallel.*norm_placement.*before.*got True"),
        ({"n_experts": 4, "n_active_experts": 5}, "n_active_experts.*from 1 to n_experts, got 5"),
        ({"shared_norm": True}, "shared_norm.*parallel.*got True"),
        ({"norm_unit_offset": True}, "norm_unit_offset.*layer_norm.*got True"),
        ({"head_bias": True}, "head_bias.*tied.*got True"),
        ({**ROTARY, "rotary_fraction": 0.05}, r"rotary_fraction.*even.*got 0\.05"),
        ({**ROTARY, "head_size": 5}, "head_size.*even.*got 5"),
        ({**ROTARY, "rotary_high_frequency": 0.5}, r"rotary_high_frequency.*rotary_low_frequency.*got 0\.5"),
        ({**ROTARY, "embedding_dim": 6, "n_heads": 2}, "embedding_dim.*even.*got 6"),
    ],
)
def test_inconsistent_values_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^GPTConfig: .*{message}"):
        GPTConfig(**values)


def test_errors_name_the_preset() -> None:
    with pytest.raises(ValueError, match=r"^DebugConfig: .*n_heads.*embedding_dim 32.*got 3"):
        DebugConfig(n_heads=3)
    with pytest.raises(ValueError, match=r"^ShakespeareConfig: .*dropout.*got 1\.5"):
        dataclasses.replace(ShakespeareConfig(), dropout=1.5)


@pytest.mark.parametrize(
    "values",
    [
        {"dropout": 0},
        {"dropout": 0.999},
        {"min_learning_rate": 0.0},
        {"min_learning_rate": 6e-4, "max_learning_rate": 6e-4},
        {"warmup_steps": 0, "sample_interval": 0, "max_gradient_norm": 0, "weight_decay": 0},
        {"steps": 0, "minutes": 0.5},
        {"expansion_ratio": 2},
        {"embedding_dim": 1, "n_heads": 1, "vocab_size": 1, "context_window": 1, "n_layers": 1},
    ],
    ids=str,
)
def test_boundary_values_are_accepted(values: dict[str, Any]) -> None:
    config = GPTConfig(**values)
    assert all(getattr(config, name) == value for name, value in values.items())


def test_configs_are_immutable() -> None:
    config = DebugConfig()
    for name in FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, getattr(config, name))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_round_trip_through_json_and_pickle(preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset](), seed=3, bias=False)
    assert isinstance(config, GPTConfig)
    values = config.to_dict()
    assert list(values) == [field.name for field in dataclasses.fields(config)]
    assert FIELDS.keys() <= values.keys()
    restored = GPTConfig.from_dict(json.loads(json.dumps(values)))
    assert isinstance(config, type(restored)) and restored.is_decoder == config.is_decoder
    back = restored.to_dict()
    assert back == values
    assert list(map(type, back.values())) == list(map(type, values.values()))
    assert pickle.loads(pickle.dumps(config)) == config != PRESETS[preset]() == PRESETS[preset]()
    assert hash(config) == hash(dataclasses.replace(config))


def test_from_dict_fills_defaults_and_rejects_unknown_fields() -> None:
    assert GPTConfig.from_dict({}) == GPTConfig()
    assert GPTConfig.from_dict({"n_layers": 3}).n_layers == 3
    with pytest.raises(ValueError) as caught:
        GPTConfig.from_dict({"n_layers": 3, "width": 1, "heads": 2})
    assert "heads, width" in str(caught.value)
    with pytest.raises(ValueError, match=r"^GPTConfig: .*n_layers.*got 0"):
        GPTConfig.from_dict({"n_layers": 0})


# -------------------------------------------------------------------- presets
SMALL_SIZES = {"context_window": 256, "embedding_dim": 384, "n_heads": 6, "n_layers": 6}
GPT2_SIZES = {"vocab_size": 50_257, "context_window": 1024, "embedding_dim": 768, "n_heads": 12, "n_layers": 12}
GPT2_PARTS = {"expansion_ratio": 4, "activation": "gelu", "norm": "layer_norm", "positions": "learned"}
MODEL_SHAPES = {
    ShakespeareConfig: {"vocab_size": 1024, **SMALL_SIZES},
    SmolGPTConfig: {"vocab_size": 50_257, "dropout": 0.2, **SMALL_SIZES},
    GPT2Config: {**GPT2_SIZES, **GPT2_PARTS, "bias": True, "tied": True},
}


@pytest.mark.parametrize("preset", MODEL_SHAPES, ids=lambda preset: preset.__name__)
def test_preset_shapes(preset: type[GPTConfig]) -> None:
    config = preset()
    promised = MODEL_SHAPES[preset]
    assert {name: getattr(config, name) for name in promised} == promised


def test_presets_by_name() -> None:
    decoders = {DebugConfig, LaptopConfig, PortableConfig, MixtureConfig, ShakespeareConfig, SmolGPTConfig, GPT2Config}
    assert set(PRESETS.values()) == decoders | {HybridConfig, ContinuationConfig}
    assert all(name == name.lower() for name in PRESETS)


@pytest.mark.parametrize("preset", ["mamba", "encoder_decoder"])
def test_presets_of_other_kinds_have_the_size_of_portable(preset: str) -> None:
    sizes = [new_model(PRESETS[name](), draw_weights=False).n_parameters for name in (preset, "portable")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_from_dict_makes_the_kind_that_has_the_fields() -> None:
    assert type(GPTConfig.from_dict({"state_size": 4})) is MambaTrainingConfig
    assert type(GPTConfig.from_dict({"start_token": 1, "batch_size": 3})) is EncoderDecoderTrainingConfig
    with pytest.raises(ValueError, match="only known fields, got start_token, state_size"):
        GPTConfig.from_dict({"state_size": 4, "start_token": 1})
    with pytest.raises(ValueError, match=r"^MambaTrainingConfig: .*batch_size.*got 0"):
        GPTConfig.from_dict({"state_size": 4, "batch_size": 0})
    with pytest.raises(ValueError, match=r"^EncoderDecoderTrainingConfig: .*recompute.*False.*got True"):
        GPTConfig.from_dict({"start_token": 1, "recompute": True})


@pytest.mark.parametrize(
    ("field", "kind"), [("linear_key_size", "DeltaNetTrainingConfig"), ("latent_size", "LatentTrainingConfig")]
)
def test_from_dict_imports_the_module_that_has_the_fields(field: str, kind: str) -> None:
    """In a new process, as when a checkpoint is loaded."""
    program = f"from tricycle.configs import GPTConfig; print(type(GPTConfig.from_dict(dict({field}=4))).__name__)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == kind


@pytest.mark.parametrize("config", [MambaConfig(), DeltaNetConfig(), LatentConfig(router_loss=0.5), GPTConfig()])
def test_trainable_fields_are_those_of_the_model(config: ModelConfig) -> None:
    run = GPTConfig.from_dict(trainable_fields(config) | {"batch_size": 7})
    assert isinstance(run, type(config)) and run.batch_size == 7
    assert differing_fields(run, config) == []
    assert trainable_fields(run) == trainable_fields(config)


def test_trainable_fields_of_encoders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoder, got .*EncoderDecoderConfig"):
        trainable_fields(EncoderDecoderConfig(positions="none"))
