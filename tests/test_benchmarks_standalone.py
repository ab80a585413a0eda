"""benchmarks/standalone: reading the speed from a page's status line; test_standalone_browser.py measures a page."""

import pytest

from benchmarks.standalone import tokens_per_second


def test_speed_is_read_from_the_status_line():
    assert tokens_per_second("64 tokens, seed 3, 1,234 tokens/s") == 1234
    with pytest.raises(ValueError, match="tokens/s, got 'stopped'"):
        tokens_per_second("stopped")
