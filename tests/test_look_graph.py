"""The graph page: steps follow the chain rule, nodes do not overlap, formulas access nothing but their variables."""

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

from tricycle.tensor import to_tensor
from tricycle_cli import look
from tricycle_lab.look.examples import EXAMPLES
from tricycle_lab.look.graph import FORMULAS, build_graph, find_formula, format_array
from tricycle_lab.look.graph_functions import build_graph_from_spec, parse_formula, parse_values
from tricycle_lab.look.layout import Layout, layout_graph


# -------------------------------------------------------------------- gradients
def final_gradients(graph: dict[str, Any]) -> dict[int, str]:
    return {one["arg"]: one["sum"] for step in graph["steps"] for one in step["contributions"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_steps_end_with_the_gradients_of_backward(name: str) -> None:
    function, values = EXAMPLES[name]
    graph = build_graph_from_spec(name)
    inputs = {key: to_tensor(value) for key, value in values.items()}
    function(**inputs).backward()
    sums = final_gradients(graph)
    by_name = {node["name"]: i for i, node in enumerate(graph["nodes"]) if node["kind"] == "input"}
    for key, tensor in inputs.items():
        assert sums[by_name[key]] == format_array(tensor.grad.array)
    json.dumps(graph, allow_nan=False)
    assert sum(node["kind"] == "result" for node in graph["nodes"]) == 1
    for step in graph["steps"]:
        for one in step["contributions"]:
            edge = graph["edges"][one["edge"]]
            assert (edge["from"], edge["to"]) == (one["arg"], step["node"])
    for node in graph["nodes"]:
        if node["op"]:
            assert node["formula"], node["op"]
            assert node["sources"], node["op"]
            assert all(":" in source["location"] for source in node["sources"])


def test_gradients_are_complete_before_their_step() -> None:
    graph = build_graph_from_spec("product")
    order = [step["node"] for step in graph["steps"]]
    for i, step in enumerate(graph["steps"]):
        later = [one["arg"] for other in graph["steps"][i:] for one in other["contributions"]]
        assert step["node"] not in later
    assert order[0] == next(i for i, node in enumerate(graph["nodes"]) if node["kind"] == "result")
    (a,) = [i for i, node in enumerate(graph["nodes"]) if node["name"] == "a"]
    sums = [one["sumLabel"] for step in graph["steps"] for one in step["contributions"] if one["arg"] == a]
    assert sums[-1] == "12"  # b * b + b
    assert len(sums) == 2


def test_input_used_twice_in_one_operation_gets_both_contributions() -> None:
    graph = build_graph_from_spec("x * x", "x=3")
    assert [one["sumLabel"] for one in graph["steps"][0]["contributions"]] == ["3", "6"]
    assert [one["edge"] for one in graph["steps"][0]["contributions"]] == [0, 1]


def test_indexed_inputs_get_gradients_and_constants_do_not() -> None:
    graph = build_graph_from_spec("x[1] * x[0] + x[1] * c", "x=[2, 5, 7], c=3")
    sums = final_gradients(graph)
    (x,) = [i for i, node in enumerate(graph["nodes"]) if node["name"] == "x"]
    assert sums[x] == "[5. 5. 0.]"
    constant = build_graph(lambda x: x * to_tensor(2.0, requires_grad=False), {"x": 1.0}, "c")
    assert [node["kind"] for node in constant["nodes"]] == ["input", "constant", "result"]
    assert len(constant["steps"][0]["contributions"]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_derivative_formula_of_each_operation(text: str, expected: str) -> None:
    result = next(node for node in build_graph_from_spec(text)["nodes"] if node["kind"] == "result")
    assert expected in result["formula"]


def test_formulas_are_found_by_the_start_of_a_name() -> None:
    assert find_formula("einsum ij->ji") == FORMULAS["einsum"]
    assert find_formula("* 0.5") == FORMULAS["*"]
    assert find_formula("a custom op") is None


# -------------------------------------------------------------------- functions and formulas
def test_graph_of_a_function_in_a_python_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def cube(x, times=1):\n    '''Compute a cube.'''\n    return x * x * x * times\n")
    graph = build_graph_from_spec(f"{path}:cube", "x=2")
    assert (graph["title"], graph["description"]) == ("mine.py:cube", "Compute a cube.")
    assert final_gradients(graph)[0] == "12."
    path.write_text("import nothing_like_this\n")
    with pytest.raises(ValueError, match=r"mine\.py: ModuleNotFoundError: .*'nothing_like_this'"):
        build_graph_from_spec(f"{path}:cube")


UNSAFE = ["__import__('os')", "x.array", "exp.__globals__", "open(x)", "import os", "f'{x}'", "exp(x=1)"]
OTHER_SYNTAX = ["(lambda: x)()", "[x for x in y]", "x if y else 0", "x and y", "(x := 2)", "x @ y; y", "", "2 + 3"]
INVALID_FORMULAS = [*UNSAFE, *OTHER_SYNTAX, "x" * 3000, "(" * 500 + "x" + ")" * 500]


@pytest.mark.parametrize("text", INVALID_FORMULAS, ids=lambda text: text[:20])
def test_invalid_and_unsafe_formulas_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_formula(text)


def test_formula_is_evaluated_and_its_size_is_limited() -> None:
    function, names = parse_formula("-sum(x[0] * 2 ** 3, 0) / mean(y @ y) + max(x)")
    assert names == ["x", "y"]
    x, y = to_tensor([[1.0, 2.0], [3.0, 4.0]]), to_tensor([[1.0, 0.0], [0.0, 2.0]])
    assert float(function(x=x, y=y)) == pytest.approx(-(3 * 8) / 1.25 + 4)
    for text in ("x * 9 ** 9 ** 9", "x * 10.0 ** 999"):
        with pytest.raises(ValueError, match="finite numbers"):
            build_graph_from_spec(text)


def test_input_values_are_parsed() -> None:
    assert parse_values("") == {}
    assert parse_values("x=2, y=[1, 2.5]") == {"x": 2, "y": [1, 2.5]}
    assert [node["label"] for node in build_graph_from_spec("x - y + z")["nodes"]][:2] == ["2", "3"]


MESSAGE = "values such as.*got "

test_bad_input = bad_input(
    {
        "no values": (lambda: parse_values("2"), MESSAGE + "'2'"),
        "a call": (lambda: parse_values("x=open('a')"), MESSAGE + r"\"x=open\('a'\)"),
        "a bracket": (lambda: parse_values("x=1) + f("), MESSAGE + r"'x=1\) \+ f\('"),
        "stars": (lambda: parse_values("**x"), MESSAGE + r"'\*\*x'"),
        "an unknown name": (lambda: build_graph_from_spec("x * 2", "y=1"), r"x \* 2: .*for x.*for y"),
        "no Tensor": (lambda: build_graph(lambda x: 3, {"x": 1}, "f"), "f: .*Tensor.*int"),
        "an input itself": (lambda: build_graph(lambda x: x, {"x": 1}, "f"), "f: .*result"),
        "no gradient": (lambda: build_graph(lambda x: x.detach() * 2, {"x": 1}, "f"), "f: .*result"),
        "text as value": (lambda: build_graph_from_spec("x * x", "x='a'"), r"x \* x: to_tensor: expected numbers"),
        "wrong index": (lambda: build_graph_from_spec("x[0]"), "indices, got getitem: too many indices"),
        "mean of a list": (lambda: build_graph_from_spec("mean([x, 1])"), "operands and indices, got .list"),
        "too many arguments": (lambda: build_graph_from_spec("exp(x, y)"), "operands and indices, got .*argument"),
        "long list": (lambda: build_graph_from_spec("[1] * 1000000000000 * x"), "operands and indices, got float"),
        "too many nodes": (lambda: build_graph_from_spec("+".join("x" * 450)), "at most 400 Tensors"),
        "other shapes": (lambda: build_graph_from_spec("x + y", "x=[1, 2], y=[1, 2, 3]"), r"add: .*\(2,\) and \(3,\)"),
    }
)


def test_graph_command_writes_a_page_or_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.html"
    look.main(["--graph", "x * y", "x=2, y=5", "--out", str(out)])
    assert str(out) in capsys.readouterr().out
    assert "Gradients of x * y" in out.read_text(encoding="utf-8")
    look.main(["--graph", "--out", str(out)])
    assert "neuron" in out.read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py: .*no such file"):
        look.main(["--graph", "nowhere.py:f"])
    with pytest.raises(ValueError, match="--lens: expected a model, got --graph"):
        look.main(["--graph", "x * y", "--lens", "lens.safetensors"])
    with pytest.raises(ValueError, match=r"model.*--graph"):
        look.main([])


# -------------------------------------------------------------------- layout
def check_layout(layout: Layout, sizes: list[tuple[float, float]], edges: list[tuple[int, int]]) -> None:
    boxes = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for (x, y), (w, h) in zip(layout.centers, sizes)]
    for (l1, t1, r1, b1), (l2, t2, r2, b2) in itertools.combinations(boxes, 2):
        assert r1 <= l2 + 1e-6 or r2 <= l1 + 1e-6 or b1 <= t2 + 1e-6 or b2 <= t1 + 1e-6
    assert all(left >= 0 and top >= 0 for left, top, _, _ in boxes)
    assert all(right <= layout.width + 1e-6 and bottom <= layout.height + 1e-6 for _, _, right, bottom in boxes)
    for (start, stop), points in zip(edges, layout.edges, strict=True):
        ys = [y for _, y in points]
        assert ys == sorted(ys)
        assert ys[0] < ys[-1]
        assert points[0] == (layout.centers[start][0], pytest.approx(boxes[start][3]))
        assert points[-1] == (layout.centers[stop][0], pytest.approx(boxes[stop][1]))


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_edges_go_down_and_nodes_do_not_overlap(graph: tuple[int, set[tuple[int, int]]]) -> None:
    n_nodes, pairs = graph
    edges = sorted((one, other) for one, other in pairs if one < other)
    sizes = [(40.0 + 10 * (i % 5), 30.0) for i in range(n_nodes)]
    check_layout(layout_graph(sizes, edges), sizes, edges)


def test_a_planar_graph_has_no_crossings() -> None:
    edges = [(0, 4), (1, 3), (2, 5), (3, 6), (4, 6), (5, 6)]
    sizes = [(50.0, 30.0)] * 7
    layout = layout_graph(sizes, edges)
    check_layout(layout, sizes, edges)
    upper = sorted(range(3), key=lambda node: layout.centers[node][0])
    lower = {0: 4, 1: 3, 2: 5}
    assert [lower[node] for node in upper] == sorted((3, 4, 5), key=lambda node: layout.centers[node][0])


def test_layout_rejects_cycles_and_handles_empty_and_deep_graphs() -> None:
    with pytest.raises(ValueError, match="without a cycle"):
        layout_graph([(1, 1)] * 2, [(0, 1), (1, 0)])
    assert layout_graph([], []).centers == []
    many_layers = [(i, i + 1) for i in range(300)] + [(0, 300)]
    check_layout(layout_graph([(40.0, 20.0)] * 301, many_layers), [(40.0, 20.0)] * 301, many_layers)


def test_large_arrays_are_abbreviated() -> None:
    assert len(format_array(np.zeros((100, 100)))) < 500
