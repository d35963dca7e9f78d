"""How new weights reach the engines."""

from typing import Literal

from pydantic import Field

from megasao.config.base import Section


class WeightsConfig(Section):
    """Publishing of weights from the trainer to the rollout workers."""

    transport: Literal["auto", "stream", "disk", "distributed", "embedded"] = Field(
        "auto",
        description="Way of the bytes. stream: gathered on trainer rank 0 and sent to each worker over ZeroMQ. disk: "
        "every rank writes its share into a directory that all see. distributed: every rank keeps its share in host "
        "memory, and each worker takes it from there over connections of its own. "
        "embedded: memory that every rank shares with embedded engines on the trainer's machine; nothing travels. "
        "auto: disk for SGLang servers, else stream.",
    )
    carrier: Literal["tcp", "gloo"] = Field(
        "tcp",
        description="What carries the bytes of distributed. tcp: a connection from each worker to each rank. gloo: "
        "process groups of torch, one for each pipeline stage and worker.",
    )
    dtype: Literal["same", "fp8_block"] = Field(
        "same",
        description="What numbers travel in, and are sampled with. same: those of the model. fp8_block: products in "
        "blocks of FP8, for SGLang servers; the trainer keeps its own.",
    )
    directory: str | None = Field(
        None,
        description="Where versions are published on disk, below it by the run's name; on the file system of the run "
        "directory. null is inside the run directory.",
    )
    node_directory: str = Field(
        "/dev/shm",
        description="Where each node of an SGLang server keeps two versions that came as distributed: memory, or a "
        "disk of its own.",
    )
    bucket_bytes: int = Field(
        4 * 2**20,
        ge=4096,
        le=256 * 2**20,
        description="Bytes that travel at once; on disk also the most that a rank holds beyond its own weights.",
    )
    shard_bytes: int = Field(
        2 * 2**30, ge=2**20, description="Most bytes of one file on disk, unless a single tensor has more."
    )
