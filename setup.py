"""Packaging entry point; metadata is in pyproject.toml. Builds csrc/ into megasao/_fused.abi3.so where it can.

The extension is optional: without a C++ compiler, or without torch at build time (build isolation hides it: use
`pip install --no-build-isolation`), or when a compiler fails, the package is installed without it, with one warning.
Environment variables:
    MEGASAO_BUILD=0        do not build;  1: fail where the CPU part cannot be built
    MEGASAO_CUDA=0         no CUDA kernels;  1: fail where they cannot be built
    MEGASAO_CUDA_ARCH      architectures for nvcc, "90" unless set; several: "90;100"
    CUDA_HOME, NVCC, CXX   where the tools are
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # the stable ABI of torch 2.10
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-Wno-maybe-uninitialized", TARGET]
CPU_SOURCES = ["ops.cpp", "cpu/select.cpp", "cpu/kernels_base.cpp", "cpu/kernels_avx2.cpp", "cpu/kernels_avx512.cpp"]
CUDA_SOURCE = CSRC / "ops_cuda.cu"


class CannotBuild(Exception):
    """Why a part of the extension is left out."""


def find_torch() -> Path:
    """The directory of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuild("torch is not importable at build time (install it first, then use --no-build-isolation)")
    return Path(spec.submodule_search_locations[0])


def find_compiler() -> str:
    """A C++ compiler."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name):
            return name
    raise CannotBuild("no C++ compiler was found (set CXX)")


def find_cuda() -> tuple[str, Path]:
    """nvcc and the CUDA toolkit's directory."""
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not shutil.which(nvcc):
        raise CannotBuild("nvcc was not found (set CUDA_HOME or NVCC)")
    named = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parents[1]), "/usr/local/cuda"]
    for home in map(Path, filter(None, named)):
        if (home / "lib64" / "libcudart_static.a").exists():
            return nvcc, home
    raise CannotBuild("libcudart_static.a was not found (set CUDA_HOME)")


def run(command: list[str]) -> str:
    """Run a compiler; its output, or CannotBuild with the end of it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]}: {error}") from None
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout + done.stderr


def compile_cpu(compiler: str, torch: Path, temp: Path, extra: list[str]) -> list[str]:
    """Objects of the schemas and the CPU kernels."""
    objects = [temp / (source.replace("/", "_") + ".o") for source in CPU_SOURCES]
    commands = [
        [compiler, *CXX_FLAGS, *extra, "-isystem", str(torch / "include"), "-c", str(CSRC / source), "-o", str(target)]
        for source, target in zip(CPU_SOURCES, objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(run, commands))
    return [str(target) for target in objects]


def compile_cuda(torch: Path, temp: Path, archs: list[str]) -> tuple[list[str], list[str]]:
    """(objects, link arguments) of the CUDA kernels; plain nvcc, also against a torch without CUDA."""
    if not CUDA_SOURCE.exists():
        raise CannotBuild("the source has no CUDA kernels")
    nvcc, home = find_cuda()
    target = temp / "ops_cuda.o"
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    host = "-fPIC,-fvisibility=hidden,-Wno-psabi"
    flags = ["-std=c++20", "-O3", "-Xcompiler", host, "-Xptxas", "-v", TARGET, *codes]
    log = run([nvcc, *flags, "-isystem", str(torch / "include"), "-c", str(CUDA_SOURCE), "-o", str(target)])
    (temp / "ptxas.log").write_text(log)
    libraries = ["-L", str(home / "lib64"), "-lcudart_static", "-lrt", "-lpthread", "-ldl"]
    return [str(target)], libraries


class BuildFused(build_ext):
    """Compiles csrc/ with plain compiler calls: the CPU part, then the CUDA part if it can be had."""

    def build_extension(self, ext: Extension) -> None:
        """Build, or say once why not."""
        build, cuda = os.environ.get("MEGASAO_BUILD"), os.environ.get("MEGASAO_CUDA")
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            if build == "0":
                raise CannotBuild("MEGASAO_BUILD=0")
            self._build(target, cuda)
        except CannotBuild as reason:
            target.unlink(missing_ok=True)
            if build == "1" or cuda == "1":
                raise SystemExit(f"megasao: the fused operators cannot be built: {reason}") from None
            warn(f"installed without the fused operators; the plain torch ones are used: {reason}")
            self.extensions.remove(ext)

    def _build(self, target: Path, cuda: str | None) -> None:
        torch, compiler, temp = find_torch(), find_compiler(), Path(self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        archs = os.environ.get("MEGASAO_CUDA_ARCH", "90").replace(",", ";").split(";")
        gpu_objects: list[str] = []
        libraries: list[str] = []
        try:
            if cuda == "0":
                raise CannotBuild("MEGASAO_CUDA=0")
            gpu_objects, libraries = compile_cuda(torch, temp, archs)
        except CannotBuild as reason:
            if cuda == "1":
                raise
            warn(f"no CUDA kernels: {reason}")
        extra = [f'-DMEGASAO_CUDA_ARCHS="{" ".join("sm_" + arch for arch in archs)}"'] if gpu_objects else []
        objects = compile_cpu(compiler, torch, temp, extra)
        target.parent.mkdir(parents=True, exist_ok=True)
        # --no-as-needed: libtorch brings in libtorch_cuda, where the weak symbol of the CUDA stream lives.
        link = ["-Wl,--no-as-needed", "-L", str(torch / "lib"), "-ltorch", "-ltorch_cpu", "-lc10", *libraries]
        run([compiler, "-shared", "-o", str(target), *objects, *gpu_objects, *link])

    def copy_extensions_to_source(self) -> None:
        """As in setuptools, but an extension that was not built is no error, and no old one stays."""
        source = ROOT / "megasao" / "_fused.abi3.so"
        built = Path(self.build_lib) / "megasao" / "_fused.abi3.so"
        if built.exists():
            shutil.copyfile(built, source.with_suffix(".new"))
            os.replace(source.with_suffix(".new"), source)  # a running process keeps its old file
        else:
            source.unlink(missing_ok=True)


def warn(message: str) -> None:
    """One line on standard error; pip shows it with -v."""
    print(f"megasao: {message}", file=sys.stderr)


setup(
    ext_modules=[Extension("megasao._fused", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildFused},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
