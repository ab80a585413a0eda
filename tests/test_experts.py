"""Mixtures of experts against a loop over tokens in float64; gradients, determinism and the load-balancing loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from model_checks import cached_logits
from test_layers import check_layer_gradients
from test_quantized_blocks import block_rows
from transformers_families import check_refused, difference, hf_llama_fields

from tricycle import Tensor, experts, no_grad, to_tensor
from tricycle.activation import ACTIVATIONS
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.blocks import TransformerBlock
from tricycle.configs import PRESETS, ModelConfig
from tricycle.configs.size import min_n_weights
from tricycle.experts import MixtureOfExperts, RouterStatistics, Routing, add_router_loss, select_experts
from tricycle.finetuning.lora import AdaptedDense, LoRAConfig
from tricycle.generate import generate
from tricycle.gradcheck import gradcheck
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import Pretrained, load
from tricycle.pretrained.adapters import TargetModules, load_adapter, new_adapter, save_adapter
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.training import compute_gradients, supervised_loss, train_on_batch
from tricycle.training_state import new_state, train_step
from tricycle.weights import quantize, set_memory_order

CONFIG = ModelConfig(
    vocab_size=31,
    context_window=16,
    embedding_dim=12,
    n_heads=2,
    n_layers=2,
    activation="swish",
    gated=True,
    hidden_size=20,
    n_experts=5,
    n_active_experts=2,
    router_loss=0.5,
    seed=3,
)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 31, (3, 17))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


SMALL = replace(CONFIG, embedding_dim=6, n_experts=4, hidden_size=5, bias=False, router_loss=0.0)


def new_mixture(dtype=np.float32, routing=None, shared_size=0, **fields) -> MixtureOfExperts:
    layer = MixtureOfExperts(replace(SMALL, **fields), routing, shared_size, generator=1)
    for parameter in layer.parameters():
        parameter.array = parameter.array.astype(dtype)
    return layer


def new_model(**changes) -> GPT:
    """Return a model with weights large enough that the routers are not near ties."""
    model = GPT(replace(CONFIG, **changes))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.array *= 12
    return model


def gradients(model) -> dict[str, np.ndarray]:
    return {name: parameter.grad.array for name, parameter in model.named_parameters()}


# -------------------------------------------------------------------- the layer
def loop_over_tokens(layer: MixtureOfExperts, x: np.ndarray) -> np.ndarray:
    """Return the mixture's result for rows x, without shared experts, one token and one expert at a time."""
    results = []
    for row in x.astype(np.float64):
        logits = row @ layer.router.weights.array
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        if layer.routing.sigmoid:
            probabilities = 1 / (1 + np.exp(-logits))
        best = best_experts(layer, probabilities)
        total = sum(probabilities[e] for e in best) if layer.routing.normalized else 1
        result = np.zeros_like(row)
        for e in best:
            up, gate = np.split(row @ layer.experts[e].up.weights.array, 2)
            hidden = up * gate / (1 + np.exp(-gate))
            weight = layer.routing.scale * probabilities[e] / total
            result += weight * (hidden @ layer.experts[e].projection.weights.array)
        results.append(result)
    return np.array(results)


def best_experts(layer: MixtureOfExperts, scores: np.ndarray) -> list[int]:
    """Return the experts of a token, from the groups with the highest scores."""
    choice = scores if layer.correction is None else scores + layer.correction.array
    groups = np.split(np.arange(len(scores)), layer.routing.n_groups)
    n_summed = 2 if layer.routing.sigmoid else 1
    groups.sort(key=lambda group: -sum(sorted(choice[group])[-n_summed:]))
    allowed = np.concatenate(groups[: layer.routing.n_active_groups])
    return sorted(allowed, key=lambda e: -choice[e])[: layer.routing.n_active]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("n_active", [1, 2, 4])
def test_result_is_that_of_a_loop_over_tokens(n_active, normalized):
    layer = new_mixture(n_active_experts=n_active, normalize_experts=normalized)
    x = RNG.standard_normal((3, 7, 6)).astype(np.float32)
    expected = loop_over_tokens(layer, x.reshape(-1, 6)).reshape(x.shape)
    assert difference(layer(x).array, expected) < 1e-6
    with no_grad():
        assert np.array_equal(layer(x).array, layer(to_tensor(x)).array)


@pytest.mark.parametrize("bias", [False, True])
def test_gradient_of_one_parameter_equals_that_beside_all_others(bias):
    x = RNG.standard_normal((40, 6))
    layer = new_mixture(np.float64, bias=bias)
    (layer(x) ** 2).sum().backward()
    for name, expected in gradients(layer).items():
        layer.zero_grad()
        for other, parameter in layer.named_parameters():
            parameter.requires_grad = other == name
        (layer(x) ** 2).sum().backward()
        found = {other: p.grad.array for other, p in layer.named_parameters() if p.grad is not None}
        assert [*found] == [name]
        np.testing.assert_allclose(found[name], expected, 1e-10)


GROUPS = Routing(3, n_groups=4, n_active_groups=2, scale=1.7)


@pytest.mark.parametrize("sigmoid", [True, False])
def test_experts_are_selected_from_the_best_groups(sigmoid):
    layer = new_mixture(routing=GROUPS._replace(sigmoid=sigmoid), n_experts=8)
    if sigmoid:
        layer.correction.array[...] = RNG.normal(0, 0.3, 8)
    layer.router.weights.array[...] *= 3
    x = RNG.standard_normal((40, 6)).astype(np.float32)
    assert difference(layer(x).array, loop_over_tokens(layer, x)) < 1e-6
    layer.routing = layer.routing._replace(n_active_groups=4)  # without this limit, other experts are selected
    assert difference(layer(x).array, loop_over_tokens(layer, x)) < 1e-6
    scores = 1 / (1 + np.exp(-layer.router(x).array))
    limited = layer.routing._replace(n_active_groups=2).select(scores)
    assert (limited != layer.routing.select(scores)).any()
    assert max(len(set(row // 2)) for row in limited) == 2


def test_shared_experts_process_every_token():
    layer = new_mixture(shared_size=7)
    x = RNG.standard_normal((9, 6)).astype(np.float32)
    assert layer.shared.projection.weights.shape == (7, 6)
    assert difference(layer(x).array, loop_over_tokens(layer, x) + layer.shared(x).array) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"routing": Routing(2, normalized=False, scale=1.7)},
        {"routing": GROUPS._replace(sigmoid=True), "n_experts": 8, "shared_size": 7},
        {"routing": Routing(2, normalized=False, sigmoid=True)},
    ],
)
def test_gradients_are_those_of_finite_differences(options):
    check_layer_gradients(new_mixture(**options), RNG.standard_normal((9, 6)))


def test_idle_experts_have_zero_gradients():
    """Not None: then all processes of a distributed training have the same gradients."""
    layer = new_mixture(n_active_experts=1)
    layer(RNG.standard_normal((1, 6))).sum().backward()
    norms = [np.abs(expert.up.weights.grad.array).sum() for expert in layer.experts]
    assert sorted(norm > 0 for norm in norms) == [False, False, False, True]


def test_result_of_a_token_does_not_depend_on_the_others():
    """There is no capacity that the tokens compete for."""
    layer = new_mixture()
    x = np.repeat(RNG.standard_normal((1, 6)), 64, axis=0)
    x[0] = 1
    with no_grad():
        assert difference(layer(x).array[:1], layer(x[:1]).array) < 1e-6


def test_equal_calls_give_equal_bits():
    layer, x = new_mixture(), to_tensor(RNG.standard_normal((50, 6)))
    results = []
    for _ in range(3):
        layer.zero_grad()
        x.zero_grad()
        y = layer(x)
        (y * y).sum().backward()
        results.append([y.array, x.grad.array, *gradients(layer).values()])
    for first, *others in zip(*results):
        assert all(np.array_equal(first, other) for other in others)


def test_first_of_equally_probable_experts_is_selected():
    weights, selected = select_experts(to_tensor(np.zeros((2, 4))), Routing(3))
    assert selected.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights.array, 1 / 3, rtol=1e-6)


def test_no_tokens_are_routed_to_groups():
    weights, selected = select_experts(to_tensor(np.zeros((0, 12))), GROUPS)
    assert weights.shape == selected.shape == (0, 3)


def test_layer_accepts_no_tokens():
    with no_grad():
        assert new_mixture()(np.zeros((0, 6))).shape == (0, 6)
    assert new_mixture()(np.zeros((2, 0, 6))).shape == (2, 0, 6)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: new_mixture()(np.zeros((2, 5))), "MixtureOfExperts.embedding_dim=6.: expected"),
        (lambda: new_mixture(routing=Routing(5)), "active experts to be from 1 to n_experts 4, got 5"),
        (lambda: new_mixture(routing=Routing(0)), "active experts to be from 1 to n_experts 4, got 0"),
        (lambda: new_mixture(n_experts=0), "active experts to be from 1 to n_experts 0, got 2"),
        (lambda: new_mixture(routing=Routing(2, sigmoid=True), router_loss=0.5), "router_loss to be 0 with sigmoid"),
        (lambda: replace(CONFIG, n_active_experts=6), "n_active_experts to be from 1 to n_experts, got 6"),
        (lambda: replace(CONFIG, n_experts=-1), "n_experts"),
        (lambda: replace(CONFIG, router_loss=-1.0), "router_loss"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -------------------------------------------------------------------- the load-balancing loss
def with_router_loss(model: GPT, scale: float = 1.0) -> float:
    loss = model.loss(*BATCH, scale=scale)
    loss.backward()
    return loss.item()


def router_logits(model: GPT) -> list[np.ndarray]:
    logits = []
    for block in model.blocks:
        router = block.mlp.router
        compute = router.forward
        router.forward = lambda x, compute=compute: logits.append(compute(x)) or logits[-1]
    model(BATCH[0])
    for block in model.blocks:
        del block.mlp.router.forward
    return [tensor.array for tensor in logits]


def test_router_loss_is_added_in_training_only():
    model = new_model()
    expected = CrossEntropy()(BATCH[1], model(BATCH[0])).item()
    loss = with_router_loss(model)
    assert loss > expected + 0.5  # at least the weight, for uniform routing to two experts twice as much
    assert model.eval().loss(*BATCH).item() == pytest.approx(expected, rel=1e-6)
    assert new_model(router_loss=0.0).loss(*BATCH).item() == pytest.approx(expected, rel=1e-6)


def test_router_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    model = new_model()
    logits = [torch.tensor(array) for array in router_logits(model)]
    expected = mixtral.load_balancing_loss_func(tuple(logits), 5, 2).item()
    added = model.loss(*BATCH).item() - CrossEntropy()(BATCH[1], model(BATCH[0])).item()
    assert added == pytest.approx(0.5 * expected, rel=1e-5)


def test_gradient_of_router_loss_is_that_of_finite_differences():
    layer = new_mixture(np.float64)

    def loss(x, weights):
        layer.router.weights = weights
        return 3 * add_router_loss(lambda: layer(x).sum() * 0.0, 0.7)

    gradcheck(loss, RNG.standard_normal((9, 6)), layer.router.weights)


def test_uniform_routing_has_the_smallest_loss():
    statistics = RouterStatistics()
    statistics.add(np.full((4, 4), 0.25), np.array([[0, 1], [1, 2], [2, 3], [3, 0]]))
    assert statistics.loss() == pytest.approx(2)  # the number of active experts
    statistics = RouterStatistics()
    statistics.add(np.eye(4)[[0, 0, 0, 0]], np.array([[0, 1]] * 4))
    assert statistics.loss() == pytest.approx(4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activation_checkpointing_changes_no_bit(precision):
    results = []
    for recompute in (None, checkpoint_activations):
        model = new_model(precision=precision, dropout=0.3)
        model.recompute = recompute
        loss = with_router_loss(model)
        results.append((loss, gradients(model)))
    (loss, grads), (second_loss, second_grads) = results
    assert loss == second_loss
    assert all(np.array_equal(grads[name], second_grads[name]) for name in grads)
    without = new_model(precision=precision, dropout=0.3, router_loss=0.0)
    with_router_loss(without)
    router = "blocks.0.mlp.router.weights"
    assert not np.array_equal(gradients(without)[router], grads[router])


def test_router_loss_is_scaled_with_the_batch():
    """Two halves of a batch, weighted by 1/2, give the mean of their losses."""
    model = new_model()
    loss = supervised_loss(model, CrossEntropy())
    halves = [(BATCH[0][:2], BATCH[1][:2]), (BATCH[0][2:], BATCH[1][2:])]
    mean = compute_gradients(model, loss, halves, [1, 1]).loss
    assert mean == pytest.approx(np.mean([loss(half, 1.0).item() for half in halves]), rel=1e-6)
    total = gradients(model)
    model.zero_grad()
    for half in halves:
        (loss(half, 1.0) * 0.5).backward()
    for name, grad in gradients(model).items():
        np.testing.assert_allclose(grad, total[name], rtol=1e-4, atol=1e-6)


def test_no_statistics_remain():
    model = new_model()
    with pytest.raises(ValueError, match="labels"):
        model.loss(BATCH[0], BATCH[1][:, :3])
    assert experts._statistics.get() is None
    assert not [
        name
        for layer in model.layers()
        for name, value in vars(layer).items()
        if isinstance(value, Tensor) and name not in ("weights", "bias", "gain")
    ]


# -------------------------------------------------------------------- in a model
def test_model_learns_and_the_experts_stay_balanced():
    model = new_model()
    optimiser = AdamW(1e-2)
    loss = supervised_loss(model, CrossEntropy())
    losses = [train_on_batch(model, optimiser, loss, BATCH) for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]


def test_caches_give_the_logits_of_the_whole_text():
    model = new_model().eval()
    assert difference(cached_logits(model, BATCH[0][:1], (5, 6))[0], model(BATCH[0][:1]).array) < 3e-6
    assert len(list(generate(model, [1, 2, 3], 8, temperature=0))) == 8


@pytest.mark.parametrize("dtype_name", ["int8", "float16"])
def test_quantized_experts_keep_a_router_of_32_bits(dtype_name):
    model = new_model().eval()
    expected = model(BATCH[0]).array
    quantize(model, dtype_name)
    mixture = model.blocks[0].mlp
    assert isinstance(mixture.experts[0].up.weights.array, QuantizedMatrix)
    assert isinstance(mixture.router.weights.array, np.ndarray)
    # a rounding may select another expert for a few tokens
    errors = np.abs(model(BATCH[0]).array - expected).max(axis=-1) / np.abs(expected).max()
    assert np.median(errors) < 0.05


def test_bfloat16_routes_in_float32():
    layer = new_mixture().use_precision("bfloat16")
    x = to_tensor(RNG.standard_normal((40, 6)))
    assert layer.router(x).dtype == np.float32
    assert np.array_equal(layer.router(x).array, x.array @ layer.router.weights.array)
    model = new_model(precision="bfloat16")
    with_router_loss(model)
    assert all(grad.dtype == np.float32 and np.isfinite(grad).all() for grad in gradients(model).values())


def test_initial_projections_of_experts_are_scaled_down():
    config = replace(CONFIG, embedding_dim=64, hidden_size=64, n_layers=8)
    mixture = GPT(config).blocks[0].mlp
    for expert in mixture.experts:
        assert expert.up.weights.array.std() == pytest.approx(0.02, rel=0.1)
        assert expert.projection.weights.array.std() == pytest.approx(0.02 / 4, rel=0.1)
    assert mixture.router.weights.array.std() == pytest.approx(0.02, rel=0.2)
    zero = GPT(replace(config, zero_projections=True)).blocks[0].mlp
    assert not zero.experts[1].projection.weights.array.any()


def test_size_counts_all_experts():
    n_matrices = sum(p.size for p in GPT(CONFIG).parameters() if p.ndim == 2)
    assert min_n_weights(CONFIG) == n_matrices


def test_adapters_of_experts_have_the_names_of_peft(tmp_path):
    model = new_model(norm="rms_norm", positions="rotary", bias=False)
    loaded = Pretrained(model.eval(), None, GenerationSettings())
    layer = "model.layers.0.block_sparse_moe"
    experts = {f"{layer}.experts.{e}.w{part}" for e in range(5) for part in (1, 2, 3)}
    assert {name for name in TargetModules(loaded).by_name if layer in name} == {f"{layer}.gate", *experts}
    adapter = new_adapter(loaded, LoRAConfig(rank=2, targets=("q_proj", "w1", "w2")))
    for low_rank in adapter.low_ranks.values():
        for up in low_rank.ups:
            up.array[...] = RNG.normal(0, 0.2, up.shape)
    batch_loss = supervised_loss(loaded.model, CrossEntropy())
    loaded.model.train()
    losses = [train_on_batch(loaded.model, AdamW(1e-2), batch_loss, BATCH) for _ in range(3)]
    assert losses[2] < losses[0]
    loaded.model.eval()
    expected = loaded.model(BATCH[0]).array
    save_adapter(adapter, loaded, tmp_path)
    tensors, _ = read_tensors(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_A.weight"].shape == (2, 20)
    adapter.detach()
    assert not np.array_equal(loaded.model(BATCH[0]).array, expected)
    load_adapter(loaded, tmp_path).merge()
    assert difference(loaded.model(BATCH[0]).array, expected) < 1e-5


def test_config_of_more_experts_than_tensors_is_refused():
    """Before an object is made for each of them."""
    fields = {"model_type": "mixtral", **hf_llama_fields(num_local_experts=10**6)}
    check_refused(fields, r"experts .*30.*got 1000000", n_tensors=30)


def test_mixture_preset_trains_and_exports(tmp_path):
    small = {"vocab_size": 31, "context_window": 16, "embedding_dim": 24, "n_layers": 2, "hidden_size": 16}
    config = replace(PRESETS["mixture"](), **small, batch_size=3, steps=3, minutes=0.0, warmup_steps=0)
    state = new_state(config, RNG.integers(0, 31, 400))
    before = state.model.state_dict()["blocks.0.mlp.router.weights"].copy()
    for _ in range(3):
        assert np.isfinite(train_step(state)[0])
    assert not np.array_equal(state.model.state_dict()["blocks.0.mlp.router.weights"], before)
    assert export_folder(state.model, None, tmp_path / "model") == "mixtral"
    back = load(tmp_path / "model").model
    assert back.config.router_loss == config.router_loss
    assert difference(back(BATCH[0]).array, state.model.eval()(BATCH[0]).array) < 1e-6


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"routing": Routing(3, normalized=False)}, {}),
        ({"routing": Routing(5)}, {}),
        ({"routing": Routing(1)}, {"n_experts": 1, "n_active_experts": 1}),
        ({"routing": GROUPS._replace(sigmoid=True), "shared_size": 7}, {"n_experts": 8, "router_loss": 0.0}),
        ({}, {"bias": True, "router_bias": True}),
        ({}, {"bias": True, "activation": "clamped_swiglu", "gated": False}),
        ({}, {"activation": "gelu", "gated": False}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_token_equals_its_row_in_a_batch(dtype, options, fields):
    """Without gradients, one token is computed without sorting, and in evaluation perhaps by one kernel."""
    layer = MixtureOfExperts(replace(CONFIG, **{"bias": False, **fields}), **options, generator=0)
    for parameter in set_memory_order(layer, "F").parameters():
        parameter.array = (parameter.array + (parameter.ndim == 1)).astype(dtype)
    x = RNG.normal(size=(6, 12)).astype(dtype)
    expected = layer(x).array
    for context in (no_grad, layer.evaluating):
        with context():
            for row, one in zip(expected, x):
                for shape in ((12,), (1, 1, 12)):
                    y = layer(to_tensor(one.reshape(shape), dtype=dtype))
                    assert y.shape == shape and y.dtype == row.dtype and not y.requires_grad
                    np.testing.assert_allclose(y.array.reshape(-1), row, rtol=1e-5, atol=1e-6)


def test_plain_experts_alone_are_computed_together():
    """An expert that is another layer, or that has a hook, an adapter or quantized weights, is called."""
    layer = MixtureOfExperts(replace(CONFIG, bias=False), generator=0)
    first, second = layer.experts[:2]
    assert experts.are_plain_mlps([first, second], np.ndarray)
    for place in (first, first.up, first.activation, first.projection, first.dropout):
        vars(place)["forward"] = place.forward
        assert not experts.are_plain_mlps([second, first], np.ndarray)
        del vars(place)["forward"]
    low_rank = SimpleNamespace(forward=None)
    for expert, name, value in (
        (first, "up", AdaptedDense(first.up, low_rank)),
        (first, "activation", ACTIVATIONS["clamped_swiglu"]()),
        (first, "activation", lambda x: x),
        (first.projection, "bias", to_tensor(np.zeros(12))),
        (first.up.weights, "array", np.zeros((12, 42), np.float32)),
        (first.up.weights, "array", QuantizedMatrix.quantize(first.up.weights.array, "float16", True)),
    ):
        before = getattr(expert, name)
        setattr(expert, name, value)
        assert not experts.are_plain_mlps([second, first], np.ndarray)
        setattr(expert, name, before)
    assert experts.are_plain_mlps([second, first], np.ndarray)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("fields", [{"bias": True, "activation": "gelu", "gated": False}, {"activation": "swish"}])
def test_experts_together_equal_one_after_the_other(fields, order):
    layer = set_memory_order(new_mixture(np.float64, **{"n_experts": 5, "gated": True} | fields), order)
    for parameter in layer.parameters():
        parameter.array += 0.1 * (parameter.ndim == 1)
    x = to_tensor(RNG.normal(size=(7, 6)), dtype=np.float64, requires_grad=True)
    found = []
    for together in (True, False):
        if not together:
            for expert in layer.experts:
                expert.forward = expert.forward  # a hook
        y = layer(x)
        (y * y).sum().backward()
        found.append([y.array, x.grad.array, *gradients(layer).values()])
        assert all(p.grad.array.flags.f_contiguous == p.array.flags.f_contiguous for p in layer.parameters())
        x.zero_grad()
        layer.zero_grad()
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_hook_of_an_expert_is_called_in_evaluation():
    layer = set_memory_order(MixtureOfExperts(replace(CONFIG, bias=False), Routing(5), generator=0), "F")
    x, seen = to_tensor(RNG.normal(size=(1, 12))), []
    forward = layer.experts[3].up.forward
    with layer.evaluating():
        expected = layer(x).array
        layer.experts[3].up.forward = lambda x, dtype=None: seen.append(x) or forward(x, dtype)
        np.testing.assert_allclose(layer(x).array, expected, rtol=1e-5, atol=1e-6)
    assert len(seen) == 1


@pytest.mark.parametrize("dtype_name", ["int8", "float16", "Q4_K", "Q8_0"])
def test_one_token_of_quantized_experts_equals_its_row_in_a_batch(dtype_name):
    config = replace(CONFIG, embedding_dim=256, hidden_size=256, bias=False)
    layer = MixtureOfExperts(config, Routing(2, scale=1.5), generator=0).eval()
    if dtype_name.startswith("Q"):
        for i, expert in enumerate(layer.freeze().experts):
            expert.up.weights.array = BlockMatrix((block_rows(dtype_name, 512, 256, i),), True, False)
            expert.projection.weights.array = BlockMatrix((block_rows(dtype_name, 256, 256, i),), True, False)
    else:
        quantize(layer, dtype_name)
    x = RNG.normal(size=(4, 256)).astype(np.float32)
    with no_grad():
        rows = np.concatenate([layer(row[None]).array for row in x])
        assert difference(rows, layer(x).array) < 1e-3


def test_gradients_share_no_memory():
    """Gradients of the experts' parameters do not share memory, so that they can be clipped in place."""
    model = new_model()
    with_router_loss(model)
    arrays = list(gradients(model).values())
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_block_accepts_a_mixture_as_its_mlp():
    layer = MixtureOfExperts(CONFIG)
    block = TransformerBlock(replace(CONFIG, n_experts=0), mlp=layer)
    assert block.mlp is layer and block(np.zeros((1, 2, 12))).shape == (1, 2, 12)
