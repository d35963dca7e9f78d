"""What `megasao plan` assumes of the machines; nothing else reads it."""

from pydantic import Field

from megasao.config.base import Section


class PlanConfig(Section):
    """Facts of the cluster that only `megasao plan` reads."""

    gpu_memory_gib: float = Field(79.6, gt=0, description="Memory of one GPU, GiB; an H100 with 80 GB has 79.6.")
    reserve_gib: float = Field(
        6.0, ge=0, description="Of it, what is not for tensors: CUDA context, communication buffers, fragmentation."
    )
    expert_imbalance: float = Field(
        1.0, ge=1, description="Tokens of the fullest expert-parallel rank over the mean of all."
    )
    rollout_gpus: int = Field(0, ge=0, description="GPUs of the rollout fleet that weights are sent to; 0 is none.")
    engine_gpus: int = Field(8, ge=1, description="GPUs of one engine, over which it splits the weights.")
    node_gpus: int = Field(8, ge=1, description="GPUs of one node; those of an engine read its weights together.")
    link_gb_per_s: float = Field(
        50.0, gt=0, description="Speed of one GPU's network link, GB/s, an assumption; 50 is a 400 Gb/s card each."
    )
    storage_gb_per_s: float = Field(
        100.0, gt=0, description="Speed of the shared file system for all readers and writers together, an assumption."
    )
    host_gb_per_s: float = Field(
        25.0, gt=0, description="Speed of one GPU's weights on their way into its host's memory, GB/s, an assumption."
    )
    fetch_gb_per_s: float = Field(
        40.0,
        gt=0,
        description="What one node takes over TCP from all ranks, GB/s, an assumption: 2.5 a connection.",
    )
    node_storage_gb_per_s: float = Field(
        20.0, gt=0, description="Speed of weights.node_directory, GB/s, an assumption: four NVMe disks at 5."
    )
    checksum_gb_per_s: float = Field(
        16.0, gt=0, description="Bytes that one worker compares with checksums in a second, GB/s: 16 threads at 1."
    )
