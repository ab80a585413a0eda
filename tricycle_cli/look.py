"""Look inside a model: a page about what it makes of a text, served to this machine's browser or written as a file.

Of two run folders or more, a page that compares the runs: `tricycle look runs/a runs/b`.
With --graph, a page about a small function: the graph behind its result, and the gradients that go back through it.
"""

from __future__ import annotations

import shlex
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from tricycle.models import GPT
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.sequences.translators import find_translators
from tricycle_cli import compare
from tricycle_cli.flags import parse
from tricycle_cli.models import ModelFlags, load_file, load_model
from tricycle_lab.look.changes import Changes
from tricycle_lab.look.page import page, whole, write_page
from tricycle_lab.look.server import Desk, LookServer, Picture
from tricycle_lab.look.subjects import Stack, Subject, saved_translator

EXAMPLE = "The cat sat on the mat, and the dog lay down beside it. When the cat got up, the dog"


@dataclass(frozen=True)
class Arguments:
    """What to look into."""

    source: Annotated[str, tyro.conf.Positional] = ""
    """a model, as `tricycle generate` takes it, an encoder or an encoder-decoder; with --graph an example (product,
    neuron, softmax, cross-entropy, attention, norm, norm-layer, block), a formula such as "x * y + exp(x)", or
    FILE.py:function, of a file of your own, which is run"""
    text: Annotated[str | None, tyro.conf.Positional] = None
    """what it is to read, of an encoder-decoder its source, and maybe => and a target; with --graph the values of the
    inputs, such as "x=2, y=[1, 2]\""""
    graph: bool = False
    """look at gradients"""
    beside: str | None = None
    """another model, to be seen side by side with it"""
    out: Path | None = None
    """write one HTML file that needs nothing else, and serve nothing: what needs the model is left out there"""
    port: int = 0
    """where to serve the page on this machine; 0 for any port that is free"""
    browser: bool = True
    """open the page"""
    tokeniser: Path | None = None
    """a tokeniser file, for a model that carries none"""
    model: ModelFlags = field(default_factory=ModelFlags)


def main(args: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if args is None else args
    if compare.are_runs(words):
        asked = parse(compare.Arguments, args=words, description=__doc__ or "")
        runs = compare.Runs(asked.folders)
        present(runs, runs.page, asked.out, asked.port, asked.browser)
        return
    arguments = parse(Arguments, args=words, description=__doc__ or "")
    if arguments.graph:
        from tricycle_lab.look.functions import graph_named

        graph = graph_named(arguments.source or "neuron", arguments.text or "")
        content = page("graph", f"Gradients of {graph['title']}", graph)
        present(Picture(content), lambda: content, arguments.out, arguments.port, arguments.browser)
        return
    if not arguments.source:
        raise ValueError("expected a model to look into, or --graph")
    text = EXAMPLE if arguments.text is None else arguments.text
    subjects = [load_inspectable(arguments, arguments.source)]
    if arguments.beside is not None:
        subjects.append(load_inspectable(arguments, arguments.beside, beside=True))
    show(subjects, text, arguments.out, arguments.port, arguments.browser)


def show(subjects: Sequence[Subject], text: str, out: Path | None = None, port: int = 0, browser: bool = True) -> None:
    """Serve a page about models, or write one where `out` says.

    Raises:
        ValueError: a text that cannot be read; a port that cannot be had.
    """
    for subject in subjects:  # so that a text that cannot be read is an error of the command
        subject.ids_of(text)
    present(Desk(subjects, text), lambda: standalone_page(subjects, text), out, port, browser)


def load_inspectable(arguments: Arguments, source: str, beside: bool = False) -> Subject:
    """Load a model by path or name for the pages."""
    translators = find_translators(source)
    if translators:
        return load_translator(translators, source, arguments)
    loaded: Any = load_file(source, arguments.model.weights)
    if isinstance(loaded.model, GPT):
        flags = replace(arguments.model, adapter=None) if beside else arguments.model
        load_model(source, None if beside else arguments.tokeniser, loaded=loaded, **vars(flags))
    elif not isinstance(loaded.model, TextEncoder):
        raise ValueError(f"{source}: expected a model of text, got a {type(loaded.model).__name__}")
    if loaded.tokeniser is None:
        raise ValueError(f"{source}: expected a model with a tokeniser; --tokeniser names one for a model without")
    return Stack(loaded.model, loaded.tokeniser, Path(source).name or source)


def load_translator(paths: Sequence[Path], source: str, arguments: Arguments) -> Subject:
    """Return the encoder-decoder in a file; raise ValueError where there are several, or flags for other models."""
    if len(paths) > 1:
        raise ValueError(f"{source}: expected one encoder-decoder, name one of {', '.join(map(str, paths))}")
    plain, given = (vars(x.model) | vars(x) for x in (Arguments(), arguments))
    for name in ("softmax", "tokeniser", "adapter", "weights"):
        if given[name] != plain[name]:
            raise ValueError(f"--{name}: expected a decoder, {paths[0]} holds an encoder-decoder")
    return saved_translator(paths[0])


def standalone_page(subjects: Sequence[Subject], text: str) -> str:
    """Return a page that needs no server, with all that there is to see."""
    sides = [whole(subject, subject.read(subject.ids_of(text), Changes())) for subject in subjects]
    data = {"served": False, "text": text, "sides": sides, "command": f"tricycle look {shlex.quote(subjects[0].title)}"}
    return page("look", " and ".join(subject.title for subject in subjects), data)


def present(desk: Desk | Picture, content: Callable[[], str], out: Path | None, port: int, browser: bool) -> None:
    """Write a page where `out` names a file; else answer a browser of this machine until Ctrl-C."""
    if out is not None:
        write_page(out, content())
        print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, for any browser")
        return
    server = LookServer(desk, port)
    print(f"{server.address}\nfor browsers of this machine alone; Ctrl-C ends it", flush=True)
    threading.Thread(target=desk.prepare, daemon=True).start()
    if browser and not webbrowser.open(server.address):
        print("no browser was found: open the address", file=sys.stderr)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
