"""Inspect a model in the browser: tokens, attention weights, activations and predictions for a text.

With two or more run folders, compare the runs: `tricycle look runs/a runs/b`. With --graph, show the computation graph
of a small function with its gradients. --out writes the page as one HTML file.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from tricycle.decoding.encoder_decoder import TargetSettings, generate_target
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.gguf_control_vectors import read_control_vectors
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.sequences.translators import find_translators
from tricycle_cli import compare
from tricycle_cli.flags import parse
from tricycle_cli.models import ModelFlags, default_sampling, load_file, load_model, stop_tokens
from tricycle_lab.attribution import check_decoder
from tricycle_lab.lens import TunedLens
from tricycle_lab.linear_probe import new_classifier, read_labeled_texts
from tricycle_lab.look.inspectable import (
    MAX_TOKENS,
    InspectableEncoderDecoder,
    InspectableModel,
    InspectableStack,
    load_inspectable_translator,
)
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.page import collect_static_data, render_page, write_page
from tricycle_lab.look.server import LookServer, StaticPage, ViewerService
from tricycle_lab.sparse_autoencoder import SparseAutoencoder

LOADING_FLAGS, FILE_FLAGS = ("tokeniser", "adapter", "softmax"), ("steer", "lens", "autoencoder", "labels")
EXAMPLE = "The cat sat on the mat, and the dog lay down beside it. When the cat got up, the dog"


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle look`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = ""
    """a model, as in `tricycle generate`, an encoder or an encoder-decoder; with --graph an example (product, neuron,
    softmax, cross-entropy, attention, norm, norm-layer, block), a formula such as "x * y + exp(x)", or
    FILE.py:function, a function in a Python file, which is executed"""
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]")] = None
    """the input text; for an encoder-decoder SOURCE or SOURCE => TARGET; with --graph the values of the inputs, such as
    "x=2, y=[1, 2]\""""
    graph: bool = False
    """show the computation graph and the gradients of a function"""
    compare_with: str | None = None
    """a second model, shown side by side"""
    out: Path | None = None
    """write one self-contained HTML file in place of serving the page; interactive parts that need the model are left
    out"""
    port: int = 0
    """the port of the page on this machine; 0 for any free port"""
    browser: bool = True
    """open the page in a browser"""
    tokeniser: Path | None = None
    """a tokenizer file, for a model without a tokenizer"""
    steer: Path | None = None
    """a GGUF file of control vectors (`tricycle inspect steer --vector`), whose strength can be changed on the page"""
    lens: Path | None = None
    """a tuned lens of the model (`tricycle inspect lens --save`)"""
    autoencoder: Path | None = None
    """a sparse autoencoder of the model (`tricycle inspect features --save`)"""
    labels: Path | None = None
    """a text file with a label, a tab and a text in each line, for linear probes (needs scikit-learn)"""
    model: ModelFlags = field(default_factory=ModelFlags)


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle look`: show models, runs or a graph, served or in an HTML file; ValueError without any of these."""
    words = sys.argv[1:] if args is None else args
    if compare.are_runs(words):
        flags = parse(compare.Arguments, args=words, description=__doc__ or "")
        runs = compare.Runs(flags.folders)
        present(runs, runs.page, flags.out, flags.port, flags.browser)
        return
    arguments = parse(Arguments, args=words, description=__doc__ or "")
    if arguments.graph:
        names = (*LOADING_FLAGS, "weights", "device", *FILE_FLAGS, "compare_with")
        _check_default(arguments, names, "a model, got --graph")
        from tricycle_lab.look.graph_functions import build_graph_from_spec

        graph = build_graph_from_spec(arguments.source or "neuron", arguments.text or "")
        content = render_page("graph", f"Gradients of {graph['title']}", graph)
        present(StaticPage(content), lambda: content, arguments.out, arguments.port, arguments.browser)
        return
    if not arguments.source:
        raise ValueError("expected a model to inspect, or --graph, got neither")
    models = [load_inspectable(arguments, arguments.source)]
    if arguments.compare_with is not None:
        models.append(load_inspectable(arguments, arguments.compare_with, is_second=True))
    text = fitting_example(models) if arguments.text is None else arguments.text
    show(models, text, arguments.out, arguments.port, arguments.browser)


def fitting_example(models: Sequence[InspectableModel]) -> str:
    """Return the first words of EXAMPLE, as many as fit into the context windows of all models, at least one."""
    words = EXAMPLE.split(" ")
    while len(words) > 1:
        with contextlib.suppress(ValueError):
            for model in models:
                model.encode_input(" ".join(words))
            break
        words.pop()
    return " ".join(words)


def show(
    models: Sequence[InspectableModel], text: str, out: Path | None = None, port: int = 0, browser: bool = True
) -> None:
    """Serve a page that inspects one or two models until Ctrl-C, or write it to the HTML file `out`.

    Args:
        models: one model, or two for a comparison.
        text: the input text.
        out: the HTML file; None serves the page.
        port: the port on this machine; 0 for any free port.
        browser: open the page in a browser.

    Raises:
        ValueError: the text cannot be encoded, or the port is not available.
    """
    for model in models:  # an invalid text is an error of the command, not of the page
        model.encode_input(text)
    present(ViewerService(models, text), lambda: standalone_page(models, text), out, port, browser)


def load_inspectable(arguments: Arguments, source: str, is_second: bool = False) -> InspectableModel:
    """Load a model of text (without --adapter and other files if `is_second`); ValueError for another one.

    Args:
        arguments: the flags for loading.
        source: the path or name.
        is_second: the model is that of --compare-with, to which --adapter, --tokeniser and files of measures do not
            apply.
    """
    translators = find_translators(source)
    if translators:
        return load_translator(translators, source, arguments)
    loaded: Any = load_file(source, arguments.model.weights, arguments.model.device)
    kinds = GPT, EncoderDecoderTransformer
    if isinstance(loaded.model, kinds):
        flags = replace(arguments.model, adapter=None) if is_second else arguments.model
        load_model(source, None if is_second else arguments.tokeniser, loaded=loaded, kinds=kinds, **vars(flags))
    elif not isinstance(loaded.model, TextEncoder):
        raise ValueError(f"{source}: expected a model of text, got a {type(loaded.model).__name__}")
    elif not is_second:
        _check_default(arguments, LOADING_FLAGS, f"a model that generates text, got the encoder {source}")
    if loaded.tokeniser is None:
        raise ValueError(f"{source}: expected a model with a tokenizer, got none: give one with --tokeniser")
    title = Path(source).name or source
    if not is_second:
        _check_files(loaded.model, arguments)
    if isinstance(loaded.model, EncoderDecoderTransformer):
        return _inspect_encoder_decoder(loaded, title)
    inspectable = InspectableStack(loaded.model, loaded.tokeniser, title)
    if not is_second:
        _attach_files(inspectable, arguments)
    return inspectable


def _inspect_encoder_decoder(loaded: Pretrained, title: str) -> InspectableEncoderDecoder:
    """Return an inspectable encoder-decoder that generates as `tricycle generate`, but greedily."""
    model, tokeniser = loaded.model, loaded.tokeniser
    stored, sampling = loaded.source, replace(default_sampling(loaded), temperature=0.0)
    settings = TargetSettings() if stored is None else TargetSettings.from_fields(stored.generation, stored.fields)
    settings = replace(settings, num_beams=1)
    context = [int(token) for token in tokeniser.encode_plain("a")][-1:]

    def token_text(token: int) -> str:
        if token >= tokeniser.n_vocab:
            return ""
        return str(tokeniser.stream(context).push([token])) or str(tokeniser.decode([token]))

    return InspectableEncoderDecoder(
        model,
        tokeniser.encode_plain,
        token_text,
        model.config.start_token,
        stop_tokens(loaded),
        title,
        min(MAX_TOKENS, model.config.context_window),
        tokeniser.encode,
        lambda source, length: list(generate_target(model, source, length, sampling, settings)),
    )


def _check_files(model: Any, arguments: Arguments) -> None:
    """Raise a ValueError if a flag names a file that only decoders can use, and the model is another one."""
    for name in FILE_FLAGS:
        if getattr(arguments, name) is not None:
            check_decoder(f"--{name}", model)


def _attach_files(inspectable: InspectableStack, arguments: Arguments) -> None:
    """Set what --steer, --lens, --autoencoder and --labels name; ValueError if one does not fit."""
    model: Any = inspectable.model
    if arguments.steer is not None:
        width = model.config.embedding_dim
        inspectable.vectors = read_control_vectors(arguments.steer, len(model.blocks), width)
    if arguments.lens is not None:
        inspectable.lens = TunedLens.load(arguments.lens, model)
    if arguments.autoencoder is not None:
        inspectable.autoencoder = SparseAutoencoder.load(arguments.autoencoder, model)
    if arguments.labels is not None:
        new_classifier()  # an ImportError of the command, not of the page
        inspectable.labeled = read_labeled_texts(arguments.labels)


def load_translator(paths: Sequence[Path], source: str, arguments: Arguments) -> InspectableModel:
    """Load the one encoder-decoder of `paths` (found at `source`); ValueError if several or if flags do not apply."""
    if len(paths) > 1:
        found = ", ".join(map(str, paths))
        raise ValueError(f"{source}: expected one encoder-decoder, got several: give one of {found}")
    names = (*LOADING_FLAGS, "weights", *FILE_FLAGS)
    _check_default(arguments, names, f"a decoder, got the encoder-decoder {paths[0]}")
    return load_inspectable_translator(paths[0])


def _check_default(arguments: Arguments, names: Sequence[str], expected: str) -> None:
    """Raise ValueError if one of these flags is not at its default; `expected` says what has such flags."""
    plain, given = (vars(x.model) | vars(x) for x in (Arguments(), arguments))
    for name in names:
        if given[name] != plain[name]:
            raise ValueError(f"--{name.replace('_', '-')}: expected {expected}")


def standalone_page(models: Sequence[InspectableModel], text: str) -> str:
    """Return a self-contained HTML page with the data of all views, which needs no server."""
    views = [collect_static_data(model, model.run(model.encode_input(text), Interventions())) for model in models]
    command = f"tricycle look {shlex.quote(models[0].title)}"
    data = {"hasServer": False, "text": text, "models": views, "command": command}
    return render_page("look", " and ".join(model.title for model in models), data, scripts=["experts.js"])


def present(
    service: ViewerService | StaticPage, content: Callable[[], str], out: Path | None, port: int, browser: bool
) -> None:
    """Write `content()` to `out`; else serve `service` on this machine until Ctrl-C, in a browser if asked."""
    if out is not None:
        write_page(out, content())
        print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
        return
    server = LookServer(service, port)
    print(f"{server.address}\nserved to this machine only; Ctrl-C stops the server", flush=True)
    threading.Thread(target=service.prepare, daemon=True).start()
    if browser and not webbrowser.open(server.address):
        print("no browser found: open the address by hand", file=sys.stderr)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
