"""CURVE keys of one run: one pair for the binding side, one pair shared by all peers that may connect.

Invariants:
- secret keys are only ever in files that nobody but their owner can read; ``load_keys`` refuses others;
- keys are made once per run; making them again keeps the ones that are there, so that any role may restart.
"""

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

_FILE = "curve.json"


@dataclass(frozen=True)
class CurveKeys:
    """Z85 text of both pairs. A peer that connects needs ``server_public`` and the client pair only."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def generate(cls) -> "CurveKeys":
        """A fresh set."""
        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(server_public, server_secret, client_public, client_secret)

    def __repr__(self) -> str:
        return f"CurveKeys(server_public={self.server_public!r}, secrets hidden)"


def make_run_keys(directory: Path) -> CurveKeys:
    """Make the keys of a run (file mode 0600, directory 0700), or load those that exist."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    path = directory / _FILE
    if path.exists():
        return load_keys(directory)
    keys = CurveKeys.generate()
    temporary = directory / f".{_FILE}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(keys), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return keys


def load_keys(directory: Path) -> CurveKeys:
    """The keys of a run. ValueError: missing, damaged, or readable by others."""
    path = directory / _FILE
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"no CURVE keys at {path}; they are made when the run is launched") from None
    if mode & 0o077:
        raise ValueError(
            f"{path} has mode {mode:04o}: others can read the run's secret keys; expected 0600 (chmod 600)"
        )
    try:
        keys = CurveKeys(**json.loads(text))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} does not hold CURVE keys: {error}; remove it and launch the run again") from error
    for name, value in asdict(keys).items():
        if not isinstance(value, str) or len(value) != 40:
            raise ValueError(f"{path}: {name} is not a CURVE key (expected 40 characters of Z85)")
    return keys
