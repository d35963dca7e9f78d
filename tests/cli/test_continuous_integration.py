"""What continuous integration insists on before the first test: the list can be read, and what is missing is named."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing(list_of_needs: Path, **environment: str) -> list[str]:
    command = [str(ROOT / ".ci" / "missing"), str(list_of_needs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment or None, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_missing_is_named_and_what_is_there_is_not(tmp_path: Path) -> None:
    needs = tmp_path / "needs"
    needs.write_text(
        "# a remark\n\ncommand sh\ncommand no-such-program\n"
        f"import {sys.prefix} json\nimport {sys.prefix} no_such_module\nimport no-such-environment json\n"
        f"found {sys.prefix} json\nfound {sys.prefix} no_such_module\nmodule json\n"
        f"file {tmp_path}\nfile {tmp_path}/absent\n"
    )
    assert missing(needs) == [
        "the command no-such-program",
        f"the module no_such_module of {sys.prefix}: ModuleNotFoundError: No module named 'no_such_module'",
        "the environment no-such-environment (no no-such-environment/bin/python), for json",
        f"the module no_such_module of {sys.prefix}: AssertionError: not installed",
        "a meaning for the line 'module json ' of the list",
        f"the file {tmp_path}/absent",
    ]


def test_every_command_of_the_real_list_is_missed_where_it_is_not(tmp_path: Path) -> None:
    """With a PATH that has nothing but the shell's own tools; daemons lie in /usr/sbin, which is always looked into."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "realpath", "dirname", "tail"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    lines = (ROOT / ".ci" / "needed").read_text(encoding="utf-8").splitlines()
    commands = [line.split()[1] for line in lines if line.startswith("command ")]
    needs = tmp_path / "needs"
    needs.write_text("\n".join(f"command {name}" for name in commands))
    found = missing(needs, PATH=str(tools))
    assert {"the command g++", "the command bwrap", "the command podman", "the command srun"} <= set(found)
