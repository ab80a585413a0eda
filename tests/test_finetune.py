"""The command `tricycle finetune`, in this process, on a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from chaos.runs import differences
from tiny_models import tiny_tokeniser, write_folder
from transformers_families import LIKE_LLAMA

from tricycle import training
from tricycle.checkpoint import load_checkpoint
from tricycle.configs import ModelConfig
from tricycle.configs.mamba import MambaConfig
from tricycle.finetuning.packing import PackedDataset
from tricycle.generate import generate
from tricycle.latent_attention import LatentConfig
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.adapters import load_adapter
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.state_spaces.delta_net import DeltaNetConfig
from tricycle.tokeniser import BPETokeniser
from tricycle_cli import updates
from tricycle_cli.evaluate import main as evaluate
from tricycle_cli.export import main as export
from tricycle_cli.finetune import main as finetune
from tricycle_cli.finetune import read_prompts
from tricycle_cli.generate import main as generate_main
from tricycle_cli.init_from import check_shape, default_config, initialize_from
from tricycle_cli.run import read_metrics
from tricycle_cli.tuning import HeldOutRows
from tricycle_datasets.examples import ExampleEncoder, Record, _record, load_examples, read_records

WORDS = "the quick brown fox jumps over lazy dogs while seven small birds sing of rain".split()


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", context_window=100)


def lines(path: Path, values: list) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def said(content: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(n: int = 60) -> list:
    """Each answer says a word as often as the length of the question."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(n):
        word, other = WORDS[rng.integers(15)], WORDS[rng.integers(15)]
        values.append({"messages": [said(f"{word} {other}", "user"), said(" ".join([word] * rng.integers(1, 8)))]})
    return values


@pytest.fixture
def data(tmp_path) -> Path:
    return lines(tmp_path / "chat.jsonl", conversations())


def preferences(chat: bool = True) -> list:
    """Of two answers the one about birds is chosen."""
    generator = np.random.default_rng(1)
    values = []
    for _ in range(60):
        first, second, third, fourth = generator.choice(WORDS, 4, replace=False)
        chosen, rejected = f"{third} birds sing", f"{fourth} fox jumps"
        if chat:
            prompt = [said(f"{first} {second}", "user")]
            values.append({"prompt": prompt, "chosen": [said(chosen)], "rejected": [said(rejected)]})
        else:
            values.append({"prompt": f"{first} {second}: ", "chosen": chosen, "rejected": rejected})
    return values


QUICK = "--steps 8 --eval-interval 4 --learning-rate 0.01 --sample-tokens 4".split()


def tune(base_folder: Path, data: Path, folder: Path, *words: str) -> int:
    quick = QUICK if "full" in words else [*QUICK, "--rank", "3"]
    return finetune([str(base_folder), "--data", str(data), "--run-folder", str(folder), *quick, *words])


def held_out_losses(run: Path) -> list[float]:
    """Return the held-out losses before training and of each evaluation."""
    before = json.loads((run / "data.json").read_text())["before"]["loss"]
    return [before, *(line["held_out_loss"] for line in read_metrics(run / "metrics.jsonl") if "held_out_loss" in line)]


def evaluated_loss(capsys, folder: Path, *words: object) -> float:
    """Return the loss that `tricycle evaluate` prints for a model, with flags, on a text in the folder."""
    (folder / "text.txt").write_text("the quick brown fox")
    capsys.readouterr()
    evaluate([*map(str, words), str(folder / "text.txt"), "--json"])
    return json.loads(capsys.readouterr().out)["total"]["loss"]


# -------------------------------------------------------------------- whole runs
def test_adapter_lowers_the_loss_and_loads_in_other_commands(base_folder, data, tmp_path, capsys):
    run = tmp_path / "run"
    assert tune(base_folder, data, run, "--steps", "40", "--eval-interval", "20") == 0
    out = capsys.readouterr().out
    assert "before training: held-out loss" in out
    assert f"--adapter {(run / 'adapter').as_posix()}" in out
    losses = held_out_losses(run)
    assert losses[-1] < losses[0] - 1
    assert (run / "loss.png").stat().st_size > 1000
    samples = (run / "samples.txt").read_text(encoding="utf-8")
    prompts = {kind: samples.split(f"--- {kind}\n")[1:] for kind in ("before", "after")}
    assert [len(part) for part in prompts.values()] == [3, 3]
    assert [part.split("\n")[0] for part in prompts["before"]] == [part.split("\n")[0] for part in prompts["after"]]
    loaded = load(base_folder)
    load_adapter(loaded, run)
    ids = loaded.tokeniser.encode("the quick")
    expected = loaded.tokeniser.decode(list(generate(loaded.model, ids, 6, temperature=0)))
    generate_main([str(base_folder), "the quick", "--length", "6", "--temperature", "0", "--adapter", str(run)])
    assert capsys.readouterr().out.startswith(f"the quick{expected}"[:12])
    export([str(base_folder), str(tmp_path / "whole"), "--adapter", str(run / "adapter")])
    whole = evaluated_loss(capsys, tmp_path, tmp_path / "whole")
    assert evaluated_loss(capsys, tmp_path, base_folder, "--adapter", run) == pytest.approx(whole, rel=1e-5)
    with pytest.raises(ValueError, match=r"adapter.*base model"):
        generate_main([str(run), "the"])


@pytest.mark.nightly_except(6)
@pytest.mark.parametrize(
    ("method", "loss"),
    [
        ("--lora-dropout 0.2", "cross-entropy"),
        ("--dora --lora-dropout 0.2", "cross-entropy"),
        ("--method full", "cross-entropy"),
        ("--lora-dropout 0.2", "dpo"),
        ("--method full", "dpo"),
    ],
)
def test_resuming_is_bit_exact(method, loss, base_folder, data, tmp_path):
    words = [*method.split(), "--accumulation-steps", "2", "--loss", loss]
    if loss == "dpo":
        lines(data, preferences())
    tune(base_folder, data, tmp_path / "whole", *words)
    calls = mock.Mock(side_effect=[*[mock.DEFAULT] * 6, OSError("the power is gone")], wraps=training.compute_gradients)
    with mock.patch.object(training, "compute_gradients", calls), pytest.raises(OSError, match=r"power is.*resume"):
        tune(base_folder, data, tmp_path / "cut", *words)
    (tmp_path / "cut" / ".best.safetensors.1-1.part").touch()  # as a kill leaves it
    finetune(["--resume", str(tmp_path / "cut")])
    assert differences(tmp_path / "cut", tmp_path / "whole") == []


# As many tokens as the tokenizer has.
SIZES: dict[str, Any] = {"vocab_size": 317, "embedding_dim": 32, "n_layers": 2, "chunk_size": 8}
SMALL: dict[str, Any] = {**SIZES, **LIKE_LLAMA, "context_window": 100, "hidden_size": 24, "attention_layers": (1,)}
SMALL |= {"n_experts": 4, "n_active_experts": 2, "shared_size": 16}
MAMBA = {"state_size": 8, "n_groups": 2}
HYBRID = {**SMALL, **MAMBA, "n_heads": 4, "head_size": 0, "n_mamba_heads": 4, "mamba_head_size": 16, "mamba_mlp": True}
DELTA_NET = {**SMALL, "n_heads": 2, "n_key_heads": 1, "head_size": 16, "qk_norm": True, "qk_norm_gain": True}
DELTA_NET |= {"n_linear_heads": 4, "n_linear_key_heads": 2, "linear_head_size": 8, "linear_key_size": 6}
DELTA_NET |= {"norm_unit_offset": True, "qk_norm_eps": 1e-5, "tied": False}
OTHER_CONFIGS: dict[str, ModelConfig] = {
    "mamba2": MambaConfig(**SIZES, **MAMBA, n_heads=4, head_size=16),
    "granitemoehybrid": MambaConfig(**{**HYBRID, "positions": "none"}),
    "qwen3_next": DeltaNetConfig(**DELTA_NET),
    "deepseek_v2": LatentConfig(
        **{**{name: SIZES[name] for name in ("vocab_size", "embedding_dim", "n_layers")}, "n_heads": 2, "head_size": 8},
        **{"hidden_size": 48, "n_experts": 4, "n_active_experts": 2, "latent_size": 16, "rotary_size": 4},
        **{"value_size": 8, "expert_size": 16, "context_window": 100},
    ),
}
# With a latent of queries, a sigmoid router with a correction, and groups of experts.
V3_FIELDS = {"query_rank": 12, "sigmoid_router": True, "normalize_experts": True, "n_groups": 2, "expert_scale": 2.5}
OTHER_CONFIGS["deepseek_v3"] = replace(OTHER_CONFIGS["deepseek_v2"], **V3_FIELDS)


@pytest.mark.nightly_except(4)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_each_kind_of_model_is_fine_tuned(name, method, data, tmp_path, capsys):
    """From a folder of transformers; the result is used by other commands, and exported to a folder again."""
    base, run, whole = tmp_path / "base", tmp_path / "run", tmp_path / "whole"
    assert export_folder(lively(GPT(OTHER_CONFIGS[name])), tiny_tokeniser(), base) == name
    tune(base, data, run, "--method", method, "--context-window", "64", "--steps", "30", "--eval-interval", "15")
    losses = held_out_losses(run)
    assert losses[-1] < losses[0] - 0.5
    adapter = ["--adapter", str(run)] if method == "lora" else []
    result = str(base if adapter else run)
    loaded = load(result)
    if adapter:
        load_adapter(loaded, run)
    prompt = loaded.tokeniser.encode("the quick brown")
    expected = loaded.tokeniser.decode(list(generate(loaded.model, prompt, 6, temperature=0))).partition("<|")[0]
    capsys.readouterr()
    greedy = "--length 6 --temperature 0 --repetition-penalty 1 --no-repeat-ngram-size 0".split()
    generate_main([result, "the quick brown", *greedy, *adapter])
    assert capsys.readouterr().out.rstrip() == f"the quick brown{expected}".rstrip()
    export([result, str(whole), *adapter])
    results = [evaluated_loss(capsys, tmp_path, *words) for words in ([result, *adapter], [whole], [base])]
    assert results[1] == pytest.approx(results[0], rel=1e-5) != pytest.approx(results[2], rel=1e-2)


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_training_starts_from_each_kind_of_model(name):
    """With `tricycle train --init-from`."""
    model, field = lively(GPT(OTHER_CONFIGS[name])), "latent_size" if "deepseek" in name else "conv_width"
    config = default_config(model)
    tokens = np.arange(40).reshape(2, 20)
    np.testing.assert_array_equal(initialize_from(model, config)(tokens).numpy(), model(tokens).numpy())
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} .*like the model.* got 7"):
        check_shape(model, replace(config, **{field: 7}))


def lively(model: GPT) -> GPT:
    """Return the model with random matrices, so that a token depends on the earlier ones."""
    generator = np.random.default_rng(3)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.array[...] = generator.normal(0, 0.3, parameter.shape)
    return model


def test_full_finetuning_saves_a_loadable_checkpoint(base_folder, data, tmp_path):
    tune(base_folder, data, tmp_path / "run", "--method", "full", "--learning-rate", "0.003")
    loaded = load(tmp_path / "run")
    assert loaded.model.config.context_window == 100
    assert loaded.tokeniser.chat_template
    base = load(base_folder).model.state_dict()
    assert all(np.abs(array - base[name]).max() > 0 for name, array in loaded.model.state_dict().items())


@pytest.mark.parametrize("n_steps", [1, 2])
def test_short_runs_update_and_evaluate_every_step(n_steps, base_folder, data, tmp_path, capsys):
    words = ["--steps", str(n_steps), "--learning-rate", "0.1", "--eval-interval", "1"]
    tune(base_folder, data, tmp_path / "run", *words)
    output, losses = capsys.readouterr().out, held_out_losses(tmp_path / "run")
    assert len(losses) == len(set(losses)) == n_steps + 1
    assert "step 1: held-out loss" in output
    assert output.count("best so far") == (n_steps == 2 and losses[2] < losses[1])


@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("words", ["--weights int8", "--weights bfloat16", "--dora --weights int8", "--dora"])
def test_adapters_on_quantized_weights_lower_the_loss(words, base_folder, data, tmp_path):
    tune(base_folder, data, tmp_path / "run", *words.split())
    losses = held_out_losses(tmp_path / "run")
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_adapter_is_trained_on_the_blocks_of_a_gguf_file(base_folder, data, tmp_path):
    pytest.importorskip("gguf")
    loaded = load(base_folder)
    export_gguf(loaded.model, loaded.tokeniser, tmp_path / "model.gguf", "Q8_0")
    tune(tmp_path / "model.gguf", data, tmp_path / "run")
    losses = held_out_losses(tmp_path / "run")
    assert losses[-1] < losses[0]
    assert finetune(["--resume", str(tmp_path / "run")]) == 0


def test_early_stopping_ends_the_run_after_patience(base_folder, data, tmp_path, capsys):
    words = ["--steps", "60", "--eval-interval", "1", "--patience", "2", "--learning-rate", "3"]
    tune(base_folder, data, tmp_path / "run", *words)
    assert "early stopping (--patience 2)" in capsys.readouterr().out
    progress = load_checkpoint(tmp_path / "run" / "last.safetensors").about["progress"]
    assert progress["step"] == progress["total_steps"] < 60
    assert progress["n_worse"] == 2
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    finetune(["--resume", str(tmp_path / "run")])
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize("shape", ["text", "pair", "plain"])
def test_text_and_pair_and_folder_data_lower_the_loss(shape, base_folder, tmp_path):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(4, 60))) for _ in range(30)]
    if shape == "text":
        path = lines(tmp_path / "data.jsonl", [{"text": text} for text in texts])
    elif shape == "pair":
        path = lines(tmp_path / "data.jsonl", [{"prompt": text[:8], "completion": text[8:]} for text in texts])
    else:
        path = tmp_path / "folder"
        path.mkdir()
        (path / "a.txt").write_text(" ".join(texts))
    tune(base_folder, path, tmp_path / "run")
    losses = held_out_losses(tmp_path / "run")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tokeniser", [tiny_tokeniser(), BPETokeniser(300).train("the quick fox", progress=False)])
def test_end_tokens_have_no_bytes_of_held_out_text(tokeniser):
    (example,) = ExampleEncoder(tokeniser, 20).encode(Record("", "pair", ["the quick", " fox"]))
    held_out = HeldOutRows.from_dataset(PackedDataset([example], 1, 20), 1, tokeniser)
    assert held_out.n_bytes == len(" fox")


def test_a_short_text_is_a_prompt_without_its_end():
    records = [Record("", "text", word) for word in WORDS] * 2
    ends = [ids[-1] for _, ids in load_examples(records, ExampleEncoder(tiny_tokeniser(), 20)).prompts]
    assert ends and tiny_tokeniser().end_of_text not in ends


# -------------------------------------------------------------------- preferences
@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("chat", [True, False])
def test_chosen_answers_become_likelier_than_rejected_ones(chat, method, base_folder, tmp_path, capsys):
    path, run = lines(tmp_path / "pairs.jsonl", preferences(chat=chat)), tmp_path / "run"
    rate = {"lora": "0.02", "full": "0.004"}[method]
    words = ["--loss", "dpo", "--method", method, "--steps", "20", "--eval-interval", "10", "--learning-rate", rate]
    assert tune(base_folder, path, run, *words) == 0
    out = capsys.readouterr().out
    assert out.count("0.6931 nats/pair, reward margin 0.000, reward accuracy 50%") == 2
    assert re.search(r"50%; after: 0\.", out)
    metrics = read_metrics(run / "metrics.jsonl")
    estimates = [line for line in metrics if "held_out_loss" in line]
    assert estimates[-1]["held_out_loss"] < 0.5
    assert estimates[-1]["reward_margin"] > 0.5
    assert estimates[-1]["reward_accuracy"] > 0.7
    updates = [line for line in metrics if "loss" in line]
    assert updates[0]["loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert all(0 <= line["reward_accuracy"] <= 1 for line in updates)
    assert np.mean([line["reward_margin"] for line in updates[-5:]]) > 0.5
    assert (run / "loss.png").stat().st_size > 1000


def test_preference_loss_mask_covers_only_the_answers():
    tokeniser = tiny_tokeniser()
    user, good, bad = said("a?", "user"), said("fox"), said("rain")
    earlier = [user, good, user]
    for value in (
        {"prompt": earlier, "chosen": [good], "rejected": [bad]},
        {"chosen": [*earlier, good], "rejected": [*earlier, bad]},  # the prompt is what both begin with
    ):
        both = ExampleEncoder(tokeniser, 200).encode(_record("here", json.dumps(value).encode()))
        assert [tokeniser.decode(one.ids[one.loss_mask]) for one in both] == ["fox<|im_end|>", "rain<|im_end|>"]
        prompt = tokeniser.chat(earlier)
        assert all(one.ids[: len(prompt)].tolist() == prompt for one in both)
    encoder = ExampleEncoder(tokeniser, 12)
    assert encoder.encode(record("preference", ["x", "fox", "fox"])) == []
    assert encoder.encode(record("chat preference", [[user] * 9, [good], [bad]])) == []
    assert (encoder.n_cut, encoder.n_left_out) == (0, 2)
    both = encoder.encode(record("preference", ["the quick brown fox " * 9, "rain", "fox jumps"]))
    assert [tokeniser.decode(one.ids[one.loss_mask]) for one in both] == ["rain<|im_end|>", "fox jumps<|im_end|>"]
    n_shared = min(int(np.argmax(one.loss_mask)) for one in both)  # both have lost as much of the prompt
    np.testing.assert_array_equal(both[0].ids[:n_shared], both[1].ids[:n_shared])
    assert max(len(one.ids) for one in both) == 13


# -------------------------------------------------------------------- loss masks
def test_chat_loss_mask_covers_answers_and_end_tokens():
    tokeniser = tiny_tokeniser()
    messages = [said("small birds <|im_end|>", "user"), said("sing of rain"), said("and?", "user"), said("\nfox")]
    parts = tokeniser.chat_parts(messages)
    assert [is_answer for _, is_answer in parts] == [False, True, False, True]
    joined = [token for ids, _ in parts for token in ids]
    assert tokeniser.decode(joined) == tokeniser.render(messages, False)
    assert joined[: len(parts[0][0])] == tokeniser.chat(messages[:1], allowed_special=False)
    assert joined.count(tokeniser.eos) == 5  # the name in the first message is text
    example = ExampleEncoder(tokeniser, 200).encode(record("messages", messages))[0]
    counted = tokeniser.decode(example.ids[example.loss_mask])
    assert counted == "sing of rain<|im_end|>\nfox<|im_end|>"
    pair = ExampleEncoder(tokeniser, 200).encode(record("pair", ["small ", "birds"]))[0]
    assert tokeniser.decode(pair.ids[pair.loss_mask]) == "birds<|im_end|>"


def record(kind, value):
    return Record("here", kind, value)


def test_truncated_tokens_are_counted():
    tokeniser = tiny_tokeniser()
    encoder = ExampleEncoder(tokeniser, 30)
    long = "the quick brown fox " * 20
    pair = encoder.encode(record("pair", [long, "rain"]))[0]
    assert len(pair.ids) == 31
    assert tokeniser.decode(pair.ids[pair.loss_mask]) == "rain<|im_end|>"
    assert (encoder.n_cut, encoder.n_left_out) == (1, 0)
    assert encoder.n_cut_tokens == len(tokeniser.encode(long)) + len(tokeniser.encode("rain")) + 1 - 31
    assert encoder.encode(record("messages", [said(long, "user"), said("rain")])) == []
    assert (encoder.n_cut, encoder.n_left_out) == (2, 1)
    windows = encoder.encode(record("text", long))
    assert sum(example.n_labels for example in windows) == len(encoder.encode_text(long)) - 1


def test_equal_records_are_held_out_together(tmp_path):
    values = [{"text": f"{WORDS[i % 15]} {i % 25}"} for i in range(100)]
    examples = load_examples(read_records([lines(tmp_path / "a.jsonl", values)]), ExampleEncoder(tiny_tokeniser(), 50))
    held = {example.ids.tobytes() for example in examples.held_out}
    assert held
    assert not held & {example.ids.tobytes() for example in examples.train}
    assert len(examples.train) + len(examples.held_out) == 100


def test_records_with_bom_and_windows_line_endings_are_read(base_folder, data, tmp_path):
    data.write_bytes(b"\xef\xbb\xbf" + data.read_bytes().replace(b"\n", b"\r\n"))
    assert len(read_records([data])) == 60


# -------------------------------------------------------------------- bad input
GOOD = json.dumps({"prompt": "small", "completion": "birds"})
BAD = {
    "empty": ("", "text file.*empty"),
    "blank": ("\n \n", "line of JSON.*none"),
    "no JSON": (GOOD + "\n{oops}\n", "line 2: .*JSON.*{oops}"),
    "no UTF-8": ('{"text": "\xff"}', "line 1: .*JSON"),
    "a list": ("[1]", 'line 1: .*"text"'),
    "other names": ({"question": "a"}, "got 'question'"),
    "no role": ({"messages": [{"content": "a"}]}, "line 1: .*message 1.*role"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1.*content.*None"),
    "no assistant message": ({"messages": [said("a", "user")]}, 'messages.*"assistant"'),
    "one side": ({"chosen": [said("a")], "rejected": "b"}, "prompt.*text"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "line 1: .*prompt.*None"),
    "rejected": ({"prompt": "", "chosen": "a", "rejected": ""}, "rejected.*a character"),
    "whose": (
        {"prompt": [{"content": "a"}], "chosen": [said("a")], "rejected": [said("b")]},
        "line 1: .*message 1 of prompt.*role",
    ),
    "no answer": (
        {"chosen": [said("a", "user")], "rejected": [said("b", "user")]},
        'line 1: .*chosen.*"assistant".*none',
    ),
    "preferences": (
        {"prompt": "x", "chosen": "a", "rejected": "b"},
        'line 1: .*--loss dpo.*"chosen".*cross-entropy',
    ),
    "deep": (GOOD + '\n{"messages": ' + "[" * 900 + "]" * 900 + "}", "line 2: .*100 levels"),
    "half a pair": ('{"text": "a"}\n{"text": "\\ud83d"}', "line 2: .*Unicode.*surrogate"),
    "all equal": (GOOD + "\n" + GOOD, "0 and 2 examples.*equal"),
    "a number": ({"text": 3}, "text.*got 3"),
    "long": ({"prompt": "a", "completion": "fox " * 200}, "answers.*100 tokens"),
    "one": (GOOD, "0 and 1 examples"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_before_any_work(name, base_folder, tmp_path):
    content, message = BAD[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode("latin-1"))
    with pytest.raises(ValueError, match=message) as error:
        tune(base_folder, path, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "config.json").exists()


# -------------------------------------------------------------------- memory
def test_too_little_memory_is_reported_before_any_work(base_folder, data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv("TRICYCLE_MEMORY_GB", "0.001")  # the model fits
    flags = (
        r"--recompute.*--batch-size \(now 4;.*--accumulation-steps.*--context-window \(now 100\).*--weights bfloat16"
    )
    with pytest.raises(MemoryError, match=r"0\.00\d+ GB.*0\.001 GB.*" + flags):
        tune(base_folder, data, run)
    assert not (run / "config.json").exists()
    monkeypatch.setenv("TRICYCLE_MEMORY_GB", "0.0003")
    with pytest.raises(MemoryError, match=r"--context-window \(now 100\).*--method lora"):
        tune(base_folder, data, run, "--method", "full", "--batch-size", "1", "--recompute")
    monkeypatch.setenv("TRICYCLE_MEMORY_GB", "0.1")
    tune(base_folder, data, run)


@pytest.mark.nightly_except(5)
@pytest.mark.parametrize("words", ["", "--recompute", "--loss dpo", "--method full", "--method full --recompute"])
def test_estimated_memory_is_a_lower_bound(words, base_folder, data, tmp_path, monkeypatch):
    if "dpo" in words:
        lines(data, preferences())
    estimates = []
    check = updates.check_training_memory

    def checked(needed: int, on_gpu: bool) -> None:
        check(needed, on_gpu)
        estimates.append(needed)
        tracemalloc.start()

    monkeypatch.setattr("tricycle_cli.finetune.check_training_memory", checked)
    big = write_folder(tmp_path / "big", n_layers=6, embedding_dim=64, context_window=100)
    try:
        tune(big, data, tmp_path / "run", "--steps", "2", "--sample-tokens", "0", *words.split())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert estimates[0] < peak < 6 * estimates[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--targets c_attn", "all-linear.*'c_attn'"),
        ("--context-window 101", "--context-window.*2 to 100"),
        ("--method full --weights int8", "--weights float32.*--method full"),
        ("--method full --dora", "--method lora.*--dora"),
        ("--method full --rank 3", "--method lora with --rank, which has no effect"),
        ("--beta 0.3", "--loss dpo with --beta"),
        ("--loss dpo --no-pack", "--loss cross-entropy with --no-pack"),
        ("--epochs 3", "no --steps with --epochs"),
        ("--sample-tokens 0 --prompts a", "--sample-tokens above 0 with --prompts"),
        ("--loss dpo", 'line 1: .*"chosen".*"rejected".*--loss dpo'),
        ("--loss dpo --beta 0", r"--beta.*0\.0"),
        ("--patience -1", "--patience.*0.*got -1"),
        ("--sample-tokens -1", "--sample-tokens.*0.*got -1"),
        ("--accumulation-steps 0", "--accumulation-steps.*1.*got 0"),
        ("--steps 0 --epochs 0", r"--epochs above 0, got 0\.0"),
        ("--steps -1", "--steps.*0.*got -1"),
        ("--held-out nothing", "expected a file"),
    ],
)
def test_invalid_flags_are_rejected(words, message, base_folder, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        tune(base_folder, data, tmp_path / "run", *words.split())


@pytest.mark.parametrize("words", ["--steps 50", "--no-pack", "--device=gpu", "model"])
def test_other_flags_with_resume_are_rejected(words, tmp_path):
    with pytest.raises(ValueError, match=f"only --track with --resume, got {words.split()[0].split('=')[0]}"):
        finetune([*words.split(), "--track", "--resume", str(tmp_path)])


def test_invalid_data_and_run_folders_are_rejected(base_folder, data, tmp_path):
    run = tmp_path / "run"
    silent = write_folder(tmp_path / "silent", chat_template=None)
    with pytest.raises(ValueError, match=r"line 1: .*chat template"):
        tune(silent, data, run)
    ties = lines(tmp_path / "ties.jsonl", [{"prompt": f"{i}", "chosen": "a", "rejected": "a"} for i in range(9)])
    with pytest.raises(ValueError, match=r"0 and 0 examples.* 9 "):
        tune(base_folder, ties, run, "--loss", "dpo")
    with pytest.raises(ValueError, match=r"60 and 0 examples.* 1 "):
        long = lines(tmp_path / "long.jsonl", [{"messages": [said("fox " * 99, "user"), said("fox")]}])
        tune(base_folder, data, run, "--held-out", str(long))
    with pytest.raises(FileNotFoundError, match="tricycle finetune"):
        finetune(["--resume", str(tmp_path)])
    other = write_folder(tmp_path / "other", n_layers=1)
    tune(base_folder, data, run)
    with pytest.raises(ValueError, match="contains a run already"):
        tune(base_folder, data, run)
    with pytest.raises(ValueError, match="adapter"):
        generate_main([str(other), "the", "--adapter", str(run)])
    about = json.loads((run / "data.json").read_text())
    for broken in ({"rank": "many"}, {"data": [3]}, {"spoon": 1}, {"loss": "spoon"}):
        (run / "data.json").write_text(json.dumps({**about, "arguments": {**about["arguments"], **broken}}))
        with pytest.raises(ValueError, match=r"data\.json: expected"):
            finetune(["--resume", str(run)])
    (run / "data.json").write_text(json.dumps(about))
    lines(data, conversations(30))
    with pytest.raises(ValueError, match="changed data"):
        finetune(["--resume", str(run)])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_changed_base_model_is_rejected(weights, data, tmp_path):
    run = tmp_path / "run"
    base = write_folder(tmp_path / "base", context_window=100)
    tune(base, data, run, "--weights", weights)
    assert finetune(["--resume", str(run)]) == 0
    other = load(base).model
    other.blocks[0].mlp.projection.weights.array *= 1.01
    shutil.rmtree(base)
    export_folder(other, tiny_tokeniser(), base)
    with pytest.raises(ValueError, match=r"changed .*base"):
        finetune(["--resume", str(run)])


@pytest.mark.parametrize("prompts", [None, 3, [3], [["a"]], [["a", "b"]], [["a", [1.5]]], {"a": [1]}])
def test_wrong_prompts_of_a_run_are_refused(prompts: object) -> None:
    with pytest.raises(ValueError, match=r"data\.json: expected prompts"):
        read_prompts(Path("data.json"), {"prompts": prompts})
