"""Single commands, and the tasks of ``code_agent``, in containers instead of bubblewrap."""

import asyncio

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.registry import make_environment
from megasao.environments.sandbox.contained import ContainerSandbox, chosen_sandbox
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.run import Sandbox
from megasao.environments.sandbox.workspace import pack, unpack
from tests.container_images import containers

LIMITS = SandboxLimits(time_s=200.0, memory_bytes=256 << 20, processes=40, workspace_bytes=1 << 20)


def run(image, command, workspace=None, **limits):
    sandbox = ContainerSandbox(*image, SandboxLimits(**{**vars(LIMITS), **limits}))
    before = containers(image[0])
    try:
        return asyncio.run(sandbox.run(["/bin/sh", "-c", command], workspace))
    finally:
        assert containers(image[0]) == before


def test_a_command_gets_a_workspace_and_gives_one_back(image):
    outcome = run(image, "cat in.txt; mkdir d; echo 'two words' > d/out.txt; exit 3", pack({"in.txt": b"one\n"}))
    assert (outcome.exit_code, outcome.stopped_by, outcome.output) == (3, None, "one\n")
    assert unpack(outcome.workspace) == {"in.txt": b"one\n", "d/out.txt": b"two words\n"}


def test_what_a_limit_stops_leaves_the_workspace_as_it_was(image):
    slow = run(image, "echo changed > a; sleep 60", pack({"a": b"1"}), time_s=1.0)
    assert (slow.exit_code, slow.stopped_by) == (None, "time") and unpack(slow.workspace) == {"a": b"1"}
    large = run(image, "head -c 9000000 /dev/zero > b; exit 0", pack({"a": b"1"}))
    assert large.exit_code == 0 and unpack(large.workspace) == {"a": b"1"}


def test_a_workspace_that_cannot_be_unpacked_whole_is_no_failure_of_the_container(image):
    whole = pack({"a": b"1", "b": b"2" * 2000})
    assert run(image, "cat a; exit 125", whole[:1100]).output == "1"


def test_tasks_of_code_agent_run_in_an_image(image):
    options = {"sandbox": image[0], "sandbox_image": image[1]}
    environment = make_environment(EnvironmentConfig(name="code_agent", options=options))
    task = environment.task("train", 0)
    [(name, text)] = task.solution.items()
    episode = environment.start(environment.prompt("train", 0), 0)

    async def body():
        return [await episode.step(turn) for turn in (f"```write {name}\n{text}```", "```bash\nls\n```", "Done.")]

    _, listed, handed_in = asyncio.run(body())
    assert name in listed.messages[0]["content"] and handed_in.reward == 1.0
    assert asyncio.run(environment.start(environment.prompt("train", 0), 0).step("Done.")).reward == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("code_agent", {"sandbox": "docker"}, "sandbox_image: docker needs an image"),
        ("code_agent", {"sandbox_image": "x"}, "sandbox_image: bubblewrap has no image"),
        (
            "code_agent",
            {"sandbox": "dokcer", "sandbox_image": "x"},
            "sandbox: expected one of bubblewrap, none, po",
        ),
        ("tool", {"tools": {"python": {}}, "sandbox": "podman"}, "sandbox_image: podman needs an image"),
    ],
)
def test_choices_that_cannot_be_are_refused(name, options, message):
    with pytest.raises(ValueError, match=rf"environment\.options\.{message}"):
        make_environment(EnvironmentConfig(name=name, options=options))


def test_what_is_not_in_an_image_runs_on_this_machine():
    assert type(chosen_sandbox("none", "", LIMITS)) is Sandbox
