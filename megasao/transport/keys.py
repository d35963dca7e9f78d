"""Secrets of one run: CURVE keys, one pair for the binding side and one shared by all peers that may connect, and the
key that its SGLang servers ask for.

Invariants:
- secret keys are only ever in files that nobody but their owner can read; ``load_keys`` refuses others;
- keys are made once per run; making them again keeps the ones that are there, so that any role may restart.
"""

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from megasao.config import Config
from megasao.config.rundir import RunDirectory

_FILE = "curve.json"
_SERVER_FILE = "sglang.key"
_SERVER_KEY_BYTES = 32


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
    path = directory / _FILE
    if path.exists():
        return load_keys(directory)
    keys = CurveKeys.generate()
    _write_secret(path, json.dumps(asdict(keys)))
    return keys


def make_server_key(directory: Path) -> str:
    """Make the key of the run's SGLang servers (file mode 0600, directory 0700), or load the one that exists."""
    path = server_key_path(directory)
    if not path.exists():
        _write_secret(path, secrets.token_urlsafe(_SERVER_KEY_BYTES))
    return load_server_key(directory)


def server_key_path(directory: Path) -> Path:
    """The file that holds the key of the run's SGLang servers, and nothing else."""
    return directory / _SERVER_FILE


def load_server_key(directory: Path) -> str:
    """The key of the run's SGLang servers. ValueError: missing, damaged, or readable by others."""
    path = server_key_path(directory)
    key = _read_secret(path, "key of SGLang servers")
    if len(key) < _SERVER_KEY_BYTES or not key.isascii() or key.split() != [key]:
        raise ValueError(f"{path} does not hold the key of SGLang servers; remove it and launch the run again")
    return key


def load_keys(directory: Path) -> CurveKeys:
    """The keys of a run. ValueError: missing, damaged, or readable by others."""
    path = directory / _FILE
    text = _read_secret(path, "CURVE keys")
    try:
        keys = CurveKeys(**json.loads(text))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} does not hold CURVE keys: {error}; remove it and launch the run again") from error
    for name, value in asdict(keys).items():
        if not isinstance(value, str) or len(value) != 40:
            raise ValueError(f"{path}: {name} is not a CURVE key (expected 40 characters of Z85)")
    return keys


def keys_of(run: RunDirectory, config: Config) -> CurveKeys | None:
    """The keys of a run; None where it does not authenticate its peers. ValueError as ``load_keys``."""
    return load_keys(run.keys) if config.transport.curve else None


def _write_secret(path: Path, text: str) -> None:
    """A file that nobody but its owner can read at any time; it is complete once it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_secret(path: Path, what: str) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"no {what} at {path}; they are made when the run is launched") from None
    if mode & 0o077:
        raise ValueError(
            f"{path} has mode {mode:04o}: others can read the run's secret keys; expected 0600 (chmod 600)"
        )
    return text
