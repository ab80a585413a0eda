"""Generation settings of pretrained models."""

import pytest

from tricycle.pretrained.generation_settings import GenerationSettings


@pytest.mark.parametrize("stop, expected", [(None, ()), (2, (2,)), ([2, 5], (2, 5)), ("none", (7,))])
def test_stop_tokens_from_one_or_several_eos_ids_else_those_of_the_model_config(stop, expected):
    fields, config = ({}, {"eos_token_id": 7}) if stop == "none" else ({"eos_token_id": stop}, {})
    assert GenerationSettings.from_fields(fields, config).stop_tokens == expected
    assert not stop or GenerationSettings.from_fields(fields, {"eos_token_id": 7}).stop_tokens == expected


def test_null_fields_use_defaults_and_unknown_fields_are_ignored():
    settings = GenerationSettings.from_fields({"top_k": None, "temperature": 0.6, "num_beams": 4}, {})
    assert settings == GenerationSettings(temperature=0.6)
    assert settings.top_k == 50 and not settings.do_sample
