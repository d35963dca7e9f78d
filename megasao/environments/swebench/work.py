"""A repository at its base commit in a container: prepared, changed by a model, and its patch judged in another.

Invariants:
- the model's container has one commit, the base: neither what came after it nor what came before;
- the hidden tests enter a container of their own, fresh from the image, in which the model has run nothing; of the
  model's work only its patch comes there, without its changes to the files of the hidden tests;
- hidden tests that cannot be put in place, and tests that do not begin, are failures, not rewards.
"""

import asyncio
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from megasao.environments.base import EnvironmentFailure
from megasao.environments.sandbox.container import Container
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.runtimes import Runtime
from megasao.environments.swebench.repositories import files_at
from megasao.environments.swebench.rows import Instance
from megasao.environments.swebench.tests import all_pass, targets, test_run, touched_files

DIRECTORY = "/testbed"
"""Where the published images have the repository."""

MAX_PATCH = 4 << 20
MAX_LOG = 32 << 20
PREPARE_TIMEOUT_S = 600.0

# The files come on standard input.
_UNPACK = "tar -xf - --no-same-owner && git init -q && git add -A -f && git commit -q -m base && git rev-parse HEAD"

# A clone of depth 1 has the objects of one commit; its .git takes the place of the image's. Changes are counted from a
# tree of all that is there: what a build left in no commit is in the image of the tests, too, and would not apply.
_SHALLOW = """set -e
new=$(mktemp -d)
git clone -q --depth 1 --no-tags --no-checkout "file://$PWD" "$new/clone"
rm -rf .git
mv "$new/clone/.git" .git
git remote remove origin
git reset -q
git add -A
git write-tree
git reset -q
"""

# The published images have the tests' interpreter in a conda environment.
ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi\n"


@dataclass(frozen=True)
class Site:
    """Where instances run. ``repository``: its files come from this machine; None: they are in the image."""

    runtime: Runtime
    image: str
    repository: Path | None
    limits: SandboxLimits
    test_time_s: float


@dataclass(frozen=True)
class Verdict:
    """``stopped``: a limit ended the tests; ``applied``: the model's patch fits."""

    passed: bool
    applied: bool = True
    stopped: bool = False


class SwebenchFailure(EnvironmentFailure):
    """An instance, or its image, is not as it must be."""

    reason = "swebench_failure"


async def begin(site: Site, instance: Instance) -> tuple[Container, str]:
    """A container for the model, and the commit or tree that its changes are counted from."""
    container = await _prepared(site, instance)
    try:
        said = await _must(container, "git rev-parse HEAD" if site.repository else _SHALLOW, "its history")
        return container, said.splitlines()[-1]
    except BaseException:
        await container.close()
        raise


async def take_patch(container: Container, base: str) -> bytes | None:
    """What has been changed since ``base``, as a diff; None where git is broken there, or the diff is too large."""
    plain = "--binary --full-index --no-ext-diff --no-textconv --no-color"
    script = f"exec 2>/dev/null; git add -A && git diff --cached {plain} {base}"  # a warning is no part of a patch
    found = await container.capture(script, time_s=PREPARE_TIMEOUT_S, output_bytes=MAX_PATCH)
    return None if found.exit_code != 0 or found.truncated else found.output


async def judge(site: Site, instance: Instance, patch: bytes) -> Verdict:
    """The hidden tests on the base commit with this patch. EnvironmentFailure where they cannot be run."""
    container = await _prepared(site, instance)
    try:
        await _must(container, "git apply --whitespace=nowarn -", "the hidden tests", instance.test_patch.encode())
        if patch.strip():
            hidden = " ".join(f"--exclude={shlex.quote(_literal(name))}" for name in touched_files(instance.test_patch))
            applied = await container.run(f"git apply --whitespace=nowarn {hidden} -", stdin=patch)
            if applied.exit_code != 0:
                return Verdict(passed=False, applied=False)
        return await _tested(container, site, instance)
    finally:
        await container.close()


async def _tested(container: Container, site: Site, instance: Instance) -> Verdict:
    run, mark = test_run(instance), secrets.token_hex(16)
    wanted = " ".join(map(shlex.quote, targets(instance)))
    # In pieces, so that a shell which shows its commands does not show the mark. What comes after it is the work's.
    script = f"{ACTIVATE}echo '{mark[:16]}''{mark[16:]}'\n{run.install or ':'}\n{run.command} {wanted}"
    log = await container.capture(script, time_s=site.test_time_s, output_bytes=MAX_LOG)
    text = log.output.decode(errors="replace")
    _, began, tests = text.partition(mark)
    if log.stopped_by is not None:
        return Verdict(passed=False, stopped=True)
    if not began:
        raise SwebenchFailure(f"{instance.instance_id}: the tests did not begin: {text[-500:]}")
    return Verdict(passed=all_pass(instance, run.read(tests)))


async def _prepared(site: Site, instance: Instance) -> Container:
    """A container with the repository at its base commit."""
    container = Container(site.runtime, site.image, DIRECTORY, site.limits)
    try:
        await container.start()
        if site.repository is not None:
            files = await asyncio.to_thread(files_at, site.repository, instance.base_commit)
            await _must(container, _UNPACK, "the repository", files)
    except BaseException:
        await container.close()
        raise
    return container


async def _must(container: Container, script: str, what: str, stdin: bytes = b"") -> str:
    """Run what cannot fail; its output. SwebenchFailure if it does."""
    outcome = await container.run(script, stdin=stdin, time_s=PREPARE_TIMEOUT_S)
    if outcome.exit_code != 0:
        raise SwebenchFailure(f"{what}: exit status {outcome.exit_code}: {outcome.output[-500:]}")
    return outcome.output.strip()


def _literal(name: str) -> str:
    """A pattern of git that matches this name only."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in name)
