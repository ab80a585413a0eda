"""Encoder-decoders against transformers: logits, gradients, decoding, beams, folders, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_checks import check_adapter
from programs import run_here
from transformers_families import check_refused, difference, randomize_weights

from tricycle.configs import ModelConfig
from tricycle.decoding.beam_search import generate_beam_search
from tricycle.decoding.encoder_decoder import TargetSettings, adjusted_log_probabilities, generate_target
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.system.files import read_json_object
from tricycle.tensor import no_grad
from tricycle_cli import generate as generate_program

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("one_torch_thread")
AGREED = 3e-6
VOCABULARY = 67
T5: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "layer_norm_epsilon": 1e-3}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "pad_token_id": None}
BART: dict[str, Any] = {"d_model": 24, "encoder_layers": 2, "max_position_embeddings": 96, "pad_token_id": None}
BART |= {
    f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("attention_heads", 3), ("ffn_dim", 40))
}
BART |= {"decoder_layers": 3, "bos_token_id": 0, "forced_eos_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("t5", T5),
    "T5 1.1": (
        "t5",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3, "d_kv": 8},
    ),
    "BART": ("bart", BART),
    "BART, scaled embeddings": (
        "bart",
        {**BART, "scale_embedding": True, "activation_function": "relu", "d_model": 30},
    ),
    "Marian": ("marian", {**BART, "activation_function": "swish", "scale_embedding": True}),
    "Marian, unscaled": ("marian", {**BART, "decoder_layers": 1, "d_model": 30}),
}
SOURCE = np.random.default_rng(1).integers(3, VOCABULARY, (3, 17))
LENGTHS = np.array([17, 9, 12])
TARGET = np.random.default_rng(2).integers(3, VOCABULARY, (3, 14))


def new_hf_model(name: str, **changes: Any) -> Any:
    """Return a model of transformers with random weights, in which each part affects the logits."""
    model_type, fields = CASES[name]
    torch.manual_seed(3)
    tokens = {"vocab_size": VOCABULARY, "decoder_start_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(model_type, **{**tokens, **fields, **changes})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").float().eval()
    if config.model_type == "t5" and not config.scale_decoder_outputs:  # whose files have an output layer
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    randomize_weights(model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "relative_attention_bias" in key:
                parameter.normal_()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


@pytest.fixture(params=CASES)
def pair(request: Any, tmp_path: Path) -> tuple[EncoderDecoderTransformer, Any]:
    """Return a model that was read from files, and that of transformers."""
    hf_model = new_hf_model(request.param)
    hf_model.save_pretrained(tmp_path)
    return load(tmp_path).model, hf_model


def hf_logits(hf_model: Any, source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> Any:
    mask = torch.from_numpy((np.arange(source.shape[1]) < lengths[:, None]).astype(np.int64))
    return hf_model(
        input_ids=torch.from_numpy(source), attention_mask=mask, decoder_input_ids=torch.from_numpy(target)
    ).logits


def rms_norm(layer: Any, x: Any) -> Any:
    """The norm of T5 in the precision of x: transformers rounds the variance to float32."""
    return layer.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)


def test_logits_and_gradients_agree(
    pair: tuple[EncoderDecoderTransformer, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hf_model = pair
    inputs = SOURCE, TARGET[:, :-1], LENGTHS
    assert difference(model(*inputs).array, hf_logits(hf_model, *inputs).detach().numpy()) < AGREED
    monkeypatch.setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", rms_norm)
    hf_model.double()  # the gradients of scores without a scale differ by 5e-6 in float32
    for parameter in model.parameters():
        parameter.array = parameter.array.astype(np.float64)
    CrossEntropy()(TARGET[:, 1:], model(*inputs)).backward()
    labels = torch.from_numpy(TARGET[:, 1:].copy()).flatten()
    torch.nn.functional.cross_entropy(hf_logits(hf_model, *inputs).flatten(0, 1), labels).backward()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.grad is not None:  # Marian's table of sinusoids has none
                parameter.copy_(parameter.grad)
    hf_model.float().save_pretrained(tmp_path / "gradients")
    grads = load(tmp_path / "gradients").model.state_dict()
    worst = {}
    for name, parameter in model.named_parameters():
        if name.endswith("cross.key.bias"):  # moves all scores of a row alike
            assert np.abs(parameter.grad.array).max() < 1e-12
        elif name != "logit_bias":  # not a parameter in transformers
            worst[name] = difference(parameter.grad.array, grads[name])
    assert max(worst.values()) < 1e-6, worst


def test_cached_and_uncached_decoding_agree(pair: tuple[EncoderDecoderTransformer, Any]) -> None:
    model, _ = pair
    with no_grad():
        whole = model(SOURCE, TARGET, LENGTHS).array
        state = model.start_decoding(SOURCE, LENGTHS, capacity=TARGET.shape[1])
        parts = [model.decode(TARGET[:, a:b], state).array for a, b in ((0, 4), (4, 5), (5, 6), (6, 14))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)


def test_a_model_is_exported_and_read_again(pair: tuple[EncoderDecoderTransformer, Any], tmp_path: Path) -> None:
    model, hf_model = pair
    kind = export_folder(model, None, tmp_path / "exported")
    assert kind == hf_model.config.model_type
    again = load(tmp_path / "exported").model
    assert again.config == model.config
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], array)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").eval()
    expected = hf_logits(hf_model, SOURCE, TARGET, LENGTHS).detach().numpy()
    assert difference(hf_logits(theirs, SOURCE, TARGET, LENGTHS).detach().numpy(), expected) < AGREED


@pytest.mark.parametrize("name", ["T5 1.1", "BART"])
def test_a_model_of_tricycle_with_equal_stacks_is_exported(name: str, tmp_path: Path) -> None:
    """Its config has no number of decoder blocks; a T5 has no context window."""
    new_hf_model(name).save_pretrained(tmp_path)
    read = load(tmp_path).model.config
    config = replace(read, n_decoder_layers=0, context_window=read.context_window if name == "BART" else 48)
    model, generator = EncoderDecoderTransformer(config).eval(), np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.array[...] += generator.normal(0, 0.1, parameter.shape)
    assert export_folder(model, None, tmp_path / "exported") == read_json_object(tmp_path / "config.json")["model_type"]
    logits, again = model(SOURCE, TARGET, LENGTHS).array, load(tmp_path / "exported").model
    assert difference(again(SOURCE, TARGET, LENGTHS).array, logits) < 1e-6  # sums in another order of memory
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").eval()
    assert difference(logits, hf_logits(theirs, SOURCE, TARGET, LENGTHS).detach().numpy()) < AGREED


ADAPTED = {"T5": ("q", "v", "wi"), "T5 1.1": ("all-linear",), "BART": ("q_proj", "fc1"), "Marian": ("all-linear",)}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_have_the_names_of_peft(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check_adapter(new_hf_model(name), ADAPTED[name], (SOURCE, TARGET, LENGTHS), tmp_path, hf_logits)


# -------------------------------------------------------------------- generation
def hf_target(hf_model: Any, n: int, **settings: Any) -> list[int]:
    """Return the tokens that transformers generates for the first source."""
    hf_model.generation_config.update(**{"max_length": None, "forced_bos_token_id": None, **settings})
    source = torch.from_numpy(SOURCE[:1])
    # its cache of T5 fails when the decoder has more blocks than the encoder
    options = {"attention_mask": source * 0 + 1, "max_new_tokens": n, "do_sample": False, "use_cache": False}
    return hf_model.generate(source, **options)[0, 1:].tolist()


def target(model: EncoderDecoderTransformer, n: int, stop: int, **settings: Any) -> list[int]:
    sampling = PenalizedSamplingParams(temperature=0, stop_tokens=[stop])
    return list(generate_target(model, SOURCE[0].tolist(), n, sampling, TargetSettings.from_fields(settings, {})))


@pytest.mark.nightly_except(6)
def test_64_greedy_tokens_agree(pair: tuple[EncoderDecoderTransformer, Any]) -> None:
    model, hf_model = pair
    settings = {"no_repeat_ngram_size": 2, "bad_words_ids": [[2]]}  # varied texts without an end
    expected = hf_target(hf_model, 64, num_beams=1, **settings)
    assert len(expected) == 64 and len(set(expected)) > 7
    assert target(model, 64, 2, **settings) == expected


BEAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short": {"length_penalty": 0.0, "early_stopping": True},
    "summary": {"length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 9, "forced_eos_token_id": 2},
    "forced": {"forced_bos_token_id": 5, "suppress_tokens": [7, 8], "early_stopping": True},
}


@pytest.mark.nightly_except(8)
@pytest.mark.parametrize("settings", BEAMS.values(), ids=BEAMS)
def test_beams_agree(pair: tuple[EncoderDecoderTransformer, Any], settings: dict[str, Any]) -> None:
    model, hf_model = pair
    logits = hf_logits(hf_model, SOURCE[:1], TARGET[:1, :5], LENGTHS[:1]).detach().numpy()
    for end in (2, *np.argsort(-logits[0, -1])[:4].tolist()):  # so that texts end at different lengths
        hf_model.generation_config.eos_token_id = end
        given = {**settings, "num_beams": 4}
        if "forced_eos_token_id" in given:
            given["forced_eos_token_id"] = end
        assert target(model, 20, end, **given) == hf_target(hf_model, 20, **given)


# -------------------------------------------------------------------- command line and refusals
PIECES = ["<pad>", "</s>", "<unk>", *"▁abcdefghijklmnopqrstuvwxyz.", "▁the", "▁sea", "er", "in", "▁a"]


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of unigrams, as T5's."""
    scores = [(piece, -(i + 1) / max(1, len(piece))) for i, piece in enumerate(PIECES)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def generate_text(*arguments: Any) -> str:
    done = run_here(generate_program.main, "generate", arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T5 1.1", "Marian"])
def test_the_command_line_prints_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    hf_model = new_hf_model(name, eos_token_id=1, decoder_start_token_id=0, vocab_size=len(PIECES))
    hf_model.generation_config.update(num_beams=3, early_stopping=True, max_length=12, eos_token_id=1)
    hf_model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("the sea in a sea.")["input_ids"]])
    for flags, beams in (([], 3), (["--beams", "1"], 1), (["--beams", "2"], 2)):
        expected = hf_model.generate(ids, attention_mask=ids * 0 + 1, use_cache=False, num_beams=beams)
        text = tokenizer.decode(expected[0], skip_special_tokens=True)
        assert len(text) > 3
        assert generate_text(tmp_path, "the sea in a sea.", *flags) == text + "\n"
    done = run_here(generate_program.main, "generate", (tmp_path, "the sea", "--temperature", "2"))
    assert done.returncode and "--temperature" in done.stderr and "with --beams 1 only, got 3 beams" in done.stderr
    assert generate_text(tmp_path, "the sea", "--beams", "1", "--temperature", "2", "--seed", "1")


def test_only_a_forced_token_has_probability_1() -> None:
    logits = np.array([1.0, 2.0, 3.0, 4.0])
    settings = TargetSettings(first_token=1, last_token=2, suppress_tokens=(0, 1, 2))
    for n_tokens, n_seen, expected in ((2, 0, [1]), (1, 0, [2]), (2, 1, [2])):
        sampling = settings.sampling(PenalizedSamplingParams(0, stop_tokens=(0,)), n_tokens)
        found = adjusted_log_probabilities(logits, [3] * (n_seen + 1), sampling)
        assert np.flatnonzero(found == 0).tolist() == expected
    sampling = settings.sampling(PenalizedSamplingParams(0, stop_tokens=(0,)), 3)
    found = adjusted_log_probabilities(logits, [3, 1], sampling)  # the only one that is not suppressed
    np.testing.assert_allclose(found[3], 4 - np.log(np.exp(logits).sum()))


def test_beams_of_a_decoder(tmp_path: Path) -> None:
    model = GPT(ModelConfig(vocab_size=len(PIECES), context_window=32, embedding_dim=16, n_heads=2, n_layers=1))
    export_folder(model, None, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    tokeniser = load(tmp_path / "model").tokeniser
    ids = tokeniser.encode("the sea")
    found = generate_beam_search(model, [ids], 8, 3, stop_tokens=1)[0]
    text = generate_text(tmp_path / "model", "the sea", "--beams", "3", "--length", "8")
    assert text.startswith("the sea") and len(text) > len("the sea\n")
    assert text == "the sea" + tokeniser.stream(ids).push([i for i in found if i != 1]) + "\n"


def test_activation_of_a_t5_is_dense_act_fn(tmp_path: Path) -> None:
    hf_model = new_hf_model("T5", dense_act_fn="silu")
    hf_model.save_pretrained(tmp_path)
    assert load(tmp_path).source.fields["feed_forward_proj"] == "relu"
    inputs = SOURCE, TARGET, LENGTHS
    assert difference(load(tmp_path).model(*inputs).array, hf_logits(hf_model, *inputs).detach().numpy()) < AGREED


CONFIGS: dict[str, dict[str, Any]] = {"t5": T5, "bart": BART, "marian": BART}
REFUSED = {
    "t5 encoder": ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder"),
    "t5 activation": ("t5", {"feed_forward_proj": "gated-elu"}, "feed_forward_proj"),
    "t5 buckets": ("t5", {"relative_attention_num_buckets": 2}, "relative_buckets"),
    "t5 distance": ("t5", {"relative_attention_max_distance": 3}, "relative_distance"),
    "t5 layers": ("t5", {"num_decoder_layers": 10**9}, "parameters"),
    "bart norms": ("bart", {"normalize_before": True}, "normalize_before"),
    "bart heads": ("bart", {"decoder_attention_heads": 2}, "decoder_attention_heads"),
    "bart head": ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    "marian vocabularies": ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
    "marian target": ("marian", {"decoder_vocab_size": 9}, "decoder_vocab_size"),
    "marian start": ("marian", {"decoder_start_token_id": 99}, "start_token"),
}


@pytest.mark.parametrize(("model_type", "fields", "name"), REFUSED.values(), ids=REFUSED)
def test_unsupported_fields_are_refused(model_type: str, fields: dict[str, Any], name: str) -> None:
    tokens = {"vocab_size": VOCABULARY, "decoder_start_token_id": 1}
    check_refused({"model_type": model_type, **tokens, **CONFIGS[model_type], **fields}, name, n_tensors=9)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 10**12}, "num_beams to be from 1 to 1024"),
        ({"suppress_tokens": 7}, "suppress_tokens to be a list of ids of tokens, got 7"),
        ({"suppress_tokens": [-5]}, "suppress_tokens to be ids of tokens"),
        ({"bad_words_ids": [[1, 2]]}, "bad_words_ids"),
        ({"min_length": "a"}, "min_length"),
    ],
)
def test_wrong_generation_settings_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TargetSettings.from_fields(fields, {})


def test_copies_of_tensors_and_a_missing_bias_are_accepted(tmp_path: Path) -> None:
    """Older files have copies of the embedding, or lack the bias of the logits or the name of the shared table."""
    hf_model = new_hf_model("BART")
    hf_model.final_logits_bias.zero_()
    hf_model.save_pretrained(tmp_path)
    expected = load(tmp_path).model(SOURCE, TARGET, LENGTHS).array
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    tensors["model.encoder.embed_tokens.weight"] = tensors.pop("model.shared.weight")
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(load(tmp_path).model(SOURCE, TARGET, LENGTHS).array, expected)
