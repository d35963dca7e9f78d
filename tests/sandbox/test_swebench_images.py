"""Instances of SWE-bench whose repository lies in an image, in the container runtimes that are here."""

import asyncio
import os

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.registry import make_environment
from tests.container_images import add_repository, containers, import_image, remove_image
from tests.swebench_rows import write_instances

TEMPLATE = f"localhost/megasao-test-{os.getpid()}-{{instance}}:1"


@pytest.fixture(scope="module", params=["podman", "docker"])
def world(request, ready, archive, tmp_path_factory):
    """The environment with the image of one instance; its repository has all its history, as a clone has."""
    runtime, path = request.param, tmp_path_factory.mktemp("images")
    ready(runtime)
    (row, *_) = write_instances(path)
    from tests.swebench_rows import git

    repository = path / "made" / "words"
    git(repository, "checkout", "-q", row["base_commit"])
    (repository / "left by the build.txt").write_text("of the image, in no commit\n")
    name = TEMPLATE.replace("{instance}", "tiny_1776_words-1")
    import_image(runtime, add_repository(archive, repository, path / "image.tar"), name)
    data = str(path / "swebench_verified.parquet")
    options = {
        "data": data,
        "eval_data": data,
        "sandbox": runtime,
        "image": TEMPLATE,
        "time_s": 20.0,
        "test_time_s": 60.0,
        "memory_mb": 512,
        "processes": 64,
        "disk_mb": 32,
    }
    yield runtime, make_environment(EnvironmentConfig(name="swebench", options=options)), row
    remove_image(runtime, name)


def play(environment, *turns):
    index = next(n for n in range(4) if environment.instance("train", n).instance_id == "tiny__words-1")
    episode = environment.start(environment.prompt("train", index), 0)

    async def body():
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await episode.close()

    return asyncio.run(body())


def test_an_instance_in_an_image_is_resolved_by_its_solution_only(world):
    runtime, environment, row = world
    before = containers(runtime)
    solved = play(environment, f"```bash\ngit apply - <<'END'\n{row['patch']}END\n```", "Done.")
    assert [result.reward for result in solved] == [0.0, 1.0], solved
    assert play(environment, "Done.")[-1].reward == 0.0
    assert containers(runtime) == before


def test_the_history_of_the_image_is_not_there(world):
    _, environment, row = world
    look = (
        "git log --all --format=%H; git cat-file --batch-all-objects --batch; git remote; git branch -a; git tag; "
        "git reflog; git status --short; cat words.py"
    )
    (result,) = play(environment, f"```bash\n{look}\n```")
    shown = result.messages[0]["content"]
    assert row["base_commit"] in shown and "split(' ')" in shown, "the base commit, unchanged"
    for secret in ("secret of the future", "count any space", "test_spaces", "default=''"):
        assert secret not in shown


def test_an_image_that_is_not_there_is_a_failure(world):
    from megasao.environments.sandbox.container import ContainerFailure

    _, environment, _ = world
    index = next(n for n in range(4) if environment.instance("train", n).instance_id == "tiny__stack-3")
    episode = environment.start(environment.prompt("train", index), 0)

    async def body():
        try:
            await episode.step("Done.")
        finally:
            await episode.close()

    with pytest.raises(ContainerFailure, match="tiny_1776_stack-3"):
        asyncio.run(body())
