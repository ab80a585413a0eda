"""Generation settings of pretrained models."""

import pytest

from tricycle.pretrained.generation_settings import GenerationSettings


@pytest.mark.parametrize("stop, expected", [(None, ()), (2, (2,)), ([2, 5], (2, 5))])
def test_stop_tokens_from_one_or_several_eos_ids(stop, expected):
    assert GenerationSettings.from_fields({"eos_token_id": stop}, {}).stop_tokens == expected


def test_generation_config_overrides_the_model_config():
    assert GenerationSettings.from_fields({"eos_token_id": [1, 2]}, {"eos_token_id": 7}).stop_tokens == (1, 2)
    assert GenerationSettings.from_fields({}, {"eos_token_id": 7}).stop_tokens == (7,)


def test_null_fields_use_defaults_and_unknown_fields_are_ignored():
    settings = GenerationSettings.from_fields({"top_k": None, "temperature": 0.6, "num_beams": 4}, {})
    assert settings == GenerationSettings(temperature=0.6)
    assert settings.top_k == 50 and not settings.do_sample
