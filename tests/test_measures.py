"""The measures of the model viewer equal those of the library, arrive layer by layer, and reject bad requests."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from tables import bad_input
from test_look import TEXT, TOKENISER, new_inspectable, new_transformer

from tricycle.checkpoint import save_checkpoint
from tricycle.configs.mamba import MambaConfig
from tricycle.models import GPT
from tricycle_cli import look
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.circuits import measure_faithfulness, rank_heads, task_prompts
from tricycle_lab.head_scores import score_heads
from tricycle_lab.lens import TunedLens, lens_log_probabilities
from tricycle_lab.linear_probe import collect_activations, new_classifier, probe_accuracy
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.look.measures import MEASURES, describe_measures, find_measures
from tricycle_lab.look.server import ViewerService
from tricycle_lab.patching import Prompts, estimate_patches, patch_activations
from tricycle_lab.path_patching import patch_paths
from tricycle_lab.sparse_autoencoder import SparseAutoencoder, typical_tokens

CORRUPTED = TEXT.replace("cat", "cot", 1)  # as many tokens as TEXT
ANSWERS = {"answer": " ", "otherAnswer": "b"}
PROMPTS = {"corruptedPrompt": CORRUPTED, **ANSWERS}


def new_model() -> InspectableStack:
    """Return a model with a tuned lens, an autoencoder after its second block, and a steering vector."""
    inspectable = new_inspectable()
    generator = np.random.default_rng(5)
    width, n_layers = inspectable.model.config.embedding_dim, len(inspectable.model.blocks)
    matrices = generator.standard_normal((n_layers - 1, width, width)).astype(np.float32)
    inspectable.lens = TunedLens(matrices, np.zeros((n_layers - 1, width), np.float32))
    inspectable.autoencoder = SparseAutoencoder(width, 30, 4), 1
    inspectable.vectors = {1: generator.standard_normal(width).astype(np.float32)}
    return inspectable


class Viewer:
    """A service with one model that has run on TEXT, and the requests of its page."""

    def __init__(self, inspectable, **interventions) -> None:
        self.service = ViewerService([inspectable], TEXT)
        self.summary = self.service.respond("run", {"text": TEXT, "interventions": interventions})

    def start(self, name, position=4, **texts):
        fields = {"trace": self.summary["trace"], "name": name, "position": position, **texts}
        return self.service.respond("start_measure", fields)["measure"]

    def next(self, measure):
        table = self.service.respond("next_table", {"measure": measure})["table"]
        json.dumps(table, allow_nan=False)
        return table

    def tables(self, name, position=4, **texts):
        """Return the final tables by title, after checking that each step completes further rows."""
        measure, found, n_before = self.start(name, position, **texts), {}, {}
        while table := self.next(measure):
            n_complete = sum(None not in row for row in table["values"])
            assert n_complete > n_before.get(table["title"], -1) or name in ("logit_lens", "features")
            n_before[table["title"]] = n_complete
            found[table["title"]] = table
        return found


@pytest.fixture(scope="module")
def viewer():
    return Viewer(new_model())


def prompts_of(inspectable):
    answers = tuple(inspectable.encode_answer(text) for text in ANSWERS.values())
    return Prompts(inspectable.encode_input(TEXT), inspectable.encode_input(CORRUPTED), answers)


def assert_values(table, expected):
    np.testing.assert_allclose(np.array(table["values"], float), expected, rtol=2e-3, atol=1e-6)  # 4 digits
    assert len(table["rows"]) == len(expected) and len(table["columns"]) == len(expected[0])


def test_head_scores_and_attribution_equal_the_library(viewer):
    inspectable = viewer.service.models[0]
    scores = score_heads(inspectable.model, start=inspectable.start_token)
    tables = viewer.tables("scores")
    assert list(tables) == ["induction", "previous token", "duplicate token"]
    for table, expected in zip(tables.values(), scores):
        assert_values(table, expected)
    prompts = prompts_of(inspectable)
    for texts, answers in ((ANSWERS, prompts.answers), ({**ANSWERS, "otherAnswer": ""}, prompts.answers[:1])):
        result = attribute_logit(inspectable.model, prompts.clean, *answers, position=4)
        tables = viewer.tables("attribution", **texts)
        assert_values(tables["heads"], result.heads)
        assert_values(tables["MLPs and attention biases"], np.stack([result.mlps, result.attention_biases], axis=1))


def test_patching_equals_the_library(viewer):
    model, prompts = viewer.service.models[0].model, prompts_of(viewer.service.models[0])
    tables = [
        *viewer.tables("patching", **PROMPTS).values(),
        *viewer.tables("patching_by_position", **PROMPTS).values(),
    ]
    for table, kind in zip(tables, ("stream", "attention", "mlp", "heads", "heads_by_position"), strict=True):
        expected = patch_activations(model, prompts, kind)
        assert_values(table, expected.reshape(-1, expected.shape[-1]))
    assert tables[-1]["rows"][:3] == ["0, head 0", "0, head 1", "1, head 0"]
    estimated = viewer.tables("estimate", **PROMPTS)
    for table, expected in zip(estimated.values(), estimate_patches(model, prompts).values(), strict=True):
        assert_values(table, expected)
    (paths,) = viewer.tables("paths", **PROMPTS).values()
    assert_values(paths, patch_paths(model, prompts))


def test_circuits_of_tasks_equal_the_library(viewer):
    inspectable = viewer.service.models[0]
    pairs = task_prompts("brackets", inspectable.encode, 10, start=inspectable.start_token)
    assert pairs[0].clean[0] == pairs[0].corrupted[0] == inspectable.encode_input("a")[0] != pairs[0].clean[1]
    effects, faithfulness = viewer.tables("circuit_brackets").values()
    expected = np.mean([estimate_patches(inspectable.model, pair)["heads"] for pair in pairs[:5]], axis=0)
    assert_values(effects, expected)
    heads = rank_heads(expected)
    assert (faithfulness["columns"], faithfulness["rowName"]) == (["0", "1", "2", "4", "6"], "prompt")
    assert_values(
        faithfulness, [measure_faithfulness(inspectable.model, pair, heads, [0, 1, 2, 4, 6]) for pair in pairs[5:]]
    )


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_linear_probes_equal_the_library(names):
    pytest.importorskip("sklearn")
    inspectable = new_model()
    inspectable.labeled = [(name, f"the {name} {dots}") for name in names for dots in (".", "..", "...", "?", "!")]
    labels = [label for label, _ in inspectable.labeled]
    texts = [inspectable.encode_input(text) for _, text in inspectable.labeled]
    activations = collect_activations(inspectable.model, texts)
    viewer = Viewer(inspectable, ablatedLayers=["blocks.1.mlp"])
    accuracy, *tables = viewer.tables("probes").values()
    assert_values(accuracy, [[probe_accuracy(rows, labels)] for rows in activations.values()])
    streams = list(viewer.service._traces[0][1].stream.values())[1:]
    shown = names[1:] if len(names) == 2 else names
    assert [table["title"] for table in tables] == [f"linear probes: probability of {name}" for name in shown]
    for name, table in zip(shown, tables):
        fitted = [new_classifier().fit(rows, labels) for rows in activations.values()]
        expected = [one.predict_proba(x)[:, names.index(name)] for one, x in zip(fitted, streams)]
        assert_values(table, expected)


@pytest.mark.parametrize("interventions", [{}, {"ablatedLayers": ["blocks.1.mlp"]}, {"steering": 2.0}])
def test_lenses_and_features_describe_the_run_of_the_page(interventions):
    viewer = Viewer(new_model(), **interventions)
    inspectable, trace = viewer.service.models[0], viewer.service._traces[0][1]
    streams = list(trace.stream.values())[1:]
    predicted = trace.predictions.top_tokens
    for name, lens in (("logit_lens", None), ("tuned_lens", inspectable.lens)):
        (table,) = viewer.tables(name).values()
        logs = [lens_log_probabilities(inspectable.model, x, i, lens) for i, x in enumerate(streams)]
        assert_values(table, [np.exp(rows[np.arange(len(rows)), predicted]) for rows in logs])
        assert table["texts"][0] == [inspectable.token_text(int(token)) for token in logs[0].argmax(axis=-1)]
    (table,) = viewer.tables("features").values()
    typical = typical_tokens(streams[1])
    expected = inspectable.autoencoder[0].activations(streams[1])
    values = np.array(table["values"], float)
    order = np.argsort(-expected[4], kind="stable")[:4]
    assert table["rows"] == [str(feature) for feature in order if expected[4, feature] > 0]
    np.testing.assert_allclose(values[:, typical], expected[typical][:, order[: len(values)]].T, rtol=2e-3, atol=1e-6)
    assert np.isnan(values[:, 0]).all()


def test_steering_changes_the_run_and_is_undone():
    inspectable = new_model()
    plain, steered, stronger = (Viewer(inspectable, steering=strength) for strength in (0, 1.5, 3))
    difference, double = (
        viewer.service._traces[0][1].stream["blocks.1"] - plain.service._traces[0][1].stream["blocks.1"]
        for viewer in (steered, stronger)
    )
    expected = np.broadcast_to(1.5 * inspectable.vectors[1], difference.shape)
    np.testing.assert_allclose(difference, expected, atol=1e-4)
    np.testing.assert_allclose(double, 2 * difference, atol=1e-4)
    assert Viewer(inspectable).summary["predictions"] == plain.summary["predictions"] != steered.summary["predictions"]


def test_other_requests_are_answered_between_two_tables(viewer):
    first = viewer.start("patching", **PROMPTS)
    assert sum(None not in row for row in viewer.next(first)["values"]) == 1
    assert viewer.service.models[0].model.training is True  # its own mode
    other = viewer.service.respond("run", {"text": "a dog"})
    assert len(other["predictions"]["ranks"]) == len(other["ids"])
    assert sum(None not in row for row in viewer.next(first)["values"]) == 2
    viewer.start("scores")
    with pytest.raises(ValueError, match="another measure was started"):
        viewer.next(first)


def test_measures_without_their_files_and_of_other_models_are_not_offered():
    names = [measure["name"] for measure in describe_measures(new_inspectable())]
    assert names == [name for name in MEASURES if name not in ("tuned_lens", "features", "probes")]
    mamba = MambaConfig(vocab_size=TOKENISER.n_vocab, context_window=40, embedding_dim=8, n_layers=1)
    assert [*find_measures(InspectableStack(GPT(mamba), TOKENISER, "mamba"))] == ["logit_lens"]
    assert describe_measures(new_transformer()) == []
    with pytest.raises(ValueError, match=r"measure.*none for this model"):
        service = ViewerService([new_transformer()], "")
        trace = service.respond("run", {"text": "the cat => the dog"})["trace"]
        service.respond("start_measure", {"trace": trace, "name": "scores", "position": 0})
    page = ViewerService([new_inspectable()], TEXT).page()
    assert json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["models"][0]["measures"][0]["name"] == "scores"
    assert "class MeasureView" in page


def test_command_reads_the_files_of_a_decoder_and_no_others(tmp_path):
    inspectable = new_model()
    checkpoint = tmp_path / "best.safetensors"
    save_checkpoint(checkpoint, inspectable.model, TOKENISER)
    inspectable.lens.save(tmp_path / "lens.safetensors")
    inspectable.autoencoder[0].save(tmp_path / "a.safetensors", 1)
    (tmp_path / "labels.tsv").write_text("cat\tthe cat\ndog\tthe dog\n")
    files = {"lens": tmp_path / "lens.safetensors", "autoencoder": tmp_path / "a.safetensors"}
    files["labels"] = tmp_path / "labels.tsv"
    loaded = look.load_inspectable(look.Arguments(str(checkpoint), **files), str(checkpoint))
    np.testing.assert_array_equal(loaded.lens.matrices, inspectable.lens.matrices)
    assert loaded.labeled == [("cat", "the cat"), ("dog", "the dog")]
    assert loaded.autoencoder[1] == 1 and len(describe_measures(loaded)) == len(MEASURES)
    second = look.load_inspectable(look.Arguments(str(checkpoint), **files), str(checkpoint), is_second=True)
    assert second.lens is None and second.autoencoder is None and second.labeled is None
    with pytest.raises(ValueError, match="GGUF"):
        look.load_inspectable(look.Arguments(str(checkpoint), steer=files["lens"]), str(checkpoint))


def compute(name, **fields):
    return lambda: Viewer(new_model()).tables(name, **fields)


test_bad_input = bad_input(
    {
        "unknown measure": (compute("mystery"), "expected a measure, one of scores, attribution"),
        "list as measure": (compute([]), "expected a measure, one of scores, attribution"),
        "no position": (compute("scores", position=None), "expected a position from 0"),
        "position outside": (compute("scores", position=99), "expected a position from 0"),
        "missing text": (compute("patching", **ANSWERS), "expected texts for corruptedPrompt, answer"),
        "no text": (compute("attribution", answer=3, otherAnswer=""), "expected texts for answer"),
        "no answer": (compute("attribution", answer="", otherAnswer=""), "answers of one token each, got 0"),
        "long answer": (compute("attribution", answer="dogs", otherAnswer=""), "answers of one token each"),
        "other length": (compute("patching", **{**PROMPTS, "corruptedPrompt": "a"}), "same number of tokens"),
        "first token": (compute("features", position=0), "expected a token that the autoencoder describes"),
        "no vectors": (lambda: Viewer(new_inspectable(), steering=1.0), "expected a model with steering vectors"),
        "strength": (lambda: Viewer(new_model(), steering=1e9), "steering strength from -1000 to 1000"),
        "strength as text": (lambda: Viewer(new_model(), steering="1"), "steering strength from -1000 to 1000"),
    }
)
