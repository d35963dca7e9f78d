"""What is compiled: CUDA kernels that are registered and do not spill, and the kernels' own tests under an emulator."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megasao.config.errors import ConfigError
from megasao.config.load import load_with_places
from megasao.launch.about import about
from megasao.launch.preflight import preflight
from megasao.ops import backend
from megasao.ops.extension import Extension, load_extension

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

S = "megasao::Scratch"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
needs_extension = pytest.mark.skipif(load_extension().problem is not None, reason="no compiled operators")


def run(*command: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=800,
    )


@needs_compiler
def test_cuda_kernels_under_the_emulator_and_sanitizers(tmp_path: Path) -> None:
    program = tmp_path / "test_kernels"
    built = run("g++", *FLAGS, *SANITIZERS, "csrc/tests/test_kernels.cpp", "-o", program)
    assert built.returncode == 0, built.stderr
    done = run(program, ASAN_OPTIONS="detect_leaks=0")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = re.search(r"(\d+) cases, 0 failures", done.stdout)
    assert cases is not None and int(cases[1]) > 50


@needs_nvcc
@needs_compiler
def test_cuda_kernels_build_for_sm_90_without_spills(tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    headers = [f'#include "{ROOT}/csrc/cuda/{name}.h"\n' for name in ("gae", "policy", "response")]
    uses = [
        f"template __global__ void megasao::{kernel}<{types}>({arguments});\n"
        for t in ("float", "double")
        for kernel, types, arguments in (
            ("gae_kernel", t, f"megasao::GaeProblem<{t}>, megasao::GaeScratch"),
            *(
                (
                    "policy_kernel",
                    f"{t}, megasao::{rule}<{t}>",
                    f"megasao::PolicyProblem<{t}>, megasao::{rule}<{t}>, {S}",
                )
                for rule in ("DisRule", "PpoRule")
            ),
            ("response_sums_kernel", t, f"megasao::ResponseProblem<{t}>, double*, {S}"),
            ("response_loss_kernel", t, f"megasao::ResponseProblem<{t}>, megasao::ResponseLosses<{t}>, {S}"),
        )
    ]
    source.write_text("".join(headers + uses))
    keep = ["--keep", "--keep-dir", tmp_path]
    done = run(
        "nvcc", "-std=c++20", "-O3", "-arch=sm_90", "-Xptxas", "-v", *keep, "-cubin", source, "-o", tmp_path / "k"
    )
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout + done.stderr)
    assert len(spills) == len(uses) == 10
    assert all(spill == ("0", "0") for spill in spills)
    ptx = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    for access in (r"ld\.global(\.nc)?\.v4\.[bf]32", r"st\.global\.v4\.[bf]32"):
        assert re.search(access, ptx), "loads and stores are of 16 bytes"


@needs_extension
def test_operators_are_registered_where_they_were_built() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = ("gae", "dis", "ppo_clip", "response_sums", "response_loss")
    for name in (*names, *(f"{name}_out" for name in names)):
        assert has(f"megasao::{name}", "CPU")
        assert has(f"megasao::{name}", "CUDA") == bool(load_extension().cuda)
        assert has(f"megasao::{name}", "Meta")
        assert not has(f"megasao::{name}", "XPU")


@needs_extension
@needs_nvcc
def test_cuda_kernels_are_in_the_extension_where_nvcc_is() -> None:
    if os.environ.get("MEGASAO_CUDA") == "0":
        pytest.skip("left out on purpose")
    assert load_extension().cuda.startswith("sm_"), "built before nvcc was there? run `make clean setup`"


def test_fused_without_the_operators_is_refused_by_the_check_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config, document = load_with_places(ROOT / "configs" / "laptop.yaml", ["ops.backend=fused"])
    monkeypatch.setattr(backend, "load_extension", lambda: Extension(problem="they were not built (test)"))
    with pytest.raises(ConfigError, match=r"ops\.backend.*there are no compiled operators: they were not built"):
        preflight(config, document)
    preflight(*load_with_places(ROOT / "configs" / "laptop.yaml", ["ops.backend=auto"]))


def test_info_says_what_is_compiled_in() -> None:
    extension, text = load_extension(), about()["ops"]
    assert extension.cpu in text and extension.cuda in text
    assert text.startswith("plain torch reference" if extension.problem else "fused")


def test_a_build_without_a_compiler_is_a_warning_and_an_error_on_request(tmp_path: Path) -> None:
    place = ["build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    without = {"PATH": str(tmp_path), "CXX": "", "MEGASAO_BUILD": ""}
    done = run(sys.executable, "setup.py", *place, **without)
    assert done.returncode == 0 and "installed without the fused operators" in done.stderr
    done = run(sys.executable, "setup.py", *place, **(without | {"MEGASAO_BUILD": "1"}))
    assert done.returncode != 0 and "no C++ compiler was found" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_a_failing_nvcc_is_an_error_on_request(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho this nvcc is broken\nexit 1\n")
    nvcc.chmod(0o755)
    place = ["build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    broken = {"NVCC": str(nvcc), "MEGASAO_CUDA": "1", "MEGASAO_BUILD": ""}
    done = run(sys.executable, "setup.py", *place, **broken)
    assert done.returncode != 0
    assert "broken" in done.stderr or "libcudart_static.a was not found" in done.stderr
