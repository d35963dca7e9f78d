"""What a server's role removes that a life before it, ended by SIGKILL, could not."""

from pathlib import Path

import pytest

from megasao.config.load import load_config
from megasao.launch.prepare import prepared_run
from megasao.rollout import server

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop_sglang.yaml"
NAME, SIBLING = "engine-0-0", "engine-0-evaluation"


def test_a_run_that_now_publishes_on_disk_gives_the_memory_of_its_nodes_back(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = [f"model.path={model}", f"run.directory={tmp_path}", "sft=null", "rollout.sglang.python=/bin/false"]
    before, after = (load_config(LAPTOP, [*settings, f"weights.transport={way}"]) for way in ("distributed", "disk"))
    with prepared_run(after, resume=False) as run:
        mine, siblings = (run.node_weights(before, name) for name in (NAME, SIBLING))
        try:
            for left in (mine, siblings):
                (left / "7.abc").mkdir(parents=True)
                (left / "7.abc" / "model.safetensors").write_bytes(b"weights")
            with pytest.raises(server.ServerDied):  # it only begins
                server.run(run, after, NAME)
            assert not mine.exists() and (siblings / "7.abc").is_dir(), "each clears its own"
            with pytest.raises(server.ServerDied):
                server.run(run, after, SIBLING)
            assert not mine.parent.exists()
        finally:
            for name in (NAME, SIBLING):
                run.clear_node_weights(before, name)
