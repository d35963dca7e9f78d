"""A node's directory of weights, its marker, and what a worker makes of the markers."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from share_world import cut_in_two
from weight_world import equal, weights

from megasao.weights.nodes import NodeDirectory, ServerNodes
from megasao.weights.shared import ShareTensors

LAYOUT = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights(0).items()}


def version(number: int) -> ShareTensors:
    return ShareTensors(cut_in_two(weights(number)), f"{number}.life")


def node(directory: Path, name: str = "engine-0-0", **changes: tuple[tuple[int, ...], torch.dtype]) -> NodeDirectory:
    marker = directory / "markers" / f"{name}.json"
    return NodeDirectory(directory / name, marker, {**LAYOUT, **changes}, file_bytes=1000)


def take(one: NodeDirectory, number: int, *, commit: bool = True) -> None:
    asyncio.run(one.prepare_weights(number, version(number)))
    if commit:
        asyncio.run(one.commit_weights(number))


def held(directory: Path) -> list[str]:
    """The labels on the disk, which must be those in the marker."""
    found = sorted(path.name for path in (directory / "engine-0-0").iterdir())
    assert found == json.loads((directory / "markers" / "engine-0-0.json").read_text())
    return found


def test_a_node_has_what_the_ranks_gave_in_several_files(tmp_path: Path) -> None:
    one = node(tmp_path, half=((7, 3), torch.float32))
    take(one, 4)
    files = sorted((tmp_path / "engine-0-0" / "4.life").iterdir())
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = weights(4)
    assert len(files) > 1 and equal(found, expected | {"half": expected["half"].float()}), "in the server's dtypes"


def test_the_version_before_stays_until_the_next_one_comes(tmp_path: Path) -> None:
    """A load that has begun may end; nothing is kept beyond that."""
    one = node(tmp_path)
    take(one, 1)
    take(one, 2)
    assert held(tmp_path) == ["1.life", "2.life"]
    take(one, 3, commit=False)
    assert held(tmp_path) == ["2.life", "3.life"]
    asyncio.run(one.discard_weights(3))
    asyncio.run(one.discard_weights(2))
    assert held(tmp_path) == ["2.life"], "what is committed is not discarded"
    one.clear()
    assert not (tmp_path / "engine-0-0").exists() and not (tmp_path / "markers" / "engine-0-0.json").exists()


def test_a_version_that_does_not_fit_or_cannot_be_written_is_not_marked(tmp_path: Path) -> None:
    one = node(tmp_path)
    take(one, 1)
    with pytest.raises(ValueError, match=r"2 tensors are missing, extra or misshapen.*extra.*half"):
        take(node(tmp_path / "other", half=((7, 4), torch.bfloat16), extra=((1,), torch.float32)), 2)
    blocked = tmp_path / "engine-0-0" / ".2.life"
    blocked.write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        take(one, 2)
    blocked.unlink()
    assert held(tmp_path) == ["1.life"]


def test_a_server_loads_only_what_all_its_nodes_have(tmp_path: Path) -> None:
    first, second = node(tmp_path), node(tmp_path, "engine-0-0.1")
    nodes = ServerNodes(tmp_path, [tmp_path / "markers" / f"{name}.json" for name in ("engine-0-0", "engine-0-0.1")])
    take(first, 1)
    assert "engine-0-0.1 does not have weights 1.life; it has none" in nodes.lacking("1.life")
    take(second, 1)
    assert nodes.lacking("1.life") is None
    restarted = node(tmp_path, "engine-0-0.1")
    assert "engine-0-0.1" in nodes.lacking("1.life"), "an earlier life's versions do not count"
    take(restarted, 1)
    take(first, 2)
    take(first, 3, commit=False)
    assert "engine-0-0 does not have weights 1.life" in nodes.lacking("1.life")
    restarted.clear()
    assert "engine-0-0.1 has no weights" in nodes.lacking("2.life")
