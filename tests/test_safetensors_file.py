"""Headers of safetensors files: round trips.

Damaged and malicious files are tested in test_pretrained.py and test_checkpoint.py.
"""

import pytest

from tricycle.system.safetensors_file import TensorInfo, read_header, write_header

LAYOUT = {"a": ("F32", (2, 3)), "b": ("U8", (5,)), "none": ("F64", (0, 4))}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        write_header(file, LAYOUT, {"said": "so"})
        file.write(bytes(29))
    return path


def test_round_trip(path):
    infos, metadata, start = read_header(path)
    assert metadata == {"said": "so"}
    assert infos == {
        "a": TensorInfo("F32", (2, 3), start),
        "b": TensorInfo("U8", (5,), start + 24),
        "none": TensorInfo("F64", (0, 4), start + 29),
    }
    assert [info.n_bytes for info in infos.values()] == [24, 5, 0]
    assert start % 8 == 0 and path.stat().st_size == start + 29


def test_safetensors_package_reads_the_file(path):
    with pytest.importorskip("safetensors").safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"said": "so"}
        assert {name: file.get_tensor(name).shape for name in file.keys()} == {  # noqa: SIM118
            name: shape for name, (_, shape) in LAYOUT.items()
        }
