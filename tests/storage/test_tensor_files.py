"""Safetensors files: what is read and written is what the library reads and writes, slice by slice and byte by byte."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasao.storage.header import DTYPES, TensorInfo
from megasao.storage.reader import TensorFiles
from megasao.storage.writer import TensorFileWriter, checksum, file_bytes

SHAPES = ((), (0, 3), (5,), (7, 3), (3, 5, 2))


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        f"{name}.{number}": (torch.randn(shape) * 3).to(dtype)
        for name, dtype in DTYPES.items()
        for number, shape in enumerate(SHAPES)
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_reading_what_the_library_wrote_whole_and_in_slices(tmp_path: Path) -> None:
    expected = tensors()
    save_file(expected, tmp_path / "file.safetensors")
    files = TensorFiles([tmp_path / "file.safetensors"])
    assert files.names() == expected.keys()
    for name, tensor in expected.items():
        assert files.info(name) == TensorInfo(name, tensor.dtype, tuple(tensor.shape))
        assert same(files.read_whole(name), tensor), name
        for dimension, size in enumerate(tensor.shape):
            for start, stop in ((0, size), (1, size), (size // 2, size // 2 + 1), (size, size)):
                if start <= stop <= size:
                    part = tensor.narrow(dimension, start, stop - start)
                    assert same(files.read_slice(name, dimension, start, stop), part), (name, dimension, start)


def test_the_library_reads_what_was_written_in_interleaved_pieces(tmp_path: Path) -> None:
    expected, path = tensors(), tmp_path / "file.safetensors"
    infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in expected.items()]
    with TensorFileWriter(path, infos) as writer:
        for half in (0, 1):
            for name, tensor in expected.items():
                flat = tensor.reshape(-1)
                writer.write(name, flat[: len(flat) // 2] if half == 0 else flat[len(flat) // 2 :])
        writer.finish()
    assert path.stat().st_size == file_bytes(infos)
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    starts = {name: TensorFiles([path])._places[name].start for name in expected}
    assert all(starts[info.name] % info.dtype.itemsize == 0 for info in infos)


def test_a_piece_too_few_or_too_many_is_a_mistake_of_ours(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "file", [TensorInfo("a", torch.float32, (4,))]) as writer:
        writer.write("a", torch.zeros(3))
        with pytest.raises(AssertionError, match="not complete"):
            writer.finish()
        with pytest.raises(AssertionError, match="more bytes"):
            writer.write("a", torch.zeros(2))
        with pytest.raises(AssertionError, match="announced as"):
            writer.write("a", torch.zeros(1, dtype=torch.float64))


def read_by_this_process() -> int:
    """Bytes that read calls have returned, counted by the kernel."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@pytest.mark.parametrize(("dimension", "start", "stop"), [(0, 100, 300), (1, 0, 256), (1, 512, 1024)])
def test_a_slice_reads_its_own_bytes_and_no_others(tmp_path: Path, dimension: int, start: int, stop: int) -> None:
    path, tensor = tmp_path / "file.safetensors", torch.randn(1000, 1024)
    save_file({"a": tensor, "b": torch.randn(1000, 1000)}, path)
    files = TensorFiles([path])
    measuring = -read_by_this_process() + read_by_this_process()
    before = read_by_this_process()
    part = files.read_slice("a", dimension, start, stop)
    assert read_by_this_process() - before - measuring == part.nbytes
    assert part.nbytes < tensor.nbytes / 2 + 1
    assert torch.equal(part, tensor.narrow(dimension, start, stop - start))


def test_damaged_files_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    save_file({"a": torch.randn(100), "b": torch.randn(50)}, good)
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def with_text(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    def with_header(change: dict[str, object]) -> bytes:
        return with_text(json.dumps({**header, "a": {**header["a"], **change}}).encode())

    again = f', "a": {json.dumps({**header["a"], "dtype": "I32"})}}}'

    variants = {
        "truncated": (data[:-1], "is truncated"),
        "grown": (data + b"x", "is damaged: it has"),
        "empty": (b"", "cannot hold its header"),
        "page": (b"<!DOCTYPE html>" * 100, "cannot hold its header"),
        "cut": (data[:40], "cannot hold its header"),
        "garbage": (data[:8] + b"?" * length + data[8 + length :], "its header is unreadable"),
        "dtype": (with_header({"dtype": "F4"}), "a has the dtype 'F4'; expected one of F64"),
        "shape": (with_header({"shape": [99]}), "is damaged: a is said to be bytes"),
        "place": (with_header({"data_offsets": [4, 404]}), "is damaged: a is said to be bytes 4 to 404"),
        "field": (with_header({"data_offsets": None}), "its header is unreadable"),
        "offset": (with_header({"data_offsets": [0]}), "its header is unreadable"),
        "half": (with_header({"shape": [100.5]}), "100.5 is no whole number"),
        "text": (with_header({"shape": ["100"]}), "'100' is no whole number"),
        "flag": (with_header({"shape": [True, 100]}), "True is no whole number"),
        "negative": (with_header({"shape": [-1, -100]}), "-1 is no whole number"),
        "endless": (with_header({"data_offsets": [0, float("inf")]}), "inf is no whole number"),
        "twice": (with_text(json.dumps(header)[:-1].encode() + again.encode()), "it has a twice"),
        "mark": (with_text(b"\xef\xbb\xbf" + json.dumps(header).encode()), "unreadable .Unexpected UTF-8 BOM"),
        "encoding": (with_text(json.dumps(header).encode("utf-16")), "its header is unreadable .'utf-8' codec"),
        "nested": (with_text(b'{"a":' + b"[" * 100_000), "unreadable .maximum recursion"),
    }
    for name, (content, message) in variants.items():
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            TensorFiles([file])
        assert str(file) in str(error.value)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.randn(100)}, path)
    files = TensorFiles([path])
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 4)
    with pytest.raises(ValueError, match="ended while a was read"):
        files.read_whole("a")


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ValueError, match="a is in two files"):
        TensorFiles([tmp_path / "one", tmp_path / "two"])


def test_checksum_tells_of_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (33 << 20))
    told: list[int] = []
    before = checksum(path, told.append)
    assert sum(told) == 33 << 20 and max(told) <= 4 << 20
    path.write_bytes(b"x" * ((33 << 20) - 1) + b"y")
    assert checksum(path) != before
