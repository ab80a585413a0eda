"""Ranks with a GPU each, on the fake device, with fakes of NCCL and MPI that check their arguments.

Ranks are played by threads. What the fake NCCL is given are addresses, numbers of elements and kinds, as the real one
is: it adds up what lies there. Its streams note who waited for whom.
"""

import ctypes
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import fake_device
import numpy as np
import pytest
from fake_device import FakeArray, fake_module
from test_fake_device import device  # noqa: F401 (a fixture)
from test_processes import CONFIG, TOKENS, Player, play

from tricycle.distributed.processes import ProcessGroup
from tricycle.training_state import new_state, train_step
from tricycle_cli.distributed import VISIBLE, share_gpus
from tricycle_mpi.ranks import MPIProcessGroup
from tricycle_mpi.transports import (
    TRANSPORT_VARIABLE,
    CUDAAwareTransport,
    HostTransport,
    NCCLTransport,
    select_gpu_transport,
)

pytestmark = pytest.mark.usefixtures("device")
KINDS = {7: ctypes.c_float, 8: ctypes.c_double}
HERE = threading.local()


class Stream:
    """One that only notes: what was done so far, and which events it has waited for."""

    def __init__(self, non_blocking=False):
        self.ptr, self.n_done, self.seen = id(self), 0, {}
        assert non_blocking or not hasattr(HERE, "current")

    def wait_event(self, event):
        self.seen[event.stream] = max(event.n_done, self.seen.get(event.stream, 0))

    def synchronize(self):
        HERE.log.append("synchronize")


class Event:
    def __init__(self, disable_timing):
        assert disable_timing

    def record(self, stream):
        stream.n_done += 1
        self.stream, self.n_done = stream.ptr, stream.n_done


def current():
    """Of this thread's rank: everything that computes has been put there."""
    if not hasattr(HERE, "current"):
        HERE.current, HERE.log = Stream(), []
    HERE.current.n_done += 1  # since it was last looked at, the model has computed something
    return HERE.current


class Communicator:
    """What NCCL's is, for numbers at addresses."""

    def __init__(self, size, unique, rank):
        assert unique == b"of rank 0" and (size, rank) == (HERE.player.size, HERE.player.rank)

    def _array(self, sendbuf, recvbuf, count, kind, stream, *same):
        own_stream = HERE.stream
        assert stream == own_stream.ptr != HERE.current.ptr
        assert own_stream.seen[HERE.current.ptr] == HERE.current.n_done, "the array may not be there yet"
        assert sendbuf == recvbuf
        assert len(set(HERE.player.all_gather((count, kind, *same)))) == 1, "ranks sum different things"
        return np.ctypeslib.as_array((KINDS[kind] * count).from_address(sendbuf))

    def allReduce(self, sendbuf, recvbuf, count, kind, op, stream):
        assert op == 0
        array = self._array(sendbuf, recvbuf, count, kind, stream, op)
        array[...] = np.sum(HERE.player.all_gather(array.copy()), axis=0)
        HERE.log.append(("sum", count))

    def broadcast(self, sendbuf, recvbuf, count, kind, root, stream):
        array = self._array(sendbuf, recvbuf, count, kind, stream, root)
        array[...] = HERE.player.all_gather(array.copy())[root]
        HERE.log.append(("broadcast", count))


def new_stream(non_blocking):
    current()
    HERE.stream = Stream(non_blocking)
    return HERE.stream


def cuda_of(has_nccl=True, bus=None):
    nccl = SimpleNamespace(available=has_nccl, NCCL_SUM=0, NCCL_FLOAT32=7, NCCL_FLOAT64=8)
    nccl.NcclCommunicator = Communicator
    nccl.get_unique_id = lambda: f"of rank {HERE.player.rank}".encode()
    place = lambda: SimpleNamespace(pci_bus_id=bus or f"00:{HERE.player.rank}")
    return SimpleNamespace(nccl=nccl, Stream=new_stream, Event=Event, get_current_stream=current, Device=place)


class Requests:
    """MPI's communicator: calls that begin take the host's arrays alone, and those that block take the device's."""

    def Iallreduce(self, in_place, host):
        assert in_place == "in place" and type(host) is np.ndarray and host.flags.c_contiguous
        host[...] = np.sum(HERE.player.all_gather(host.copy()), axis=0)
        return SimpleNamespace(Test=lambda: True)

    def Ibcast(self, host, rank):
        assert type(host) is np.ndarray and host.flags.c_contiguous
        host[...] = HERE.player.all_gather(host.copy())[rank]
        return SimpleNamespace(Test=lambda: True)

    def Ibarrier(self):
        HERE.player.all_gather(None)
        return SimpleNamespace(Test=lambda: True)

    def Allreduce(self, in_place, array):
        assert in_place == "in place" and type(array) is FakeArray and array.flags.c_contiguous
        assert HERE.log[-1] == "synchronize"
        array.host_array[...] = np.sum(HERE.player.all_gather(array.host_array.copy()), axis=0)

    def Bcast(self, array, rank):
        assert type(array) is FakeArray and array.flags.c_contiguous and HERE.log[-1] == "synchronize"
        array.host_array[...] = HERE.player.all_gather(array.host_array.copy())[rank]


class GPURank(Player):
    """A player whose arrays travel as those of `MPIProcessGroup`."""

    mpi = SimpleNamespace(IN_PLACE="in place")
    wait = MPIProcessGroup.wait
    _transport, start_all_reduce, start_broadcast = (
        MPIProcessGroup._transport,
        MPIProcessGroup.start_all_reduce,
        MPIProcessGroup.start_broadcast,
    )

    def __init__(self, player):
        super().__init__(player.table, player.rank)
        HERE.player, HERE.log = self, []
        self._gradients, self._gpus = Requests(), None
        self._host = HostTransport(self, self._gradients)


@pytest.fixture
def cuda(monkeypatch):
    """The module `cupy.cuda` of the device; a function that changes it."""

    def choose(**how):
        monkeypatch.setattr(type(fake_module), "cuda", cuda_of(**how), raising=False)

    monkeypatch.setattr(
        FakeArray, "data", property(lambda self: SimpleNamespace(ptr=self.host_array.ctypes.data)), False
    )
    monkeypatch.delenv(TRANSPORT_VARIABLE, raising=False)
    choose()
    return choose


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize(
    ("name", "kind", "shard", "optimiser"),
    [  # any two of these meet once at least
        ("", NCCLTransport, False, "adamw"),
        ("", NCCLTransport, True, "muon"),
        ("nccl", NCCLTransport, False, "muon"),
        ("nccl", NCCLTransport, True, "adamw"),
        ("mpi", CUDAAwareTransport, False, "adamw"),
        ("mpi", CUDAAwareTransport, True, "muon"),
        ("host", HostTransport, False, "muon"),
        ("host", HostTransport, True, "adamw"),
    ],
)
def test_gpu_ranks_train_like_a_single_process(cuda, monkeypatch, name, kind, shard, optimiser):
    monkeypatch.setenv(TRANSPORT_VARIABLE, name)
    config = replace(CONFIG, batch_size=2, accumulation_steps=3, dropout=0.1, optimiser=optimiser)

    def act(player):
        processes = GPURank(player) if player.size > 1 else player
        processes.bucket_bytes = 20_000
        state = new_state(config, TOKENS, True, processes=processes, shard_optimiser=shard)
        results = [train_step(state) for _ in range(3)]
        n_reads = len(fake_device.reads)
        numbers = np.array([[each.host_array for each in result] for result in results])
        weights = np.concatenate([parameter.array.host_array.ravel() for parameter in state.model.parameters()])
        if player.size > 1:
            assert type(processes._gpus) is kind
        return numbers, weights, n_reads

    numbers, weights, _ = act(ProcessGroup())
    fake_device.reads.clear()
    several = play(3, act)
    for others, other_weights, n_reads in several:
        np.testing.assert_allclose(others, numbers, rtol=1e-4)
        np.testing.assert_allclose(other_weights, weights, atol=3e-4)
        assert other_weights.tobytes() == several[0][1].tobytes()
        assert (n_reads > 0) == (kind is HostTransport)  # by the others nothing comes to the host


def test_all_reduce_uses_a_separate_stream(cuda):
    """The model's stream waits for the all-reduce only in `wait`."""

    def act(player):
        ranks = GPURank(player)
        array = FakeArray(np.full(5, ranks.rank + 1, np.float32))
        pending = ranks.start_all_reduce(array)
        assert HERE.log == [("sum", 5)] and HERE.stream.ptr not in HERE.current.seen
        pending.make_progress()
        assert HERE.stream.ptr not in HERE.current.seen
        pending.wait()
        assert HERE.current.seen[HERE.stream.ptr] == HERE.stream.n_done
        return array.host_array.tolist()

    assert play(2, act) == [[3.0] * 5] * 2


@pytest.mark.parametrize("name", ["nccl", "mpi", "host"])
@pytest.mark.parametrize(
    "cut", [lambda a: a, lambda a: a.T, lambda a: a[:, ::2], lambda a: a[1:3]], ids=["whole", "turned", "gaps", "rows"]
)
def test_broadcast_of_any_memory_layout(cuda, monkeypatch, name, cut):
    monkeypatch.setenv(TRANSPORT_VARIABLE, name)

    def act(player):
        ranks = GPURank(player)
        held = np.arange(24, dtype=np.float64).reshape(4, 6) * (10 if ranks.rank == 1 else 1)
        ranks.start_broadcast(FakeArray(cut(held)), 1).wait()
        return held

    expected = np.arange(24, dtype=np.float64).reshape(4, 6)
    first, second = play(2, act)
    np.testing.assert_array_equal(cut(first), 10 * cut(expected))
    np.testing.assert_array_equal(second, 10 * expected)
    assert (first == 10 * expected).sum() == (cut(expected) > 0).sum() + 1  # and nothing beside it (zero is itself)


def test_unsupported_nccl_dtypes_raise(cuda):
    def act(player):
        with pytest.raises(TypeError, match=r"NCCL: .*float16, float32, float64.*int64"):
            GPURank(player).start_all_reduce(FakeArray(np.arange(3)))

    play(2, act)


# -------------------------------------------------------------------- choice of the transport
def chosen(size=2):
    def act(player):
        return type(select_gpu_transport(GPURank(player), Requests(), fake_module.cuda))

    return play(size, act)


@pytest.mark.parametrize(
    ("how", "message"), [({"has_nccl": False}, "TRICYCLE_MPI_GPU=nccl: "), ({"bus": "00:7"}, "NCCL.*GPU")], ids=str
)
def test_host_transport_is_used_without_nccl_or_for_ranks_that_share_a_gpu(cuda, monkeypatch, how, message):
    cuda(**how)
    assert chosen() == [HostTransport] * 2
    monkeypatch.setenv(TRANSPORT_VARIABLE, "nccl")
    with pytest.raises(RuntimeError, match=f"{message}.*rank 0, rank 1"):
        chosen()


def test_unknown_transport_is_rejected(cuda, monkeypatch):
    monkeypatch.setenv(TRANSPORT_VARIABLE, "pigeons")
    with pytest.raises(ValueError, match=r"TRICYCLE_MPI_GPU: .*nccl, mpi, host"):
        chosen()


class Told(ProcessGroup):
    """A rank with given results of `all_gather`."""

    def __init__(self, rank, everybody):
        super().__init__()
        self.rank, self.size, self.everybody = rank, len(everybody), everybody

    def all_gather(self, value):
        host = value[0]
        return [(host if here else "another", seen) for here, seen in self.everybody]


def test_each_rank_of_a_machine_has_a_gpu(monkeypatch):
    variables = []
    for rank in range(4):
        monkeypatch.setenv(VISIBLE, "3,5")
        share_gpus(Told(rank, [(True, ["3", "5"]), (False, ["3", "5"]), (True, ["3", "5"]), (True, ["3", "5"])]))
        variables.append(os.environ[VISIBLE])
    assert [variables[0], variables[2], variables[3]] == ["3", "5", "3"]
    monkeypatch.setenv(VISIBLE, "")
    share_gpus(Told(1, [(True, [])] * 2))
    assert os.environ[VISIBLE] == ""
