"""Linear probes: what a linear classifier can read from activations of a model, by layer (needs scikit-learn).

Source: Alain and Bengio 2016, "Understanding intermediate layers using linear classifier probes".

Shapes: N texts, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.devices import to_cpu
from tricycle.models import GPT
from tricycle.system.files import read_file
from tricycle_lab.attribution import check_decoder, check_tokens
from tricycle_lab.probe import Probe

MAX_FILE_BYTES = 2**26


def read_labeled_texts(path: Path) -> list[tuple[str, str]]:
    """Return (label, text) of each line of a file that is not blank; ValueError unless a tab separates them.

    Raises:
        ValueError: no line, a line without a tab, with an empty label or text, or not UTF-8; more than 64 MiB.
    """
    try:
        content = read_file(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got another encoding at byte {error.start:,}") from None
    lines = content.replace("\r\n", "\n").split("\n")  # not splitlines(), as a text may contain U+2028 and others
    parts = [(number, line.partition("\t")) for number, line in enumerate(lines, 1) if line.strip()]
    bad = [number for number, (label, _, text) in parts if not label.strip() or not text.strip()]
    if bad or not parts:
        got = f"another line {bad[0]}" if bad else "no line"
        raise ValueError(f"{path}: expected a label, a tab and a text in each line, got {got}")
    return [(label, text) for _, (label, _, text) in parts]


def collect_activations(model: GPT, texts: Sequence[Sequence[int]], *patterns: str) -> dict[str, np.ndarray]:
    """Return {layer: results at the last token of each text, (N, C)}; ValueError without texts.

    Args:
        texts: token ids.
        patterns: select layers, as those of `Probe`, such as "blocks.*.mlp"; by default all blocks.

    Raises:
        ValueError: no texts, ids out of range, a pattern that matches no layer, or activations that are not finite.
    """
    check_decoder("collect_activations", model)
    names = patterns or [f"blocks.{layer}" for layer in range(len(model.blocks))]
    rows: dict[str, list[np.ndarray]] = {}
    if not len(texts):
        raise ValueError("collect_activations: expected at least one text, got none")
    for tokens in texts:
        check_tokens("collect_activations", tokens, model.config.vocab_size)
        with Probe(model, *names) as probe, model.evaluating():
            model.logits(model.hidden_states(model.place(np.array([tokens])))[:, -1:])  # also runs the last norm
        for name, array in probe.activations.items():
            last = array.reshape(-1, array.shape[-1])[-1]  # positions and routers have no batch axis
            rows.setdefault(name, []).append(to_cpu(last).astype(np.float32))
    stacked = {name: np.stack(rows[name]) for name, _ in model.named_layers() if name in rows}
    for name, array in stacked.items():
        if not np.isfinite(array).all():
            raise ValueError(f"collect_activations: expected finite activations, got NaN or infinity from {name}")
    return stacked


def probe_accuracy(activations: np.ndarray, labels: Sequence[str], n_folds: int = 5, penalty: float = 1.0) -> float:
    """Return cross-validated accuracy of logistic regression on (N, C), by scikit-learn; ValueError for few texts.

    Args:
        activations: (N, C), which are standardized with the statistics of the fitted texts.
        labels: of the N texts.
        n_folds: parts of the texts, each of which is held out once, with equal fractions of each label.
        penalty: the strength of the L2 penalty, 1 / C of scikit-learn.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: one label only, fewer texts of a label than folds, or another number of labels than of texts.
    """
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    if len(labels) != len(activations) or len(counts) < 2 or counts.min() < n_folds or n_folds < 2:
        expected = f"{len(activations)} labels, at least two of them different, each of {max(2, n_folds)} texts or more"
        raise ValueError(f"probe_accuracy: expected {expected}, got {len(labels)} with counts {counts.tolist()}")
    classifier = new_classifier(penalty)
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    folds = StratifiedKFold(n_folds, shuffle=True, random_state=0)
    return float(cross_val_score(classifier, activations, np.asarray(labels), cv=folds).mean())


def new_classifier(penalty: float = 1.0) -> Any:
    """Return an unfitted logistic regression of scikit-learn on standardized channels; ImportError without it.

    Args:
        penalty: the strength of the L2 penalty, 1 / C of scikit-learn.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ModuleNotFoundError as error:
        raise ImportError("linear probes need scikit-learn: pip install scikit-learn") from error
    return make_pipeline(StandardScaler(), LogisticRegression(C=1 / penalty, max_iter=1000))
