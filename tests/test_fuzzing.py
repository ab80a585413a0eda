"""Random models and modes: fast kernels against the reference, cached decoding against full passes.

A sample runs each time, with a seed that is the date; what fails prints the seed. A longer run with a seed of choice:

    TRICYCLE_EXAMPLES=2000 TRICYCLE_SEED=7 python -m pytest -m nightly tests/test_fuzzing.py
"""

from __future__ import annotations

import datetime
import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fuzzed_models import VOCABULARY, Case, build, cases, documents_of
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from tricycle import models
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.attention import cache
from tricycle.debug import use_reference
from tricycle.decoding.batch import GenerationBatch
from tricycle.decoding.prompt_lookup import generate_prompt_lookup
from tricycle.decoding.ragged import next_logits
from tricycle.decoding.speculative import SpeculativeState, decode_batch
from tricycle.finetuning.packing import packed_forward_kwargs, supports_packing
from tricycle.generate import generate
from tricycle.layers import generators_in
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.sampling import SamplingParams
from tricycle.state.activations import free_activations
from tricycle.tensor import to_tensor
from tricycle_accelerators import attention_blocks, chunks, cpu, matmul_plan

EXAMPLES = int(os.environ.get("TRICYCLE_EXAMPLES", 60))
SEED = int(os.environ.get("TRICYCLE_SEED", datetime.date.today().toordinal()))
SIXTEEN_BITS = ("bfloat16", "float16")
pytestmark = pytest.mark.filterwarnings("ignore:precision bfloat16")


def fuzzed(check: Any) -> list[Any]:
    """Return a test of a short sample and a nightly test of EXAMPLES, both from SEED."""
    options = {"deadline": None, "derandomize": False, "database": None, "print_blob": True}
    options["suppress_health_check"] = list(HealthCheck)

    def test(n_examples: int) -> None:
        seed(SEED)(settings(max_examples=n_examples, **options)(given(cases(), st.data())(check)))()

    return pytest.mark.parametrize(
        "n_examples",
        [pytest.param(6, id=f"seed-{SEED}"), pytest.param(EXAMPLES, marks=pytest.mark.nightly, id="more")],
    )(test)


@contextmanager
def small_pieces(case: Case) -> Any:
    """Have small arrays take the paths of large ones, and small caches forget what no later token sees."""
    limits = [(matmul_plan, "MIN_SHARED_WORK", 0), (cpu.attention, "MAX_BATCHED_SCORES", 0), (chunks, "CHUNK_SIZE", 64)]
    limits += [(attention_blocks, "KEY_BLOCK", 24), (cache, "MIN_CAPACITY", 16), (cache, "MAX_ROLLBACK", 8)]
    limits += [(models, "n_logit_rows", lambda *_: 5)]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in limits if case.small_pieces else ():
            patch.setattr(module, name, value)
        yield


def tokens_of(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.integers(0, VOCABULARY, shape)


# -------------------------------------------------------------------- how close
def assert_close(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Compare arrays by name, each on its own scale or a thousandth of the largest one's."""
    assert actual.keys() == expected.keys()
    largest = max((np.abs(array).max(initial=0) for array in expected.values()), default=0)
    for name, array in expected.items():
        scale = max(np.abs(array).max(initial=0), 1e-2 * largest, 1e-12)
        distance = np.abs(np.asarray(actual[name], np.float64) - array).max(initial=0) / scale
        assert distance <= tolerance, f"{name}: off by {distance:.2g} of its largest, {tolerance:.2g} allowed"


def assert_as_exact(actual: dict[str, Any], rounded: dict[str, Any], exact: dict[str, Any]) -> None:
    """Compare results of 16-bit products: on the whole not much further from the exact ones than those that a model has
    whose weights alone are rounded to 16 bits."""

    def error(found: dict[str, Any]) -> float:
        return float(np.sqrt(sum(np.square(found[name] - exact[name], dtype=float).sum() for name in exact)))

    assert actual.keys() == exact.keys()
    size = float(np.sqrt(sum(np.square(array, dtype=float).sum() for array in exact.values())))
    assert error(actual) <= 6 * error(rounded) + 0.03 * size


# -------------------------------------------------------------------- training
def train(model: GPT, layers: Any, batch: tuple[Any, ...], **options: Any) -> dict[str, np.ndarray]:
    """Return the loss and all gradients; dropout draws the same masks each time.

    Args:
        layers: those whose parameters learn.
        batch: tokens, labels and the numbers of documents or None.
    """
    states = [(generator, generator.bit_generator.state) for generator in generators_in(model)]
    tokens, labels, documents = batch
    for parameter in layers.parameters():
        parameter.zero_grad()
    with ExitStack() as stack:
        if options.get("reference"):
            stack.enter_context(use_reference())
        if options.get("forget"):
            stack.enter_context(free_activations())
        model.recompute = options.get("recompute", False) and checkpoint_activations
        loss_fn = CrossEntropy(ignore_index=-1, label_smoothing=0.1)
        loss = model.loss(
            to_tensor(tokens, dtype=int),
            to_tensor(labels, dtype=int),
            loss_fn,
            1.0,
            **packed_forward_kwargs(model, tokens, documents),
        )
        results = {"loss": np.array(loss.array)}
        if loss.requires_grad:
            loss.backward()
    results |= {name: p.grad.array for name, p in layers.named_parameters() if p.grad is not None}
    for generator, state in states:
        generator.bit_generator.state = state
    return results


def check_training(case: Case, data: Any) -> None:
    with small_pieces(case):
        model, adapter = build(case)
        layers = adapter or model
        generator = np.random.default_rng(case.seed)
        shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, case.config.context_window))
        tokens = tokens_of(generator, *shape)
        labels = np.where(generator.random(shape) < 0.2, -1, tokens_of(generator, *shape))
        labels[0, 0] = 1
        documents = documents_of(generator, shape) if supports_packing(model) and data.draw(st.booleans()) else None
        batch = tokens, labels, documents
        fast = train(model, layers, batch)
        for options in ({"forget": True}, {"recompute": True}, {"recompute": True, "forget": True}):
            again = train(model, layers, batch, **options)
            for name, array in fast.items():
                np.testing.assert_array_equal(again[name], array, f"{name} with {options}")
        exact = train(model, layers, batch, reference=True)
        if case.config.precision in SIXTEEN_BITS:
            assert_as_exact(fast, train(round_weights(model), layers, batch, reference=True), exact)
        else:
            assert_close(fast, exact, 1e-2 if case.quantized else 2e-3)


# -------------------------------------------------------------------- generation
def full_logits(model: GPT, tokens: list[int]) -> np.ndarray:
    """Return the logits after each token, (T, V), of one pass through the layers without a cache."""
    with model.evaluating():
        return model(to_tensor([tokens], dtype=int)).array[0]


def round_weights(model: GPT) -> GPT:
    """Round all weights to bfloat16, in place; returns the model."""
    for parameter in model.parameters():
        parameter.array = parameter.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    return model


def _tolerance(case: Case, tokens: list[int], has_16_bits: bool = False) -> float:
    """Return what logits may be off by, of the largest one: with 16 bits 6 times what rounding the weights changes."""
    plain = 0.02 if case.quantized == "int8" else 2e-3
    if not (has_16_bits or case.config.precision in SIXTEEN_BITS):
        return plain
    exact = replace(case, config=replace(case.config, precision="float32"))
    with use_reference():
        expected, rounded = (full_logits(model, tokens) for model in (build(exact)[0], round_weights(build(exact)[0])))
    return plain + 0.03 + 6 * float(np.abs(rounded - expected).max() / np.abs(expected).max())


def check_generation(case: Case, data: Any) -> None:
    with small_pieces(case):
        model, _ = build(case)
        window = case.config.context_window
        generator = np.random.default_rng(case.seed)
        tokens = tokens_of(generator, window).tolist()
        with use_reference():
            expected = full_logits(model, tokens)
        cached = data.draw(st.sampled_from([None, None, "float16", "bfloat16"]))
        tolerance = _tolerance(case, tokens, cached is not None)

        def check(actual: np.ndarray, places: Any, title: str) -> None:
            assert_close({title: actual}, {title: expected[places]}, tolerance)

        check(full_logits(model, tokens), slice(None), "full pass")
        states = [SpeculativeState(model, cached) for _ in range(2)]
        stops = sorted(set(data.draw(st.lists(st.integers(1, window), min_size=1, max_size=4))))
        note(f"read up to {stops}, cache of {cached}")
        for stop in stops:
            check(states[0].logits(tokens[:stop]), stop - 1, f"read up to {stop}")
        other = data.draw(st.integers(1, window))
        for row, stop in zip(decode_batch(states, [tokens[:window], tokens[:other]]), (window, other)):
            check(row[-1], stop - 1, f"{stop} tokens read in a batch")
        check(states[0].fork(other).logits(tokens[:other]), other - 1, f"fork at {other}")
        check(states[0].logits(tokens[:other]), other - 1, f"back to {other}")
        caches = model.new_caches(states[0].dtype)
        check(next_logits(model, [tokens], [caches], every=True), slice(None), "every")
        prompt, n_new = (tokens[:other] + tokens[:other])[:window], window + 5
        plain = list(generate(model, prompt, n_new, temperature=0))
        assert list(generate_prompt_lookup(model, prompt, n_new, temperature=0, n_draft_tokens=5)) == plain


def check_packing(case: Case, data: Any) -> None:
    """Documents side by side give the logits that each of them gives alone."""
    model, _ = build(case)
    if not supports_packing(model):
        return
    with small_pieces(case), model.evaluating():
        generator = np.random.default_rng(case.seed)
        tokens = tokens_of(generator, data.draw(st.integers(1, 3)), case.config.context_window)
        documents = documents_of(generator, tokens.shape)
        together = model(to_tensor(tokens, dtype=int), **packed_forward_kwargs(model, tokens, documents)).array
        tolerance = _tolerance(case, tokens[0].tolist())
        for row, numbers, logits in zip(tokens, documents, together):
            for number in range(numbers[-1] + 1):
                alone = model(to_tensor(row[None, numbers == number], dtype=int)).array[0]
                assert_close({"logits": logits[numbers == number]}, {"logits": alone}, tolerance)


def check_batches(case: Case, data: Any) -> None:
    """Texts written at the same time are drawn from the logits that a full pass gives, also past the context window."""
    with small_pieces(case):
        model, _ = build(case)
        window = case.config.context_window
        generator = np.random.default_rng(case.seed)
        tolerance = _tolerance(case, tokens_of(generator, window).tolist())
        batch = GenerationBatch(model, n_draft_tokens=data.draw(st.sampled_from([0, 4])))
        for number in range(data.draw(st.integers(1, 3))):
            text, start = tokens_of(generator, data.draw(st.integers(1, window))).tolist(), [0]

            def check(token: int, logits: np.ndarray, text: list[int] = text, start: list[int] = start) -> None:
                if len(text) - start[0] > window:
                    start[0] = len(text) - max(1, window // 2)
                with use_reference():
                    expected = full_logits(model, text[start[0] :])[-1]
                assert_close({"logits": logits}, {"logits": expected}, tolerance)
                text.append(token)

            batch.add(text, min(8, window + 3), SamplingParams(0.0, seed=number), listener=check)
        while len(batch):
            batch.step()


# -------------------------------------------------------------------- saved and loaded
def check_loaded_weights(case: Case, data: Any) -> None:
    """A model that takes over another's weights gives the same bits, whatever it computed before."""
    case = replace(case, quantized=None)  # quantized weights cannot be written to
    (model, _), (other, _) = build(case), build(case, case.seed + 1)
    tokens = tokens_of(np.random.default_rng(case.seed), case.config.context_window).tolist()
    before, expected = full_logits(other, tokens), full_logits(model, tokens)
    other.load_state_dict(model.state_dict())
    after = full_logits(other, tokens)
    np.testing.assert_array_equal(after, expected)
    assert not np.array_equal(before, after)


test_training = fuzzed(check_training)
test_generation = fuzzed(check_generation)
test_batches = fuzzed(check_batches)
test_packing = fuzzed(check_packing)
test_loaded_weights = fuzzed(check_loaded_weights)
