"""experiments/ten_minutes: held-out data, variants, the PyTorch baseline, and a small run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags

from experiments.shared import texts as shared_texts
from experiments.ten_minutes import __main__ as program
from experiments.ten_minutes import ablations, data, pytorch_baseline, report, study, syntax_check
from experiments.ten_minutes.ablations import PLAIN, RECIPE, VARIANTS, configs
from experiments.ten_minutes.time_budget import Budget
from tricycle.checkpoint import save_checkpoint
from tricycle.configs import PRESETS, GPTConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.evaluation import evaluate
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser
from tricycle.training_state import new_state, train_step
from tricycle_datasets.corpus import is_held_out
from tricycle_datasets.text import TextFiles

SMALL = replace(
    GPTConfig(),
    vocab_size=300,
    context_window=24,
    embedding_dim=16,
    n_heads=2,
    n_layers=1,
    batch_size=2,
    warmup_steps=2,
    max_learning_rate=1e-2,
    min_learning_rate=1e-3,
    minutes=0.01,
    steps=0,
)
MODERN: dict = {
    "positions": "rotary",
    "qk_norm": True,
    "norm": "rms_norm",
    "bias": False,
    "activation": "relu_squared",
    "zero_projections": True,
    "optimiser": "muon",
    "schedule": "linear",
    "token_shift": True,
    "key_shift": True,
    "rotary_fraction": 0.5,
    "score_scale": 0.25,
}
WORDS = (
    "--vocab-size 300 --context-window 24 --embedding-dim 16 --n-heads 2 --n-layers 1 --batch-size 2 --minutes 0.002"
).split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """A folder of functions, and a cache of its own."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        body = "\n".join(f"def f{i}_{j}(x, y):\n    return x * {j} + y\n" for j in range(20))
        (folder / f"file_{i}.py").write_text(body, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRICYCLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield folder


# -------------------------------------------------------------------- the texts
def test_python_documents_exclude_the_held_out_files():
    names = data.python_files()
    kept = [name for name in names if not is_held_out(name)]
    chosen = [name for name in kept if data.is_for_validation(name)]
    assert 0 < len(chosen) < len(kept) / 10 and len(kept) < len(names)
    documents = list(data.python_documents())
    assert [len(text) for text, _ in documents] == [(data.python_root() / name).stat().st_size for name in kept]
    assert sum(held_out for _, held_out in documents) == len(chosen)
    assert not any(is_held_out(name) and data.is_for_validation(name) for name in names)


def test_hold_out_tenth_before_last_splits_a_text():
    text = bytes(range(100))
    assert list(data.hold_out_tenth_before_last(text)) == [(text[:80], False), (text[80:90], True)]


def test_text_documents_exclude_the_held_out_files(texts, tmp_path):
    official = TextFiles(texts, 300, progress=False)
    documents = list(data.text_documents([texts]))
    held_out = official.validation_bytes
    assert held_out and not any(text in held_out for text, _ in documents)
    names = [path.name for path in sorted(texts.iterdir())]
    kept = [name for name in names if not is_held_out(name)]
    assert [is_for_validation for _, is_for_validation in documents] == [data.is_for_validation(n) for n in kept]
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 101)))
    (short, _), (tail, _) = data.text_documents([tmp_path / "one.txt"])
    assert short + tail == bytes(range(1, 91))
    corpus = data.load("text", "validation", 300, [texts])
    assert corpus.validation_bytes == b"".join(text for text, chosen in documents if chosen)
    assert data.load("text", "held-out", 300, [texts]).validation_bytes == held_out
    scored = shared_texts.held_out(corpus)
    assert len(scored.tokens) == len(corpus.validation) + 1 and scored.n_bytes == len(corpus.validation_bytes)


def test_unknown_texts_are_refused():
    with pytest.raises(ValueError, match=r"python, shakespeare, text.*prose"):
        data.load("prose", "validation", 300)


# -------------------------------------------------------------------- the clock
def test_budget_predicts_the_number_of_steps():
    now = [0.0]
    budget = Budget(100, lambda: now[0], spent=10, reserve=2)
    found = []
    for step in range(1, 1000):
        now[0] += 5 if step < 3 else 1 + step % 2
        found.append(budget.total_steps())
        if found[-1] == step:
            break
    assert found[:4] == [0] * 4
    left = (100 - 10 - 2 * 5 - 3) / 1.5 + 3 - 2
    assert found[-1] == pytest.approx(left, abs=2)
    assert np.abs(np.array(found[8:]) - left).max() <= 3


def test_spent_budget_allows_one_step():
    assert Budget(1, lambda: 0.0, spent=2).total_steps() == 1


# -------------------------------------------------------------------- variants
def test_every_variant_differs_from_the_recipe():
    recipe = GPTConfig.from_dict(PRESETS["laptop"]().to_dict())
    found = configs(recipe)
    assert next(iter(found)) == RECIPE and found[RECIPE] == recipe
    assert len(found) > 10
    for name, config in found.items():
        assert (config == recipe) == (name == RECIPE)
        assert config.minutes == recipe.minutes
    assert set(found) <= set(VARIANTS)
    assert set(PLAIN) <= ablations.FIELDS | {"token_shift"}


def test_variants_and_also_flags_of_a_small_recipe():
    found = configs(replace(SMALL, **MODERN), ("adamw", "vocabulary-1024", "gelu", "gelu"))
    assert list(found) == [RECIPE, "adamw", "vocabulary-1024", "gelu"]
    assert found["vocabulary-1024"].vocab_size == 1024
    assert list(configs(SMALL, ("gelu",))) == [RECIPE]  # it has that already
    also = configs(SMALL, ("mine",), ("mine: optimiser=muon, batch_size=5",))
    assert also["mine"] == replace(SMALL, optimiser="muon", batch_size=5)
    for words in ("mine", "gelu: bias=True", "mine: width=3", "mine: bias"):
        with pytest.raises(ValueError, match=r"expected .*--also"):
            configs(SMALL, (), (words,))
    with pytest.raises(ValueError, match=r"variant mine: .*n_heads"):
        configs(SMALL, ("mine",), ("mine: n_heads=5",))


# -------------------------------------------------------------------- trials
@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a run"
    words = ("--data", "text", "--files", texts, "--variants", "adamw", "swiglu", "--optimiser", "muon")
    words = (*words, *WORDS, "--jobs", "2", "--output", folder)
    return folder, words, run_study(program.main, *words)


@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(finished):
    folder, _, out = finished
    check_files(folder, ["ablations.png", "results.json"], 200)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    trials = {trial["variant"]: trial for trial in results["trials"]}
    assert set(trials) == {RECIPE, "adamw", "swiglu"}
    for trial in trials.values():
        assert 0 < trial["bits"] < 9 and trial["steps"] >= 1 and trial["seconds"] < 5
        assert GPTConfig.from_dict(trial["config"]).minutes == 0.002
    assert trials["adamw"]["config"]["optimiser"] == "adamw"
    check_tables(report.tables(folder), out)
    assert "| SwiGLU instead of squared ReLU |" in out


@pytest.mark.nightly
def test_finished_runs_are_skipped(finished, monkeypatch):
    folder, words, _ = finished
    before = (folder / "results.json").read_bytes()
    (folder / "ablations.png").unlink()
    monkeypatch.setattr(study, "run_trial", lambda *given: pytest.fail("a training"))
    run_study(program.main, *words)
    assert (folder / "results.json").read_bytes() == before
    assert (folder / "ablations.png").is_file()
    printed = run_study(program.main, "--report", "--output", folder)
    assert report.tables(folder).popitem()[1] in printed
    with pytest.raises(ValueError, match=r"n_layers 1.*2"):
        run_study(program.main, *words, "--n-layers", 2)


def test_results_of_other_files_are_refused(tmp_path):
    settings = study.Settings(data="text", files=("a",), output=tmp_path, config=SMALL)
    study.Trials(settings).save()
    with pytest.raises(ValueError, match=r"files \['a'\] there and \['b'\] here"):
        study.Trials(replace(settings, files=("b",)))


def test_failed_training_keeps_the_other_results(monkeypatch, tmp_path):
    def fake(settings, config, cores, bar):
        if config.activation == "swiglu":
            raise RuntimeError("broken")
        return {"bits": 1.0}

    monkeypatch.setattr(study, "run_trial", fake)
    settings = study.Settings(variants=("swiglu", "untied"), seeds=2, output=tmp_path, config=SMALL)
    with pytest.raises(RuntimeError, match=r"2 of 6 .*SwiGLU.*seed 0: broken"):
        study.measure(settings)
    trials = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["trials"]
    assert sorted((trial["variant"], trial["seed"]) for trial in trials) == [
        (name, seed) for name in (RECIPE, "untied") for seed in (0, 1)
    ]


@pytest.mark.nightly
def test_failed_training_reports_the_reason(texts):
    settings = study.Settings(data="text", files=(str(texts / "nowhere"),), config=SMALL)
    cores: study.queue.Queue = study.queue.Queue()
    cores.put(None)
    with pytest.raises(RuntimeError, match=r"ValueError: TextFiles: .*file"):
        study.run_trial(settings, SMALL, cores, study.tqdm(disable=True))
    assert cores.get_nowait() is None


test_wrong_flags_are_refused = wrong_flags(
    program.main,
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--jobs", "0"], "--jobs.*got 0"),
    (["--minutes", "0", "--steps", "5"], "--minutes.*got 0"),
    (["--variants", "lion"], "--variants.*got lion"),
    (["--data", "text"], "--files.*--data text.*got --data text"),
    (["--report", "--output", "no such folder"], "no such folder: .*results"),
)

test_wrong_flags_of_the_baseline_are_refused = wrong_flags(
    pytorch_baseline.main,
    (["--threads", "0"], "--threads.*got 0"),
    (["--precision", "tf32"], "--precision.*got tf32"),
    (["--files", "a"], "--files.*got --data python"),
)

test_wrong_flags_of_syntax_check_are_refused = wrong_flags(
    syntax_check.main,
    (["nowhere"], "run folder or.*checkpoint.*nowhere"),
    ([".", "--samples", "0"], "--samples.*got 0"),
    ([".", "--temperatures", "-1"], "temperature.*got -1.0"),
    ([".", "--temperatures"], "--temperatures.*got none"),
    ([".", "--top-p", "0"], "top_p.*got 0.0"),
    ([".", "--min-p", "2"], "min_p.*got 2.0"),
)


def test_losses_of_variants():
    """`report.table` makes a table of the README from the stored results."""
    rows = [(RECIPE, 0, 1.0), (RECIPE, 1, 1.2), ("b", 0, 1.5), ("a", 0, 0.9), ("a", 1, 1.0)]
    trials = [{"variant": variant, "seed": seed, "bits": bits, "label": variant} for variant, seed, bits in rows]
    assert report.losses(trials) == {"a": pytest.approx([-0.1, -0.2]), "b": [0.5]}
    assert report.losses(trials[2:]) == {}


# -------------------------------------------------------------------- PyTorch
TWINS = {
    "GPT-2": SMALL,
    "the recipe": replace(SMALL, **MODERN, weight_decay=0.1),
    "the recipe clipped": replace(SMALL, **MODERN, max_gradient_norm=0.5, accumulation_steps=2),
    "others": replace(SMALL, activation="swiglu", norm="rms_norm", tied=False, max_gradient_norm=0.5),
}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def assert_close(actual: dict, expected: dict, rtol: float) -> None:
    for name, array in expected.items():
        assert np.linalg.norm(actual[name].numpy() - array) <= rtol * np.linalg.norm(array), name


@pytest.mark.parametrize("config", TWINS.values(), ids=TWINS)
def test_pytorch_baseline_matches_loss_gradients_and_updates(torch, one_torch_thread, config):
    tokens = np.random.default_rng(0).integers(0, 300, 4000)
    model = GPT(config)
    generator = np.random.default_rng(1)
    for parameter in model.parameters():  # so that what begins at 0 or 1 counts
        parameter.array += 0.05 * generator.standard_normal(parameter.shape, dtype=np.float32)
    tricycle_state, torch_state = (
        new_state(replace(config, minutes=0, steps=40), tokens, model=m) for m in (model, GPT(config))
    )
    torch_state.model.load_state_dict(model.state_dict())
    trainer = pytorch_baseline.Trainer(torch_state)

    inputs, outputs = next(new_state(config, tokens).dataset)
    loss = CrossEntropy()(outputs, model(inputs))
    loss.backward()
    torch_loss = trainer.loss(*(np.asarray(ids.array, np.int64) for ids in (inputs, outputs)))
    torch_loss.backward()
    assert float(loss) == pytest.approx(torch_loss.item(), rel=1e-5)
    torch_grads = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert_close(torch_grads, {name: p.grad.array for name, p in model.named_parameters()}, 1e-4)
    model.zero_grad()
    trainer.model.zero_grad()

    for _ in range(3):
        assert float(train_step(tricycle_state)[0]) == pytest.approx(trainer.step(), rel=1e-4)
    assert_close(trainer.model.state_dict(), {name: p.array for name, p in model.named_parameters()}, 2e-3)


def test_baseline_run_writes_comparable_results(torch, one_torch_thread, texts, tmp_path):
    words = ["--data", "text", "--files", texts, "--part", "validation", "--threads", "1", "--output", tmp_path]
    for recipe in (["--recipe", "gpt2"], ["--precision", "bfloat16"]):
        assert "PyTorch" in run_study(pytorch_baseline.main, *recipe, *words, *WORDS)
    names = [f"pytorch-{recipe}-text-validation-0.json" for recipe in ("gpt2-eager-float32", "laptop-eager-bfloat16")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    comparable_fields, modern = (report.read(tmp_path / name) for name in names)
    assert comparable_fields["settings"]["config"]["optimiser"] == "adamw"
    for found in (comparable_fields, modern):
        assert 0 < found["result"]["bits"] < 9
    table = report.tables(tmp_path)["PyTorch"]
    assert "| GPT-2's model, AdamW, float32 | text, validation |" in table


def test_baseline_evaluation_matches_the_library(torch, texts):
    tokens = np.random.default_rng(0).integers(0, 300, 200)
    state = new_state(replace(SMALL, **MODERN), tokens)
    trainer = pytorch_baseline.Trainer(state)
    expected, actual = (
        evaluate(model, tokens, 2, stride=12) for model in (pytorch_baseline.EvaluationAdapter(trainer), state.model)
    )
    assert expected[0] == pytest.approx(actual[0], rel=1e-5) and expected[1] == actual[1]
    assert torch.is_grad_enabled() and trainer.model.training


# -------------------------------------------------------------------- functions that parse
def test_is_complete_detects_the_end_of_a_function():
    assert not syntax_check.is_complete(b"\n\ndef f(\n    a,\n) -> int:\n\n    return 1\n\n")
    assert syntax_check.is_complete(b"\n\ndef f():\n    return 1\nx")
    assert syntax_check.is_complete(b"def f():\n    return 1\n\n\n# a remark")


NO_FUNCTIONS = ["def f(x):\n    return (x\n", "x = 1\n", "", "def f():\n    a\0b\n", "def f():\n", "default = 1\n"]


def test_is_python_accepts_only_valid_functions():
    for text in ("def f(x):\n    return x\n", "def f(): return '\\d'\n"):
        assert syntax_check.is_python(text)
    for text in (*NO_FUNCTIONS, "def f():\n  return " + "(" * 5000):
        assert not syntax_check.is_python(text), text[:30]


def test_function_signatures_include_the_docstring():
    source = b'''@decorated
def f(a,
      b=1):
    """One line."""
    return a

def none():
    return 1

def only():
    """A docstring."""

class C:
    def method(self):
        """Inside."""
        return 1

def odd():
    """First.
not indented
    """
    return 1

def last():
  """Two
  lines."""
  pass
'''
    assert list(syntax_check.function_signatures(source)) == [
        b'\n\ndef f(a,\n      b=1):\n    """One line."""\n    ',
        b'\n\ndef last():\n  """Two\n  lines."""\n  ',
    ]
    assert list(syntax_check.function_signatures(b"def f(:\n")) == []


class Parrot:
    """A fake `GenerationBatch` that continues every prompt with TEXT."""

    def __init__(self, model):
        self.texts = []

    def __len__(self):
        return sum(bool(text) for text in self.texts)

    def add(self, prompt, n_tokens, sampling):
        self.texts.append(list(TEXT[len(prompt) - 1 :][:n_tokens]))

    def remove(self, number):
        self.texts[number] = []

    def step(self):
        return [(i, text.pop(0)) for i, text in enumerate(self.texts) if text]


TEXT = b"\n\ndef f(x):\n  return x\n\n\nx = 1\n"


def test_generated_functions_end_with_the_function(monkeypatch):
    tokeniser = BPETokeniser(300)
    prompts = [b"\n\ndef", b"\n\ndef f("]
    with monkeypatch.context() as patch:
        patch.setattr(syntax_check, "GenerationBatch", Parrot)
        settings = syntax_check.Settings(Path(), tokens=100, no_repeat_ngram_size=0)
        written = syntax_check.write(GPT(SMALL), tokeniser, prompts, settings, 1.0, 0)
        assert written == [("def f(x):\n  return x\n", True)] * 2
        cut = syntax_check.write(GPT(SMALL), tokeniser, prompts[:1], replace(settings, tokens=18), 0, 0)
        assert cut == [("def f(x):\n  ret\n", False)]
    assert syntax_check.count_outcomes(written)["parsed"] == 2
    model = GPT(replace(SMALL, vocab_size=tokeniser.n_vocab))
    (text, _), _ = syntax_check.write(model, tokeniser, prompts, replace(settings, tokens=30), 0.8, 5)
    prompt = [tokeniser.end_of_text, *tokeniser.encode(prompts[0])]
    limits = {"n_vocab": tokeniser.n_vocab, "stop_tokens": tokeniser.end_of_text}
    sampling = PenalizedSamplingParams(0.8, min_p=settings.min_p, seed=5, **limits)
    whole = [*prompt, *generate(model, prompt, 30 - len(prompt), sampling)]
    assert text == syntax_check.function_of(tokeniser, whole, tokeniser.end_of_text)


@pytest.mark.nightly
def test_syntax_check_writes_a_row_for_each_setting(tmp_path):
    tokeniser = BPETokeniser(300)
    save_checkpoint(tmp_path / "best.safetensors", GPT(replace(SMALL, context_window=250)), tokeniser)
    words = ["--samples", "3", "--temperatures", "0", "1", "--batch", "2"]
    printed = run_study(syntax_check.main, tmp_path, *words)
    rows = report.read(tmp_path / "parses.json")["rows"]
    assert [(row["prompt"], row["samples"]) for row in rows] == [
        (syntax_check.PLAIN, 1),
        (syntax_check.PLAIN, 3),
        (syntax_check.CONSTRAINED, 3),
        (syntax_check.CONSTRAINED, 3),
    ]
    assert report.syntax_table(rows) in printed
