"""Vendor and features of the processor, from Linux's cpuinfo or from NumPy."""

import pytest

from tricycle_accelerators import processor

EMERALD_RAPIDS = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512f avx512_bf16
"""


@pytest.fixture
def set_cpuinfo(monkeypatch, tmp_path):
    """Return a function that sets the text of cpuinfo (None: no such file) and the name that Python gives."""
    path = tmp_path / "cpuinfo"
    monkeypatch.delenv("NPY_DISABLE_CPU_FEATURES", raising=False)

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


@pytest.mark.parametrize(
    "vendor, flag, is_intel, has_amx, is_faster",
    [
        ("GenuineIntel", "avx512_bf16", True, False, False),
        ("GenuineIntel", "avx512_bf16 amx_bf16", True, True, True),
        ("GenuineIntel", "amx_bf16", True, True, True),
        ("AuthenticAMD", "avx512_bf16", False, False, True),
        ("AuthenticAMD", "avx512f", False, False, False),
        ("", "", False, False, False),
    ],
)
def test_vendor_and_speed_of_bfloat16(set_cpuinfo, vendor, flag, is_intel, has_amx, is_faster):
    set_cpuinfo(EMERALD_RAPIDS.replace("GenuineIntel", vendor).replace("avx512_bf16", flag) if vendor else "")
    assert processor.is_intel() == is_intel
    assert processor.has_amx_bfloat16() == has_amx
    assert processor.has_fast_bfloat16() == is_faster


def test_processor_features_without_linux(set_cpuinfo):
    set_cpuinfo(None, "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel")
    assert processor.is_intel() and not processor.has_amx_bfloat16()
    set_cpuinfo(None, "arm")
    assert not processor.is_intel()


def test_features_of_arm(set_cpuinfo):
    set_cpuinfo("processor\t: 0\nFeatures\t: fp asimd atomics\nCPU implementer\t: 0x41\n")
    assert processor.vendor_and_features() == ("", {"fp", "asimd", "atomics"})


@pytest.mark.parametrize("disabled", ["X86_V4 AVX512_ICL", "AVX512_ICL,AVX512F"])
def test_numpy_setting_disables_avx512(set_cpuinfo, disabled, monkeypatch):
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", disabled)
    set_cpuinfo(EMERALD_RAPIDS.replace("avx512_bf16", "avx512_bf16 amx_bf16"))
    assert processor.vendor_and_features()[1] == {"fpu", "avx2"}
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX512_ICL")
    set_cpuinfo(EMERALD_RAPIDS)
    assert "avx512f" in processor.vendor_and_features()[1]


@pytest.mark.parametrize(
    "baseline, found, expected",
    [
        (["X86_V2"], ["X86_V3", "X86_V4"], {"avx2", "avx512f"}),
        (["SSE", "SSE2", "SSE3"], ["AVX2"], {"avx2"}),
        (["NEON", "ASIMD"], [], {"asimd"}),
    ],
)
def test_features_from_numpy(set_cpuinfo, baseline, found, expected, monkeypatch):
    simd = {"baseline": baseline, "found": found, "not found": []}
    monkeypatch.setattr("numpy.show_config", lambda mode: {"SIMD Extensions": simd})
    set_cpuinfo(None, "some processor")
    assert processor.vendor_and_features() == ("some processor", expected)
