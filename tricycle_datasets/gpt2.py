"""The tokenizer of GPT-2, from its published vocabulary file."""

from __future__ import annotations

from tricycle.tokeniser import BPETokeniser
from tricycle_datasets.download import fetch

URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def gpt2_tokeniser() -> BPETokeniser:
    """Return GPT-2's BPE tokenizer of 50,257 tokens with tiktoken's ids; its file is downloaded if necessary.

    Raises:
        ValueError: the file in TRICYCLE_DATA is not the published one.
        OSError: the file is missing, and could not be downloaded.
    """
    path = fetch("vocab.bpe", URL, SHA256, folder="gpt2")
    # The vocabulary file writes each byte as one character: a visible byte as itself, the others as the characters from
    # U+0100 on. The ids of the visible bytes come first.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in visible]
    as_byte = {chr(value): bytes([value]) for value in visible}
    as_byte |= {chr(0x100 + i): bytes([value]) for i, value in enumerate(hidden)}
    tokens = list(as_byte.values())
    for merge in path.read_text(encoding="utf-8").splitlines()[1:]:
        tokens.append(b"".join(as_byte[character] for character in merge.replace(" ", "")))
    return BPETokeniser.from_tokens(tokens, split="gpt2")
