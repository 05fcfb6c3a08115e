"""One safetensors file: against the safetensors library, and every way in which a file can be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baltoro.errors import WeightsError
from baltoro.model.tensor_file import Stored, TensorFile, read_header, sorted_for_file, write_text

TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.arange(2, dtype=torch.float64).view(1, 2),
    "single": torch.arange(3, dtype=torch.float32),
}
CODES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float64: "F64", torch.float32: "F32"}


def write_ours(path: Path) -> None:
    stored = sorted_for_file(Stored(n, CODES[t.dtype], tuple(t.shape)) for n, t in TENSORS.items())
    file = TensorFile(path, stored, {"format": "pt"})
    for item in stored:
        file.write(item.name, TENSORS[item.name].view(-1).view(torch.uint8).numpy().data)
    file.finish()
    file.rename()


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def field(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    write_ours(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(file.get_tensor(name), tensor) and file.get_tensor(name).dtype == tensor.dtype


def test_we_read_headers_that_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    entries = read_header(path)
    assert entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        entry = entries[name]
        assert (entry.dtype, entry.shape) == (CODES[tensor.dtype], tuple(tensor.shape))
        data = path.read_bytes()[entry.begin : entry.begin + entry.num_bytes]
        assert data == tensor.view(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_lies_on_a_multiple_of_its_item(tmp_path: Path) -> None:
    write_ours(tmp_path / "a.safetensors")
    for entry in read_header(tmp_path / "a.safetensors").values():
        assert entry.begin % TENSORS[entry.name].element_size() == 0


def test_a_file_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    file = TensorFile(path, [Stored("x", "U8", (2,))], {})
    assert not path.exists()
    with pytest.raises(WeightsError, match="y is not the next tensor"):
        file.write("y", memoryview(b"ab"))
    with pytest.raises(WeightsError, match="x has 3 bytes, its shape and dtype ask for 2"):
        file.write("x", memoryview(b"abc"))
    file.write("x", memoryview(b"ab"))
    with pytest.raises(WeightsError, match="x is not the next tensor"):
        file.write("x", memoryview(b"ab"))
    assert not path.exists()
    file.discard()
    assert list(tmp_path.iterdir()) == []


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "old")
    write_text(tmp_path / "a.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "new")]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "not JSON"),
        ([], b"", "not an object"),
        (b'{"x": {}, "x": {}}', b"", "names x twice"),
        ({"x": {"dtype": "U8"}}, b"", "x lacks dtype, shape or data_offsets"),
        ({"x": 5}, b"", "x lacks dtype"),
        ({"x": field("F4", [2], 0, 1)}, b"a", "x has the unknown dtype 'F4'"),
        ({"x": field("U8", [-2], 0, 1)}, b"a", "x has a shape or an offset that is not a count"),
        ({"x": field("F32", [2], 0, 4)}, b"abcd", r"x is F32 \[2\], 8 bytes, but its offsets span 4"),
        ({"x": field("U8", [2], 0, 2), "y": field("U8", [2], 1, 3)}, b"abc", "y begins at byte"),
        ({"x": field("U8", [2], 1, 3)}, b"abc", "x begins at byte"),
        ({"x": field("U8", [4], 0, 4)}, b"abc", "cut short: x ends"),
        ({"x": field("U8", [2], 0, 2)}, b"abc", "1 bytes that belong to no tensor"),
    ],
)
def test_a_broken_file_says_what_is_wrong_and_where(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        read_header(write_raw(tmp_path / "broken.safetensors", header, data))
    assert "broken.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", (10**6).to_bytes(8, "little") + b"{}", (0).to_bytes(8, "little")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        read_header(tmp_path / "a.safetensors")
