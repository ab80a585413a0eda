"""Evaluate models with the LM Evaluation Harness: python -m tricycle_cli.lm_eval run --model tricycle ...

The command takes the arguments of `lm_eval`, and registers the model type `tricycle` first:

    python -m tricycle_cli.lm_eval run --model tricycle --model_args pretrained=smollm2 --tasks hellaswag

Releases of lm_eval after 0.4.13 find the model type by the entry point `lm_eval.models`, and need only `lm_eval run`.
The package lm_eval comes with the pip extra `evaluation`. In Python, `lm_eval.simple_evaluate` takes a `TricycleLM`.

Source: Gao et al. 2021, https://github.com/EleutherAI/lm-evaluation-harness (interface of version 0.4.13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from tricycle.decoding.batch import GenerationBatch
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.models import GPT
from tricycle.tokeniser import Tokeniser
from tricycle_cli.likelihoods import Pair, iter_likelihoods
from tricycle_cli.models import load_model, stop_tokens
from tricycle_serve.output_processor import StopStringFilter

MAX_NEW_TOKENS = 256  # the default of the harness
DEFAULT_BATCH_SIZE = 8  # of generated texts
TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("tricycle")
class TricycleLM(TemplateLM):
    """A decoder as a model of the harness.

    Args:
        pretrained: a model, as in `tricycle generate`.
        batch_size: the maximum number of texts in a batch, or "auto".
        device: "cpu" or "gpu"; by default, and for the name of a CUDA device, a GPU if one is available.
        weights, adapter: as --weights and --adapter of `tricycle generate`.
        max_length: the maximum number of tokens of a text; by default the model's context window.
        add_bos_token: begin each text with the beginning-of-sequence token; by default as the tokenizer does.
        max_batch_size: ignored.
    """

    def __init__(
        self,
        pretrained: str = "smollm2",
        batch_size: int | str = "auto",
        device: str = "auto",
        weights: str = "auto",
        adapter: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        device = "auto" if device.startswith("cuda") else device  # the harness passes cuda:0 by default
        folder = None if adapter is None else Path(adapter)
        self.loaded = load_model(pretrained, device=device, weights=weights, adapter=folder)
        self.tokenizer: Any = self.loaded.tokeniser
        self.batch_size = None if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = min(max_length or self.model.config.context_window, self.model.config.context_window)
        self._name = pretrained
        self._add_bos_token = add_bos_token

    @property
    def model(self) -> GPT:
        """Return the loaded GPT."""
        return self.loaded.model

    @property
    def eot_token_id(self) -> int:
        """Return the id of the end-of-text token."""
        return int(self.tokenizer.end_of_text)

    @property
    def prefix_token_id(self) -> int:
        """Return the id that precedes a text without context: beginning-of-sequence, or else end-of-text."""
        return int(self.tokenizer.new_text)

    @property
    def tokenizer_name(self) -> str:
        """Return the model's name with "__" for "/", by which the harness caches its requests."""
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text; without a generation prompt, the last message can be continued."""
        text: str = self.tokenizer.render(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].rstrip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; its special tokens are parsed, and none is added to a text that begins with one."""
        if add_special_tokens is None:
            has_prefix = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = False if has_prefix else self._add_bos_token
        if hasattr(self.tokenizer, "backend"):
            return list(self.tokenizer.encode(string, add_special_tokens is not False))
        return [int(token) for token in self.tokenizer.encode(string)]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the harness's ids of both; of the continuation alone if all of it is joined with the context."""
        context_ids, ids = super()._encode_pair(context, continuation)
        if not ids:
            stripped = context.rstrip()
            ids = self.tok_encode(context[len(stripped) :] + continuation, add_special_tokens=False)
        return context_ids, ids

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any) -> list[Any]:
        """Return (log-likelihood, is greedy) for each (key, context ids, continuation ids); cache those with a key."""
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        results: list[Any] = [None] * len(pairs)
        scored = iter_likelihoods(self.model, pairs, self.batch_size, self.max_length)
        for i, likelihood in tqdm(scored, "log-likelihoods", len(pairs), disable=disable_tqdm):
            results[i] = tuple(likelihood)
            if requests[i][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text in nats, in disjoint windows with one token of context."""
        windows: list[Any] = []
        owners = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            own = [(None, *utils.make_disjoint_window(window)) for window in rolling]
            windows += own
            owners += [i] * len(own)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[i] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each request's context up to a stop string, greedy unless the request samples."""
        texts = [self._new_text(i, *request.args) for i, request in enumerate(requests)]
        results = [""] * len(requests)
        generated = _generate(self.model, texts, self.batch_size or DEFAULT_BATCH_SIZE)
        for i, text in tqdm(generated, "texts", len(texts), disable=disable_tqdm):
            results[i] = text
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return results

    def _new_text(self, number: int, context: str, options: dict[str, Any]) -> _Text:
        """Return the _Text of a request; ValueError for unknown options or too many new tokens."""
        options = dict(options)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        given = [int(options.pop(name)) for name in TOKEN_LIMITS if options.get(name) is not None]
        n_tokens = given[0] if given else MAX_NEW_TOKENS
        if n_tokens >= self.max_length:
            raise ValueError(f"expected fewer new tokens than the context window of {self.max_length}, got {n_tokens}")
        ids = self.tok_encode(context)[n_tokens - self.max_length :]
        is_greedy = options.pop("do_sample", None) is False
        chosen = {name: options.pop(name) for name in SAMPLING if options.get(name) is not None}
        if unknown := [name for name, value in options.items() if value is not None]:
            raise ValueError(f"expected generation_kwargs {', '.join((*TOKEN_LIMITS, *SAMPLING))}, got {unknown[0]}")
        chosen["temperature"] = 0.0 if is_greedy else float(chosen.get("temperature", 0.0))
        stops = {*stop_tokens(self.loaded), self.eot_token_id, *self._special_ids(until)}
        sampling = PenalizedSamplingParams(
            **chosen, seed=number, stop_tokens=sorted(stops), n_vocab=self.tokenizer.n_vocab
        )
        return _Text(ids or [self.prefix_token_id], n_tokens, sampling, until, self.tokenizer)

    def _special_ids(self, texts: Sequence[str]) -> Iterator[int]:
        """Yield the ids of texts that are names of special tokens, which generated text does not contain."""
        for text in texts:
            ids = self.tok_encode(text, add_special_tokens=False)
            if len(ids) == 1 and ids[0] in getattr(self.tokenizer, "special_ids", ()):
                yield ids[0]


class _Text:
    """A text to generate."""

    def __init__(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: PenalizedSamplingParams,
        until: Sequence[str],
        tokeniser: Tokeniser,
    ) -> None:
        self.prompt, self.max_tokens, self.sampling = prompt, max_tokens, sampling
        self.text = ""
        self._skipped = {*getattr(tokeniser, "special_ids", ()), *sampling.stop_tokens}  # type: ignore[misc]
        self._filter = StopStringFilter([stop for stop in until if stop])
        self._stream: Any = tokeniser.stream(prompt)
        self._n_tokens = 0

    def push(self, token: int) -> bool:
        """Add a token to the text; return whether it is complete: by a stop token, a stop string or its length."""
        self._n_tokens += 1
        is_last = token in self.sampling.stop_tokens or self._n_tokens == self.max_tokens  # type: ignore[operator]
        decoded = "" if token in self._skipped else self._stream.push([token])
        self.text += self._filter.push(decoded + (self._stream.flush() if is_last else ""))
        if is_last:
            self.text += self._filter.flush()
        return is_last or self._filter.has_stopped


def _generate(model: GPT, texts: Sequence[_Text], batch_size: int) -> Iterator[tuple[int, str]]:
    """Yield (index, text) of each text once it is complete; a batch has up to `batch_size` texts at a time."""
    batch = GenerationBatch(model)
    waiting = deque(sorted(range(len(texts)), key=lambda i: -len(texts[i].prompt)))
    active: dict[int, int] = {}
    while waiting or active:
        while waiting and len(active) < batch_size:
            i = waiting.popleft()
            active[batch.add(texts[i].prompt, texts[i].max_tokens, texts[i].sampling)] = i
        for number, token in batch.step():
            if texts[active[number]].push(token):
                batch.remove(number)
                i = active.pop(number)
                yield i, texts[i].text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
