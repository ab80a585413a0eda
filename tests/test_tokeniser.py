"""Byte-pair encoding against a slow one that follows the definition, and on whatever bytes there are."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tricycle import tokeniser as module
from tricycle.bpe import END_OF_TEXT, PIECE, ByteLevelBPE
from tricycle.tokeniser import BPETokeniser, PieceIds, StreamDecoder, gpt2_pattern
from tricycle_datasets.gpt2 import gpt2_tokeniser

TEXT = """def greet(name, times=3):
    # says hello, more than once
    for i in range(times):
        print("Hello, " + name + "!", i)

    return  times * 1000


It was the best of times; it was the worst of times. Wasn't it? “Здравствуй, мир” - 你好、世界 🚲🚲
"""
# letters that repeat, all kinds of space, and characters on the borders of the pattern's classes
LIKELY = st.text(alphabet="aab  \n\n\t\r.,(=_'09\x1c\x85\xa0éЖ你、\uff0c\u1680\u2028\u3000🚲\U000e0041", max_size=200)
SCRAPS = [b"def ", b"\xe4\xbd", b"\xa0", b"\xff", b"  \n", b"\xed\xa0\x80", b"times", b"<|endoftext|>"]
ANY_TEXT = st.one_of(LIKELY, st.text(max_size=100))
ANY_BYTES = st.one_of(
    st.binary(max_size=200), ANY_TEXT.map(str.encode), st.lists(st.sampled_from(SCRAPS)).map(b"".join)
)


@pytest.fixture(scope="module")
def trained() -> BPETokeniser:
    return BPETokeniser(290).train(TEXT, progress=False)


@pytest.fixture(scope="module")
def gpt2() -> BPETokeniser:
    if not Path(os.environ.get("TRICYCLE_DATA", "-"), "gpt2", "vocab.bpe").is_file():
        pytest.skip("gpt2/vocab.bpe is not under TRICYCLE_DATA")
    return gpt2_tokeniser()


def merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    out: list[int] = []
    i = 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def slow_merges(text: str, n_merges: int) -> list[tuple[int, int]]:
    """Count every pair anew before each merge."""
    pieces = [list(piece.encode()) for piece in re.findall(PIECE, text)]
    merges: list[tuple[int, int]] = []
    while len(merges) < n_merges:
        counts = Counter(pair for piece in pieces for pair in pairwise(piece))
        # "aaa" holds the pair (a, a) twice in this count, as it does in the fast one
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        pieces = [merge(piece, best, 256 + len(merges)) for piece in pieces]
        merges.append(best)
    return merges


def slow_encode(text: str, merges: list[tuple[int, int]]) -> list[int]:
    ids = []
    for piece in re.findall(PIECE, text):
        tokens = list(piece.encode())
        for i, pair in enumerate(merges):
            tokens = merge(tokens, pair, 256 + i)
        ids += tokens
    return ids


def tokens_of(merges: list[tuple[int, int]]) -> list[bytes]:
    tokens = [bytes([value]) for value in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    return tokens


# training


REPETITIVE = st.tuples(st.text(alphabet="ab ", max_size=60).filter(bool), st.sampled_from([0, 3, 30, 2**32 - 256]))


@settings(max_examples=400, deadline=None)
@given(train_on=st.one_of(st.tuples(LIKELY.filter(bool), st.just(30)), REPETITIVE), text=ANY_TEXT)
def test_training_and_encoding_match_slow_reference(train_on, text):
    train_text, n_merges = train_on
    merges = slow_merges(train_text, n_merges)
    tokeniser = BPETokeniser(256 + n_merges, special_tokens=()).train(train_text, progress=False)
    assert [tokeniser.token_bytes(i) for i in range(len(tokeniser))] == tokens_of(merges)
    assert tokeniser.encode(text).tolist() == slow_encode(text, merges)


def test_byte_level_bpe_matches_bpe_tokeniser(trained):
    """`BPETokeniser` adds bytes, checks and files to it."""
    plain = ByteLevelBPE(290).train([TEXT], progress=False)
    assert plain.n_vocab == trained.n_vocab and plain.dtype == trained.dtype
    ids = plain.encode(TEXT)
    assert ids.dtype == np.uint16 and ids.tolist() == trained.encode(TEXT).tolist()
    assert plain.decode(ids) == TEXT and plain.decode_bytes(ids) == TEXT.encode()
    with pytest.raises(ValueError, match=r"ByteLevelBPE: .*UTF-8"):
        plain.train([], progress=False)


def test_split_pieces_concatenate_to_the_text():
    everything = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    assert "".join(re.findall(PIECE, everything)) == everything


def test_equal_texts_give_equal_tokenisers(trained):
    again = BPETokeniser(290).train(TEXT.encode(), progress=False)
    assert again == trained and again.to_dict() == trained.to_dict()
    documents = [TEXT, "to be or not to be\n", "so be it\n"]
    forwards = BPETokeniser(300).train(iter(documents), progress=False)
    assert forwards == BPETokeniser(300).train(documents[::-1], progress=False)
    assert forwards != trained and trained != "a tokeniser"


def test_retraining_replaces_the_vocabulary(trained):
    tokeniser = BPETokeniser(290).train("completely different words " * 9, progress=False)
    assert tokeniser.train(TEXT, progress=False) is tokeniser
    assert tokeniser == trained
    assert tokeniser.encode(TEXT).tolist() == trained.encode(TEXT).tolist()


def test_a_pair_that_occurs_once_is_never_merged():
    tokeniser = BPETokeniser(1000).train("abcdefg", progress=False)
    assert tokeniser.n_vocab == 257 and tokeniser.vocab_size == 1000
    assert tokeniser.special_tokens == {END_OF_TEXT: 256}
    assert BPETokeniser(1000).train("ab ab", progress=False).n_vocab == 258


def test_training_shows_progress(capsys):
    BPETokeniser(260).train(TEXT)
    assert "Training tokeniser" in capsys.readouterr().err
    BPETokeniser(260).train(TEXT, progress=False)
    assert capsys.readouterr().err == ""


def test_training_on_invalid_utf8():
    tokeniser = BPETokeniser(300).train(b"\xff\xfe caf\xe9 caf\xe9 \xff\xfe", progress=False)
    assert b" caf" in [tokeniser.token_bytes(i) for i in range(256, len(tokeniser))]
    assert not any(0xE9 in tokeniser.token_bytes(i) for i in range(256, len(tokeniser)))


@pytest.mark.parametrize("text", ["", b"", [], ["", b""], b"\xff\xff"])
def test_training_on_empty_text_is_rejected(text):
    with pytest.raises(ValueError, match=r"UTF-8.*'none'"):
        BPETokeniser(300).train(text, progress=False)


@pytest.mark.parametrize("text", [3, None, [1, 2]])
def test_text_of_wrong_type_is_rejected(text, trained):
    with pytest.raises((ValueError, TypeError)):
        BPETokeniser(300).train(text, progress=False)
    with pytest.raises(ValueError, match="str or bytes"):
        trained.encode(text)


# encoding and decoding


@settings(max_examples=200, deadline=None)
@given(raw=ANY_BYTES)
def test_byte_strings_round_trip(raw, trained):
    for tokeniser in (trained, BPETokeniser(257)):
        ids = tokeniser.encode(raw)
        assert tokeniser.decode_bytes(ids) == raw
        assert tokeniser.decode(ids) == raw.decode("utf-8", errors="replace")
        assert tokeniser.end_of_text not in ids


@given(text=st.text(alphabet=st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=50))
@settings(deadline=None)
def test_lone_surrogates_round_trip(text, trained):
    assert trained.decode_bytes(trained.encode(text)).decode("utf-8", "surrogatepass") == text


def test_untrained_tokeniser_encodes_bytes():
    tokeniser = BPETokeniser(5000)
    assert tokeniser.encode("né\xff").tolist() == list("né\xff".encode())
    assert tokeniser.encode("").shape == (0,) and tokeniser.encode(b"").dtype == np.uint16
    assert tokeniser.decode([]) == "" and tokeniser.decode(np.array([], int)) == ""
    assert tokeniser.decode(104) == "h"


def test_ids_have_the_narrowest_dtype():
    assert BPETokeniser(2**16).encode("a").dtype == np.uint16
    assert BPETokeniser(2**16 + 1).encode("a").dtype == np.uint32


def test_encoding_does_not_depend_on_chunk_boundaries(trained, monkeypatch):
    text = TEXT * 20
    whole = trained.encode(text)
    monkeypatch.setattr(module, "_CHUNK", 150)
    assert len(list(module._chunks(text))) > 50
    assert trained.encode(text).tolist() == whole.tolist()
    assert BPETokeniser(290).train(text, progress=False) == BPETokeniser(290).train([TEXT] * 20, progress=False)
    monkeypatch.setattr(module, "_CHUNK", 7)  # no good place to cut within seven characters: still lossless
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("unit", [" ", "a", "\n", "!", "ab ", "\n\t", "你"])
def test_long_runs_of_one_character_round_trip(trained, gpt2, unit):
    text = unit * 300_000 + "x"
    for tokeniser in (trained, gpt2):
        assert tokeniser.decode(tokeniser.encode(text)) == text


# without tiktoken


def without_tiktoken(tokeniser: BPETokeniser) -> BPETokeniser:
    """A copy that has met an environment in which tiktoken is not installed."""
    other = copy.copy(tokeniser)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)
        other.encode("")
    assert isinstance(other._encoding, PieceIds)
    return other


@settings(max_examples=100, deadline=None)
@given(train_on=LIKELY.filter(bool), texts=st.lists(ANY_TEXT))
def test_encoding_without_tiktoken_is_identical(train_on, texts):
    tokeniser = BPETokeniser(256 + 30, special_tokens=()).train(train_on, progress=False)
    other = without_tiktoken(tokeniser)
    for text in texts:
        ids = other.encode(text)
        assert ids.dtype == np.uint16 and ids.tolist() == tokeniser.encode(text).tolist()


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.text("ab", min_size=2, max_size=7), unique=True, max_size=30), text=st.text("ab", max_size=40)
)
def test_encoding_without_tiktoken_with_unreachable_tokens(tokens, text):
    """Tokens in any order, some of which no merge leads to."""
    tokeniser = BPETokeniser.from_tokens(
        [bytes([value]) for value in range(256)] + [token.encode() for token in tokens]
    )
    assert without_tiktoken(tokeniser).encode(text).tolist() == tokeniser.encode(text).tolist()


def test_gpt2_encoding_without_tiktoken_is_identical(gpt2):
    other = without_tiktoken(gpt2)
    for text in (TEXT * 3, *CUTS, (TEXT * 60).encode() + b"\xff", " \n" * 1000 + "ab" * 1000):
        assert other.encode(text).tolist() == gpt2.encode(text).tolist()


@settings(max_examples=200, deadline=None)
@given(train_on=st.one_of(st.tuples(LIKELY.filter(bool), st.just(30)), REPETITIVE))
def test_training_without_tiktoken_caches_the_ids_of_its_pieces(train_on):
    text, n_merges = train_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)
        tokeniser = BPETokeniser(256 + n_merges, special_tokens=()).train(text, progress=False)
    cached, merges = tokeniser._encoding, slow_merges(text, n_merges)
    assert set(cached) == {piece for piece in re.findall(PIECE, text) if len(piece) <= module._LONGEST_KEPT}
    for piece, ids in cached.items():
        assert ids == slow_encode(piece, merges), piece


def test_long_pieces_without_tiktoken_are_fast_and_not_cached(trained, gpt2):
    random = np.random.default_rng(0).integers(97, 123, 200_000, np.uint8).tobytes().decode()
    for tokeniser in (trained, gpt2):
        other = without_tiktoken(tokeniser)
        for text in (random, "a" * 200_000):
            assert other.encode(text).tolist() == tokeniser.encode(text).tolist()
        assert not other._encoding


def test_piece_cache_without_tiktoken_is_bounded(trained, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 10)
    other = without_tiktoken(trained)
    assert other.encode(TEXT).tolist() == trained.encode(TEXT).tolist()
    assert len(other._encoding) == 10


def test_special_tokens_are_encoded_only_on_request(trained):
    text = f"one{END_OF_TEXT}two"
    assert trained.end_of_text == trained.n_vocab - 1 == trained.special_tokens[END_OF_TEXT]
    assert trained.end_of_text not in trained.encode(text)
    ids = trained.encode(text, allowed_special=True)
    assert ids.tolist() == [*trained.encode("one"), trained.end_of_text, *trained.encode("two")]
    assert trained.decode(ids) == text
    assert trained.encode(b"\xff" + text.encode(), allowed_special=True).tolist() == [0xFF, *ids]


def test_several_special_tokens():
    tokeniser = BPETokeniser(300, special_tokens=("<|a|>", "<|a|><|b|>", "\n(x)")).train(TEXT, progress=False)
    assert list(tokeniser.special_tokens.values()) == [len(tokeniser) - 3, len(tokeniser) - 2, len(tokeniser) - 1]
    ids = tokeniser.encode("<|a|><|b|>\n(x)<|a|>", allowed_special=True)
    assert ids.tolist() == [len(tokeniser) - 2, len(tokeniser) - 1, len(tokeniser) - 3]
    assert tokeniser.token_bytes(len(tokeniser) - 3) == b"<|a|>"
    with pytest.raises(ValueError, match=r"<\|endoftext\|>"):
        print(tokeniser.end_of_text)
    assert BPETokeniser(256, special_tokens=()).encode("a", allowed_special=True).tolist() == [97]


@pytest.mark.parametrize("ids", [[290], [-1], [0, 10**6], np.array([65535], np.uint16), [2**40]])
def test_ids_outside_the_vocabulary_are_rejected(trained, ids):
    with pytest.raises(ValueError, match=rf"0 to 289.*\[({np.max(np.abs(ids))}|-1\])"):
        trained.decode(ids)


@pytest.mark.parametrize("ids", [[1.5], ["a"], [None], [True], [2**70]])
def test_non_integer_ids_are_rejected(trained, ids):
    with pytest.raises(ValueError, match="integer"):
        trained.decode_bytes(ids)


@settings(deadline=None)
@given(raw=ANY_BYTES)
def test_streaming_yields_complete_characters(raw, trained):
    decoder = StreamDecoder(trained)
    ids = trained.encode(raw)
    parts = [decoder.push(token) for token in ids]
    assert "".join(parts) + decoder.flush() == trained.decode(ids)


def test_streaming_buffers_incomplete_characters():
    decoder = StreamDecoder(BPETokeniser(257))
    assert [decoder.push(token) for token in "🚲!".encode()] == ["", "", "", "🚲", "!"]
    assert decoder.push(list("né".encode())[:2]) == "n"
    assert decoder.flush() == "\ufffd"


def test_streaming_completes_a_character_from_the_prompt():
    tokeniser = BPETokeniser(257)
    for n_begun in range(4):
        stream = tokeniser.stream(list("né🚲".encode())[: 3 + n_begun])
        assert "".join(map(stream.push, list("🚲!".encode())[n_begun:])) + stream.flush() == "🚲!"


# bad settings


@pytest.mark.parametrize("vocab_size", [0, -5, 256, 2**32 + 1, 300.0, "300", None, True])
def test_bad_vocabulary_sizes_are_rejected(vocab_size):
    with pytest.raises(ValueError, match=r"vocab_size.*257"):
        BPETokeniser(vocab_size)


@pytest.mark.parametrize("names", [["a", "a"], [""], [3], ["\ud800"], [b"a"]])
def test_bad_special_tokens_are_rejected(names):
    with pytest.raises(ValueError, match="special_tokens"):
        BPETokeniser(300, special_tokens=names)


# saving


def test_save_and_load_round_trip(trained, tmp_path):
    path = tmp_path / "deep" / "tokeniser.json"
    trained.save(path)
    loaded = BPETokeniser.load(path)
    assert loaded == trained and len(loaded) == len(trained)
    assert loaded.encode(TEXT).tolist() == trained.encode(TEXT).tolist()
    assert [file.name for file in path.parent.iterdir()] == ["tokeniser.json"]
    assert BPETokeniser.from_dict(json.loads(json.dumps(trained.to_dict()))) == trained


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t))])
def test_pickle_and_copy_round_trip(trained, again):
    trained.encode("so that there is an Encoding")
    other = again(trained)
    assert other._encoding is None
    assert other == trained and other.encode(TEXT).tolist() == trained.encode(TEXT).tolist()


def test_copies_train_independently(trained):
    other = copy.copy(trained).train("other words other words", progress=False)
    assert other != trained and trained == BPETokeniser(290).train(TEXT, progress=False)


def with_tokens(*tokens):
    return lambda state: {**state, "tokens": [*state["tokens"][:280], *tokens]}


BAD_FIELDS = {
    "extra": [1],
    "format": ["other"],
    "version": [2, None],
    "split": ["(a+)+$", ["tricycle"]],
    "vocab_size": [289, 10, "290", 1e300],
    "special_tokens": ["<|endoftext|>", None, ["a", "a"], [["a"]]],
    "tokens": [None, {}, []],
}
CRAFTED = [lambda state: None, lambda state: [state], lambda state: {}]
CRAFTED += [lambda state: {name: value for name, value in state.items() if name != "tokens"}]
CRAFTED += [lambda state, f=f, v=v: {**state, f: v} for f, values in BAD_FIELDS.items() for v in values]
CRAFTED += [lambda state, cut=cut: {**state, "tokens": state["tokens"][cut]} for cut in (slice(255), slice(1, None))]
CRAFTED += [with_tokens(*tokens) for tokens in (["the", "the"], [""], ["€"], [7], [["a"]])]


@pytest.mark.parametrize("change", CRAFTED)
def test_crafted_states_are_rejected(trained, tmp_path, change):
    state = change(trained.to_dict())
    with pytest.raises(ValueError, match=r"expected .*, got") as error:
        BPETokeniser.from_dict(state)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    path = tmp_path / "crafted.json"
    path.write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(ValueError, match=r"crafted\.json: .*tokeniser"):
        BPETokeniser.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04.", b"\xff\xfe", b"[" * 100_000, b"NaN", b"9" * 5000])
def test_foreign_files_are_rejected(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"foreign\.json: .*tokeniser") as error:
        BPETokeniser.load(path)
    assert "\n" not in str(error.value)


def test_truncated_file_is_rejected(trained, tmp_path):
    path = tmp_path / "tokeniser.json"
    trained.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"tokeniser\.json"):
        BPETokeniser.load(path)
    with pytest.raises(FileNotFoundError):
        BPETokeniser.load(tmp_path / "absent.json")


# GPT-2


def test_gpt2_matches_the_published_vocabulary(gpt2):
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    names = json.loads(Path(os.environ["TRICYCLE_DATA"], "gpt2", "encoder.json").read_text(encoding="utf-8"))
    assert len(gpt2) == len(names) == gpt2.vocab_size == 50257
    assert gpt2.end_of_text == names[END_OF_TEXT] == 50256
    assert gpt2.token_bytes(names["Ġhello"]) == b" hello"
    ranks = {gpt2.token_bytes(i): i for i in range(50256)}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    for text in (TEXT, TEXT * 2000):  # the second is cut in several places
        assert gpt2.encode(text).tolist() == encoding.encode_ordinary(text)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.decode_bytes(gpt2.encode(bytes(range(256)) * 2)) == bytes(range(256)) * 2


def test_import_loads_no_optional_package():
    code = "import sys, tricycle.tokeniser; print(*{'tiktoken', 'tqdm', 'regex'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


# -------------------------------------------------------------------- GPT-2's way to cut a text
CUTS = [
    "don't you'll WE'VE it's 1234567 3½ ²³ x٣٤",
    "  two spaces,  and\n\n\tlines \r\n \u00a0\u2003x\u0085 \x1c\x1f",
    "naïve na\u0308ive 日本語とไทยและ العربية 한국어 👩\u200d👧",
    "'s 'd'm'''t a'b\u2028\u3000 ",
]


@pytest.mark.parametrize("text", CUTS)
def test_gpt2_split_matches_pattern(text: str) -> None:
    pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    expected = [text[start:end] for _, (start, end) in byte_level.pre_tokenize_str(text)]
    assert re.findall(gpt2_pattern(), text) == expected


def test_tokeniser_with_gpt2_split() -> None:
    text = "we don't, they don't; 1234 and 1234,\n\n" * 20
    tokeniser = BPETokeniser(300, split="gpt2").train(text, progress=False)
    assert tokeniser.to_dict()["split"] == "gpt2"
    tokens = {tokeniser.token_bytes(token) for token in range(tokeniser.n_vocab)}
    assert b"'t" in tokens and b" don" in tokens and b" don't" not in tokens
    assert b" 1234" in tokens
    assert tokeniser.decode(tokeniser.encode(text)) == text
    assert len(tokeniser.encode(text)) < len(text) / 2
    again = BPETokeniser.from_dict(tokeniser.to_dict())
    assert again == tokeniser
    assert again.train(text, progress=False) == tokeniser
    with pytest.raises(ValueError, match=r"tricycle.*gpt2.*'words'"):
        BPETokeniser(300, split="words")
