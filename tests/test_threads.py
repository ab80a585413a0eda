"""Worker threads: work is divided, BLAS has one thread meanwhile, errors are raised, no thread waits forever."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

from tricycle import kernels
from tricycle.einsum import Einsum
from tricycle.kernels import ScoreOptions, muon
from tricycle.kernels import row_attention as row_kernels
from tricycle.sequences.recurrent import LSTM
from tricycle.tensor import to_tensor
from tricycle_accelerators import chunks, threads
from tricycle_accelerators.compiled import tiled_matmul


# -------------------------------------------------------------------- worker threads
@pytest.fixture(params=[1, 2, 3])
def n_workers(request, monkeypatch):
    monkeypatch.setattr(threads, "n_threads", lambda: request.param)
    yield request.param


@pytest.mark.parametrize("n_rows, row_size", [(0, 5), (1, 1), (512, 768), (4096, 1536), (589_824, 1), (7, 10**6)])
def test_chunks_are_balanced_over_threads(n_workers, n_rows, row_size):
    parts = chunks.row_chunks(n_rows, row_size)
    sizes = [len(range(n_rows)[part]) for part in parts]
    assert sum(sizes) == n_rows and all(sizes)
    assert all(size == 1 or size * row_size <= chunks.CHUNK_SIZE for size in sizes)
    if 1 < len(sizes) < n_rows:
        assert len(sizes) % n_workers == 0 and max(sizes) - min(sizes) < len(sizes)


@pytest.mark.parametrize("shape", [(4096, 1152), (512, 50304), (2048, 512), (128, 2112)])
def test_parts_of_a_tiled_product_are_balanced(n_workers, shape):
    parts = tiled_matmul._parts(shape, 4, 64)
    done = np.zeros(shape, int)
    busy = [0] * n_workers
    for part in parts:
        done[part] += 1
        busy[busy.index(min(busy))] += done[part].size  # the first free thread takes the next
    assert (done == 1).all()
    assert max(busy) <= 1.07 * done.size / n_workers


def blas_threads() -> list[int]:
    return [library.num_threads for library in threads.blas_libraries()]


def interrupted(module, n: int, function) -> bool:
    """Call a function with an interrupt at the n-th call, or after the n-th C function, in a module; return if any."""

    def count(frame, event, arg):
        nonlocal n
        if event in ("call", "c_return") and frame.f_code.co_filename == module.__file__:
            n -= frame.f_code.co_name != "__del__"  # which ignores errors
            if n == 0:
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def run_threads(*targets) -> None:
    """Run functions in one thread each, and wait for them."""
    running = [threading.Thread(target=target) for target in targets]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


@pytest.mark.parametrize("n_items", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("calls_blas", [True, False])
def test_parallel_for_processes_every_item_once(n_workers, n_items, calls_blas):
    received, n_holders = [], []

    def work(item):
        received.append(item)
        n_holders.append(len(threads.blas_limit.holders))

    threads.parallel_for(work, range(n_items), calls_blas)
    assert sorted(received) == list(range(n_items))
    assert set(n_holders) <= {int(calls_blas) + threads.blas_limit.is_permanent}


def test_workers_use_the_errstate_of_the_caller(n_workers):
    everyone = threading.Barrier(n_workers)

    def overflow(item):
        everyone.wait(timeout=30)
        np.full(3, 1e38, np.float32) * np.float32(1e38)

    with np.errstate(all="ignore"):
        threads.parallel_for(overflow, range(n_workers))  # a warning would be an error here
    everyone.reset()
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        threads.parallel_for(overflow, range(n_workers))


@pytest.mark.parametrize("from_another_thread", [False, True])
def test_blas_has_one_thread_inside_parallel(n_workers, from_another_thread):
    """Also where another thread was the first to limit it and is alive, which threadpoolctl minds."""
    before, inside = blas_threads(), []
    threads.parallel_for(lambda item: None, range(4))
    share = partial(threads.parallel_for, lambda item: inside.extend(blas_threads()), range(4))
    run_threads(share) if from_another_thread else share()
    assert blas_threads() == before and set(inside) <= {1}


class PerThread(threading.local):
    """A BLAS each of whose threads has a number of its own, as with OpenMP."""

    threading_layer = "openmp"
    num_threads = 5

    def set_num_threads(self, number):
        self.num_threads = number


def test_per_thread_blas_limit_applies_in_every_worker(n_workers, monkeypatch):
    library = PerThread()
    monkeypatch.setattr(threads, "blas_libraries", lambda: (library,))
    monkeypatch.setattr(threads, "_started", [])  # each helper holds the libraries that it finds when it starts
    everyone = threading.Barrier(n_workers)
    counts = []

    def work(item):
        everyone.wait(timeout=30)
        counts.append(library.num_threads)

    for _ in range(2):
        threads.parallel_for(work, range(n_workers))
    with threads.single_blas_thread(), threads.single_blas_thread():
        counts.append(library.num_threads)
    assert counts == [1] * (2 * n_workers + 1)
    assert library.num_threads == 5


def test_blas_limit_is_lifted_by_the_last_caller():
    before = blas_threads()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with threads.single_blas_thread():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with threads.single_blas_thread():
        thread.start()
        assert entered.wait(30)
    assert set(blas_threads()) <= {1}
    leave.set()
    thread.join()
    assert blas_threads() == before


def test_nested_parallel_runs_in_the_same_thread(n_workers):
    done = []
    threads.parallel_for(lambda i: threads.parallel_for(lambda j: done.append((i, j)), range(3)), range(4))
    assert sorted(done) == [(i, j) for i in range(4) for j in range(3)]


def test_in_parallel_reports_the_current_thread(n_workers):
    everyone = threading.Barrier(n_workers)
    inside, beside = [], []

    def work(item):
        everyone.wait(timeout=30)
        inside.append(threads.in_worker())
        run_threads(lambda: beside.append(threads.in_worker()))

    threads.parallel_for(work, range(n_workers))
    assert inside == [True] * n_workers
    assert beside == [False] * n_workers
    assert not threads.in_worker()


@pytest.mark.nightly_except(3)
def test_workers_release_their_arrays(n_workers):
    everyone = threading.Barrier(n_workers)
    array = np.zeros(10)
    gone = weakref.ref(array)
    threads.parallel_for(lambda item, array=array: everyone.wait(timeout=30), range(n_workers))
    del array
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("bad", [0, 5])
def test_errors_propagate_and_workers_survive(n_workers, bad):
    def work(item):
        if item == bad:
            raise KeyError(item)

    before, received = blas_threads(), []
    for _ in range(3):
        with pytest.raises(KeyError, match=str(bad)):
            threads.parallel_for(work, range(10))
    threads.parallel_for(received.append, range(10))
    assert sorted(received) == list(range(10)) and blas_threads() == before


def test_concurrent_callers(n_workers):
    received = []
    run_threads(*[lambda: [threads.parallel_for(received.append, range(10)) for _ in range(50)]] * 2)
    assert sorted(received) == sorted([*range(10)] * 100)


def test_second_caller_waits(n_workers):
    """With one worker, no work is divided and no thread waits."""
    entered, leave, finished = threading.Event(), threading.Event(), threading.Event()

    def stay(item):
        entered.set()
        leave.wait(30)

    def come_second():
        threads.parallel_for(lambda item: None, range(4))
        finished.set()

    first = threading.Thread(target=threads.parallel_for, args=(stay, range(4)))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=come_second)
    second.start()
    assert finished.wait(0.3) == (n_workers == 1)
    leave.set()
    first.join()
    second.join()
    assert finished.is_set()


def run_with(code: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a program in a new process, with no other settings of threads than `variables`."""
    names = ("TRICYCLE_NUM_THREADS", "TRICYCLE_TUNE_HOST", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=300)


# -------------------------------------------------------------------- interrupts
INTERRUPTED = """
import signal, threading, time
from tricycle_accelerators import threads
main = threading.main_thread().ident
def interrupt():
    time.sleep(0.3)
    signal.pthread_kill(main, signal.SIGINT)
def check():
    seen = []
    threads.parallel_for(seen.append, range(10))
    print(sorted(seen) == list(range(10)), *{lib.num_threads for lib in threads.blas_libraries()} - before)
before = {lib.num_threads for lib in threads.blas_libraries()}
"""


WAITS = {
    "for another caller": """
leave = threading.Event()
other = threading.Thread(target=threads.parallel_for, args=(lambda item: leave.wait(60), range(4)))
other.start()
time.sleep(0.2)
threading.Thread(target=interrupt).start()
try:
    threads.parallel_for(print, range(4))
except KeyboardInterrupt:
    print("interrupted")
leave.set()
other.join()
check()
""",
    # The interrupt comes after their work, for it goes on in arrays that the caller may free.
    "for workers": """
done, begun = [], threading.Event()
def work(item):
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        time.sleep(1)
        done.append(item)
    else:
        begun.wait(60)
        threading.Thread(target=interrupt).start()
try:
    threads.parallel_for(work, range(2))
except KeyboardInterrupt:
    print("interrupted" if len(done) == 1 else done)
check()
""",
    "to hand over work": """
threads.parallel_for(time.sleep, [0, 0])
usual = threading.Lock
def interrupt():
    threading.Lock = usual
    raise KeyboardInterrupt
threading.Lock = interrupt
try:
    threads.parallel_for(print, range(4))
except KeyboardInterrupt:
    print("interrupted")
check()
""",
}


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signals to threads")
@pytest.mark.parametrize("wait", WAITS)
def test_interrupt_while_waiting(wait):
    result = run_with(INTERRUPTED + WAITS[wait], TRICYCLE_NUM_THREADS="2")
    assert result.stdout.split() == ["interrupted", "True"], result.stderr


def test_helper_finishes_what_an_interrupted_caller_has_left():
    helper, leave, done = threads._Helper(), threading.Event(), []
    helper.begin(lambda: leave.wait(60))
    threading.Timer(0.2, leave.set).start()
    helper.begin(lambda: done.append("work"))
    assert (helper.end(), done) == ([], ["work"])


@pytest.mark.parametrize("calls_blas", [False, True])
def test_work_after_an_interrupt_is_done_with_the_same_blas_threads(calls_blas, monkeypatch):
    monkeypatch.setattr(threads, "n_threads", lambda: 2)

    def share() -> list[int]:
        done: list[int] = []
        threads.parallel_for(lambda item: time.sleep(0.001) or done.append(item), range(3), calls_blas)
        return sorted(done)

    before = blas_threads()
    for n in itertools.count(1):
        was_interrupted = interrupted(threads, n, share)
        assert (blas_threads(), share()) == (before, [0, 1, 2]), n
        if not was_interrupted:
            break


# -------------------------------------------------------------------- the number of threads
@pytest.fixture
def n_threads_with(monkeypatch):
    """Return a function that counts the threads anew with environment variables."""

    def count(**variables: str) -> int:
        for name in ("TRICYCLE_NUM_THREADS", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(threads, "_n_threads", None)
        return threads.n_threads()

    return count


def test_environment_variables_set_the_number_of_threads(n_threads_with):
    assert n_threads_with(TRICYCLE_NUM_THREADS="3") == 3
    assert n_threads_with(TRICYCLE_NUM_THREADS="1", OMP_NUM_THREADS="2") == 1
    if threads.blas_libraries():
        assert n_threads_with(OMP_NUM_THREADS="2") == n_threads_with(OMP_NUM_THREADS="2,1") == 2
    for value in ("0", "-1", "many", "1.5"):
        with pytest.raises(ValueError, match=f"TRICYCLE_NUM_THREADS: .*whole number.*'{value}'"):
            n_threads_with(TRICYCLE_NUM_THREADS=value)


FIRST_CALLS = {
    "our own hold": "with threads.single_blas_thread(): threads.n_threads()",
    "shared work": "threads.parallel_for(lambda item: threads.n_threads(), range(4))",
    "a product": "kernels.matmul(a, a)",
    "a hold for good": "assert threads.limit_blas_until_exit(); threads.n_threads()",
    "a user's limit": """
with threadpool_limits(1):
    assert threads.n_threads() == 1
    kernels.matmul(a, a)
""",
    "a hold in a user's limit": """
with threadpool_limits(1), threads.single_blas_thread():
    assert threads.n_threads() == 1
""",
    "another thread's hold": """
held, leave = threading.Event(), threading.Event()
def hold():
    with threads.single_blas_thread():
        held.set()
        leave.wait(60)
other = threading.Thread(target=hold)
other.start()
held.wait(60)
threads.n_threads()
leave.set()
other.join()
""",
}


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_number_of_threads_does_not_depend_on_the_first_call(name):
    code = f"""
import threading
import numpy as np
from threadpoolctl import threadpool_limits
from tricycle import kernels
from tricycle_accelerators import threads
threads._n_processors = lambda: 2
for library in threads.blas_libraries():
    threads.set_blas_threads(library, 2)
a = np.ones((600, 600), np.float32)
{FIRST_CALLS[name]}
threads.parallel_for(lambda item: None, range(4))
helpers = [thread for thread in threading.enumerate() if thread.name == "tricycle"]
print(threads.n_threads(), len(helpers))
"""
    result = run_with(code)
    assert result.stdout.split() == ["2", "1"], result.stderr


def test_matmul_without_threadpoolctl():
    code = "import sys; sys.modules['threadpoolctl'] = None; from tricycle import kernels;"
    code += "from tricycle_accelerators import threads; import numpy as np;"
    code += "a = np.ones((300, 300), np.float32); print(threads.blas_libraries(), kernels.matmul(a, a)[0, 0])"
    assert run_with(code).stdout.split() == ["()", "300.0"]


# -------------------------------------------------------------------- forks
FORKED = """
import os, sys, threading, time
from tricycle_accelerators import threads
def status(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def works():
    seen = []
    threads.parallel_for(seen.append, range(4))
    return sorted(seen) == [0, 1, 2, 3]
before = [lib.num_threads for lib in threads.blas_libraries()]
"""


FORKS = {
    "after shared work": """
threads.parallel_for(lambda item: None, range(4))
child = os.fork()
if child == 0:
    os._exit(0 if works() else 1)
print(works(), status(child))
""",
    # What the other thread held, its turn and BLAS, is free in the child.
    "while another thread shares work": """
leave = threading.Event()
other = threading.Thread(target=threads.parallel_for, args=(lambda item: leave.wait(60), range(4)))
other.start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    same = before == [lib.num_threads for lib in threads.blas_libraries()]
    os._exit(0 if same and works() else 1)
found = status(child)
leave.set()
other.join()
print(works(), found)
""",
    "inside shared work, which raises in the child": """
first = threading.Barrier(2)
def work(item):
    first.wait(30)
    if threading.current_thread() is threading.main_thread():
        global child
        child = os.fork()
    else:
        time.sleep(0.5)
child = None
try:
    threads.parallel_for(work, range(2))
except RuntimeError as error:
    os._exit(0 if "forked" in str(error) and child == 0 and works() else 1)
if child == 0:
    os._exit(2)
print(works(), status(child))
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("moment", FORKS)
def test_forked_process_starts_its_own_threads(moment):
    assert run_with(FORKED + FORKS[moment], TRICYCLE_NUM_THREADS="2").stdout.split() == ["True", "0"]


# -------------------------------------------------------------------- the same bits
JOBS = """
import asyncio, functools, hashlib, threading
import numpy as np
from tricycle import to_tensor
from tricycle.configs import GPTConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimiser_rules import Muon
from tricycle.optimisers import AdamW, clip_gradients
from tricycle.sampling import SamplingParams
from tricycle.sequences.attentions import LuongAttention
from tricycle.sequences.seq2seq import Seq2SeqAttention
from tricycle.tokeniser import BPETokeniser

def new_gpt(**options):
    return GPT(GPTConfig(vocab_size=257, context_window=128, embedding_dim=128, n_heads=2, n_layers=2, **options))

def train(model, optimiser, draw):
    rng = np.random.default_rng(1)
    for _ in range(4):
        *inputs, labels = draw(rng)
        CrossEntropy()(to_tensor(labels, dtype=int), model(*inputs)).backward()
        clip_gradients(model, 0.1)
        model.update(optimiser)
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()

def train_gpt(optimiser=AdamW, **options):
    return train(new_gpt(**options), optimiser(1e-3), lambda rng: rng.integers(0, 257, (2, 8, 128)))

def train_translator():
    def draw(rng):
        source, target = rng.integers(0, 300, (48, 31)), rng.integers(0, 400, (48, 31))
        return source, target[:, :-1], target[:, 1:]

    generator = np.random.default_rng(2)
    attention = LuongAttention(128, 256, generator=generator)
    model = Seq2SeqAttention(attention, 300, 400, 96, 128, attend_before_step=False, generator=generator)
    return train(model, AdamW(1e-3), draw)

def write():
    return [*generate(new_gpt(n_key_heads=1, positions="rotary"), [1, 2, 3], 100, SamplingParams(seed=5))]

def serve():
    from tricycle_serve.completion_requests import SequenceRequest
    from tricycle_serve.engine import EngineLimits, GenerationEngine

    engine = GenerationEngine(new_gpt(), BPETokeniser(257), EngineLimits())

    async def complete(token):
        request = SequenceRequest([token, 2, 3], 60, PenalizedSamplingParams(temperature=0.0))
        deltas = [delta async for some in engine.submit([request], 60).outputs() for delta in some]
        return "".join(delta.text for delta in deltas)

    async def complete_all():
        return await asyncio.gather(*map(complete, range(4)))

    engine.start()
    try:
        return asyncio.run(complete_all())
    finally:
        engine.close()
        engine.join(60)

train_other_gpt = functools.partial(train_gpt, Muon, softmax="adaptive", activation="relu_squared")
"""
AT_ONCE = """
jobs = [JOBS]
alone = [job() for job in jobs]
for _ in range(3):
    found = {}
    run = lambda i: found.update({i: jobs[i]()})
    workers = [threading.Thread(target=run, args=[i]) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(*("equal" if found.get(i) == result else jobs[i] for i, result in enumerate(alone)))
"""


@pytest.mark.slow
@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_training_is_bit_reproducible(n):
    first, second = (run_with(f"{JOBS}print(train_gpt())", TRICYCLE_NUM_THREADS=n) for _ in range(2))
    assert first.stdout == second.stdout and len(first.stdout) == 65, first.stderr


@pytest.mark.nightly_except(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [pytest.param("1", marks=pytest.mark.nightly), "2", pytest.param("3", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "jobs", ["train_gpt, train_other_gpt", "train_gpt, train_translator", "train_gpt, write, serve, " * 2]
)
def test_concurrent_jobs_give_bit_identical_results_to_separate_ones(jobs, n):
    if "serve" in jobs:
        pytest.importorskip("starlette")
    result = run_with(JOBS + AT_ONCE.replace("JOBS", jobs), TRICYCLE_NUM_THREADS=n)
    assert result.stdout.splitlines() == [" ".join(["equal"] * len(jobs.split()))] * 3, result.stderr


def attend(draw, dtype):
    """Few queries, one item, one head: too few scores to be shared."""
    q, grad = draw(1, 13, 1, 301), draw(1, 13, 1, 301)
    k, v = draw(1, 1999, 1, 301), draw(1, 1999, 1, 301)
    score_options = ScoreOptions(k.shape[3] ** -0.5)
    out, logsumexp = kernels.attention(q, k, v, score_options, False)
    gradients = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    kernels.attention_backward(grad, q, k, v, out, logsumexp, score_options, *gradients)
    rows = kernels.softmax
    row_gradients = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    row_out = row_kernels.row_attention(q, k, v, score_options, rows)
    to_scores = lambda grad, scores, weights: kernels.softmax_backward(grad, weights)
    row_kernels.row_attention_backward(grad, q, k, v, score_options, rows, to_scores, *row_gradients)
    return out, *gradients, row_out, *row_gradients


def differentiate(op, *arrays):
    inputs = [to_tensor(array, dtype=array.dtype) for array in arrays]
    result = op(*inputs)
    result.backward()
    return result.array, *(x.grad.array for x in inputs)


def recur(draw, dtype):
    layer = LSTM(301, 203, generator=np.random.default_rng(1))
    for parameter in layer.parameters():
        parameter.array = parameter.array.astype(dtype)
    result = layer(to_tensor(draw(37, 19, 301), dtype=dtype))[0]
    result.backward()
    return result.array, *(p.grad.array for p in layer.parameters())


# Sizes for which OpenBLAS gives other bits with one thread than with two, in one of the dtypes.
USE_BLAS = {
    "matmul": lambda draw, dtype: [kernels.matmul(draw(300, 500), draw(500, 300))],
    "matmul of many terms": lambda draw, dtype: [kernels.matmul(draw(100, 1001), draw(1001, 100))],
    "matmul of a row": lambda draw, dtype: [kernels.matmul(draw(1, 1003), draw(1003, 201))],
    "matmul of some rows": lambda draw, dtype: [kernels.matmul(draw(7, 1003), draw(20_001, 1003).T)],
    "matmul of a column": lambda draw, dtype: [kernels.matmul(draw(3000, 1001).T, draw(3000, 1))],
    "matmul to a number": lambda draw, dtype: [kernels.matmul(draw(1, 100_003), draw(100_003, 1))],
    "sum_squares": lambda draw, dtype: [kernels.sum_squares(draw(100_003)), kernels.sum_squares(draw(1_000_003))],
    "sum_rows": lambda draw, dtype: [kernels.sum_rows(draw(3001, 1003))],
    "orthogonalize": lambda draw, dtype: [muon.orthogonalize(draw(2, 301, 503))],
    "attention": attend,
    "einsum": lambda draw, dtype: differentiate(Einsum("ij,jk->ik"), draw(300, 500), draw(500, 300)),
    "batched einsum": lambda draw, dtype: differentiate(Einsum("bij,bjk->bik"), draw(3, 300, 501), draw(3, 501, 300)),
    "einsum with a vector": lambda draw, dtype: differentiate(Einsum("bij,bj->bi"), draw(2, 999, 1001), draw(2, 1001)),
    "LSTM": recur,
}


@pytest.mark.nightly_except(9)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", USE_BLAS)
def test_results_do_not_depend_on_the_blas_thread_count(name, dtype, monkeypatch):
    """For another thread may be in `parallel`, which holds BLAS to one, or may not."""
    monkeypatch.setattr(threads, "blas_limit", threads._BlasLimit())  # an earlier test may hold it for good
    monkeypatch.setattr(threads, "_n_threads", 2)  # as after the first product of a process
    results = []
    usual = blas_threads()
    try:
        for n in (1, 2, 3):
            for library in threads.blas_libraries():
                threads.set_blas_threads(library, n)
            rng = np.random.default_rng(0)
            arrays = USE_BLAS[name](lambda *shape, rng=rng: rng.standard_normal(shape, dtype), dtype)
            results.append(b"".join(array.tobytes() for array in arrays))
    finally:
        for library, number in zip(threads.blas_libraries(), usual):
            threads.set_blas_threads(library, number)
    assert results[0] == results[1] == results[2]
