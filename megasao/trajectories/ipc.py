"""Arrow IPC stream bytes, read from a peer or a file that may be damaged.

Invariants:
- any bytes whatever either give a batch whose buffers are safe to read, or ValueError with the reason;
- a stream that was cut off, also at the boundary of a message, is an error.
"""

import pyarrow as pa

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

READ_ERRORS = (pa.ArrowException, OSError, EOFError, MemoryError, ValueError, TypeError, KeyError)
"""What pyarrow raises on bytes that are no Arrow stream."""


def to_ipc(batch: pa.RecordBatch) -> bytes:
    """One complete Arrow IPC stream with this batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def from_ipc(data: bytes | memoryview) -> pa.RecordBatch:
    """The batch in a complete Arrow IPC stream; several are joined. ValueError says what is wrong with the bytes."""
    if bytes(data[-len(_END_OF_STREAM) :]) != _END_OF_STREAM:
        raise ValueError(f"not a complete Arrow IPC stream: {len(data)} bytes without the end-of-stream mark")
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            batches = list(reader)
            for batch in batches:
                check_buffers(batch)
            return join(batches, reader.schema)
    except READ_ERRORS as error:
        raise ValueError(f"not an Arrow IPC stream: {error}") from error


def check_buffers(batch: pa.RecordBatch) -> None:
    """Raise ValueError where offsets, lengths or text of ``batch`` are damaged; reading it is safe afterwards."""
    batch.validate(full=True)


def join(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """One batch with the rows of all."""
    if len(batches) == 1:
        return batches[0]
    joined = pa.Table.from_batches(batches, schema=schema).combine_chunks().to_batches()
    return joined[0] if joined else pa.RecordBatch.from_pylist([], schema=schema)
