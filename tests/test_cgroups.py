"""CPU quotas of cgroups; tests/test_memory.py has the memory limits."""

import pytest

from tricycle.system import cgroups
from tricycle_accelerators import threads


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Return a folder in whose files the cgroups of this process are described."""
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path / "groups")
    (tmp_path / "groups" / "a" / "b").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "own_quota, parent, quota",
    [("max 100000", "150000 100000", 1.5), ("50000 100000", "max 100000", 0.5), ("", "max 1", None)],
)
def test_cpu_quota_v2(system, own_quota, parent, quota):
    (system / "cgroup").write_text("0::/a/b\n")
    (system / "groups" / "a" / "cpu.max").write_text(parent + "\n")
    (system / "groups" / "a" / "b" / "cpu.max").write_text(own_quota + "\n")
    assert cgroups.cpu_quota() == quota


def test_cpu_quota_v1(system, monkeypatch):
    (system / "cgroup").write_text("3:cpu,cpuacct:/a\n0::/\n")
    assert cgroups.cpu_quota() is None
    folder = system / "groups" / "cpu" / "a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(8), raising=False)
    for microseconds, quota, n_processors in [(-1, None, 8), (250_000, 2.5, 3), (10_000, 0.1, 1)]:
        (folder / "cpu.cfs_quota_us").write_text(f"{microseconds}\n")
        assert cgroups.cpu_quota() == quota and threads._n_processors() == n_processors
