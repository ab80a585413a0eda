"""Worker threads: work is shared out, BLAS is held back meanwhile, errors come through, nobody waits for ever."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import weakref

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
def test_causal_chunks_are_balanced(n_workers, shape):
    parts = tiled_matmul._parts(shape, 2048, 4, 64)
    done = np.zeros(shape, int)
    busy = [0] * n_workers
    for part in parts:
        done[part] += 1
        busy[busy.index(min(busy))] += done[part].size  # whoever is done first takes the next
    assert (done == 1).all()
    assert max(busy) <= 1.07 * done.size / n_workers


def blas_threads() -> list[int]:
    return [library.num_threads for library in threads.blas_libraries()]


@pytest.mark.parametrize("n_items", [0, 1, 2, 7, 100])
def test_parallel_for_processes_every_item_once(n_workers, n_items):
    received = []
    threads.parallel_for(received.append, range(n_items))
    assert sorted(received) == list(range(n_items))


def test_all_workers_run_concurrently(n_workers):
    everyone = threading.Barrier(n_workers)  # passes only when all are there
    threads.parallel_for(lambda item: everyone.wait(timeout=30), range(n_workers))


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


def test_blas_has_one_thread_inside_parallel(n_workers):
    before = blas_threads()
    inside = []
    threads.parallel_for(lambda item: inside.extend(blas_threads()), range(4))
    assert blas_threads() == before
    assert set(inside) <= {1}


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


def test_blas_limit_applies_to_any_calling_thread(n_workers):
    """Also where another thread was the first to do so and is alive, which threadpoolctl minds."""
    inside = []
    other = threading.Thread(target=threads.parallel_for, args=(lambda item: inside.extend(blas_threads()), range(4)))
    threads.parallel_for(lambda item: None, range(4))
    other.start()
    other.join()
    assert set(inside) <= {1}


def test_blas_limit_is_lifted_after_an_error(n_workers):
    before = blas_threads()
    with pytest.raises(ZeroDivisionError):
        threads.parallel_for(lambda item: 1 // item, range(4))
    assert blas_threads() == before


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
        other = threading.Thread(target=lambda: beside.append(threads.in_worker()))
        other.start()
        other.join()

    threads.parallel_for(work, range(n_workers))
    assert inside == [True] * n_workers
    assert beside == [False] * n_workers
    assert not threads.in_worker()


@pytest.mark.slow_except(3)
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

    for _ in range(3):
        with pytest.raises(KeyError, match=str(bad)):
            threads.parallel_for(work, range(10))
    received = []
    threads.parallel_for(received.append, range(10))
    assert sorted(received) == list(range(10))


def test_concurrent_callers(n_workers):
    received = []
    callers = [
        threading.Thread(target=lambda: [threads.parallel_for(received.append, range(10)) for _ in range(50)])
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(received) == sorted([*range(10)] * 100)


def test_second_caller_waits(monkeypatch, n_workers):
    """With one worker nobody shares anything, and nobody waits."""
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
    names = ("TRICYCLE_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120)


# -------------------------------------------------------------------- interrupts
needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signals to threads")
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


@needs_signals
def test_interrupt_while_waiting_for_another_caller():
    code = """
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
"""
    result = run_with(INTERRUPTED + code, TRICYCLE_NUM_THREADS="2")
    assert result.stdout.split() == ["interrupted", "True"], result.stderr


@needs_signals
def test_interrupt_while_waiting_for_workers():
    """After their work, for it goes on in arrays that the caller may free."""
    code = """
done = []
def work(item):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(1)
        done.append(item)
    else:
        time.sleep(0.1)
threading.Thread(target=interrupt).start()
try:
    threads.parallel_for(work, range(2))
except KeyboardInterrupt:
    print("interrupted", *done)
check()
"""
    result = run_with(INTERRUPTED + code, TRICYCLE_NUM_THREADS="2")
    words = result.stdout.split()
    assert (words[0], words[-1], len(words)) == ("interrupted", "True", 3), result.stderr


# -------------------------------------------------------------------- the number of threads


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRICYCLE_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"TRICYCLE_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
    ],
)
def test_environment_variables_set_the_number_of_threads(variables, expected):
    code = "from tricycle_accelerators import threads; print(threads.n_threads())"
    assert run_with(code, **variables).stdout.split() == [str(expected)]


FIRST_CALLS = {
    "our own hold": "with threads.single_blas_thread(): threads.n_threads()",
    "shared work": "threads.parallel_for(lambda item: threads.n_threads(), range(4))",
    "an operand of 16 bits": "kernels.matmul_operand(np.ones((300, 300), np.float32), 'bfloat16')",
    "Muon's step": "from tricycle.kernels import muon; muon.orthogonalize(np.ones((2, 64, 64), np.float32))",
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


@pytest.mark.slow_except(3)
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


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_bad_number_of_threads_is_rejected(value):
    result = run_with("from tricycle_accelerators import threads; threads.n_threads()", TRICYCLE_NUM_THREADS=value)
    assert re.search(f"ValueError: TRICYCLE_NUM_THREADS: .*whole number.*{re.escape(repr(value))}", result.stderr)


def test_matmul_without_threadpoolctl():
    code = "import sys; sys.modules['threadpoolctl'] = None; from tricycle import kernels;"
    code += "from tricycle_accelerators import threads; import numpy as np;"
    code += "a = np.ones((300, 300), np.float32); print(threads.blas_libraries(), kernels.matmul(a, a)[0, 0])"
    assert run_with(code).stdout.split() == ["()", "300.0"]


@pytest.mark.parametrize("n", ["1", "2", "5"])
def test_parallel_for_leaves_blas_threads_unchanged(n):
    code = """
from tricycle_accelerators import threads
before = [library.num_threads for library in threads.blas_libraries()]
n = threads.n_threads()
threads.parallel_for(lambda item: None, range(9))
print(n, before == [library.num_threads for library in threads.blas_libraries()])
"""
    assert run_with(code, TRICYCLE_NUM_THREADS=n).stdout.split() == [n, "True"]


# -------------------------------------------------------------------- forks
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
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


@needs_fork
def test_forked_process_starts_its_own_threads():
    code = """
threads.parallel_for(lambda item: None, range(4))
child = os.fork()
if child == 0:
    os._exit(0 if works() else 1)
print(works(), status(child))
"""
    assert run_with(FORKED + code, TRICYCLE_NUM_THREADS="2").stdout.split() == ["True", "0"]


@needs_fork
def test_fork_while_another_thread_is_in_parallel():
    """What the other thread held, its turn and BLAS, is free there."""
    code = """
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
"""
    assert run_with(FORKED + code, TRICYCLE_NUM_THREADS="2").stdout.split() == ["True", "0"]


@needs_fork
def test_fork_inside_parallel_raises_in_the_child():
    code = """
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
    os._exit(7 if "forked" in str(error) and child == 0 and works() else 1)
if child == 0:
    os._exit(2)
print(works(), status(child))
"""
    assert run_with(FORKED + code, TRICYCLE_NUM_THREADS="2").stdout.split() == ["True", "7"]


# -------------------------------------------------------------------- the same bits
TRAIN = """
import hashlib, numpy as np
from tricycle import to_tensor
from tricycle.configs import GPTConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
model = GPT(GPTConfig(vocab_size=300, context_window=160, embedding_dim=96, n_heads=3, n_layers=2, batch_size=8))
rng, optimiser = np.random.default_rng(0), AdamW(1e-3)
for _ in range(3):
    ids = rng.integers(0, 300, (2, 8, 160))
    CrossEntropy()(to_tensor(ids[0], dtype=int), model(to_tensor(ids[1], dtype=int))).backward()
    model.update(optimiser)
print(hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest())
"""


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_training_is_bit_reproducible(n):
    first, second = (run_with(TRAIN, TRICYCLE_NUM_THREADS=n) for _ in range(2))
    assert first.stdout == second.stdout and len(first.stdout) == 65, first.stderr


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


@pytest.mark.slow_except(2)
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


AT_ONCE = """
import hashlib, sys, threading
import numpy as np
from tricycle import to_tensor
from tricycle.configs import GPTConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimiser_rules import Muon
from tricycle.optimisers import clip_gradients
from tricycle.optimisers import AdamW
from tricycle.sequences.attentions import LuongAttention
from tricycle.sequences.seq2seq import Seq2SeqAttention

def new_gpt(optimiser, **options):
    sizes = dict(vocab_size=500, context_window=128, embedding_dim=128, n_heads=2, n_layers=2, batch_size=8)
    model = GPT(GPTConfig(**sizes, **options))
    rng = np.random.default_rng(1)

    def loss():
        inputs, labels = rng.integers(0, 500, (2, 8, 128))
        return CrossEntropy()(to_tensor(labels, dtype=int), model(to_tensor(inputs, dtype=int)))

    return model, optimiser, loss

def new_translator():
    generator = np.random.default_rng(2)
    attention = LuongAttention(128, 256, generator=generator)
    model = Seq2SeqAttention(attention, 300, 400, 96, 128, attend_before_step=False, generator=generator)
    rng = np.random.default_rng(3)

    def loss():
        source, target = rng.integers(0, 300, (48, 31)), rng.integers(0, 400, (48, 31))
        return CrossEntropy()(to_tensor(target[:, 1:], dtype=int), model(source, target[:, :-1]))

    return model, AdamW(1e-3), loss

NEW = {
    "gpt": lambda: new_gpt(AdamW(1e-3)),
    "other gpt": lambda: new_gpt(Muon(1e-3), softmax="adaptive", activation="relu_squared"),
    "translator": new_translator,
}

def train(name, found):
    model, optimiser, loss = NEW[name]()
    for _ in range(4):
        loss().backward()
        clip_gradients(model, 0.1)
        model.update(optimiser)
    found[name] = hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()

alone = {}
for name in NEW:
    train(name, alone)
for _ in range(3):
    for pair in (("gpt", "other gpt"), ("gpt", "translator")):
        found = {}
        trainings = [threading.Thread(target=train, args=(name, found)) for name in pair]
        for training in trainings:
            training.start()
        for training in trainings:
            training.join()
        print(*(name if found[name] == alone[name] else "CHANGED" for name in pair), sep=", ")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [pytest.param("1", marks=pytest.mark.nightly), "2", pytest.param("3", marks=pytest.mark.nightly)]
)
def test_concurrently_trained_models_are_bit_identical_to_separate_ones(n):
    result = run_with(AT_ONCE, TRICYCLE_NUM_THREADS=n)
    assert result.stdout.splitlines() == ["gpt, other gpt", "gpt, translator"] * 3, result.stderr


TRAIN_GENERATE_SERVE = """
import asyncio, hashlib, threading
import numpy as np
from tricycle import to_tensor
from tricycle.configs import GPTConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.sampling import SamplingParams
from tricycle.tokeniser import BPETokeniser
from tricycle_serve.completion_requests import SequenceRequest
from tricycle_serve.engine import EngineLimits, GenerationEngine

def new_model(**options):
    return GPT(GPTConfig(vocab_size=257, context_window=128, embedding_dim=128, n_heads=2, n_layers=2, **options))

def train():
    model, optimiser, rng = new_model(), AdamW(1e-3), np.random.default_rng(1)
    for _ in range(6):
        inputs, labels = (to_tensor(ids, dtype=int) for ids in rng.integers(0, 257, (2, 8, 64)))
        model.loss(inputs, labels).backward()
        model.update(optimiser)
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()

def write():
    return [*generate(new_model(n_key_heads=1, positions="rotary"), [1, 2, 3], 100, SamplingParams(seed=5))]

def serve():
    engine = GenerationEngine(new_model(), BPETokeniser(257), EngineLimits())

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

def run(i, found):
    found[i] = JOBS[i]()

JOBS = [train, write, serve, train, write, serve]
alone = [job() for job in JOBS]
for _ in range(3):
    found = [None] * len(JOBS)
    workers = [threading.Thread(target=run, args=(i, found)) for i in range(len(JOBS))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(*("equal" if ours == other else job.__name__ for job, ours, other in zip(JOBS, found, alone)))
"""


@pytest.mark.slow
def test_threads_that_train_generate_and_serve_give_the_results_of_separate_ones():
    pytest.importorskip("starlette")
    result = run_with(TRAIN_GENERATE_SERVE, TRICYCLE_NUM_THREADS="2")
    assert result.stdout.splitlines() == [" ".join(["equal"] * 6)] * 3, result.stderr
