"""Images and runtimes for the tests of containers."""

import os
import shutil

import pytest

from megasao.environments.sandbox import runtimes
from megasao.environments.sandbox.bubblewrap import SandboxUnavailable
from tests.container_images import import_image, remove_image, root_archive

IMAGE = f"localhost/megasao-test:{os.getpid()}"


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """The root directory of an image."""
    return root_archive(tmp_path_factory.mktemp("image") / "root.tar")


@pytest.fixture(scope="session")
def ready(tmp_path_factory):
    """Skips where a runtime is not here; podman uses runc where it can, which knows both kinds of control groups."""
    if shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin") and "CONTAINERS_CONF" not in os.environ:
        file = tmp_path_factory.mktemp("podman") / "containers.conf"
        file.write_text('[engine]\nruntime = "runc"\n')
        os.environ["CONTAINERS_CONF"] = str(file)

    def check(runtime):
        try:
            runtimes.require(runtime)
        except SandboxUnavailable as error:
            pytest.skip(str(error))

    return check


@pytest.fixture(scope="session")
def imported(ready, archive):
    """Gives a runtime that is here the image IMAGE; skips where it runs no container."""
    there = set()

    def have(runtime):
        ready(runtime)
        if runtime != "bubblewrap" and runtime not in there:
            import_image(runtime, archive, IMAGE)
            there.add(runtime)
        return runtime, "" if runtime == "bubblewrap" else IMAGE

    yield have
    for runtime in there:
        remove_image(runtime, IMAGE)


@pytest.fixture(params=["bubblewrap", "podman", "docker"])
def place(request, imported):
    """A runtime that is here, and an image that it has."""
    return imported(request.param)


@pytest.fixture(params=["podman", "docker"])
def image(request, imported):
    """A container runtime that is here, and an image that it has."""
    return imported(request.param)
