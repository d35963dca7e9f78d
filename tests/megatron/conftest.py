"""Lets tests import their neighbours as ``tests.megatron.*``, however pytest was started."""

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3_moe checkpoint directory with a tokenizer."""
    from tests.megatron.tiny import write_tiny_checkpoint, write_tiny_tokenizer

    directory = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "moe")
    write_tiny_tokenizer(directory)
    return directory
