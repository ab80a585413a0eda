"""Text as it is generated."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from tricycle.tokeniser import BPETokeniser

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class StreamDecoder:
    """Decodes ids as they are generated, and holds a character back until all of its bytes are there.

    `"".join([*map(decoder.push, ids), decoder.flush()])` equals `tokeniser.decode(ids)`.
    """

    def __init__(self, tokeniser: BPETokeniser) -> None:
        self.tokeniser = tokeniser
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: ArrayLike) -> str:
        """Take one id or several; return the characters that they complete, perhaps none."""
        return self._decoder.decode(self.tokeniser.decode_bytes(ids))

    def flush(self) -> str:
        """End the text: what is still incomplete shows as U+FFFD."""
        return self._decoder.decode(b"", final=True)
