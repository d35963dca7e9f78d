"""The commands of ``megasao convert``. Modules that import torch are imported inside them."""

import time
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from megasao.config.errors import UserError

if TYPE_CHECKING:
    from megasao.conversion.output import Output

DIFFERENT = 1
_SHOWN = 40
"""Differences that are listed; the others are counted."""

P = ParamSpec("P")

app = typer.Typer(help="Convert, quantise and compare checkpoints, with little memory.", no_args_is_help=True)

HfDir = Annotated[Path, typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint directory.")]
OutDir = Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Directory to make; it must not exist.")]
Parallel = Annotated[int, typer.Option(min=1, help="Files that are made at the same time.")]
ShardGb = Annotated[float, typer.Option(min=0.000001, max=1e6, help="Most GB of one file.")]


class Fp8Format(StrEnum):
    """How numbers are kept in FP8."""

    fp8_block = "fp8_block"
    fp8_tensor = "fp8_tensor"


def _told(command: Callable[P, None]) -> Callable[P, None]:
    """A command that says of a file or directory which the system refuses what is wrong with it."""

    @wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OSError as error:
            raise UserError(
                f"{error.filename or 'a file'}: {error.strerror or error}; it must be there and readable, and the "
                "directory around OUT_DIR writable"
            ) from error

    return told


@app.command()
@_told
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="Checkpoint directory, or a safetensors file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What it is compared with.")],
) -> None:
    """Compare keys, shapes, dtypes and values; exit code 0: equal, 1: different, 2: one is not a whole checkpoint."""
    from megasao.conversion.progress import progress_bar
    from megasao.conversion.verify import compare, compared_bytes, open_sides

    sides = open_sides(a, b)
    with progress_bar("comparing", compared_bytes(*sides)) as advance:
        found = compare(*sides, advance)
    if not found.differences:
        typer.echo(f"equal: {found.tensors} tensors, {found.equal_bytes} bytes")
        return
    for line in found.differences[:_SHOWN]:
        typer.echo(line)
    if len(found.differences) > _SHOWN:
        typer.echo(f"... and {len(found.differences) - _SHOWN} more")
    typer.echo(f"different: {len(found.differences)} tensors; {found.tensors} are in both")
    raise typer.Exit(DIFFERENT)


@app.command()
@_told
def quantize(
    hf_dir: HfDir,
    out_dir: OutDir,
    format: Annotated[
        Fp8Format,
        typer.Option(help="fp8_block: blocks of 128 x 128, each with a scale; fp8_tensor: by nvidia-modelopt."),
    ] = Fp8Format.fp8_block,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="From fp8_block back to bfloat16.")] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts, one a line, to calibrate the activations of fp8_tensor with."),
    ] = None,
    parallel: Parallel = 1,
    shard_gb: ShardGb = 5.0,
) -> None:
    """Make a checkpoint in FP8 of one in bfloat16, or the other way; the same command goes on after an interruption."""
    from megasao.conversion.to_hf import dequantized, quantized

    per_tensor = format is Fp8Format.fp8_tensor
    if per_tensor != (calibration is not None):
        raise UserError("--calibration FILE goes with --format fp8_tensor, which needs it")
    if calibration is not None:
        if dequantize:
            raise UserError("--dequantize reads fp8_block; leave out --format and --calibration")
        from megasao.conversion.per_tensor import quantized_per_tensor

        with quantized_per_tensor(hf_dir, out_dir, calibration, shard_bytes=_bytes(shard_gb)) as output:
            _run("writing", output, parallel)
        return
    plan = dequantized if dequantize else quantized
    output = plan(hf_dir, out_dir, shard_bytes=_bytes(shard_gb))
    _run("dequantising" if dequantize else "quantising", output, parallel)


@app.command("hf-to-megatron")
@_told
def hf_to_megatron(hf_dir: HfDir, out_dir: OutDir, parallel: Parallel = 1, shard_gb: ShardGb = 5.0) -> None:
    """Make a training checkpoint that the trainer loads under any layout; FP8 becomes bfloat16."""
    from megasao.conversion.to_megatron import hf_to_model

    _run("converting", hf_to_model(hf_dir, out_dir, part_bytes=_bytes(shard_gb)), parallel)


@app.command("megatron-to-hf")
@_told
def megatron_to_hf(
    ckpt_dir: Annotated[
        Path,
        typer.Argument(metavar="CKPT_DIR", help="A model's checkpoint, a run's, or a run: its latest actor."),
    ],
    out_dir: OutDir,
    model: Annotated[
        Path | None,
        typer.Option(metavar="HF_DIR", help="What it was trained from; default: model.path of the run around it."),
    ] = None,
    parallel: Parallel = 1,
    shard_gb: ShardGb = 5.0,
) -> None:
    """Make a Hugging Face checkpoint of the weights of a training checkpoint, whatever layout wrote it."""
    from megasao.conversion.to_hf import model_to_hf

    _run("converting", model_to_hf(ckpt_dir, model, out_dir, shard_bytes=_bytes(shard_gb)), parallel)


def _bytes(gigabytes: float) -> int:
    return int(gigabytes * 1e9)


def _run(what: str, output: "Output", parallel: int) -> None:
    from megasao.conversion.output import make, reserved
    from megasao.conversion.progress import progress_bar

    with reserved(output) as missing:
        finished = len(output.files) - len(missing)
        if finished:
            typer.echo(f"going on with {output.partial}: {finished} of {len(output.files)} files are there")
        read = sum(file.read_bytes for file in missing) + sum(part.stat().st_size for part in output.summed)
        start = time.monotonic()
        try:
            with progress_bar(what, read) as advance:
                make(output, missing, parallel=parallel, advance=advance)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; the same command goes on from {output.partial}", err=True)
            raise
    seconds = time.monotonic() - start
    tensors, written = sum(len(file.infos) for file in output.files), sum(file.nbytes for file in missing)
    typer.echo(
        f"{output.path}: {tensors} tensors in {len(output.files)} files; read {read / 1e9:.3f} GB and wrote "
        f"{written / 1e9:.3f} GB in {seconds:.1f} s ({read / 1e9 / seconds:.2f} GB/s read)"
    )
