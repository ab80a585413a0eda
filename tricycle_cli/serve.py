"""Offer a model to OpenAI's clients, and as a page to talk with: http://127.0.0.1:8000.

/v1/chat/completions, /v1/completions, /v1/models, and /v1/embeddings for encoders. Ctrl-C ends it.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import tyro

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.sentences import sentences_of
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.system.memory import free_memory
from tricycle_cli.flags import parse
from tricycle_cli.models import Cache, ModelFlags, SamplingFlags, cache_dtype, load_file, load_model, use_gpu
from tricycle_serve.engine import Limits
from tricycle_serve.served import Encoder, Served, Ways, Writer

KEY = "TRICYCLE_API_KEY"
SHARE = 0.5  # of the memory that is free once the model is loaded, for what it remembers of texts
GROWTH = 2  # room for keys and values is taken in larger and larger pieces, at most so many times what is needed


@dataclass(frozen=True)
class Arguments:
    """What to offer, to whom, and how much of it."""

    source: tyro.conf.Positional[str] = "smollm2"
    """a model, as `tricycle generate` takes it, or an encoder"""
    host: str = "127.0.0.1"
    """the address to listen at; others than this machine's own need --api-key"""
    port: int = 8000
    """0 takes any that is free"""
    api_key: str | None = None
    """what requests have to bring along; better in the variable TRICYCLE_API_KEY, for other users see command lines"""
    name: str | None = None
    """what requests call the model; the last part of SOURCE unless given"""
    names: tuple[str, ...] = ()
    """further host names under which this server is reached"""
    origins: tuple[str, ...] = ()
    """pages of other servers that may ask this one, such as http://localhost:3000"""
    length: int = 1024
    """the most tokens of an answer"""
    texts: int = 8
    """how many texts are written at once"""
    queue: int = 64
    """how many may wait; more are told to come again (429)"""
    conversations: int = 8
    """of how many texts keys and values are kept, for a question that follows"""
    seconds: float = 600.0
    """the most time for a request"""
    body: int = 2**22
    """the most bytes of a request"""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    cache: Cache = "auto"
    """what keys and values are kept in: "float16" and "bfloat16" take half the memory, "auto" leaves them as they are
    computed (float32 on a CPU)"""
    model: ModelFlags = field(default_factory=ModelFlags)

    def __post_init__(self) -> None:
        for name in ("length", "texts", "queue", "body"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected --{name} to be 1 or more, got {getattr(self, name)}")
        if self.conversations < 0:
            raise ValueError(f"expected --conversations to be 0 or more, got {self.conversations}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"expected --seconds to be above 0, got {self.seconds}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"expected --port to be from 0 to 65535, got {self.port}")


def main(args: Sequence[str] | None = None) -> None:
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f'tricycle serve needs {package}: pip install "tricycle-gpt[serve]"')
    from tricycle_serve.app import new_app
    from tricycle_serve.server import Server, listen

    key = api_key(arguments)
    listener = listen(arguments.host, arguments.port)  # before the model is loaded, which may take a while
    served = load(arguments)
    names = [*arguments.names, arguments.host, socket.gethostname()]
    app = new_app(served, names=names, origins=arguments.origins, key=key, most_bytes=arguments.body)
    served.engine.start()
    print(f"{served.name} at {address(listener)} (Ctrl-C ends it)", flush=True)
    try:
        Server(app, served.engine.close).run(sockets=[listener])
    except KeyboardInterrupt:
        print("ended", flush=True)
    finally:
        served.close()
        served.engine.join(5)


def api_key(arguments: Arguments) -> str | None:
    """Return the key of requests; raise ValueError for none where other machines can ask, or for an unfit one."""
    key = os.environ.get(KEY) if arguments.api_key is None else arguments.api_key
    if key is None:
        if not is_loopback(arguments.host):
            raise ValueError(
                f"--host {arguments.host}: expected a key where other machines can ask, in {KEY} or --api-key"
            )
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"expected the key ({KEY} or --api-key) to be of printable ASCII characters without spaces")
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(listener: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def load(arguments: Arguments) -> Served:
    """Load the model or encoder that is to be offered."""
    name = arguments.name or name_of(arguments.source)
    created = int(time.time())
    limits = Limits(arguments.texts, arguments.queue, arguments.conversations)
    on_gpu = use_gpu(arguments.model.device, arguments.model.weights)
    loaded = load_file(arguments.source, arguments.model.weights)
    if isinstance(loaded.model, TextEncoder):
        if on_gpu:
            loaded.model.to_gpu()
        encoder = sentences_of(loaded, arguments.source)
        return Encoder(name, encoder, limits, created, arguments.seconds)
    load_model(arguments.source, loaded=loaded, **vars(arguments.model))
    cache = cache_dtype(arguments.cache)
    limits.n_tokens = math.inf if on_gpu else cache_capacity_tokens(loaded.model, cache)
    sampling = sampling_of(arguments.sampling, loaded)
    ways = Ways(sampling, sampling, arguments.length, arguments.seconds)
    return Writer(name, loaded, ways, limits, created, cache)


def sampling_of(flags: SamplingFlags, loaded: Pretrained) -> PenalizedSamplingParams:
    """Return how answers are drawn where a request does not say: without penalties that neither a flag nor the model's
    own generation settings ask for, so that `temperature` 0 is greedy decoding.
    """
    sampling = flags.of(loaded)
    if loaded.source is not None:
        return sampling
    if flags.repetition_penalty is None:
        sampling = replace(sampling, repetition_penalty=1.0)
    if flags.no_repeat_ngram_size is None:
        sampling = replace(sampling, no_repeat_ngram_size=0)
    return sampling


def name_of(source: str) -> str:
    """What requests call a model: no more of a place in the file system than its last part."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def cache_capacity_tokens(model: GPT, cache: str | None) -> float:
    """Of how many tokens keys and values fit into memory."""
    free = free_memory()
    if free is None:
        return math.inf
    config = model.config
    itemsize = 2 if cache in ("float16", "bfloat16") else np.dtype(np.float32).itemsize
    n_bytes = 2 * config.n_layers * config.key_heads * config.channels_per_head * itemsize
    return max(256, int(SHARE * free / (GROWTH * n_bytes)))
