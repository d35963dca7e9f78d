"""SWE-bench as an environment: an issue of a real repository, a shell and an editor, and the hidden tests as reward.

A turn of the model does one thing, the last fenced block in it (``edits``); a turn without one hands the work in: the
patch is judged in a fresh container, and the reward is 1 if FAIL_TO_PASS and PASS_TO_PASS all pass, else 0.

Invariants:
- neither the hidden tests, the solution, hints, nor history other than the base commit are where the model works;
- a container that breaks, and hidden tests that cannot be run, are counted failures, never a reward;
- work that is not handed in earns 0; an episode leaves no container.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasao.environments.base import (
    DemonstrationTurn,
    Episode,
    Prompt,
    Split,
    StepResult,
    check_place,
    shown_to_model,
)
from megasao.environments.edits import HOW, Block, find_block, replaced
from megasao.environments.options import OptionsEnvironment, nearest, require_positive
from megasao.environments.sandbox.bubblewrap import SandboxUnavailable
from megasao.environments.sandbox.container import MAX_SCRIPT, Container
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.runtimes import RUNTIMES, Runtime, first_with_images, require
from megasao.environments.sandbox.shown import shown
from megasao.environments.sandbox.workspace import is_inside
from megasao.environments.splits import text_hash
from megasao.environments.swebench.repositories import find_repository
from megasao.environments.swebench.rows import Instance, load_instances
from megasao.environments.swebench.work import ACTIVATE, Site, begin, judge, take_patch

NOTE = f"""You mend a repository, in the current directory, so that this issue is resolved:

<issue>
{{issue}}
</issue>

Tests that you do not see will judge your work. {HOW}"""

HELD_OUT = 4
"""Without instances of their own for evaluation, one in this many is held out."""

IMAGE = "docker.io/swebench/sweb.eval.x86_64.{instance}:latest"
"""The published images: ``{instance}`` is the id with ``_1776_`` for ``__``."""

_IMAGES = {
    "podman": IMAGE,
    "docker": IMAGE,
    "apptainer": "images/sweb.eval.x86_64.{instance}.sif",
    "enroot": "images/sweb.eval.x86_64.{instance}.sqsh",
    "pyxis": "swebench/sweb.eval.x86_64.{instance}:latest",
}

_MIB = 1 << 20


@dataclass(frozen=True)
class SwebenchOptions:
    """Options under ``environment.options``, and under ``benchmarks.swebench``."""

    data: str = ""
    """The published file, or a directory of such."""
    eval_data: str = ""
    """Held-out instances; empty holds one in four of ``data`` out."""
    repositories: str = ""
    """Directory of git repositories and bundles, OWNER__NAME[.bundle]; empty: they are in the images."""
    sandbox: str = "auto"
    """A container runtime, bubblewrap, or none; auto: bubblewrap with ``repositories``, else the first one found."""
    image: str = ""
    """Name or path of an image with {instance} in it; empty: the published name, or images/ for files of images."""
    chat: bool = True
    """Speak through the model's chat template; false: plain text."""
    stop: str = ""
    """Token that ends a turn; empty is the model's own end of turn."""
    time_s: float = 120.0
    """For one command."""
    test_time_s: float = 1800.0
    """For the hidden tests."""
    memory_mb: int = 8192
    processes: int = 512
    disk_mb: int = 2048
    """Of a repository in bubblewrap, and of one file anywhere."""
    output: int = 8000
    """Characters of a command's output that the model is shown."""

    def __post_init__(self) -> None:
        require_positive(self, "time_s", "test_time_s", "memory_mb", "processes", "disk_mb", "output")
        if self.sandbox not in ("auto", *RUNTIMES):
            known = ["auto", *RUNTIMES]
            guess = nearest(self.sandbox, known)
            raise ValueError(
                f"environment.options.sandbox: expected one of {', '.join(known)}, got {self.sandbox!r}{guess}"
            )
        if self.sandbox in ("bubblewrap", "none") and not self.repositories:
            raise ValueError(f"environment.options.repositories: {self.sandbox} has no images; name the directory")
        if self.image and "{instance}" not in self.image and not self.repositories:
            raise ValueError("environment.options.image: expected {instance} in it, where the id of the image goes")


class SwebenchEpisode(Episode):
    """One issue being worked on; its container begins with the first turn."""

    def __init__(self, instance: Instance, site: Site, options: SwebenchOptions) -> None:
        self._instance, self._site, self._options = instance, site, options
        self._container: Container | None = None
        self._base = ""

    async def step(self, action_text: str) -> StepResult:
        """Do what the turn says, or judge the work. EnvironmentFailure if the container breaks."""
        block = find_block(action_text)
        if self._container is None:
            self._container, self._base = await begin(self._site, self._instance)
        if block is None:
            return await self._handed_in(self._container)
        if block.kind == "bash":
            return await self._command(self._container, block.text)
        error = await self._edit(self._container, block)
        return self._answer(error or "done", {"edits": 1.0, "edit_errors": float(error is not None)})

    async def close(self) -> None:
        """End the container."""
        container, self._container = self._container, None
        if container is not None:
            await container.close()

    async def _handed_in(self, container: Container) -> StepResult:
        patch = await take_patch(container, self._base)
        await self.close()
        if patch is None:
            return StepResult("", 0.0, True, {"handed_in": 1.0, "no_patch": 1.0})
        verdict = await judge(self._site, self._instance, patch)
        metrics = {"not_applied": float(not verdict.applied), "tests_stopped": float(verdict.stopped)}
        return StepResult("", float(verdict.passed), True, {"handed_in": 1.0, "no_patch": 0.0, **metrics})

    async def _command(self, container: Container, text: str) -> StepResult:
        if len(text.encode(errors="replace")) > MAX_SCRIPT - len(ACTIVATE):
            return self._answer("error: the command is too long", {"commands": 1.0, "command_errors": 1.0})
        outcome = await container.run(ACTIVATE + text.replace("\0", ""))
        said = shown(outcome, self._options.output)
        return self._answer(said, {"commands": 1.0, "command_errors": float(outcome.exit_code != 0)})

    async def _edit(self, container: Container, block: Block) -> str | None:
        """Change a file; what is wrong with the edit, if anything."""
        path, text = block.path, block.text
        if not is_inside(path):
            return f"error: {path!r} is no file in the repository"
        quoted = shlex.quote(f"./{path}")
        if block.kind == "replace":
            limit = self._options.disk_mb * _MIB
            found = await container.capture(f"cat {quoted}", output_bytes=limit)
            if found.exit_code != 0 or found.truncated:
                return f"error: there is no file {path}"
            text, error = replaced(found.output.decode(errors="surrogateescape"), text, path)
            if error is not None:
                return error
        written = await container.run(
            f'mkdir -p "$(dirname {quoted})" && cat > {quoted}', stdin=text.encode(errors="surrogateescape")
        )
        return None if written.exit_code == 0 else f"error: {written.output.strip()[-200:]}"

    def _answer(self, text: str, metrics: dict[str, float]) -> StepResult:
        return shown_to_model(text, metrics, chat=self._options.chat)


class SwebenchEnvironment(OptionsEnvironment[SwebenchOptions]):
    """Issues of repositories."""

    name = "swebench"
    options_type = SwebenchOptions

    def __init__(self, options: SwebenchOptions, instances: Mapping[Split, Sequence[Instance]] | None = None) -> None:
        """ValueError for data that cannot be read, or where there is nothing to run it in."""
        super().__init__(options)
        self._instances = _split(options) if instances is None else instances
        self._runtime = _runtime(options)
        self._limits = SandboxLimits(
            time_s=options.time_s,
            memory_bytes=options.memory_mb * _MIB,
            processes=options.processes,
            file_bytes=options.disk_mb * _MIB,
            workspace_bytes=options.disk_mb * _MIB,
        )
        self._repositories = Path(options.repositories) if options.repositories else None
        if self._repositories is not None:
            for instance in (one for split in self._instances.values() for one in split):
                find_repository(self._repositories, instance)

    def size(self, split: Split) -> int:
        """How many instances."""
        return len(self._instances[split])

    def instance(self, split: Split, index: int) -> Instance:
        """The instance with this index, round and round; ValueError below 0 or for an unknown split."""
        check_place(split, index)
        return self._instances[split][index % len(self._instances[split])]

    def site(self, instance: Instance) -> Site:
        """Where this instance runs."""
        template = self.options.image or _IMAGES.get(self._runtime, "")
        repository = find_repository(self._repositories, instance) if self._repositories is not None else None
        return Site(self._runtime, instance.image(template), repository, self._limits, self.options.test_time_s)

    def prompt(self, split: Split, index: int) -> Prompt:
        """The issue, and how to work on it."""
        instance = self.instance(split, index)
        text = NOTE.replace("{issue}", instance.problem_statement.strip())
        return Prompt(
            prompt_id=f"{self.name}/{split}/{instance.instance_id}",
            task=self.name,
            text=f"{text}\n",
            payload={"split": split, "index": index},
            messages=({"role": "user", "content": text},) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> SwebenchEpisode:
        """Begin an episode; nothing in it is random."""
        instance = self.instance(prompt.payload["split"], prompt.payload["index"])
        return SwebenchEpisode(instance, self.site(instance), self.options)

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """The published solution, applied as a patch, and handing in."""
        if self.options.chat:
            raise ValueError("environment.options.chat: fine-tuning on demonstrations needs plain prompts; use false")
        end = self.options.stop
        solution = self.instance("train", index).patch.rstrip("\n")
        return [
            DemonstrationTurn(self.prompt("train", index).text, False),
            DemonstrationTurn(f"```bash\ngit apply - <<'END OF PATCH'\n{solution}\nEND OF PATCH\n```{end}", True),
            DemonstrationTurn("\n```output\n\n```\n", False),
            DemonstrationTurn(f"It is mended.{end}", True),
        ]


def _runtime(options: SwebenchOptions) -> Runtime:
    try:
        if options.sandbox != "auto":
            found: Runtime = options.sandbox  # type: ignore[assignment]
        else:
            found = "bubblewrap" if options.repositories else first_with_images()
        require(found)
    except SandboxUnavailable as error:
        raise ValueError(f"environment.options.sandbox: {error}") from error
    return found


def _split(options: SwebenchOptions) -> Mapping[Split, list[Instance]]:
    if not options.data:
        raise ValueError("environment.options.data: name the published file of SWE-bench, or rows of the same format")
    instances = _load("data", options.data)
    if options.eval_data:
        return {"train": instances, "eval": _load("eval_data", options.eval_data)}
    if len(instances) < 2:
        raise ValueError("environment.options.data: with one instance none can be held out; name eval_data")
    ordered = sorted(instances, key=lambda instance: text_hash("swebench-split", instance.instance_id))
    count = max(1, len(instances) // HELD_OUT)
    return {"train": ordered[count:], "eval": ordered[:count]}


def _load(option: str, path: str) -> list[Instance]:
    try:
        return load_instances(path)
    except ValueError as error:
        raise ValueError(f"environment.options.{option}: {error}") from error
