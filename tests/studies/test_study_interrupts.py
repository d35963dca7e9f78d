"""A study that is interrupted on the terminal, as every process of it is then."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from megasao.studies.pool import processes, run_all

def forever(marker):
    part = Path(marker + ".part")
    part.write_text(str(os.getpid()))
    part.rename(marker)
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    try:
        with processes(2) as pool:
            run_all(pool, [(forever, (f"{sys.argv[1]}/{name}",), name) for name in "abcdefgh"], print)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_an_interrupt_ends_a_study_and_its_processes(tmp_path: Path) -> None:
    """Without more, a pool would go on with the eight tasks, one after the other."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    words = [sys.executable, str(script), str(tmp_path)]
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in "ab"):
            assert time.monotonic() < deadline and process.poll() is None, "the work did not begin"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert not (tmp_path / "c").exists()
    for name in "ab":
        assert not Path("/proc", (tmp_path / name).read_text()).exists(), "a process was left behind"
