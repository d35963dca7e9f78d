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


@pytest.fixture(scope="session", params=["bubblewrap", "podman", "docker"])
def place(request, ready, archive):
    """A runtime that is here, and an image that it has."""
    runtime = request.param
    ready(runtime)
    if runtime == "bubblewrap":
        yield runtime, ""
        return
    import_image(runtime, archive, IMAGE)
    yield runtime, IMAGE
    remove_image(runtime, IMAGE)
