"""GPT-2's published vocabulary."""

from __future__ import annotations

from tricycle.tokeniser import BPETokeniser
from tricycle_datasets.download import fetch

URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def gpt2_tokeniser() -> BPETokeniser:
    """A tokeniser with the 50,257 ids of GPT-2, those of tiktoken's "gpt2".

    Raises:
        ValueError: the file under TRICYCLE_DATA is not the published one.
        OSError: there is no file, and it could not be downloaded.
    """
    path = fetch("vocab.bpe", URL, SHA256, folder="gpt2")
    # GPT-2 writes each byte as one visible character: itself where that is visible, and the characters from
    # U+0100 on for the others. Its ids list the visible bytes first.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in visible]
    as_byte = {chr(value): bytes([value]) for value in visible}
    as_byte |= {chr(0x100 + i): bytes([value]) for i, value in enumerate(hidden)}
    tokens = list(as_byte.values())
    for merge in path.read_text(encoding="utf-8").splitlines()[1:]:
        tokens.append(b"".join(as_byte[character] for character in merge.replace(" ", "")))
    return BPETokeniser.from_tokens(tokens, split="gpt2")
