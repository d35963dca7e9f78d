"""What one command, or one container, may use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SandboxLimits:
    """Of one command. ``memory_bytes`` holds for each process and for all together."""

    time_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 64
    file_bytes: int = 64 << 20
    workspace_bytes: int = 256 << 20
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"sandbox {name}: expected more than 0, got {value}")
