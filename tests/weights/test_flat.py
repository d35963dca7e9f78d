"""Flat buffers and manifests: bit-exact there and back, and nothing else accepted."""

import zlib

import msgspec
import pytest
import torch
from weight_world import equal, weights

from megasao.weights.download import Download
from megasao.weights.flat import check_manifest, pack, unpack
from megasao.weights.messages import Announce, Bucket, TensorSpec


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1000, 10**6])
def test_pack_and_unpack_are_bit_exact(bucket_bytes: int) -> None:
    flat = pack(3, weights(1), bucket_bytes)
    check_manifest(flat.specs, len(flat.buffer), bucket_bytes)
    assert equal(unpack(flat.specs, flat.buffer), weights(1))
    assert not equal(unpack(flat.specs, flat.buffer), weights(2))
    assert b"".join(flat.bucket(index) for index in range(flat.buckets)) == flat.buffer.numpy().tobytes()


def test_packed_weights_do_not_follow_the_live_ones() -> None:
    tensors = weights(1)
    flat = pack(3, tensors, 1000)
    tensors["embed"].zero_()
    assert equal(unpack(flat.specs, flat.buffer), weights(1))


def test_types_that_do_not_travel_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="counts has dtype int64"):
        pack(1, {"counts": torch.zeros(3, dtype=torch.int64)}, 1000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "object"}, "dtype"),
        ({"shape": (-1, 4)}, "negative"),
        ({"shape": (10**9, 10**9)}, "starts at byte|announced"),
        ({"offset": 5}, "starts at byte"),
        ({"name": "scale"}, "twice"),
    ],
)
def test_manifest_that_does_not_fit_its_buffer_is_refused(change: dict, reason: str) -> None:
    flat = pack(3, weights(1), 1000)
    specs: list[TensorSpec] = [msgspec.structs.replace(flat.specs[0], **change), *flat.specs[1:]]
    with pytest.raises(ValueError, match=reason):
        check_manifest(specs, len(flat.buffer), 1000)
    with pytest.raises(ValueError, match="announced"):
        check_manifest(flat.specs, len(flat.buffer) + 64, 1000)
    with pytest.raises(ValueError, match="bucket_bytes"):
        check_manifest(flat.specs, len(flat.buffer), 0)


def test_download_takes_each_bucket_once_whole_and_undamaged() -> None:
    flat = pack(3, weights(1), 1000)
    download = Download(Announce("life", 3, flat.specs, len(flat.buffer), 1000))
    asked = download.next_buckets()
    data = bytes(flat.bucket(asked[0]))
    bucket = Bucket("life", 3, asked[0], zlib.crc32(data))
    with pytest.raises(ValueError, match="damaged"):
        download.take(bucket, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="999 bytes, expected 1000"):
        download.take(bucket, data[:-1])
    download.take(bucket, data)
    download.take(bucket, b"a second time is ignored")
    while not download.complete:
        for index in [*download.asked, *download.next_buckets()]:
            data = bytes(flat.bucket(index))
            download.take(Bucket("life", 3, index, zlib.crc32(data)), data)
    assert equal(unpack(download.specs, download.buffer), weights(1))
