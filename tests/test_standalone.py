"""The page of `tricycle export --html` in Node: logits, tokenizer, samples and texts equal those of Python."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzed_models import Case, build, cases
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from node import Node, running_node, worker_source
from tables import bad_input
from test_fuzzing import EXAMPLES
from test_models import TINY, lively

from tricycle.bpe import ByteLevelBPE
from tricycle.checkpoint import save_checkpoint
from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.mamba import MambaConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.finetuning.lora import LoRAConfig
from tricycle.generate import generate
from tricycle.latent_attention import LatentConfig
from tricycle.models import GPT
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import quantize
from tricycle_cli import export
from tricycle_cli.models import SAMPLING
from tricycle_lab.look.standalone import (
    CHOICES,
    SAMPLING_FIELDS,
    check_supported,
    describe_tokenizer,
    pack_weights,
    render_standalone_page,
)

TEXT = "the cat sat on the mat; the dog é ate 12345 of the cat's  mice\n\tand </script> ran, 日本語 🙂 aaa aaaa "
TOKENISERS = {split: BPETokeniser(330, split=split).train(TEXT * 3, progress=False) for split in ("tricycle", "gpt2")}
TOKENISER = TOKENISERS["tricycle"]
CONFIG = replace(TINY, vocab_size=TOKENISER.n_vocab, context_window=24, n_layers=2, positions="rotary", softmax="sink")
ATTACK = "</script><script>window.attacked = 1</script><!--"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(worker_source(), tmp_path_factory.mktemp("node")) as node:
        yield node


def fuzzed(check: Any) -> Any:
    """Return a test of a short sample, and a slow test of EXAMPLES."""
    options: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    def test(node: Node, n_examples: int) -> None:
        settings(max_examples=n_examples, **options)(given(st.data())(lambda data: check(node, data)))()

    return pytest.mark.parametrize("n_examples", [8, pytest.param(10 * EXAMPLES, marks=pytest.mark.nightly)])(test)


# -------------------------------------------------------------------- the model
@fuzzed
def test_logits_and_attention_equal_those_of_python(node: Node, data: Any) -> None:
    case: Case = data.draw(cases())
    assume(case.config.softmax in CHOICES["softmax"])
    if data.draw(st.booleans()):
        case = replace(case, config=replace(case.config, activation="clamped_swiglu"))
    model, _ = build(replace(case, variant=None, adapter=None, quantized=None))
    quantize(model).use_precision("float32")
    tensors, content = pack_weights(model)
    for parameter in model.parameters():  # the same weights, without the rounding of activations for fast products
        parameter.array = np.asarray(parameter.array, np.float64)
    ids = np.random.default_rng(case.seed).integers(0, case.config.vocab_size, min(30, case.config.context_window))
    with model.evaluating():
        expected = model(model.place(ids)).numpy()
    results = node.call("logits", config=model.config.to_dict(), tensors=tensors, content=content, ids=ids.tolist())
    actual = np.array([result["logits"] for result in results])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    for t, result in enumerate(results):
        weights = np.array(result["weights"]).reshape(model.config.n_layers, model.config.n_heads, t + 1)
        assert (weights.sum(axis=-1) <= 1 + 1e-5).all()


# -------------------------------------------------------------------- the tokenizer
@fuzzed
def test_tokenizer_equals_that_of_python(node: Node, data: Any) -> None:
    tokeniser = TOKENISERS[data.draw(st.sampled_from(sorted(TOKENISERS)))]
    words = st.one_of(
        st.text(), st.sampled_from(re.findall(r"\s*\S+", TEXT)), st.text(" \n\r\t\x0b\x85\xa0a1.'"), st.text("a")
    )
    text = "".join(data.draw(st.lists(words, max_size=8)))
    tokenizer = describe_tokenizer(tokeniser)
    # not `BPETokeniser.encode`: tiktoken may have the tables of another version of Unicode
    assert node.call("encode", tokenizer=tokenizer, text=text) == ByteLevelBPE.encode(tokeniser, text).tolist()
    ids = data.draw(st.lists(st.integers(0, tokeniser.n_vocab - 1), max_size=12))
    assert node.call("decode", tokenizer=tokenizer, ids=ids) == tokeniser.decode(ids)


# -------------------------------------------------------------------- sampling
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
def test_random_numbers_equal_those_of_numpy(node: Node, seed: int) -> None:
    assert node.call("random", seed=seed, n=50) == np.random.default_rng(seed).random(50).tolist()


@fuzzed
def test_samples_equal_those_of_python(node: Node, data: Any) -> None:
    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    params = PenalizedSamplingParams(
        temperature=draw(0.0, 0.5, 0.9, 3.0),
        top_k=draw(0, 1, 5),
        top_p=draw(1.0, 0.3, 0.9),
        min_p=draw(0.0, 0.1),
        seed=data.draw(st.integers(0, 2**32 - 1)),
        n_vocab=draw(25, 30),
        repetition_penalty=draw(1.0, 1.15),
        no_repeat_ngram_size=draw(0, 1, 2, 6),
    )
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits, seen = generator.normal(0, 3, 30).astype(np.float32), generator.integers(0, draw(3, 30), 20).tolist()
    fields = {name: value for name, value in asdict(params).items() if name in SAMPLING_FIELDS}
    token = node.call("sample", logits=logits.tolist(), seen=seen, params=fields, seed=params.seed)
    assert token == params.sample(logits, params.new_generator(), seen)


# -------------------------------------------------------------------- the page
def page_data(content: str) -> dict[str, Any]:
    """Return the data that a page contains."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', content, re.DOTALL)
    return json.loads(data)


def texts_of(folder: Path, data: dict[str, Any], *requests: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each request to generate, the messages of a page's worker."""
    content = zlib.decompress(base64.b64decode(data["weights"]))
    with running_node(data["worker"], folder) as node:
        load = {name: data[name] for name in ("config", "tensors", "tokenizer")}
        assert node.call("worker", kind="load", content=content, **load) == [{"kind": "ready"}]
        for request in requests:
            params = data["sampling"] | {"seed": 3} | request.pop("params")
            yield node.call("worker", kind="generate", run=1, params=params, **request)


def test_worker_of_page_generates_the_same_texts_as_python(tmp_path: Path) -> None:
    model = lively(CONFIG)
    page = page_data(render_standalone_page(model, TOKENISER, replace(SAMPLING, n_vocab=TOKENISER.n_vocab), "tiny"))
    quantize(model)
    prompts = {" mice </script>": 0.0, "ran": 0.9}
    requests = [
        {"prompt": prompt, "length": 64, "params": {"temperature": temperature}}
        for prompt, temperature in prompts.items()
    ]
    for (prompt, temperature), messages in zip(prompts.items(), texts_of(tmp_path, page, *requests), strict=True):
        *tokens, last = messages
        params = replace(SAMPLING, temperature=temperature, seed=3, n_vocab=TOKENISER.n_vocab)
        ids = TOKENISER.encode(prompt).tolist()
        expected = [*ids, *generate(model, ids, 64, params)]
        assert [token["id"] for token in tokens] == expected
        assert last["kind"] == "done" and last["nTokens"] == 64
        assert tokens[0].get("prob") is None
        assert all(token["rank"] == 0 or token["top"][0]["prob"] >= token["prob"] for token in tokens[1:])
        assert {token["start"] for token in tokens} > {0}  # the context window was full
        for i, token in enumerate(tokens):
            n_keys = i + 1 - token["start"]
            weights = (np.array(token["attention"]).reshape(CONFIG.n_layers, CONFIG.n_heads, n_keys) / 255) ** 2
            assert (weights.sum(axis=-1) < 1.1).all()


def test_worker_reports_errors_and_stops_at_end_of_text(tmp_path: Path) -> None:
    page = page_data(render_standalone_page(lively(CONFIG), TOKENISER, SAMPLING, "tiny"))
    greedy = {"temperature": 0}
    every = {**greedy, "stop_tokens": list(range(TOKENISER.n_vocab))}
    requests = [
        {"prompt": "x " * 30, "length": 5, "params": greedy},
        {"prompt": "", "length": 5, "params": every},
        {"ids": [70, 71], "length": 2, "params": greedy},
    ]
    (error,), begun, given = texts_of(tmp_path, page, *requests)
    assert re.search("60 tokens.*at most 24", error["message"])
    assert [message["kind"] for message in begun] == ["token", "token", "done"]
    assert begun[0]["id"] == TOKENISER.new_text
    assert [message.get("isGiven") for message in given] == [True, True, False, False, None]


def test_page_is_self_contained_and_resists_its_texts() -> None:
    tokeniser = BPETokeniser(400).train(ATTACK * 9, progress=False)
    config = replace(CONFIG, vocab_size=tokeniser.n_vocab)
    content = render_standalone_page(lively(config), tokeniser, SAMPLING, ATTACK, {ATTACK: ATTACK, "loss": 1 / 3})
    assert content.count("</script>") == 2 and content.count("<script") == 2 and "<!--" not in content
    data = page_data(content)
    assert data["title"] == ATTACK and data["facts"][ATTACK] == ATTACK and data["facts"]["loss"] == "0.3333"
    assert data["facts"]["parameters"] == f"{lively(config).n_parameters:,}"
    assert data["worker"] == worker_source()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', content)
    (script,) = re.findall(r"<script>(.*?)</script>", content, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; worker-src blob:; script-src 'sha256-{digest}'; style-src")
    assert not re.findall(r"(?:src|href)=\"(?!data:)", content)


def test_page_leaves_the_model_unchanged() -> None:
    model = lively(CONFIG)
    before = {name: parameter.array.copy() for name, parameter in model.named_parameters()}
    render_standalone_page(model, TOKENISER, SAMPLING, "tiny")
    for name, parameter in model.named_parameters():
        assert parameter.array.dtype == np.float32 and parameter.requires_grad
        np.testing.assert_array_equal(parameter.array, before[name])


def test_command_writes_a_page_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = tmp_path / "a <b> run", tmp_path / "page.html"
    save_checkpoint(run / "best.safetensors", lively(CONFIG), TOKENISER)
    (run / "data.json").write_text('{"data": "shakespeare"}')
    (run / "metrics.jsonl").write_text(
        '{"step": 7, "final_loss": 1.23456, "final_bits_per_byte": 2.5, "best_step": 7}\n'
    )
    export.main([str(run), "--html", str(path)])
    content = path.read_text(encoding="utf-8")
    assert "<title>a &lt;b&gt; run</title>" in content
    facts = page_data(content)["facts"]
    assert facts["trained on"] == "shakespeare" and facts["held-out loss, nats per token"] == "1.235"
    assert page_data(content)["sampling"]["stop_tokens"] == [TOKENISER.end_of_text]
    save_checkpoint(run / "last.safetensors", lively(CONFIG), TOKENISER)
    assert export.training_results(run / "best.safetensors") == export.training_results(run)
    assert export.training_results(run / "last.safetensors") == {"trained on": "shakespeare"}
    assert export.training_results(run / "a model on huggingface.co") == {}
    size = f"{lively(CONFIG).n_parameters:,} parameters in 8 bits, {path.stat().st_size / 1e6:.2f} MB"
    assert capsys.readouterr().out == f"{path}: {size}\n"
    with pytest.raises(FileExistsError, match=r"page\.html: .*new file.*exists"):
        export.main([str(run), "--html", str(path)])
    with pytest.raises(ValueError, match="output folder, --gguf, --gguf-adapter or --html"):
        export.main([str(run)])


def check(config: Any, tokeniser: Any = TOKENISER) -> Any:
    return lambda: check_supported(GPT(config, draw_weights=False), tokeniser)


def adapted() -> GPT:
    case = Case(CONFIG, None, LoRAConfig(1, 4.0), None, "C", False, 0)
    return build(case)[0]


test_unsupported_models_are_refused = bad_input(
    {
        "experts": (check(replace(CONFIG, n_experts=4)), "n_experts to be 0, got 4"),
        "scaling": (
            check(replace(CONFIG, rotary_scaling="longrope", rotary_divisors=(1.0,) * 4)),
            "rotary_scaling to be none, linear, llama3, yarn, got 'longrope'",
        ),
        "blocks of another kind": (
            check(MambaConfig(vocab_size=TOKENISER.n_vocab, embedding_dim=8, n_heads=2, head_size=8, n_layers=1)),
            "transformer blocks, got a MambaBlock",
        ),
        "latents": (
            check(LatentConfig(vocab_size=TOKENISER.n_vocab, embedding_dim=8, n_heads=2, n_layers=1, n_experts=0)),
            "MultiHeadSelfAttention in all blocks, got LatentAttention",
        ),
        "softmax": (check(replace(CONFIG, softmax="blocks")), "softmax to be softmax, softmax1, sink.*got 'blocks'"),
        "tokenizer": (check(CONFIG, ByteLevelBPE(300)), "tokenizer of Tricycle.*got a ByteLevelBPE"),
        "encoder": (
            lambda: check_supported(TextEncoder(EncoderConfig(n_layers=1, embedding_dim=8, n_heads=1)), TOKENISER),
            "expected a decoder, got a TextEncoder",
        ),
        "adapter": (lambda: check_supported(adapted(), TOKENISER), "without an adapter"),
        "large": (
            check(replace(CONFIG, embedding_dim=2048, n_heads=16, n_layers=2)),
            r"at most 67 million parameters, got \d+ million: the page would have about \d+ MB",
        ),
    }
)
