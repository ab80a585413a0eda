"""What Linux, or Python elsewhere, tells of the processor."""

import pytest

from tricycle_accelerators import processor

EMERALD_RAPIDS = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512f avx512_bf16
"""


@pytest.fixture
def set_cpuinfo(monkeypatch, tmp_path):
    """A function that has the system tell this."""
    path = tmp_path / "cpuinfo"

    def tell(text: str | None, python: str = "") -> None:
        processor.vendor_and_features.cache_clear()
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(processor, "CPUINFO", path)
        monkeypatch.setattr("platform.processor", lambda: python)

    yield tell
    processor.vendor_and_features.cache_clear()


def test_intel(set_cpuinfo):
    set_cpuinfo(EMERALD_RAPIDS)
    assert processor.is_intel() and processor.has_slow_bfloat16() and not processor.has_amx_bfloat16()
    set_cpuinfo(EMERALD_RAPIDS.replace("avx512_bf16", "avx512_bf16 amx_bf16"))
    assert processor.has_amx_bfloat16()


@pytest.mark.parametrize(
    "vendor, flag, is_faster",
    [
        ("GenuineIntel", "avx512_bf16", False),
        ("GenuineIntel", "amx_bf16", True),
        ("AuthenticAMD", "avx512_bf16", True),
        ("AuthenticAMD", "avx512f", False),
    ],
)
def test_whether_bfloat16_is_faster(set_cpuinfo, vendor, flag, is_faster):
    set_cpuinfo(EMERALD_RAPIDS.replace("GenuineIntel", vendor).replace("avx512_bf16", flag))
    assert processor.has_fast_bfloat16() == is_faster


def test_others(set_cpuinfo):
    set_cpuinfo(EMERALD_RAPIDS.replace("GenuineIntel", "AuthenticAMD"))
    assert not processor.is_intel() and not processor.has_slow_bfloat16()
    set_cpuinfo("")
    assert not processor.is_intel() and not processor.has_amx_bfloat16()


def test_without_linux(set_cpuinfo):
    set_cpuinfo(None, "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel")
    assert processor.is_intel() and not processor.has_amx_bfloat16()
    set_cpuinfo(None, "arm")
    assert not processor.is_intel()
