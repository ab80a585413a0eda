"""Corpora and downloads without internet access: a local server drops connections."""

import hashlib
import os
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tricycle.tokeniser import BPETokeniser
from tricycle_datasets import corpus as corpus_module
from tricycle_datasets import text as text_module
from tricycle_datasets.codeparrot import CodeParrot
from tricycle_datasets.corpus import Corpus, is_held_out
from tricycle_datasets.download import DownloadError, fetch
from tricycle_datasets.fineweb import FineWeb
from tricycle_datasets.gpt2 import gpt2_tokeniser
from tricycle_datasets.python_code import PythonCode
from tricycle_datasets.shakespeare import Shakespeare
from tricycle_datasets.text import TextFiles

DATA = os.environ.get("TRICYCLE_DATA", "-")  # each test has a folder of its own instead
CONTENT = bytes(range(256)) * 2000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
DOCUMENTS = [
    (f"document {i} says: hello hello {i * i}, and caf\xe9\n".encode("latin-1"), i % 5 == 0) for i in range(40)
]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """An empty cache and an empty TRICYCLE_DATA folder."""
    monkeypatch.setenv("TRICYCLE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TRICYCLE_CACHE", str(tmp_path / "cache"))
    return SimpleNamespace(data=tmp_path / "data", cache=tmp_path / "cache")


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# downloads


@pytest.fixture
def server():
    """Serves CONTENT; `drop_after` holds, for each coming request, the bytes after which it hangs up."""
    state = SimpleNamespace(content=CONTENT, drop_after=[], ranges=[], takes_ranges=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.ranges.append(self.headers.get("Range"))
            start = 0
            if state.takes_ranges and self.headers.get("Range"):
                start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if self.path != "/file":
                self.send_error(404)
                return
            if start and start >= len(state.content):
                self.send_error(416)
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(state.content) - 1}/{len(state.content)}")
            self.end_headers()
            self.wfile.write(body[: state.drop_after.pop(0)] if state.drop_after else body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_address[1]}/file"
        state.fetch = lambda: fetch("file.bin", state.url, SHA256, "things")
        yield state
        http.shutdown()
        thread.join()


def test_file_is_downloaded_once_and_cached(server, folders):
    path = server.fetch()
    assert path == folders.cache / "things" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert server.fetch() == path
    assert len(server.ranges) == 1
    assert [file.name for file in path.parent.iterdir()] == ["file.bin"]


def test_files_under_tricycle_data_take_precedence_and_are_verified(server, folders):
    path = write(folders.data / "things" / "file.bin", CONTENT)
    assert server.fetch() == path
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=f"file.bin: .*{SHA256}.*{'[0-9a-f]' * 64}"):
        server.fetch()
    assert server.ranges == []


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_a_dropped_connection_is_resumed(server, takes_ranges):
    server.drop_after, server.takes_ranges = [100_000, 50_000], takes_ranges
    assert server.fetch().read_bytes() == CONTENT
    assert server.ranges[0] is None
    positions = [int(header.removeprefix("bytes=").removesuffix("-")) for header in server.ranges[1:]]
    assert len(positions) == 2 and 0 < positions[0] <= 100_000
    assert positions[0] < positions[1] <= 150_000 or not takes_ranges


def test_an_interrupted_download_is_resumed_later(server, folders):
    server.drop_after = [100_000, 0, 0]
    with pytest.raises(DownloadError):
        server.fetch()
    (left,) = (folders.cache / "things").iterdir()
    assert left.name == "file.bin.part" and CONTENT.startswith(left.read_bytes())
    server.ranges.clear()
    assert server.fetch().read_bytes() == CONTENT
    assert server.ranges[0] not in (None, "bytes=0-")
    assert [file.name for file in (folders.cache / "things").iterdir()] == ["file.bin"]


@pytest.mark.parametrize("content", [CONTENT, CONTENT[:-1], CONTENT + b"more", b"of another file", b""])
@pytest.mark.parametrize("name", ["file.bin", "file.bin.part"])
def test_complete_partial_and_damaged_files_in_the_cache_give_the_content(server, folders, name, content):
    path = write(folders.cache / "things" / name, content)
    assert server.fetch().read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file.bin"]


def test_wrong_content_is_never_stored(server, folders):
    server.content = b"not what was published"
    with pytest.raises(DownloadError, match=SHA256):
        server.fetch()
    assert not [path for path in folders.cache.rglob("*") if path.is_file()]


def test_concurrent_fetches_download_once(server):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: server.fetch(), range(4)))
    assert {path.read_bytes() == CONTENT for path in paths} == {True}
    assert server.ranges == [None]


def test_offline_error_names_the_paths(server, folders, monkeypatch):
    for url in (server.url + "/absent", "http://127.0.0.1:9/file"):
        with pytest.raises(OSError) as error:
            fetch("file.bin", url, SHA256, "things")
        message = str(error.value)
        for expected in (url, str(folders.data / "things" / "file.bin"), str(folders.cache / "things" / "file.bin")):
            assert expected in message
        assert "\n" not in message
    monkeypatch.delenv("TRICYCLE_DATA")
    with pytest.raises(DownloadError, match=r"\$TRICYCLE_DATA.things.file.bin"):
        fetch("file.bin", url, SHA256, "things")


# what corpora share


def make(documents=None, vocab_size=300, **options) -> Corpus:
    chosen = DOCUMENTS if documents is None else documents
    return Corpus("test", lambda: iter(chosen), vocab_size, **{"progress": False, **options})


def cached_files(folders) -> dict[str, Path]:
    (folder,) = (folders.cache / "corpora").iterdir()
    return {path.name: path for path in folder.iterdir()}


def test_corpus_tokens_decode_to_separated_documents():
    corpus = make()
    assert corpus.vocab_size == corpus.tokeniser.vocab_size == 300
    for tokens, held_out in ((corpus.train, False), (corpus.validation, True)):
        texts = [text for text, out in DOCUMENTS if out == held_out]
        cuts = np.flatnonzero(tokens == corpus.tokeniser.end_of_text)
        assert len(cuts) == len(texts) - 1
        documents = [corpus.tokeniser.decode_bytes(part) for part in np.split(tokens, cuts)]
        assert [part.removeprefix(b"<|endoftext|>") for part in documents] == texts
        assert tokens.dtype == np.uint16 and isinstance(tokens, np.memmap)
    assert corpus.validation_bytes == b"".join(text for text, out in DOCUMENTS if out)
    assert "1,0" not in repr(corpus) and "Corpus(vocab_size=300" in repr(corpus)


def test_a_corpus_is_a_sequence_of_training_tokens():
    corpus = make()
    assert len(corpus) == len(corpus.train) == len(np.asarray(corpus))
    assert corpus[3] == corpus.train[3]
    assert corpus[2:9].tolist() == np.asarray(corpus)[2:9].tolist() == np.array(corpus, dtype=np.int64)[2:9].tolist()
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_empty_documents_are_ignored():
    with_empty = [(b"", False), *DOCUMENTS, (b"", True), (b"", False)]
    assert make(with_empty).train.tolist() == make().train.tolist()


def test_corpus_is_built_once_and_cached(folders, monkeypatch):
    first = make()
    monkeypatch.setattr(Corpus, "_write", None)  # to write again would be an error
    second = make()
    assert second.train.tolist() == first.train.tolist() and second.tokeniser == first.tokeniser
    names = "hashes.json tokeniser.json train.npy validation.npy validation.bin"
    assert set(cached_files(folders)) == {*names.split()}


def test_cache_depends_on_texts_and_settings(folders):
    other_tokeniser = BPETokeniser(300).train("something else entirely, something", progress=False)
    corpora = [
        make(),
        make(vocab_size=301),
        make(vocab_size=None),
        make(tokeniser=other_tokeniser),
        make(split="gpt2"),
        make([*DOCUMENTS[:-1], (DOCUMENTS[-1][0] + b"!", False)]),
        make([(text, not out) for text, out in DOCUMENTS]),
    ]
    assert len(list((folders.cache / "corpora").iterdir())) == len(corpora)
    assert corpora[2].vocab_size == 1024
    assert corpora[3].tokeniser == other_tokeniser
    assert corpora[4].tokeniser.to_dict()["split"] == "gpt2"


def test_given_tokeniser_determines_the_vocabulary():
    tokeniser = BPETokeniser(70_000)
    corpus = make(vocab_size=None, tokeniser=tokeniser)
    assert corpus.vocab_size == 70_000 and corpus.train.dtype == np.uint32
    with pytest.raises(ValueError, match=r"vocab_size 70000.*got 300"):
        make(vocab_size=300, tokeniser=tokeniser)
    with pytest.raises(ValueError, match=r"<\|endoftext\|>"):
        make(vocab_size=None, tokeniser=BPETokeniser(300, special_tokens=()))


@pytest.mark.parametrize("name", ["tokeniser.json", "train.npy", "validation.npy", "validation.bin", "hashes.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove", "replace"])
def test_a_damaged_cache_is_rebuilt(folders, name, damage):
    expected = make().train.tolist()
    path = cached_files(folders)[name]
    content = path.read_bytes()
    path.unlink()  # the old corpus may still have it mapped
    damaged = {
        "truncate": content[:-3],
        "flip": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        "empty": b"",
        "replace": b'["a list"]',
    }
    if damage != "remove":
        path.write_bytes(damaged[damage])
    corpus = make()
    assert corpus.train.tolist() == expected
    assert path.read_bytes() == content


def test_a_failed_build_leaves_no_valid_cache(folders):
    with pytest.raises(TypeError, match="int"):
        make([*DOCUMENTS, 3], fingerprint="given")
    assert not list((folders.cache / "corpora").iterdir())
    assert len(make(fingerprint="given")) == len(make())


@pytest.mark.slow
def test_concurrent_builds_give_equal_corpora(folders):
    code = """if True:
        import sys
        from tricycle_datasets.corpus import Corpus
        documents = [(f"document {i} says hello {i * i}\\n".encode() * 50, i % 5 == 0) for i in range(400)]
        sys.stdin.readline()
        for i in range(5):
            corpus = Corpus(f"shared{i}", lambda: iter(documents), 400, progress=False)
            print(hash(tuple(corpus.train.tolist())), len(corpus.validation), corpus.vocab_size)
    """
    start = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(start, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    for folder in (folders.cache / "corpora").iterdir():
        assert corpus_module._intact(folder) and len(list(folder.iterdir())) == 5


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "text to train on"),
        ([(b"", False)], "text to train on"),
        ([(b"held out", True)], "text to train on"),
        ([(b"some text", False)], "text held out"),
    ],
)
def test_corpus_without_training_or_held_out_text_is_rejected(documents, message):
    with pytest.raises(ValueError, match=message):
        make(documents)
    if documents and documents[0][1]:
        with pytest.raises(ValueError, match=r"test: .*text"):
            make(documents, tokeniser=BPETokeniser(300))


def test_tokeniser_is_trained_on_training_text_and_a_sample_of_a_large_corpus(monkeypatch):
    assert make().tokeniser == BPETokeniser(300).train([text for text, out in DOCUMENTS if not out], progress=False)
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 1000)
    monkeypatch.setattr(corpus_module, "_BLOCK", 50)
    read = []
    monkeypatch.setattr(BPETokeniser, "train", lambda self, blocks, progress: read.extend(blocks) or self)
    documents = [(bytes([65 + i % 26]) * 500, i % 5 == 4) for i in range(26)]
    make(documents)
    assert sum(map(len, read)) == 1000
    first_bytes = {block[:1] for block in read}
    assert first_bytes == {text[:1] for text, out in documents if not out}  # a sample of every training document
    read.clear()
    make(documents, fingerprint="bytes not counted")
    assert b"".join(read) == documents[0][0] + documents[1][0]


# the corpora


@pytest.fixture
def shakespeare_text(monkeypatch) -> bytes:
    path = Path(DATA, "tinyshakespeare", "input.txt")
    if not path.is_file():
        pytest.skip("tinyshakespeare/input.txt is not under TRICYCLE_DATA")
    monkeypatch.setenv("TRICYCLE_DATA", DATA)
    return path.read_bytes()


def test_shakespeare_holds_out_the_last_tenth(shakespeare_text):
    corpus = Shakespeare(vocab_size=512, progress=False)
    cut = len(shakespeare_text) - len(shakespeare_text) // 10
    assert corpus.tokeniser.decode_bytes(corpus.train) == shakespeare_text[:cut]
    assert corpus.tokeniser.decode_bytes(corpus.validation) == shakespeare_text[cut:] == corpus.validation_bytes
    assert corpus.vocab_size == corpus.tokeniser.n_vocab == 512
    assert corpus.tokeniser == BPETokeniser(512).train(shakespeare_text[:cut], progress=False)


def test_gpt2_file_with_wrong_hash_is_rejected(folders):
    write(folders.data / "gpt2" / "vocab.bpe", b"#version: 0.2\n")
    with pytest.raises(ValueError, match=r"vocab\.bpe: .*SHA-256"):
        gpt2_tokeniser()


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A small standard library, with files that must be excluded."""
    root = tmp_path / "lib"
    for i in range(200):
        write(root / f"module{i}.py", f"def function{i}(x):\n    return x + {i}  # caf\xe9\n".encode("latin-1"))
    for name in ("test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/torch/d.py", "e.txt"):
        write(root / name, b"never = 'read'\n")
    write(root / "json" / "decoder.py", b"import re\n")
    write(root / "json" / "test.py", b"a file of this name is read\n")
    if sys.platform != "win32":  # where links need a permission
        (root / "sitecustomize.py").symlink_to(root / "missing.py")
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root) if name == "stdlib" else get_path(name))
    return root


def test_python_code_excludes_tests_and_installed_packages(library):
    corpus = PythonCode(vocab_size=300, progress=False)
    names = sorted([*(f"module{i}.py" for i in range(200)), "json/decoder.py", "json/test.py"])
    held_out = [n for n in names if int(hashlib.sha256(n.encode()).hexdigest(), 16) % 20 == 0]
    assert 0 < len(held_out) < 30
    assert corpus.validation_bytes == b"".join((library / name).read_bytes() for name in held_out)
    end = b"<|endoftext|>"
    text = end.join((library / name).read_bytes() for name in names if name not in held_out)
    assert corpus.tokeniser.decode_bytes(corpus.train) == text
    assert b"never" not in text


def test_python_code_without_sources_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"standard library.*\.py"):
        PythonCode(300)


def test_text_files_of_a_folder_are_read_and_split_by_name(tmp_path):
    for i in range(100):
        write(tmp_path / "texts" / f"part{i % 3}" / f"{i}.txt", f"This is text {i}.\n".encode())
    write(tmp_path / "texts" / "picture.png", b"\x89PNG\0\0")
    write(tmp_path / "texts" / ".git" / "config", b"hidden")
    write(tmp_path / "texts" / "empty.txt", b"")
    corpus = TextFiles(tmp_path / "texts", 300, progress=False)
    names = sorted(f"part{i % 3}/{i}.txt" for i in range(100))
    held_out = [name for name in names if is_held_out(name)]
    assert 0 < len(held_out) < 15
    assert corpus.validation_bytes == b"".join((tmp_path / "texts" / name).read_bytes() for name in held_out)
    assert corpus.tokeniser.decode(corpus.train).count("<|endoftext|>") == 100 - len(held_out) - 1
    assert b"PNG" not in corpus.tokeniser.decode_bytes(corpus.train)


def test_few_text_files_hold_out_the_end_of_each(tmp_path):
    first, second = write(tmp_path / "b.txt", b"0123456789" * 10), write(tmp_path / "a.txt", b"abcdefghij" * 20)
    corpus = TextFiles([str(first), second, tmp_path], 300, progress=False)  # the folder brings nothing new
    assert corpus.validation_bytes == b"0123456789" + b"abcdefghij" * 2
    assert corpus.tokeniser.decode(corpus.train) == "0123456789" * 9 + "<|endoftext|>" + "abcdefghij" * 18


def test_missing_binary_and_empty_text_files_are_rejected(tmp_path):
    binary = write(tmp_path / "folder" / "binary.dat", b"a\0b")
    for paths, expected in [
        (tmp_path / "absent", "expected a file or a folder, but there is none at .*absent"),
        (binary, "expected a text file, got one with NUL bytes .*binary.dat"),
        (tmp_path / "folder", "expected text files, found none in"),
        ([], "expected text files, found none in"),
        (write(tmp_path / "empty.txt", b""), "expected a text file, got an empty one"),
        (write(tmp_path / "tiny.txt", b"abc"), "expected some text held out for validation"),
    ]:
        with pytest.raises(ValueError, match=expected) as error:
            TextFiles(paths, 300, progress=False)
        assert "\n" not in str(error.value)


@pytest.fixture
def hub(monkeypatch):
    """Replace Hugging Face datasets by a fake."""
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        return ({"content": f"code {i}\n" * 5, "text": f"page {i}\n" * 5} for i in range(1000))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_streamed_corpus_is_split_and_cached(hub):
    corpus = CodeParrot(300, n_documents=100, progress=False)
    texts = [f"code {i}\n" * 5 for i in range(100)]
    assert corpus.validation_bytes.decode() == "".join(texts[::20])
    expected = "<|endoftext|>".join(text for i, text in enumerate(texts) if i % 20)
    assert corpus.tokeniser.decode(corpus.train) == expected
    options = {"name": None, "split": "train", "streaming": True, "revision": "main"}
    assert hub[0] == ("codeparrot/codeparrot-clean", options)
    n_calls = len(hub)
    again = CodeParrot(300, n_documents=100, progress=False)
    assert len(hub) == n_calls and len(again) == len(corpus)  # from the cache
    resumed = CodeParrot(300, n_documents=100, tokeniser=corpus.tokeniser, progress=False)
    assert len(hub) == n_calls and len(resumed) == len(corpus)  # with its own tokeniser, too
    CodeParrot(300, n_documents=100, revision="abc", progress=False)
    assert hub[-1][1]["revision"] == "abc"


def test_streamed_corpora_stop_at_their_limits(hub):
    page = len(b"page 1\n" * 5)
    corpus = FineWeb(300, max_bytes=page * 10, progress=False)
    assert hub[0][0] == "HuggingFaceFW/fineweb" and hub[0][1]["name"] == "sample-10BT"
    assert corpus.tokeniser.decode(corpus.train).count("<|endoftext|>") == 10 - 1 - 1
    few_held_out = FineWeb(300, n_documents=200, held_out_bytes=2 * page + 10, progress=False)
    assert few_held_out.validation_bytes == b"page 0\n" * 5 + b"page 20\n" * 5
    assert "page 40\n" in few_held_out.tokeniser.decode(few_held_out.train)


@pytest.mark.parametrize(
    "limits", [{"max_bytes": 0}, {"n_documents": -1}, {"max_bytes": 1e9}, {"held_out_bytes": None}]
)
def test_bad_limits_of_streamed_corpora_are_rejected(limits):
    (name,) = limits
    with pytest.raises(ValueError, match=f"CodeParrot: .*{name}"):
        CodeParrot(300, **limits)


def test_streaming_without_datasets_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "tricycle-gpt\[datasets\]"'):
        FineWeb(300, progress=False)


def test_importing_datasets_imports_no_heavy_modules():
    names = "shakespeare, python_code, text, codeparrot, fineweb, download"
    heavy = "{'tiktoken', 'tqdm', 'urllib.request', 'datasets'}"
    code = f"import sys; from tricycle_datasets import {names}; print(*{heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_held_out_text_is_bounded(tmp_path, monkeypatch):
    for module in (corpus_module, text_module):
        monkeypatch.setattr(module, "HELD_OUT_BYTES", 1000)
    single = write(tmp_path / "single.txt", b"some words and more\n" * 2000)
    assert len(TextFiles([single], 300, progress=False).validation_bytes) == 1000
    for i in range(100):
        write(tmp_path / "many" / f"{i}.txt", f"file {i} has some words\n".encode() * 20)
    corpus = TextFiles([tmp_path / "many"], 300, progress=False)
    assert 0 < len(corpus.validation_bytes) <= 1000
    assert len(corpus.validation_bytes) < sum(is_held_out(f"{i}.txt") for i in range(100)) * 400
