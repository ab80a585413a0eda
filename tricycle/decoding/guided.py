"""Guided decoding: a JSON schema, regular expression or grammar determines which tokens may be sampled next.

The library llguidance compiles grammars and computes the masks of allowed tokens. Its errors are ValueErrors here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.tokeniser import BPETokeniser, Tokeniser

MAX_GRAMMAR_BYTES = 2**16
MAX_COMPILE_SECONDS = 1  # of CPU time; wall time is limited, too, but to more
WALL_TIME_FACTOR = 12
MAX_COMPILE_BYTES = 200_000_000  # memory of the process that checks a grammar, on Linux
MAX_CACHED_GRAMMARS = 32
# A lexer state takes about 2 kB; a mask may take about 20 ms.
LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False}
# Unlimited white space would let a model that repeats itself continue until the maximum number of tokens.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{1,20}", "lenient": False}
# A few grammars of this size take hours or overflow the stack, which ends the process. The parser of bytes takes the
# time and memory of the real one; only validation reports errors, because bytes lack the model's special tokens.
CHECK = """
import json, sys
message = json.loads(sys.stdin.buffer.read())
sys.path[:] = message["path"]
if sys.platform != "win32":
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (message["seconds"], message["seconds"] + 1))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (message["memory"], message["memory"]))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
grammar, limits = message["grammar"], LLParserLimits(**message["limits"])
error = LLMatcher.validate_grammar(grammar, None, limits=limits)
if not error:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_logit_bias()
sys.stdout.buffer.write(json.dumps(error).encode())
"""


class Constraint:
    """A compiled grammar for the generated tokens of one text, with the state of the tokens seen so far.

    Args:
        matcher: an `llguidance.LLMatcher` in its initial state.
        end_tokens: ids that llguidance takes for the end of a text.

    Attributes:
        error: why the grammar could not be continued, or "". Then only stop tokens are allowed.
    """

    def __init__(self, matcher: Any, end_tokens: Sequence[int]) -> None:
        self._initial = matcher
        self._matcher = matcher.deep_copy()
        self._end_tokens = list(end_tokens)
        self._consumed: list[int] = []
        self.error = ""

    def new_text(self) -> Constraint:
        """Return a constraint of the same grammar for another text."""
        return Constraint(self._initial, self._end_tokens)

    def allowed_tokens(self, generated: Sequence[int], stop_tokens: Sequence[int], n_vocab: int) -> np.ndarray:
        """Return a mask (n_vocab,) of the tokens that may follow; stop tokens if the text is complete or on an error.

        Args:
            generated: the ids after the prompt. Tokens that were passed before are not parsed again.
            n_vocab: at least the size of the tokenizer's vocabulary.
        """
        self._consume(list(generated))
        bits = np.zeros(-(-n_vocab // 32), np.int32)
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._store_error()
        mask = np.unpackbits(bits.view(np.uint8), count=n_vocab, bitorder="little").astype(bool)
        mask[self._end_tokens] = False
        stop_tokens = [token for token in stop_tokens if token < n_vocab]  # the model may have more than its tokenizer
        mask[stop_tokens] = bool(self.error) or self._matcher.is_accepting()
        if not mask.any():
            self.error = "no token of the vocabulary continues the text"
            mask[stop_tokens] = True
        return mask

    def _consume(self, generated: list[int]) -> None:
        """Advance the matcher by the new tokens, from the start if earlier ones differ; store its error."""
        n = len(self._consumed)
        if generated[:n] != self._consumed:
            self._matcher, self.error = self._initial.deep_copy(), ""
            n = 0
        self._consumed = generated
        if generated[n:] and not self.error and not self._matcher.consume_tokens(generated[n:]):
            self._store_error()

    def _store_error(self) -> None:
        """Store the matcher's message in `error` if it has failed."""
        if self._matcher.is_error():
            self.error = _one_line(self._matcher.get_error())


class GrammarCompiler:
    """Compiles grammars for the vocabulary of a tokenizer, and keeps the latest of them.

    Methods may be called from several threads. Each raises a ValueError with the reason for a grammar that is invalid,
    not supported, has more than MAX_GRAMMAR_BYTES, or takes too long to compile.

    Args:
        tokeniser: a byte-level or SentencePiece tokenizer with an end-of-text token.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: a tokenizer that llguidance does not support.
    """

    def __init__(self, tokeniser: Tokeniser) -> None:
        try:
            import llguidance
        except ImportError:
            advice = 'need llguidance: pip install "tricycle-gpt[guided]"'
            raise ImportError(f"JSON schemas, regular expressions and grammars {advice}") from None
        self._llguidance: Any = llguidance
        self._tokenizer = _to_llguidance(self._llguidance, tokeniser)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    def from_json_schema(self, schema: dict[str, Any]) -> Constraint:
        """Return a constraint to JSON text that is valid under a schema; ValueError if unsupported or too large."""
        text = json.dumps(schema)
        _check_size(text)
        try:
            grammar = self._llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        except ValueError as error:
            raise ValueError(_one_line(str(error))) from None
        return self._compile(grammar)

    def from_regex(self, regex: str) -> Constraint:
        """Return a constraint to texts that a regular expression (as in Rust) fully matches; ValueError if invalid."""
        _check_size(regex)
        return self._compile(self._llguidance.LLMatcher.grammar_from_regex(regex))

    def from_lark(self, grammar: str) -> Constraint:
        """Return a constraint to texts of a context-free grammar in llguidance's Lark syntax; ValueError if invalid."""
        _check_size(grammar)
        return self._compile(self._llguidance.LLMatcher.grammar_from_lark(grammar))

    def _compile(self, grammar: str) -> Constraint:
        """Return a new Constraint of a grammar, from a cache if compiled before; ValueError if invalid."""
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            check_grammar(grammar)
            limits = self._llguidance.LLParserLimits(**LIMITS)
            matcher = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise ValueError(_one_line(matcher.get_error()))
            known = Constraint(matcher, self._tokenizer.eos_tokens)
        with self._lock:
            self._compiled[grammar] = known
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return known.new_text()


def check_grammar(grammar: str, seconds: int = MAX_COMPILE_SECONDS) -> None:
    """Compile a grammar in a child process with limits of time and memory; ValueError if invalid or over a limit.

    Args:
        grammar: as llguidance's `grammar_from_...` functions return it.
        seconds: the time limit.

    Raises:
        ValueError: the grammar is invalid, or exceeds a limit.
    """
    message = {"path": sys.path, "memory": MAX_COMPILE_BYTES, "seconds": seconds, "grammar": grammar, "limits": LIMITS}
    command = [sys.executable, "-I", "-c", CHECK]
    timeout = WALL_TIME_FACTOR * seconds
    has_timed_out = False
    try:
        done = subprocess.run(command, input=json.dumps(message).encode(), capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        has_timed_out = True
    if has_timed_out or done.returncode == -getattr(signal, "SIGXCPU", 0) < 0:
        raise ValueError(f"it takes more than {seconds} s to compile")
    if done.returncode:
        raise ValueError(f"it is too complex: its compiler ended with status {done.returncode}")
    if error := json.loads(done.stdout):
        raise ValueError(_one_line(error))


def _check_size(text: str) -> None:
    """Raise a ValueError for a text of more than MAX_GRAMMAR_BYTES bytes."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"it has {n_bytes:,} bytes, more than {MAX_GRAMMAR_BYTES:,}")


def _one_line(text: str) -> str:
    """Return a message of llguidance on one line, at most 500 characters."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:500]


def _to_llguidance(llguidance: Any, tokeniser: Tokeniser) -> Any:
    """Return an `llguidance.LLTokenizer`; ValueError for a tokenizer that it does not support."""
    from tricycle.pretrained.tokenisers import PretrainedTokeniser
    from tricycle.pretrained.tokenizer_json import to_tokenizer_json

    if isinstance(tokeniser, PretrainedTokeniser):
        document = tokeniser.to_tokenizer_json()
    elif isinstance(tokeniser, BPETokeniser):
        document = to_tokenizer_json(tokeniser)
    else:
        raise ValueError(f"expected a tokenizer with a tokenizer.json, got a {type(tokeniser).__name__}")
    try:
        return llguidance.LLTokenizer(document, n_vocab=tokeniser.n_vocab, eos_token=[tokeniser.end_of_text])
    except Exception as error:  # llguidance does not document the type
        raise ValueError(f"llguidance does not support this tokenizer: {_one_line(str(error))}") from None
