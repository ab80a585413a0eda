"""Tables of names: a row alone gives a config's value, a flag's choice and an entry in the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tricycle.activation import ACTIVATIONS, ReLU
from tricycle.attention.rotary import POSITIONS, SCALINGS
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.functions import Softmax1
from tricycle.models import GPT
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimiser_rules.schedules import SCHEDULES, WarmupLinear
from tricycle.softmaxes import SOFTMAXES

DOCS = Path(__file__).resolve().parents[1] / "docs"
# By field of the config: its table, and a row.
TABLES: dict[str, tuple[dict[str, Any], Any]] = {
    "softmax": (SOFTMAXES, Softmax1),
    "activation": (ACTIVATIONS, ReLU),
    "positions": (POSITIONS, POSITIONS["none"]),
    "rotary_scaling": (SCALINGS, SCALINGS["none"]),
    "optimiser": (OPTIMISERS, OPTIMISERS["lion"]),
    "schedule": (SCHEDULES, WarmupLinear),
}
# Those that the reference lists, by the place of the table.
LISTED = {
    "softmax": "tricycle.softmaxes.SOFTMAXES",
    "activation": "tricycle.activation.ACTIVATIONS",
    "optimiser": "tricycle.optimiser_rules.OPTIMISERS",
    "schedule": "tricycle.optimiser_rules.schedules.SCHEDULES",
}


@pytest.mark.parametrize("field", TABLES)
def test_new_table_row_appears_in_configs_flags_and_help(field: str, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("tyro")
    from tricycle_cli.completion import flags_of
    from tricycle_cli.flags import parse

    table, row = TABLES[field]
    monkeypatch.setitem(table, "throwaway", row)
    monkeypatch.setenv("COLUMNS", "200")
    assert getattr(DebugConfig(**{field: "throwaway"}), field) == "throwaway"
    with pytest.raises(ValueError, match=rf"^GPTConfig: .*{field}.*throwaway.*'other'"):
        GPTConfig(**{field: "other"})  # type: ignore[arg-type]
    flag = f"--{field.replace('_', '-')}"
    assert getattr(parse(GPTConfig, args=[flag, "throwaway"]), field) == "throwaway"
    (choices,) = (one.choices for one in flags_of("train") if one.name == flag)
    assert choices == tuple(table)
    with pytest.raises(SystemExit):
        parse(GPTConfig, args=["--help"])
    assert f"{flag} {{{','.join(table)}}}" in capsys.readouterr().out


def test_a_model_computes_with_a_new_softmax(monkeypatch: Any) -> None:
    monkeypatch.setitem(SOFTMAXES, "throwaway", Softmax1)
    logits = [GPT(DebugConfig(softmax=name))(np.arange(8)).array for name in ("throwaway", "softmax1", "softmax")]
    assert np.array_equal(logits[0], logits[1]) and not np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("field", LISTED)
def test_the_documentation_lists_every_row(field: str, monkeypatch: Any) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    from repository import table_entries

    table, row = TABLES[field]
    monkeypatch.setitem(table, "throwaway", row)
    listed = table_entries(LISTED[field]).splitlines()
    assert listed[::2] == [f"``{name}``" for name in table]
    assert all(len(line.split()) > 2 for line in listed[1::2])
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.rst"))
    assert f"\n.. table-entries:: {LISTED[field]}\n" in pages


def test_attention_page_lists_registered_softmaxes() -> None:
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(named) == 5 and set(named) <= set(SOFTMAXES)
