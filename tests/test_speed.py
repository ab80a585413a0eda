"""tricycle machine --speed: fractions of peak, where a step's time goes, and what follows from that."""

import re
import threading

import numpy as np
import pytest

from tricycle import kernels
from tricycle.configs import GPTConfig
from tricycle.kernels.dispatch import Kernel
from tricycle_cli import machine, speed
from tricycle_cli.speed import timed_kernels

TINY = GPTConfig(vocab_size=31, context_window=8, embedding_dim=8, n_heads=2, n_layers=1, batch_size=2)


class Clock:
    """A clock that work sets forward."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float):
        return lambda *args: setattr(self, "now", self.now + seconds)


def speed_of(precision: str, tokens_per_second: float, **shares: float) -> speed.Speed:
    return speed.Speed(precision, 2e11, "numba", tokens_per_second, 0.5, shares)


# -------------------------------------------------------------------- times
def test_kernels_are_timed_without_those_that_they_call():
    clock = Clock()
    inner, outer = Kernel(clock.work(1.0)), Kernel(lambda x: (clock.work(2.0)(), inner(x)))
    inner.reference.__name__, outer.reference.__name__ = "inner", "outer"
    with timed_kernels(clock) as seconds:
        outer(0)
        inner(0)
        inner(0)
        thread = threading.Thread(target=inner, args=(0,))
        thread.start()
        thread.join()
    inner(0)
    assert seconds == {"outer": 3.0, "inner": 2.0}


def test_a_kernel_that_fails_leaves_no_trace():
    def fail(x):
        raise ValueError

    before = Kernel.__call__
    with timed_kernels() as seconds:
        with pytest.raises(ValueError):
            Kernel(fail)(0)
        kernels.sum_squares(np.ones(3, np.float32))
    assert set(seconds) == {"fail", "sum_squares"} and Kernel.__call__ is before


def test_rounds_are_interleaved_and_end():
    clock, order = Clock(), []

    def logged(name: str, seconds: float):
        return lambda: (order.append(name), clock.work(seconds)())

    sides = [speed.PrecisionTiming(x, "", logged(f"{x} product", 0.25), logged(f"{x} step", 0.5)) for x in "ab"]
    speed.measure(sides, seconds=0, clock=clock)
    assert order[:4] == ["a product", "a step", "b product", "b step"]  # not timed
    turns = ["a product", "a product", "a step", "b product", "b product", "b step"]
    assert order[4:] == turns * speed.N_ROUNDS
    assert sides[0].product_seconds == [0.25] * 3 and sides[1].step_seconds == [0.5] * 3
    speed.measure(sides, seconds=1e9, clock=clock)
    assert len(sides[0].step_seconds) == 3 + speed.MAX_ROUNDS


# -------------------------------------------------------------------- arithmetic
def test_rates_and_shares(monkeypatch):
    monkeypatch.setattr(speed, "PRODUCT_SIZE", 100)
    side = speed.PrecisionTiming("float32", "numba", lambda: None, lambda: None)
    side.product_seconds, side.step_seconds = [0.001, 0.002, 9.0], [1.0, 4.0, 1.0]
    side.kernel_seconds.update({"matmul": 3.0, "attention": 1.0, "attention_backward": 0.5, "adamw": 0.25, "add": 1.0})
    found = speed.summarize(side, TINY)
    assert found.product_rate == 2 * 100**3 / 0.002
    assert found.tokens_per_second == 16
    assert found.fraction == pytest.approx(speed.flops_per_token(TINY) * 16 / 1e9)
    shares = {"matmul": 0.5, "attention": 0.25, "norms + activations": 0, "optimizer": 0.25 / 6, "rest": 1.25 / 6}
    assert found.shares == pytest.approx(shares)


def test_groups_name_kernels_once():
    names = [name for names in speed.GROUPS.values() for name in names]
    assert len(names) == len(set(names)) and set(names) <= set(kernels.KERNELS)


def test_tables():
    shares = dict(zip([*speed.GROUPS, speed.REST], (0.7, 0.1, 0.06, 0.04, 0.1)))
    table = speed.tables([speed.Speed("float32", 2.5e11, "numba", 2400, 0.66, shares)]).splitlines()
    rates_head, rates, _, _, shares_head, row = table
    assert rates.split() == ["float32", "250", "numba", "2,400", "66%"]
    assert row.split() == ["float32", "70%", "10%", "6%", "4%", "10%"]
    assert len(rates_head) == len(rates) and len(shares_head) == len(row)


def test_a_slow_processor_gets_smaller_batches():
    assert speed.config_for(30e9).batch_size == 4 and speed.config_for(300e9).batch_size == 8


def test_faster_bfloat16_and_the_largest_group_unless_it_is_products_are_suggested():
    base = speed_of("float32", 1000, matmul=1)
    for speeds, expected in [
        ([base, speed_of("bfloat16", 1500, matmul=1)], "--precision bfloat16: 1.5 times"),
        ([base], None),
        ([base, speed_of("bfloat16", 1010, matmul=1)], None),
        ([speed_of("float32", 1, matmul=0.4, attention=0.5)], "attention in float32: 50%.*matrix products 40%"),
        ([speed_of("float32", 1, matmul=0.5, attention=0.4)], None),
    ]:
        suggestions = speed.advice(speeds)
        assert len(suggestions) == (expected is not None)
        assert all(re.search(expected, suggestion) for suggestion in suggestions)


# -------------------------------------------------------------------- a run
def test_a_run_with_tiny_sizes_and_without_a_provider_for_16_bits(monkeypatch):
    monkeypatch.setattr(speed, "PRODUCT_SIZE", 32)
    speeds = speed.measure_precisions(TINY, seconds=0)
    assert [x.precision for x in speeds] in (["float32"], ["float32", "bfloat16"])
    for found in speeds:
        assert found.product_rate > 0 and found.tokens_per_second > 0 and found.fraction > 0
        assert sum(found.shares.values()) == pytest.approx(1) and min(found.shares.values()) >= 0
        assert found.shares["matmul"] > 0 and found.shares["attention"] > 0 and found.shares["optimizer"] > 0
    assert "width 8, 1 layers, 8 tokens, batch 2" in speed.report(speeds, TINY)
    monkeypatch.setattr(speed.onednn, "unavailable_reason", lambda: "not installed")
    speeds = speed.measure_precisions(TINY, seconds=0)
    assert [x.precision for x in speeds] == ["float32"]
    assert speed.report(speeds, TINY).endswith("\nno bfloat16: not installed")


def test_speed_flag_prints_fraction_of_peak_and_advice(monkeypatch, capsys):
    speeds = [speed_of("float32", 1000, **dict.fromkeys([*speed.GROUPS, speed.REST], 0.2))]
    monkeypatch.setattr(speed, "measure_precisions", lambda config: speeds)
    monkeypatch.setattr(speed, "product_rate", lambda: 3e11)
    monkeypatch.setattr(machine, "advice", lambda shown, problem: ["an advice"])
    monkeypatch.setattr("sys.argv", ["tricycle", "--speed"])
    monkeypatch.setattr("sys.stdout.reconfigure", lambda **_: None, raising=False)
    assert machine.main() == 0
    out, err = capsys.readouterr()
    assert "15 seconds" in err and err.count("\n") == 1
    assert "fraction of peak" in out and out.endswith("Suggestions for more speed:\n  an advice\n")
