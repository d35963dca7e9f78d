"""FP8 with one scale a tensor, by nvidia-modelopt (extra ``modelopt``): the scales of activations need calibration.

modelopt needs the whole model in memory and runs it on texts. Of what it exports, the FP8 tensors and their scales are
taken; all else comes from the source, bit for bit: routers' biases in float32, multi-token prediction, config.json.
"""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megasao.config.errors import UserError
from megasao.conversion.blocks import FP8
from megasao.conversion.hf import HfCheckpoint, open_hf
from megasao.conversion.output import Output, check_place
from megasao.conversion.tasks import Copy, Task
from megasao.conversion.to_hf import SHARD_BYTES, hf_output, kept_matrices
from megasao.families.names import carried_names, fp8_names
from megasao.storage.hf_directory import checkpoint_files
from megasao.storage.reader import TensorFiles

_TEXTS, _TOKENS = 512, 512
"""Most lines that are read of the calibration file, and most tokens of each."""
_SCALES = ("weight_scale", "input_scale")


@contextmanager
def quantized_per_tensor(
    source: Path, out: Path, calibration: Path, *, shard_bytes: int = SHARD_BYTES
) -> Iterator[Output]:
    """The checkpoint at ``source`` in FP8, with activations calibrated on the lines of a text file.

    The products are those of :func:`megasao.conversion.to_hf.quantized` but for multi-token prediction, which
    transformers does not run. What modelopt exported lies beside the output until the context ends.

    Raises:
        UserError: see :func:`open_hf`; no texts; modelopt is not installed; too little memory.
    """
    hf = open_hf(source)
    if hf.block is not None:
        raise UserError(f"{source} is in FP8 already; --dequantize makes it bfloat16")
    check_place(out)
    texts = _read_texts(calibration)
    if importlib.util.find_spec("modelopt") is None:
        raise UserError("fp8_tensor needs nvidia-modelopt, which is not installed; pip install 'megasao[modelopt]'")
    needed, free = sum(info.nbytes for info in hf.files.infos()), psutil.virtual_memory().available
    if needed * 3 // 2 > free:
        raise UserError(
            f"{source} has {needed / 1e9:.1f} GB, and modelopt needs it in memory half as much again; {free / 1e9:.1f} "
            "GB are free. fp8_block needs no more than a piece of a tensor"
        )
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.modelopt-") as directory:
        _export(hf, texts, Path(directory))
        yield _combined(hf, Path(directory), out, shard_bytes)


def _read_texts(calibration: Path) -> list[str]:
    try:
        texts = [line for line in calibration.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibration {calibration} cannot be read: {error}") from None
    if not texts:
        raise UserError(f"--calibration {calibration} has no texts; give one a line, like those the model will see")
    return texts[:_TEXTS]


def _export(hf: HfCheckpoint, texts: list[str], directory: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf.path, dtype="auto")
    tokenizer = Tokenizer.from_file(str(hf.path / "tokenizer.json"))
    rows = [tokens[:_TOKENS] for text in texts if (tokens := tokenizer.encode(text).ids)]

    def calibrate(quantized: torch.nn.Module) -> None:
        with torch.no_grad():
            for row in rows:
                quantized(torch.tensor([row]))

    disabled = [{"quantizer_name": f"{name.removesuffix('.weight')}.*", "enable": False} for name in kept_matrices(hf)]
    settings = {**mtq.FP8_DEFAULT_CFG, "quant_cfg": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *disabled]}
    export_hf_checkpoint(mtq.quantize(model, settings, calibrate), export_dir=str(directory))


def _combined(hf: HfCheckpoint, exported: Path, out: Path, shard_bytes: int) -> Output:
    files = TensorFiles(checkpoint_files(exported))
    quantized = {info.name for info in files.infos() if info.dtype == FP8}
    expected = (fp8_names(hf.hf_config) & hf.files.names()) - carried_names(hf.hf_config)
    if quantized != expected:
        first = sorted(quantized ^ expected)[0]
        raise UserError(f"modelopt quantised other tensors than the family's rules say, such as {first}")
    tasks: list[Task] = []
    for name in hf.weights():
        if name not in quantized:
            tasks.append(hf.plain(name, name))
            continue
        for stored in (name, *(f"{name.removesuffix('weight')}{scale}" for scale in _SCALES)):
            tasks.append(Copy(files, stored, files.info(stored)))
    config = hf.unquantized_config | {"quantization_config": _settings(hf, exported)}
    output = hf_output(out, tasks, config, hf.path, kind="fp8_tensor", sources=hf.files.files, shard_bytes=shard_bytes)

    def write_documents(directory: Path) -> None:
        output.documents(directory)
        stated = json.loads((exported / "hf_quant_config.json").read_text(encoding="utf-8"))
        stated["quantization"]["exclude_modules"] = config["quantization_config"]["ignore"]
        (directory / "hf_quant_config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")

    return replace(output, documents=write_documents)


def _settings(hf: HfCheckpoint, exported: Path) -> dict[str, Any]:
    """modelopt's, which name everything that is kept."""
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    settings: dict[str, Any] = config["quantization_config"]
    carried = carried_names(hf.hf_config) & hf.files.names()
    kept = {name for name in carried if len(hf.files.info(name).shape) == 2} | set(kept_matrices(hf))
    settings["ignore"] = sorted({*settings["ignore"], *(name.removesuffix(".weight") for name in kept)})
    return settings
