"""The benchmark of small things runs and prints its tables; how fast is no test's business."""

import importlib.util

import pytest
from test_programs import call, good

from benchmarks.small import NETWORKS, SIDES

pytestmark = pytest.mark.nightly


def test_both_tables():
    out = good(call("-m", "benchmarks.small", "--peer", "none", "--steps", "2", "--repeats", "1"))
    for name in (*NETWORKS, "numpy", "tricycle"):
        (row,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert float(row.removeprefix(name).split()[0]) > 0


@pytest.mark.parametrize("network", NETWORKS)
def test_a_step_of_each_side(network):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    for side in SIDES.values():
        step = side(*NETWORKS[network])
        step()
        step()
