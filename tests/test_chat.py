"""`tricycle chat`: through pipes, and in a terminal with Ctrl-C."""

import functools
import json
import os
import re
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from programs import one_line, run_here
from tiny_models import smollm2_file, write_folder

from tricycle import generate as generation
from tricycle.checkpoint import save_checkpoint
from tricycle.configs import DebugConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.sampling import SamplingParams
from tricycle.tokeniser import BPETokeniser
from tricycle_cli.chat import Conversation, handle_line
from tricycle_cli.main import MODULE, main
from tricycle_cli.models import DecodingFlags, default_sampling

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "tricycle", "chat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "small", context_window=120)


def talk(folder: Path, stdin: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`python -m tricycle chat` in this process."""
    return run_here(functools.partial(main, MODULE), MODULE, ("chat", folder, *words), cwd, stdin)


def answers(folder: Path, questions: list[str], length: int, system: str | None = None) -> list[str]:
    """What the model answers, computed anew for each question."""
    loaded = load(folder)
    messages = [{"role": "system", "content": system}] if system else []
    given = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        sampling = SamplingParams(0, stop_tokens=2, n_vocab=loaded.tokeniser.n_vocab)
        tokens = generate(loaded.model, loaded.tokeniser.chat(messages), length, sampling)
        text = loaded.tokeniser.decode([token for token in tokens if token != 2])
        messages.append({"role": "assistant", "content": text})
        given.append(text)
    return given


# -------------------------------------------------------------------- through pipes
def test_each_input_line_is_a_message(folder):
    """Run a separate process, whose streams begin in ASCII."""
    questions = ["the quick brown fox", "é🚲 birds", "sing"]
    stdin, environment = "\n".join(questions).encode() + b"\n", {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    words = [*COMMAND, str(folder), "--length", "12"]
    done = subprocess.run(words, input=stdin, capture_output=True, cwd=ROOT, env=environment, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("utf-8") == "".join(f"{text}\n" for text in answers(folder, questions, 12))


def test_each_answer_matches_the_regular_expression(folder):
    pytest.importorskip("llguidance")
    done = talk(folder, "the quick\nbrown fox\n", "--regex", "[0-9]{4}")
    assert re.fullmatch("([0-9]{4}\n){2}", done.stdout), done.stderr


def test_system_message_changes_the_answers(folder):
    questions = ["the quick", "brown"]
    done = talk(folder, "\n".join(questions), "--length", "9", "--system", "small birds")
    expected = answers(folder, questions, 9, "small birds")
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    assert expected != answers(folder, questions, 9)


def test_slash_commands_save_and_reset_the_conversation(folder, tmp_path):
    words = ["the quick", "/save one.json", "/save deep/two.txt", "/reset", "the quick", "/save three.json"]
    words += ["/what", "/help", "/save", "", "   ", "//reset"]
    done = talk(folder, "\n".join(words), "--length", "5", cwd=tmp_path)
    first, second = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("one.json", "three.json"))
    assert first == second
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert first[1]["content"] == answers(folder, ["the quick"], 5)[0]
    text = (tmp_path / "deep" / "two.txt").read_text(encoding="utf-8")
    assert text.startswith(f"user: the quick\n\nassistant: {first[1]['content']}")
    parts = [
        "(saved: one.json)",
        "(new conversation)",
        "unknown command /what",
        "/reset        start",
        "name: /save FILE",
    ]
    assert [part for part in parts if part not in done.stdout] == []
    assert done.stdout.endswith(answers(folder, ["the quick", "/reset"], 5)[1] + "\n")
    assert done.returncode == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_save_rejects_invalid_names_and_does_not_replace_folders_and_special_files(folder, tmp_path):
    """A pipe and a link to it represent devices, which a replacement would delete."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    names = ["folder", "pipe", "link", "~nosuchuser/file", "a\0b"]
    done = talk(folder, "".join(f"/save {name}\n" for name in names), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("(not saved: expected a regular file") == 3
    assert done.stdout.count("(not saved: ") == len(names)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_bad_arguments_and_models_without_a_chat_template_are_rejected_in_one_line(folder, tmp_path):
    plain = write_folder(tmp_path / "plain", chat_template=None)
    checkpoint_path = tmp_path / "best.safetensors"
    save_checkpoint(checkpoint_path, GPT(DebugConfig(vocab_size=257)), BPETokeniser(257))
    refusing = write_folder(tmp_path / "refusing", "{{ raise_exception('no system') if messages[0].role == 'system' }}")
    large = write_folder(tmp_path / "large", "{% set a = ('a' * 4000000)|list %}" * 10)
    for source, words, message in (
        (folder, ["--length", "0"], "--length.*got 0"),
        (folder, ["--temperature", "-1"], "temperature.*got -1"),
        (folder, ["--softmax", "hard"], "'hard'.*--softmax"),
        (large, [], "4,194,304 characters"),
        (plain, [], "model with a chat template"),
        (checkpoint_path, [], "model with a chat template"),
        (refusing, ["--system", "x"], "chat template, line 1: no system"),
        (tmp_path / "gone.gguf", [], r"gone\.gguf: .*no such file"),
    ):
        done = talk(source, "hi", *words)
        assert done.returncode == (2 if "--softmax" in words else 1)
        one_line(done, f"^python -m tricycle chat: .*{message}")


# -------------------------------------------------------------------- the conversation itself
def conversation(folder: Path, n_tokens: int = 20, system: str | None = None, **settings) -> Conversation:
    loaded = load(folder)
    return Conversation(loaded, system, n_tokens, replace(default_sampling(loaded), **settings))


def test_dropped_messages_are_reported(small, capsys):
    one = conversation(small, system="rain")
    for i in range(6):
        handle_line(one, f"the quick brown fox {i}")
    out = capsys.readouterr().out
    dropped = re.findall(r"\(dropped the oldest (\d) messages, which exceed the context window of 120 tokens\)", out)
    assert dropped and set(dropped) <= {"2", "4"}
    assert one.messages[0] == {"role": "system", "content": "rain"}
    assert [message["role"] for message in one.messages[1:]] == ["user", "assistant"] * (len(one.messages) // 2)
    assert len(one.messages) < 13
    assert one.messages[-2]["content"] == "the quick brown fox 5"
    assert len(one.tokeniser.chat(one.messages)) <= 125
    before = [*one.messages]
    handle_line(one, "birds sing " * 50)
    assert re.search(r"\(.*message.*at most 100 tokens.*got \d+", capsys.readouterr().out)
    assert one.messages == before


def test_overflow_error_rejects_the_message(small):
    """What does not fit is not kept; after /reset there is room again."""
    message = "the quick brown fox\n" * 8
    done = talk(small, f"{message}/reset\nthe quick\n", "--length", "20", "--overflow", "error")
    lines = done.stdout.splitlines()
    is_full = ["120 tokens is full" in line and "/reset" in line for line in lines]
    begin = is_full.index(True)
    assert begin >= 1
    assert is_full == [False] * begin + [True] * (8 - begin) + [False] * 2
    assert lines[-2] == "(new conversation)"
    assert lines[-1] == answers(small, ["the quick"], 20)[0]


@pytest.mark.parametrize("cache", ["float16", "bfloat16", "int8"])
def test_kv_cache_dtype_sets_the_dtype_of_the_cache(small, cache):
    loaded = load(small)
    one = Conversation(loaded, None, 20, default_sampling(loaded), DecodingFlags(kv_cache_dtype=cache))
    handle_line(one, "the quick brown fox")
    assert {held.keys.dtype.name for held in one.state.caches} == {cache}
    done = talk(small, "the quick brown fox\n", "--length", "20", "--kv-cache-dtype", cache)
    assert done.stdout.splitlines() == [one.messages[-1]["content"]]


def test_only_new_tokens_are_prefilled(folder, monkeypatch):
    one = conversation(folder, 6)
    n_read, read = [], generation.next_logits
    monkeypatch.setattr(
        generation, "next_logits", lambda model, new, caches: n_read.append(len(new)) or read(model, new, caches)
    )
    "".join(one.ask("the quick brown fox jumps over the lazy dogs")[0])
    first = n_read[0]
    n_read.clear()
    "".join(one.ask("birds")[0])
    assert n_read[0] < first  # though the text to read is longer
    assert len(one.state.tokens) > first + 6


def test_default_sampling_without_generation_settings(tmp_path):
    folder = write_folder(tmp_path / "model", settings=GenerationSettings(stop_tokens=(2,)))
    flags = ([], ["--temperature", "0", "--repetition-penalty", "1.05"], ["--repetition-penalty", "1"])
    outs = [talk(folder, "the quick\nbrown", "--length", "30", *words).stdout for words in flags]
    assert outs[0] == outs[1] != outs[2]


def test_end_of_answer_token_comes_from_the_template(tmp_path):
    """Though the files name another token."""
    loaded = load(write_folder(tmp_path / "model", settings=GenerationSettings(stop_tokens=(0,))))
    assert Conversation(loaded, None, 5, SamplingParams()).stops == [0, 2]
    loaded.tokeniser.chat_templates["default"] = "{{ messages[0].content }}"
    assert Conversation(loaded, None, 5, SamplingParams()).stops == [0]


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    """As `transformers` answers from the same file, with greedy decoding.

    Rounding of activations to 8 bits, the default for this file, exchanges the first two candidates, as in llama.cpp.
    """
    words = "--temperature 0 --top-p 1 --repetition-penalty 1 --weights exact".split()
    done = talk(smollm2_file(), "What is the capital of France?\n", *words)
    assert done.stdout == "The capital of France is Paris.\n"


def test_sampling_defaults_are_the_generation_settings(tmp_path):
    settings = GenerationSettings(True, 0.5, 7, 0.9, 0.05, 1.2, (2, 5))
    loaded = load(write_folder(tmp_path / "model", settings=settings))
    assert default_sampling(loaded) == PenalizedSamplingParams(
        0.5, 7, 0.9, 0.05, repetition_penalty=1.2, stop_tokens=(2, 5), n_vocab=loaded.tokeniser.n_vocab
    )
    assert Conversation(loaded, None, 5, SamplingParams()).stops == [2, 5]
    greedy = load(write_folder(tmp_path / "greedy", settings=GenerationSettings(temperature=0.5, stop_tokens=(2,))))
    assert default_sampling(greedy).temperature == 0


# -------------------------------------------------------------------- in a terminal
class Terminal:
    """The program at a terminal."""

    def __init__(self, *words: str) -> None:
        pty = pytest.importorskip("pty")
        self.keyboard, terminal = pty.openpty()
        environment = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8", "TERM": "dumb"}
        self.shown = ""

        def lead() -> None:
            import fcntl
            import termios

            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        self.program = subprocess.Popen([*COMMAND, *words], cwd=ROOT, env=environment, preexec_fn=lead, **streams)
        os.close(terminal)

    def read(self, seconds: float) -> bool:
        """Read what the program writes next; return whether it wrote something in time."""
        if not select.select([self.keyboard], [], [], seconds)[0]:
            return False
        try:
            self.shown += os.read(self.keyboard, 4096).decode("utf-8", "replace")
        except OSError:  # it has left
            return False
        return True

    def wait_for(self, text: str) -> str:
        """What is shown until a text comes; that is used up."""
        while text not in self.shown:
            assert self.read(60), f"waited for {text!r}, there is {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def close(self) -> int:
        """Wait until it has left; returns its status."""
        end = time.monotonic() + 30
        while self.program.poll() is None and time.monotonic() < end:
            self.read(0.1)
        self.program.kill()
        os.close(self.keyboard)
        return self.program.wait()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a terminal of POSIX")
def test_ctrl_c_stops_an_answer_but_not_the_program(folder):
    terminal = Terminal(str(folder), "--length", "3900")
    terminal.wait_for("> ")
    terminal.type("the quick\n")
    terminal.wait_for("the quick\r\n")
    assert terminal.read(60)  # the answer comes
    time.sleep(0.5)
    terminal.type("\x03")
    assert len(terminal.wait_for("(interrupted)")) > 1
    terminal.wait_for("> ")
    terminal.type("/help\n")
    terminal.wait_for("stop an answer")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a terminal of POSIX")
def test_ctrl_c_at_the_prompt_exits(folder):
    terminal = Terminal(str(folder))
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    for _ in range(30):  # Python sees one that comes between the prompt and its wait for keys at the next key alone
        terminal.type("\x03")
        if terminal.read(1):
            break
    assert terminal.close() == 0
