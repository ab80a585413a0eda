"""Graphs to look at: every step is the chain rule's, the drawing has no overlaps, formulas reach nothing else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import bad_input

from tricycle.ops import OPS
from tricycle.tensor import Tensor, to_tensor
from tricycle_cli import look
from tricycle_lab.look.examples import EXAMPLES
from tricycle_lab.look.functions import formula, graph_named, values_of
from tricycle_lab.look.graph import FORMULAS, formula_of, graph_of, text_of
from tricycle_lab.look.layout import Placed, place


# -------------------------------------------------------------------- gradients
def last_sums(graph: dict[str, Any]) -> dict[int, str]:
    return {one["arg"]: one["sum"] for step in graph["steps"] for one in step["to"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_steps_end_with_the_gradients_of_backward(name: str) -> None:
    example = EXAMPLES[name]
    graph = graph_named(name)
    inputs = {key: to_tensor(value) for key, value in example.values.items()}
    example.function(**inputs).backward()
    sums = last_sums(graph)
    by_name = {node["name"]: i for i, node in enumerate(graph["nodes"]) if node["kind"] == "input"}
    for key, tensor in inputs.items():
        assert sums[by_name[key]] == text_of(tensor.grad.array)
    json.dumps(graph, allow_nan=False)
    assert sum(node["kind"] == "result" for node in graph["nodes"]) == 1
    for step in graph["steps"]:
        for one in step["to"]:
            edge = graph["edges"][one["edge"]]
            assert (edge["from"], edge["to"]) == (one["arg"], step["node"])
    for node in graph["nodes"]:
        if node["op"]:
            assert node["formula"], node["op"]
            assert node["sources"], node["op"]
            assert all(":" in source["place"] for source in node["sources"])


def test_no_step_comes_before_its_gradient_is_whole() -> None:
    graph = graph_named("product")
    order = [step["node"] for step in graph["steps"]]
    for i, step in enumerate(graph["steps"]):
        later = [one["arg"] for other in graph["steps"][i:] for one in other["to"]]
        assert step["node"] not in later
    assert order[0] == next(i for i, node in enumerate(graph["nodes"]) if node["kind"] == "result")
    (a,) = [i for i, node in enumerate(graph["nodes"]) if node["name"] == "a"]
    came = [one["sumLabel"] for step in graph["steps"] for one in step["to"] if one["arg"] == a]
    assert came[-1] == "12"  # b * b + b
    assert len(came) == 2


def test_one_input_twice_in_one_operation() -> None:
    graph = graph_named("x * x", "x=3")
    assert [one["sumLabel"] for one in graph["steps"][0]["to"]] == ["3", "6"]
    assert [one["edge"] for one in graph["steps"][0]["to"]] == [0, 1]


def test_parts_and_constants() -> None:
    graph = graph_named("x[1] * x[0] + x[1] * c", "x=[2, 5, 7], c=3")
    sums = last_sums(graph)
    (x,) = [i for i, node in enumerate(graph["nodes"]) if node["name"] == "x"]
    assert sums[x] == "[5. 5. 0.]"
    constant = graph_of(lambda x: x * to_tensor(2.0, requires_grad=False), {"x": 1.0}, "c")
    assert [node["kind"] for node in constant["nodes"]] == ["input", "constant", "result"]
    assert len(constant["steps"][0]["to"]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x + 4", "dx = g"),
        ("3 - x", "dx = -g"),
        ("1 / x", "dx = -g z / x"),
        ("2 ** x", "dx = g z ln c"),
        ("x ** 2", "dx = c g x^(c-1)"),
        ("exp(x)", "dx = g z"),
        ("maximum(x, y)", "the larger"),
    ],
)
def test_formulas(text: str, said: str) -> None:
    result = next(node for node in graph_named(text)["nodes"] if node["kind"] == "result")
    assert said in result["formula"]


def test_formulas_are_of_operations_that_there_are() -> None:
    assert formula_of("einsum ij->ji") == FORMULAS["einsum"]
    assert formula_of("* 0.5") == FORMULAS["*"]
    assert formula_of("what I made") is None
    assert {"exp", "tanh", "matmul", "reshape", "where", "softcap"} <= OPS.keys()


# -------------------------------------------------------------------- what may be named
def test_a_function_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def cube(x, times=1):\n    '''Of one number.'''\n    return x * x * x * times\n")
    graph = graph_named(f"{path}:cube", "x=2")
    assert (graph["title"], graph["said"]) == ("mine.py:cube", "Of one number.")
    assert last_sums(graph)[0] == "12."
    path.write_text("import nothing_like_this\n")
    with pytest.raises(ValueError, match=r"mine\.py: ModuleNotFoundError: No module named 'nothing_like_this'"):
        graph_named(f"{path}:cube")


REACHING_OUT = ["__import__('os')", "x.array", "exp.__globals__", "open(x)", "import os", "f'{x}'", "exp(x=1)"]
OTHER_FORMS = ["(lambda: x)()", "[x for x in y]", "x if y else 0", "x and y", "(x := 2)", "x @ y; y", "", "2 + 3"]
FORMULA_RULES = [*REACHING_OUT, *OTHER_FORMS, "x" * 3000, "(" * 500 + "x" + ")" * 500]


@pytest.mark.parametrize("text", FORMULA_RULES, ids=lambda text: text[:20])
def test_a_formula_reaches_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        formula(text)


def test_a_formula_means_what_it_says() -> None:
    function, names = formula("-sum(x[0] * 2 ** 3, 0) / mean(y @ y) + max(x)")
    assert names == ["x", "y"]
    x, y = to_tensor([[1.0, 2.0], [3.0, 4.0]]), to_tensor([[1.0, 0.0], [0.0, 2.0]])
    assert float(function(x=x, y=y)) == pytest.approx(-(3 * 8) / 1.25 + 4)
    for text in ("x * 9 ** 9 ** 9", "x * 10.0 ** 999"):
        with pytest.raises(ValueError, match="expected a formula of finite numbers"):
            graph_named(text)
    with pytest.raises(ValueError, match="at most 400 Tensors"):
        graph_named("+".join("x" * 450))


def test_values() -> None:
    assert values_of("") == {}
    assert values_of("x=2, y=[1, 2.5]") == {"x": 2, "y": [1, 2.5]}
    assert [node["label"] for node in graph_named("x - y + z")["nodes"]][:2] == ["2", "3"]


def values(text: str) -> Any:
    return lambda: values_of(text)


WANTED = 'expected values such as "x=2, y=[1, 2]", got '

test_bad_input = bad_input(
    {
        "no values": (values("2"), WANTED + "'2'"),
        "a call": (values("x=open('a')"), WANTED + "\"x=open('a')\""),
        "a bracket": (values("x=1) + f("), WANTED + "'x=1) + f('"),
        "stars": (values("**x"), WANTED + "'**x'"),
        "a strange name": (lambda: graph_named("x * 2", "y=1"), "x * 2: expected values for x, got one for y"),
        "no Tensor": (lambda: graph_of(lambda x: 3, {"x": 1}, "f"), "f: expected a Tensor as its result, got int"),
        "an input itself": (lambda: graph_of(lambda x: x, {"x": 1}, "f"), "f: expected a result that was computed"),
        "no gradient": (lambda: graph_of(lambda x: x.detach() * 2, {"x": 1}, "f"), "f: expected a result that was"),
        "too many nodes": (lambda: graph_of(many, {"x": 1}, "f"), "f: expected a graph of at most 400 Tensors to"),
        "shapes that do not fit": (lambda: graph_named("x + y", "x=[1, 2], y=[1, 2, 3]"), "add: shapes (2,) and (3,)"),
    }
)


def many(x: Tensor) -> Tensor:
    for _ in range(401):
        x = x + 1
    return x


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.html"
    look.main(["--graph", "x * y", "x=2, y=5", "--out", str(out)])
    assert str(out) in capsys.readouterr().out
    assert "Gradients of x * y" in out.read_text(encoding="utf-8")
    look.main(["--graph", "--out", str(out)])
    assert "neuron" in out.read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py: there is no such file"):
        look.main(["--graph", "nowhere.py:f"])
    with pytest.raises(ValueError, match="expected a model to inspect, or --graph"):
        look.main([])


# -------------------------------------------------------------------- the drawing
def check(placed: Placed, sizes: list[tuple[float, float]], edges: list[tuple[int, int]]) -> None:
    boxes = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for (x, y), (w, h) in zip(placed.centres, sizes)]
    for (l1, t1, r1, b1), (l2, t2, r2, b2) in itertools.combinations(boxes, 2):
        assert r1 <= l2 + 1e-6 or r2 <= l1 + 1e-6 or b1 <= t2 + 1e-6 or b2 <= t1 + 1e-6
    assert all(left >= 0 and top >= 0 for left, top, _, _ in boxes)
    assert all(right <= placed.width + 1e-6 and bottom <= placed.height + 1e-6 for _, _, right, bottom in boxes)
    for (start, stop), points in zip(edges, placed.edges, strict=True):
        ys = [y for _, y in points]
        assert ys == sorted(ys)
        assert ys[0] < ys[-1]
        assert points[0] == (placed.centres[start][0], pytest.approx(boxes[start][3]))
        assert points[-1] == (placed.centres[stop][0], pytest.approx(boxes[stop][1]))


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_any_graph_is_drawn_downwards_and_apart(graph: tuple[int, set[tuple[int, int]]]) -> None:
    n_nodes, pairs = graph
    edges = sorted((one, other) for one, other in pairs if one < other)
    sizes = [(40.0 + 10 * (i % 5), 30.0) for i in range(n_nodes)]
    check(place(sizes, edges), sizes, edges)


def test_a_graph_without_crossings_is_drawn_without() -> None:
    edges = [(0, 4), (1, 3), (2, 5), (3, 6), (4, 6), (5, 6)]
    sizes = [(50.0, 30.0)] * 7
    placed = place(sizes, edges)
    check(placed, sizes, edges)
    upper = sorted(range(3), key=lambda node: placed.centres[node][0])
    lower = {0: 4, 1: 3, 2: 5}
    assert [lower[node] for node in upper] == sorted((3, 4, 5), key=lambda node: placed.centres[node][0])


def test_no_circle_and_none_at_all() -> None:
    with pytest.raises(ValueError, match="expected edges without a circle"):
        place([(1, 1)] * 2, [(0, 1), (1, 0)])
    assert place([], []).centres == []
    many_layers = [(i, i + 1) for i in range(300)] + [(0, 300)]
    check(place([(40.0, 20.0)] * 301, many_layers), [(40.0, 20.0)] * 301, many_layers)


def test_values_are_short() -> None:
    assert len(text_of(np.zeros((100, 100)))) < 500
