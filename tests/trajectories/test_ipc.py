"""Arrow bytes from outside: whole, or an error; never a crash."""

import pickle
import subprocess
import sys

import pyarrow as pa
import pytest
from trajectory_samples import sample

from megasao.trajectories.schema import from_batch, from_ipc, to_batch, to_ipc

STREAM = to_ipc(to_batch([sample("a"), sample("b", rollout_logprobs=None)]))


def test_every_truncation_is_an_error():
    assert len(from_batch(from_ipc(STREAM))) == 2
    for length in range(len(STREAM)):
        with pytest.raises(ValueError, match="not a"):
            from_ipc(STREAM[:length])


def test_several_batches_are_joined():
    sink = pa.BufferOutputStream()
    batch = to_batch([sample("a")])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for name in ("a", "b", "c"):
            writer.write_batch(to_batch([sample(name)]))
    rows = from_batch(from_ipc(sink.getvalue().to_pybytes()))
    assert [row.trajectory_id for row in rows] == ["a", "b", "c"]


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(1000), pickle.dumps({"a": 1}), b"\xff" * 64, STREAM[8:]])
def test_garbage_is_an_error(garbage):
    with pytest.raises(ValueError, match="not a"):
        from_ipc(garbage)


DAMAGE = """
import random, sys
sys.path.insert(0, sys.argv[1])
from test_ipc import STREAM
from megasao.trajectories.schema import from_batch, from_ipc, validate_rows
refused = bad_rows = 0
generator = random.Random(0)
for _ in range(1500):
    data = bytearray(STREAM)
    for _ in range(generator.randint(1, 3)):
        data[generator.randrange(len(data))] = generator.choice([0, 1, 127, 128, 255, generator.randrange(256)])
    try:
        bad_rows += bool(validate_rows(from_ipc(bytes(data))))
    except ValueError:
        refused += 1
print(refused, bad_rows)
"""


def test_damaged_bytes_never_crash(request):
    """In a process of its own: a crash of Arrow's reader would be a signal, not an exception."""
    command = [sys.executable, "-c", DAMAGE, str(request.path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, bad_rows = map(int, done.stdout.split())
    assert refused > 300 and bad_rows > 3
