"""The command `tricycle`, on runs of its own and on other people's models."""

import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from chaos.runs import differences
from programs import call as call_apart
from programs import good, metrics_of, one_line, run_here
from tiny_models import TEXT, tiny_tokeniser, write_folder

import tricycle
from tricycle.checkpoint import load_checkpoint, save_checkpoint
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.evaluation import evaluate
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.adapters import new_adapter, save_adapter
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.sampling import SamplingParams
from tricycle.tokeniser import BPETokeniser
from tricycle_cli import init_from, updates
from tricycle_cli.main import COMMANDS, MODULE, main

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("cache")


def call(*words, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run `python -m tricycle` with some words in this process."""
    return run_here(functools.partial(main, MODULE), MODULE, words, folder)


@pytest.fixture(scope="module")
def pretrained_folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", context_window=100)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "best.safetensors"
    tokeniser = BPETokeniser(300).train(TEXT, progress=False)
    save_checkpoint(path, GPT(DebugConfig(vocab_size=300)), tokeniser)
    return path.parent


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "long.txt").write_text(TEXT * 3, encoding="utf-8")
    (folder / "odd.txt").write_bytes(b"na\xefve <|im_end|> \xe2\x82 \xf0\x9f\x9a\xb2 end")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def continuation(loaded, ids, n_tokens: int, sampling=None) -> str:
    """Return the text of a prompt and its continuation, by default a greedy one, without the stop token."""
    sampling = sampling or SamplingParams(0, stop_tokens=2, n_vocab=loaded.tokeniser.n_vocab)
    tokens = [*ids, *generate(loaded.model, ids, n_tokens, sampling)]
    return loaded.tokeniser.decode([token for token in tokens if token != 2]) + "\n"


# -------------------------------------------------------------------- the command itself
def test_help_lists_commands_and_unknown_command_fails():
    for words in (["--help"], ["-h"], ["help"]):
        out = good(call(*words))
        for name, summary in COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.MULTILINE)
    assert good(call_apart("-m", "tricycle", "--version")) == f"tricycle {tricycle.__version__}\n"
    done = call("trian")
    one_line(done, f"a command, one of {', '.join(COMMANDS)}, got 'trian'")
    assert done.returncode == 2


def test_installed_script_runs_the_cli():
    assert "usage: tricycle COMMAND" in good(run_here(main, "/bin/tricycle", ()))
    assert "usage: tricycle generate" in good(run_here(main, "/bin/tricycle", ("generate", "--help")))
    assert "usage: python -m tricycle generate" in good(call("generate", "--help"))
    assert '[project.scripts]\ntricycle = "tricycle_cli.main:main"\n' in (ROOT / "pyproject.toml").read_text()


# -------------------------------------------------------------------- generate
def test_pretrained_models_use_their_generation_settings(pretrained_folder):
    loaded = load(pretrained_folder)
    text = continuation(loaded, loaded.tokeniser.encode("the quick brown"), 30)
    words = [pretrained_folder, "the quick brown", "--length", "30"]
    assert good(call("generate", *words)) == good(call_apart("inference.py", *words)) == text


def test_json_schema_and_regex_constrain_the_text(pretrained_folder, tmp_path):
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}', encoding="utf-8")
    for words in (["--seed", "1"], ["--draft-tokens", "4"]):
        out = good(call("generate", pretrained_folder, "the quick", *words, "--json-schema", schema))
        assert 2 <= len(json.loads(out.removeprefix("the quick"))) <= 3
    assert re.fullmatch("x[0-9]{4}\n", good(call("generate", pretrained_folder, "x", "--regex", "[0-9]{4}")))
    schema.write_text('{"type": "foo"}', encoding="utf-8")
    for words, reason in (
        (["--json-schema", schema], "schema.json: Invalid type: foo"),
        (["--json-schema", tmp_path / "missing.json"], "missing.json"),
        (["--regex", "(a"], "--regex: .*unclosed group"),
        (["--regex", "a", "--json-schema", schema], "got both"),
        (["--regex", "a", "--no-stop"], "without --no-stop"),
        (["--regex", "a", "--beams", "2"], "expected --beams without"),
        (["--draft-tokens", "4", "--beams", "2"], "expected --beams without"),
        (["--repetition-penalty", "2", "--beams", "2"], "expected --beams without"),
        (["--draft-tokens", "-1"], "--draft-tokens to be 0 or more, got -1"),
        (["--strength", "2"], "--steer with --strength, which has no effect"),
    ):
        one_line(call("generate", pretrained_folder, "x", *words), reason)


def test_flags_override_generation_settings(tmp_path):
    settings = GenerationSettings(True, 0.7, 12, 0.9, stop_tokens=(2,))
    folder = write_folder(tmp_path / "model", settings=settings)
    loaded = load(folder)
    ids, known = loaded.tokeniser.encode("birds"), {"stop_tokens": 2, "n_vocab": loaded.tokeniser.n_vocab, "seed": 4}
    for flags, chosen in (
        ("", {"temperature": 0.7, "top_k": 12, "top_p": 0.9}),
        ("--temperature 2 --top-k 0", {"temperature": 2.0, "top_p": 0.9}),
        ("--repetition-penalty 1.5 --top-p 1", {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.5}),
        (
            "--min-p 0.1 --no-repeat-ngram-size 2",
            {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.1, "no_repeat_ngram_size": 2},
        ),
    ):
        out = good(call("generate", folder, "birds", "--seed", "4", "--length", "40", *shlex.split(flags)))
        assert out == continuation(loaded, ids, 40, PenalizedSamplingParams(**chosen, **known)), flags


def test_empty_prompt_starts_with_the_start_token(pretrained_folder, run_folder):
    loaded = load(pretrained_folder)
    expected = continuation(loaded, [1], 10).removeprefix(loaded.tokeniser.decode([1]))
    for words in ([], ["--draft-tokens", "4"], ["--lookahead=4"]):  # the latter is deprecated
        assert good(call("generate", pretrained_folder, "--length", "10", *words)) == expected
    assert good(call("generate", run_folder, "--length", "0")) == "\n"


def test_prompt_lookup_is_imported_only_with_draft_tokens():
    program = "import sys, tricycle_cli.chat, tricycle_cli.generate; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "tricycle.generate" in modules
    assert not {"tricycle.decoding.prompt_lookup", "tricycle.decoding.speculative"} & {*modules}


def test_overflow_option_continues_or_raises(pretrained_folder):
    """The model has a context window of 100 tokens."""
    words = ["generate", pretrained_folder, "the quick brown", *shlex.split("--length 130 --no-stop")]
    for dtype in ("float16", "int8"):
        assert len(good(call(*words, "--kv-cache-dtype", dtype)).encode()) > 130
    for flag in ("--overflow", "--past_window"):  # the latter is deprecated
        one_line(call(*words, flag, "error"), "generate: the context window of 100 tokens is full")


@pytest.mark.parametrize("softmax", ["softmax1", "adaptive", "blocks"])
def test_softmax_option_replaces_the_softmax_of_a_model(pretrained_folder, softmax):
    loaded = load(pretrained_folder)
    prompt = "the quick brown fox jumps, " * 9  # "blocks" cuts the context, so beyond its middle it differs
    ids = loaded.tokeniser.encode(prompt)
    assert 50 < len(ids) < 80
    plain = loaded.model(np.array([ids])).array
    loaded.model.use_softmax(softmax)
    assert np.abs(loaded.model(np.array([ids])).array - plain).max() > 1e-3
    words = [pretrained_folder, prompt, "--length", "20", "--softmax", softmax]
    assert good(call("generate", *words)) == continuation(loaded, ids, 20)


def test_invalid_model_sources_and_prompts_are_rejected(tmp_path, pretrained_folder, texts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.npz").write_bytes(b"x")
    for source, message in (
        ("empty", r"empty: .*config\.json and model\.safetensors"),
        ("model.npz", r"a folder.*\.safetensors, \.gguf, .*\.pickle"),
        ("nothing.gguf", r"nothing\.gguf: .*no such file"),
        ("../a/b/c", r"\.\./a/b/c: .*no such folder or file"),
    ):
        one_line(call("generate", source, "hi", folder=tmp_path), message)
    one_line(call("generate", pretrained_folder, "the quick " * 99), "prompt of 1 to 100 tokens")
    one_line(call("generate", pretrained_folder, ""), "prompt of at least one character")


# -------------------------------------------------------------------- evaluate
def nats(model, ids: np.ndarray) -> float:
    """Return the summed loss of a text that fits into the context window."""
    logits = model(ids[None, :-1])
    return float(CrossEntropy()(model.place(ids[None, 1:]), logits)) * (len(ids) - 1)


def test_evaluate_reports_loss_perplexity_and_bits_per_byte(pretrained_folder, texts):
    loaded = load(pretrained_folder)
    text = (texts / "odd.txt").read_bytes()
    ids = loaded.tokeniser.encode_plain(text)
    assert 2 not in ids
    (score,) = json.loads(good(call("evaluate", pretrained_folder, texts / "odd.txt", "--json")))["files"]
    n_bytes = len(text) - len(loaded.tokeniser.decode(ids[:1]))  # the first token is only read
    assert (score["tokens"], score["bytes"]) == (len(ids) - 1, n_bytes)
    total = nats(loaded.model, ids)
    assert score["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    assert score["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-5)


def test_evaluate_of_a_run_folder_matches_the_library_function(run_folder, texts):
    """All bytes are scored, because an end-of-text token precedes each text."""
    checkpoint = load_checkpoint(run_folder / "best.safetensors")
    tokeniser = checkpoint.tokeniser()
    report = json.loads(good(call("evaluate", run_folder, texts / "odd.txt", texts / "long.txt", "--json")))
    for score, name in zip(report["files"], ("odd.txt", "long.txt")):
        text = (texts / name).read_bytes()
        ids = np.array([tokeniser.end_of_text, *tokeniser.encode(text)])
        assert score["bytes"] == len(text)
        assert score["tokens"] == len(ids) - 1
        loss, _ = evaluate(checkpoint.model(), ids, 4, stride=16)
        assert score["loss"] == pytest.approx(loss, rel=1e-5)
    total, scores = report["total"], report["files"]
    nats_in_all = sum(score["loss"] * score["tokens"] for score in scores)
    assert total["bits_per_byte"] == pytest.approx(nats_in_all / math.log(2) / sum(score["bytes"] for score in scores))
    assert (report["window"], report["stride"]) == (32, 16)
    assert report["model"] == str(run_folder)


def test_evaluate_prints_a_line_per_file_and_a_total(pretrained_folder, texts):
    words = [texts / "long.txt", texts / "odd.txt", "--window", "50", "--batch-size", "3"]
    lines = good(call("evaluate", pretrained_folder, *words)).splitlines()
    pattern = r"\d+\.\d{4} nats/token, perplexity [\d.]+, \d+\.\d{4} bits/byte; [\d,]+ tokens, [\d,]+ bytes"
    assert re.fullmatch(rf".*long.txt: {pattern}", lines[0])
    assert re.fullmatch(rf"all: {pattern} \(windows of 50 tokens, stride 25\)", lines[2])
    far = good(call("evaluate", pretrained_folder, texts / "long.txt", "--window", "50", "--stride", "9000", "--json"))
    assert json.loads(far)["stride"] == 50
    other = good(call("evaluate", pretrained_folder, texts / "long.txt", "--softmax", "softmax1", "--window", "50"))
    assert other.split(": ")[1].split(" (")[0] != lines[0].split(": ")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty.txt"], "empty.txt: .*two tokens"),
        (["gone.txt"], "gone.txt"),
        ([], "at least one file"),
        (["long.txt", "--window", "101"], "--window.*1 to 100.*got 101"),
        (["long.txt", "--stride", "-1"], "--stride of 0 or more, got -1"),
        (["--task", "induction", "--batch-size", "-1"], "--batch-size of 0 or more, got -1"),
    ],
)
def test_evaluate_rejects_bad_files_and_sizes(pretrained_folder, texts, words, message):
    one_line(call("evaluate", pretrained_folder, *words, folder=texts), message)


# -------------------------------------------------------------------- train --init-from
QUICK = """--data text --steps 4 --minutes 0 --eval-interval 2 --sample-interval 0 --context-window 24
    --max-learning-rate 3e-3""".split()


def start(pretrained_folder: Path, texts: Path, folder: Path, *words) -> list:
    files = ["--files", texts / "long.txt", "--run-folder", folder]
    return ["train", "--init-from", pretrained_folder, *QUICK, *files, *words]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, pretrained_folder, texts) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    return folder, good(call(*start(pretrained_folder, texts, folder)))


def test_init_from_keeps_tokeniser_and_architecture(tuned, pretrained_folder):
    folder, out = tuned
    assert json.loads((folder / "data.json").read_text())["init_from"] == str(pretrained_folder)
    checkpoint = load_checkpoint(folder / "best.safetensors")
    assert checkpoint.tokeniser() == load(pretrained_folder).tokeniser
    assert checkpoint.tokeniser().encode(TEXT) == tiny_tokeniser().encode(TEXT)
    config = checkpoint.config
    shape = load(pretrained_folder).model.config
    assert config.context_window == 24 < shape.context_window
    assert (config.n_key_heads, config.n_layers, config.gated) == (shape.n_key_heads, shape.n_layers, shape.gated)
    assert (config.optimiser, config.batch_size) == ("adamw", init_from.TRAINING["batch_size"])
    metrics = metrics_of(folder)
    assert metrics[-1]["final_loss"] < metrics[0]["loss"]
    assert out.rstrip().endswith(f"python -m tricycle generate {folder}")
    output = good(call("generate", folder, "the quick", "--temperature", "0", "--length", "8"))
    assert output.startswith("the quick")


def test_first_training_loss_equals_the_loss_of_the_model(tuned, pretrained_folder, texts):
    """Training starts from the weights and the tokeniser of the model."""
    report = json.loads(good(call("evaluate", pretrained_folder, texts / "long.txt", "--window", "24", "--json")))
    first = metrics_of(tuned[0])[0]["loss"]
    assert first == pytest.approx(report["total"]["loss"], rel=0.1)
    assert math.log(420) * 1.2 < first  # the untrained model is confident and wrong


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_run_with_init_from_resumes_bit_exactly(tuned, pretrained_folder, texts, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    log = updates.RunSession.log

    def stopped(session, loss, norm):
        if session.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        log(session, loss, norm)

    with monkeypatch.context() as patch:
        patch.setattr(updates.RunSession, "log", stopped)
        out = good(call(*start(pretrained_folder, texts, folder)))
    assert f"tricycle train --resume {folder}" in out
    good(call("train", "--resume", folder))

    assert differences(folder, tuned[0]) == []
    for name in (
        "last.safetensors",
        "best.safetensors",
        "metrics.jsonl",
        "samples.txt",
    ):  # as if killed before the first
        (folder / name).unlink()
    good(call("train", "--resume", folder))
    assert differences(folder, tuned[0]) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--n-heads 8", "--n-heads.*4.*--init-from.*got 8"),
        ("--activation relu", "--activation.*swish.*--init-from.*got relu"),
        ("--vocab-size 500", "--vocab-size.*420"),
        ("--context-window 101", "--context-window.*at most 100.*--init-from"),
        ("--preset debug", "no --preset.*--init-from.*debug"),
        ("--tokeniser gpt2", "no --tokeniser.*--init-from.*gpt2"),
    ],
)
def test_flags_that_contradict_the_model_are_rejected(pretrained_folder, texts, tmp_path, words, message):
    one_line(call(*start(pretrained_folder, texts, tmp_path / "run"), *shlex.split(words)), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("softmax", ["softmax", "softmax1"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_smaller_context_window_keeps_the_logits(positions, softmax):
    """Of learned positions the first ones are kept."""
    model = GPT(DebugConfig(positions=positions, qk_norm=False, precision="float32"))
    config = GPTConfig.from_dict({**model.config.to_dict(), "context_window": 10, "softmax": softmax, "dropout": 0.5})
    started = init_from.initialize_from(model, config)
    assert started.config == config and started.dropout.probability == 0.5
    tokens = np.random.default_rng(0).integers(0, 300, (2, 10))
    model.use_softmax(softmax)
    np.testing.assert_allclose(started.eval()(tokens).array, model.eval()(tokens).array, atol=1e-5)


# -------------------------------------------------------------------- export
def test_exported_run_folder_gives_equal_logits(tuned, tmp_path):
    folder = tmp_path / "out"
    out = good(call("export", tuned[0], folder))
    assert out == f"{folder}: model type llama, {load(folder).model.n_parameters:,} parameters in float32\n"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "started from | tiny" in card
    assert f"{metrics_of(tuned[0])[-1]['final_loss']:.4g}" in card
    ids = load(folder).tokeniser.encode("the quick brown fox")
    logits = [load(place).model(np.array([ids])).array for place in (folder, tuned[0])]
    np.testing.assert_allclose(*logits, atol=1e-5)
    one_line(call("export", tuned[0], folder), "folder .*new or empty")
    one_line(call("export", tuned[0]), "output folder, --gguf, --gguf-adapter or --html")


def test_exported_gguf_gives_equal_logits(pretrained_folder, tmp_path):
    path = tmp_path / "model.gguf"
    good(call("export", pretrained_folder, "--gguf", path, "--type", "F32"))
    ids = load(pretrained_folder).tokeniser.encode("the quick brown fox 12")
    assert load(path).tokeniser.encode("the quick brown fox 12") == ids
    logits = [load(place).model(np.array([ids])).array for place in (path, pretrained_folder)]
    np.testing.assert_allclose(*logits, atol=1e-5)
    one_line(call("export", pretrained_folder, "--gguf", path), r"model\.gguf: .*new file.*exists")


def test_exported_gguf_adapter_gives_equal_text(pretrained_folder, tmp_path):
    loaded = load(pretrained_folder)
    adapter = new_adapter(loaded)
    for low_rank in adapter.low_ranks.values():
        for up in low_rank.ups:
            up.array[...] = np.random.default_rng(0).normal(0, 0.1, up.shape)
    save_adapter(adapter, loaded, tmp_path / "adapter")
    path, folder, flags = tmp_path / "a.gguf", tmp_path / "merged", ("--adapter", tmp_path / "adapter")
    out = good(call("export", pretrained_folder, folder, *flags, "--gguf-adapter", path))
    assert out.startswith(f"{path}: architecture llama, {adapter.n_parameters:,} parameters in F32\n{folder}: ")
    words = ("--temperature", 0, "--length", 12)
    texts = [good(call("generate", pretrained_folder, "the quick", "--adapter", a, *words)) for a in (path, flags[1])]
    assert texts[0] == texts[1] == good(call("generate", folder, "the quick", *words))
    one_line(call("export", pretrained_folder, *flags, "--gguf-adapter", path), r"a\.gguf: .*new file.*exists")
    one_line(call("export", pretrained_folder, "--gguf-adapter", path), "--gguf-adapter: expected --adapter")
    one_line(call("export", pretrained_folder, tmp_path / "b", "--type", "Q4_K_M"), "--type with --gguf, got .*Q4_K_M")
    one_line(call("export", pretrained_folder, "--gguf", "b", "--dtype", "float16"), "--dtype with a folder")
    one_line(call("generate", path, "the quick"), "expected a model, got general.type 'adapter'")


def test_exported_gguf_is_calibrated_with_a_text(pretrained_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    plain, calibrated = tmp_path / "plain.gguf", tmp_path / "calibrated.gguf"
    good(call("export", pretrained_folder, "--gguf", plain, "--type", "Q4_K_M"))
    good(call("export", pretrained_folder, "--gguf", calibrated, "--type", "Q4_K_M", "--calibrate", text))
    assert plain.stat().st_size == calibrated.stat().st_size and plain.read_bytes() != calibrated.read_bytes()
    assert load(calibrated).generation == load(plain).generation
    for arguments in (["out"], ["--gguf", "a.gguf"], ["--gguf", "a.gguf", "--type", "Q8_0"]):
        pattern = "--calibrate with --gguf and a --type of at most 6 bits"
        one_line(call("export", pretrained_folder, *arguments, "--calibrate", text), pattern)
    for content, pattern in {"": "at least 512 tokens, got 0", "a b": "at least 512 tokens"}.items():
        text.write_text(content)
        new = tmp_path / "new.gguf"
        one_line(call("export", pretrained_folder, "--gguf", new, "--type", "Q4_0", "--calibrate", text), pattern)
        assert not new.exists()
    one_line(call("export", pretrained_folder, "--gguf", new, "--type", "Q4_0", "--calibrate", tmp_path / "x"), "x: ")


# -------------------------------------------------------------------- quantized weights
@pytest.mark.parametrize("weights", ["int8", "float16", "stored"])
def test_generate_and_evaluate_with_quantized_weights(weights, run_folder, pretrained_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 3)
    for source in (run_folder, pretrained_folder):
        assert good(call("generate", source, "the", "--length", 5, "--weights", weights, "--temperature", 0))
        words = ["evaluate", source, text, "--json", "--weights"]
        losses = [json.loads(good(call(*words, kind)))["total"]["loss"] for kind in ("float32", weights)]
        assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_quantized_weights_are_rejected_on_a_gpu(run_folder):
    one_line(call("generate", run_folder, "--weights", "int8", "--device", "gpu"), "--weights int8: .*--device cpu")
