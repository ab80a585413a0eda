"""Serve a model over HTTP with OpenAI's API, and a chat page for the browser: http://127.0.0.1:8000.

The endpoints are /v1/chat/completions, /v1/responses, /v1/completions, /v1/models, and /v1/embeddings for encoders.
Ctrl-C stops the server.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.sentence_encoder import to_sentence_encoder
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.system.memory import available_memory
from tricycle_cli.flags import parse
from tricycle_cli.models import (
    CacheDtype,
    ModelFlags,
    SamplingFlags,
    cache_dtype,
    chat_stop_tokens,
    load_file,
    load_model,
    stop_tokens,
    use_gpu,
)
from tricycle_serve.engine import EngineLimits
from tricycle_serve.services import EmbeddingService, GenerationService, ModelService, ServiceDefaults

KEY_VARIABLE = "TRICYCLE_API_KEY"
CACHE_FRACTION = 0.5  # of the memory that is free once the model is loaded, for KV caches
GROWTH = 2  # a growing KV cache allocates at most this many times the memory that it needs


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle serve`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "smollm2"
    """a model, as in `tricycle generate`, or an encoder"""
    host: str = "127.0.0.1"
    """the address to listen on; an address that other machines can reach needs --api-key"""
    port: int = 8000
    """the port to listen on; 0 for any free port"""
    api_key: str | None = None
    """the key that requests must contain; prefer the variable TRICYCLE_API_KEY, because other users can see command
    lines"""
    model_name: str | None = None
    """the name of the model in requests; by default the last part of MODEL"""
    allowed_hosts: tuple[str, ...] = ()
    """further host names that requests may be addressed to"""
    allowed_origins: tuple[str, ...] = ()
    """origins of other web pages that may send requests (CORS), such as http://localhost:3000"""
    length: int = 1024
    """the maximum number of tokens of an answer"""
    max_batch_size: int = 64
    """the maximum number of texts that are decoded in one batch"""
    max_queue: int = 64
    """the maximum number of texts that wait; further requests get status 429"""
    cached_texts: int = 8
    """the number of texts whose KV caches are kept for following requests"""
    timeout_seconds: float = 600.0
    """the maximum time for a request"""
    max_request_bytes: int = 2**22
    """the maximum size of a request"""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    kv_cache_dtype: CacheDtype = "auto"
    """data type of the KV caches: "float16" and "bfloat16" need half the memory, "int8" about a quarter; "auto" is the
    type that the model computes in (float32 on a CPU)"""
    model: ModelFlags = field(default_factory=ModelFlags)

    def __post_init__(self) -> None:
        """Raise ValueError for a count below its minimum, a timeout not above 0, or an invalid port, host or origin."""
        lowest = {"length": 1, "max_batch_size": 1, "max_queue": 1, "max_request_bytes": 1, "cached_texts": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ValueError(f"expected --{flag} to be {least} or more, got {getattr(self, name)}")
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"expected --timeout-seconds to be above 0, got {self.timeout_seconds}")
        for values, flag, pattern, example in (
            (self.allowed_hosts, "--allowed-hosts", r"[\w.-]+", "gpu.example.com"),
            (self.allowed_origins, "--allowed-origins", r"[\w+.-]+://[^/*,]+/?|null", "http://localhost:3000"),
        ):
            for value in values:
                if not re.fullmatch(pattern, value):
                    raise ValueError(f"expected {flag} such as {example}, separated by spaces, got {value!r}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"expected --port to be from 0 to 65535, got {self.port}")


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle serve`: load a model, serve it over HTTP until Ctrl-C; ImportError without uvicorn or starlette."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f'tricycle serve needs {package}: pip install "tricycle-gpt[serve]"')
    from tricycle_serve.app import create_app
    from tricycle_serve.server import Server, listen

    key = api_key(arguments)
    listener = listen(arguments.host, arguments.port)  # before the model is loaded, which may take a while
    service = load(arguments)
    app = create_app(
        service,
        allowed_hosts=[*arguments.allowed_hosts, arguments.host, socket.gethostname()],
        allowed_origins=arguments.allowed_origins,
        api_key=key,
        max_request_bytes=arguments.max_request_bytes,
    )
    service.engine.start()
    print(f"serving {service.name} at {address(listener)} (Ctrl-C stops the server)", flush=True)
    try:
        Server(app, service.engine.close).run(sockets=[listener])
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        service.close()
        service.engine.join(5)


def api_key(arguments: Arguments) -> str | None:
    """Return --api-key, else TRICYCLE_API_KEY, else None; ValueError if malformed, or None and not a loopback host."""
    key = os.environ.get(KEY_VARIABLE) if arguments.api_key is None else arguments.api_key
    if key is None:
        if not is_loopback(arguments.host):
            raise ValueError(
                f"--host {arguments.host}: expected a key for an address that other machines can reach, got none: "
                f"set {KEY_VARIABLE} or --api-key"
            )
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"expected a key ({KEY_VARIABLE} or --api-key) of printable ASCII without spaces, got another")
    return key


def is_loopback(host: str) -> bool:
    """Return whether a host is "localhost" or a loopback address; other names are not resolved: False."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(listener: socket.socket) -> str:
    """Return the http URL of a listening socket, with this machine's name for a wildcard address."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def load(arguments: Arguments) -> ModelService:
    """Load the model; return an EmbeddingService for a text encoder, else a GenerationService, not started yet.

    Raises:
        FileNotFoundError, ValueError: as of `load_model`; or a flag is given that only decoders support.
    """
    name = arguments.model_name or published_name(arguments.source)
    created = int(time.time())
    limits = EngineLimits(arguments.max_batch_size, arguments.max_queue, arguments.cached_texts)
    on_gpu = use_gpu(arguments.model.device, arguments.model.weights)
    loaded = load_file(arguments.source, arguments.model.weights, arguments.model.device)
    if isinstance(loaded.model, TextEncoder):
        _reject_decoder_flags(arguments)
        if on_gpu:
            loaded.model.to_gpu()
        encoder = to_sentence_encoder(loaded, arguments.source)
        return EmbeddingService(name, encoder, limits, created, arguments.timeout_seconds)
    load_model(arguments.source, loaded=loaded, **vars(arguments.model))
    cache = cache_dtype(arguments.kv_cache_dtype)
    limits.max_cache_tokens = math.inf if on_gpu else cache_capacity_tokens(loaded.model, cache)
    sampling = default_request_sampling(arguments.sampling, loaded)
    chat = replace(sampling, stop_tokens=chat_stop_tokens(loaded))
    defaults = ServiceDefaults(chat, sampling, arguments.length, arguments.timeout_seconds)
    return GenerationService(name, loaded, defaults, limits, created, cache)


def _reject_decoder_flags(arguments: Arguments) -> None:
    """Raise ValueError if a flag is given that has no effect on an encoder."""
    default = Arguments("", model=replace(arguments.model, adapter=None, softmax=None))
    names = {"model": "--adapter and --softmax", "sampling": "flags for sampling"}
    for name in ("model", "sampling", "kv_cache_dtype", "length", "max_batch_size", "cached_texts"):
        if getattr(arguments, name) != getattr(default, name):
            flags = names.get(name, f"--{name.replace('_', '-')}")
            raise ValueError(f"{arguments.source}: expected {flags} with a decoder, got an encoder")


def default_request_sampling(flags: SamplingFlags, loaded: Pretrained) -> PenalizedSamplingParams:
    """Return the default sampling of requests: flags, then settings that the model's files state, then OpenAI's.

    OpenAI's defaults are temperature 1 without filters and penalties. A model's repetition penalty is not applied
    unless a flag or the request sets one, so that `temperature` 0 is greedy decoding.
    """
    stated = {} if loaded.source is None else loaded.source.generation
    names = [name for name in ("temperature", "top_k", "top_p", "min_p") if stated.get(name) is not None]
    values = {name: getattr(loaded.generation, name) for name in names}
    if stated.get("do_sample") is False:
        values["temperature"] = 0.0
    return flags.override(
        PenalizedSamplingParams(**values, stop_tokens=stop_tokens(loaded), n_vocab=loaded.tokeniser.n_vocab)
    )


def published_name(source: str) -> str:
    """Return the model name for requests: the last part of an existing path, which hides its folders, else `source`."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def cache_capacity_tokens(model: GPT, cache: str | None) -> float:
    """Return the number of KV-cache tokens that fit into part of free main memory, at least 256; inf if unknown."""
    free = available_memory()
    if free is None:
        return math.inf
    config = model.config
    itemsize = {"float16": 2, "bfloat16": 2, "int8": 1.125}.get(cache or "", 4)  # int8 with scales
    n_bytes = 2 * config.n_layers * config.key_heads * config.channels_per_head * itemsize
    return max(256, int(CACHE_FRACTION * free / (GROWTH * n_bytes)))
