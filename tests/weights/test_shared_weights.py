"""Shares of a version: their checksums, their memory, what makes a whole; and the server of one rank."""

import asyncio
import gc
import socket
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from share_world import SECRET, Distributed, cut_in_two, encode, offer, retire
from weight_world import equal, weights

from megasao.weights.intake import Intake
from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.serving import (
    HEAD,
    LENGTH,
    NONCE_BYTES,
    ShareServer,
    address_towards,
    bound,
    proof,
    receive_into,
)
from megasao.weights.shared import BufferPool, ShareManifest, ShareTensors, bucket_sum, read_manifest
from megasao.weights.shares_download import SharesDownload


def test_a_checksum_sees_every_changed_word_and_words_that_change_places() -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 512, dtype=np.uint64)
    bucket = words.view(np.uint8)
    right, plain = bucket_sum(bucket), int(words.sum())
    for place in range(bucket.size):
        for flip in (1, 128):
            bucket[place] ^= flip
            assert bucket_sum(bucket) != right
            bucket[place] ^= flip
    for place in range(1, len(words)):
        words[[0, place]] = words[[place, 0]]
        assert bucket_sum(bucket) != right
        assert int(words.sum()) == plain, "a plain sum does not see it"
        words[[0, place]] = words[[place, 0]]
    assert bucket_sum(bucket) == right
    assert bucket_sum(np.zeros(64, np.uint8)) != bucket_sum(np.zeros(128, np.uint8)), "a bucket of zeros cut short"


def test_a_checksum_is_the_one_of_its_definition() -> None:
    words, total, modulus = [3, 2**64 - 1, 7], 0, 2**64
    for index, word in enumerate(words):
        state = (index + 1) * 0x9E3779B97F4A7C15 % modulus
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % modulus
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % modulus
        total = (total + word * ((state ^ (state >> 31)) | 1)) % modulus
    assert bucket_sum(np.array(words, np.uint64).view(np.uint8)) == total ^ 3


def test_shares_make_every_tensor_whole_bit_for_bit() -> None:
    assert equal(ShareTensors(cut_in_two(weights(3))), weights(3))
    turned = [cut_in_two(weights(3))[rank] for rank in (1, 0)]
    assert equal(ShareTensors(turned), weights(3)), "ranks may come in any order"


def test_tensors_that_are_not_whole_once_are_refused_by_name() -> None:
    first, second = cut_in_two(weights(0))
    for wrong in ([first], [first, second, second], [second]):
        with pytest.raises(ValueError, match=r"embed.*do not make it whole once"):
            ShareTensors(wrong)
    manifest, data = second
    for change in ({"start": 3}, {"dim": 0}, {"dtype": "float16"}, {"whole": (32, 17)}):
        pieces = [msgspec.structs.replace(p, **change) if p.name == "embed" else p for p in manifest.layout.pieces]
        layout = msgspec.structs.replace(manifest.layout, pieces=pieces)
        with pytest.raises(ValueError, match="embed"):
            ShareTensors([first, (replace(manifest, layout=layout), data)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"total_bytes": 2**20}, "announced were"),
        ({"bucket_bytes": 100}, "a multiple of 64"),
        ({"sums": []}, "do not fit"),
        ({"offset": 32}, "no place"),
        ({"offset": 2**40}, "ends beyond"),
        ({"dtype": "int8"}, "has dtype 'int8'"),
    ],
)
def test_a_manifest_that_does_not_fit_its_share_is_refused(change: dict, reason: str) -> None:
    manifest, data = cut_in_two(weights(0))[0]
    assert [read_manifest(encode(manifest), data.size).sums for _ in range(2)] == [manifest.sums] * 2
    layout, sums = manifest.layout, change.pop("sums", manifest.sums)
    if change.keys() & {"offset", "dtype"}:
        change = {"pieces": [msgspec.structs.replace(layout.pieces[0], **change)]}
    wrong = ShareManifest(msgspec.structs.replace(layout, **change), sums)
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            read_manifest(encode(wrong), data.size)


def test_a_layout_that_changes_is_read_anew() -> None:
    first, second = (cut_in_two(tensors)[0] for tensors in (weights(0), {"other": torch.ones(8, 8)}))
    for _ in range(2):
        for manifest, data in (first, second):
            read = read_manifest(encode(manifest), data.size)
            assert read.layout.pieces == manifest.layout.pieces and read.sums == manifest.sums


def test_memory_is_used_again_only_when_no_tensor_of_it_is_left() -> None:
    pool = BufferPool()
    first = pool.take(4096)
    place, tensor = first.ctypes.data, torch.from_numpy(first[64:128]).view(torch.bfloat16)
    part = tensor[3:]
    del first, tensor
    gc.collect()
    second = pool.take(4096)
    assert second.ctypes.data != place, "somebody has a part of it"
    del part
    gc.collect()
    assert pool.take(4096).ctypes.data == place
    assert pool.take(64).size == 64


def download(shares: list[Share], version: int = 1, secret: bytes = SECRET) -> SharesDownload:
    return SharesDownload(AnnounceShares("epoch", version, shares, secret), Intake())


def fetched(one: SharesDownload, timeout_s: float = 60.0) -> str | None:
    return asyncio.run(one.verify(timeout_s))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_version_is_fetched_from_all_ranks_over_either_protocol(host: str) -> None:
    ranks = Distributed(host)
    pairs = zip(ranks.servers, cut_in_two(weights(5)), strict=True)
    shares = [offer(server, rank, 1, share) for rank, (server, share) in enumerate(pairs)]
    one = download(shares)
    assert fetched(one) is None and equal(one.tensors(), weights(5))
    assert address_towards(host) == host
    assert "does not have this version" in fetched(download(shares, version=2))
    assert "too early" in fetched(download(shares, secret=b"guessed")), "a stranger gets nothing"
    assert "CRC-32" in fetched(download([msgspec.structs.replace(shares[0], manifest_crc32=1), shares[1]]))
    ranks.close()
    assert "of trainer rank" in fetched(download(shares)), "nobody is there"


def test_a_version_that_is_let_go_gives_its_memory_to_the_next() -> None:
    ranks, intake, places = Distributed(), Intake(), []
    pairs = zip(ranks.servers, cut_in_two(weights(5)), strict=True)
    shares = [offer(server, rank, 1, share) for rank, (server, share) in enumerate(pairs)]
    for _ in range(2):
        one = SharesDownload(AnnounceShares("epoch", 1, shares, SECRET), intake)
        assert fetched(one) is None
        places.append({flat.data_ptr() for flat in one.tensors()._flats})
        del one  # at once, not when garbage is collected
    assert places[0] == places[1]
    ranks.close()


def test_a_receiver_that_takes_nothing_does_not_hold_up_the_trainer() -> None:
    """It is cut off as soon as the share is wanted back, long before its own time is over."""
    server = ShareServer("127.0.0.1", SECRET, timeout_s=3600)
    server.offer(1, b"manifest", memoryview(bytearray(2**26)))
    silent = socket.create_connection(("127.0.0.1", server.port))
    stuck = threading.Thread(target=fetched, args=(download([Share(0, "127.0.0.1", server.port, 2**26, 0)]),))
    stuck.start()
    server.retire(1)
    assert not server._reading
    server.close()
    stuck.join(60)
    silent.close()
    assert not stuck.is_alive()


def test_a_version_that_is_taken_back_disturbs_nobody_who_reads_the_next() -> None:
    server = ShareServer("127.0.0.1", SECRET, timeout_s=60)
    shares = {version: memoryview(bytearray([version]) * 2**26) for version in (1, 2)}
    readers = {}
    for version, share in shares.items():
        server.offer(version, b"manifest", share)
        readers[version] = socket.create_connection(("127.0.0.1", server.port))
        bound(readers[version], 60)
        nonce, head = bytearray(NONCE_BYTES), bytearray(HEAD.size + len(b"manifest"))
        receive_into(readers[version], memoryview(nonce))
        asked = LENGTH.pack(version)
        readers[version].sendall(asked + proof(SECRET, bytes(nonce), asked))
        receive_into(readers[version], memoryview(head))  # the share is on its way, and waits for us
    server.retire(1)
    found = bytearray(2**26)
    with pytest.raises(ConnectionError, match="too early"):
        receive_into(readers[1], memoryview(found))
    receive_into(readers[2], memoryview(found))
    assert found == shares[2]
    for reader in readers.values():
        reader.close()
    server.close()


def test_waiting_for_a_rank_that_says_nothing_is_bounded() -> None:
    mute = socket.create_server(("127.0.0.1", 0))
    one = download([Share(7, "127.0.0.1", mute.getsockname()[1], 64, 0)])
    reason = fetched(one, 0.3)
    assert "more than 0.3 s" in reason or "nothing arrived in time" in reason
    mute.close()


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="is it an address of this machine"):
        ShareServer("192.0.2.1", SECRET, timeout_s=1)
    with pytest.raises(ValueError, match="no way to"):
        address_towards("no-such-host.invalid")


def test_connections_are_kept_for_the_next_version_and_made_anew_where_a_rank_has_closed_them() -> None:
    ranks, intake = Distributed(), Intake()
    accepted: list[object] = []

    def fetch(version: int) -> SharesDownload:
        shares = []
        for rank, (server, share) in enumerate(zip(ranks.servers, cut_in_two(weights(version)), strict=True)):
            with server._changed:  # it has what it asked for, which the thread that sent it may not know yet
                assert server._changed.wait_for(lambda server=server: not server._reading, 60)
            retire(server)
            shares.append(offer(server, rank, version, share))
        one = SharesDownload(AnnounceShares("epoch", version, shares, SECRET), intake)
        assert fetched(one, 60.0) is None and equal(one.tensors(), weights(version))
        accepted.append({server.port: set(server._peers) for server in ranks.servers})
        return one

    fetch(1)
    fetch(2)
    assert accepted[0] == accepted[1] and all(len(peers) == 1 for peers in accepted[0].values())
    with ranks.servers[0]._changed:
        ranks.servers[0]._end(lambda: ranks.servers[0]._peers)
    fetch(3)
    assert accepted[2] != accepted[1], "the one that was cut is another"
    assert accepted[2][ranks.servers[1].port] == accepted[1][ranks.servers[1].port]
    others = Distributed()
    shares = [offer(server, rank, 4, cut_in_two(weights(4))[rank]) for rank, server in enumerate(others.servers)]
    assert fetched(SharesDownload(AnnounceShares("epoch", 4, shares, SECRET), intake), 60.0) is None
    assert intake._ahead.places == [(server.host, server.port) for server in others.servers], "of the next life only"
    intake.close()
    ranks.close()
    others.close()


def test_a_proof_does_not_go_for_another_version_or_connection() -> None:
    server = ShareServer("127.0.0.1", SECRET, timeout_s=60)
    server.offer(1, b"manifest", memoryview(b"share"))

    def read(connection: socket.socket, count: int) -> bytes:
        found = bytearray(count)
        receive_into(connection, memoryview(found))
        return bytes(found)

    def answer(connection: socket.socket, version: int, proven: bytes) -> bytes:
        connection.sendall(LENGTH.pack(version) + proven)
        return read(connection, HEAD.size)

    def connected() -> tuple[socket.socket, bytes]:
        connection = socket.create_connection(("127.0.0.1", server.port))
        bound(connection, 60)
        return connection, read(connection, NONCE_BYTES)

    one, nonce = connected()
    right = proof(SECRET, nonce, LENGTH.pack(1))
    assert HEAD.unpack(answer(one, 1, right)) == (1, len(b"manifest"))
    assert read(one, len(b"manifestshare")) == b"manifestshare"
    with pytest.raises(ConnectionError, match="ended"):
        answer(one, 2, right)
    two, _ = connected()
    with pytest.raises(ConnectionError, match="ended"):
        answer(two, 1, right)
    one.close()
    two.close()
    server.close()
