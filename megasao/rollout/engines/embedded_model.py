"""The transformers model of the embedded engine: one step over many requests, and weights swapped in place.

Everything here is called from the engine's one model thread, except ``stage``.

Invariants, asserted by the tests:
- the logits are those of the transformers model for each sequence alone, to fp32 rounding (checked at start too);
- the loaded parameters equal the checkpoint's tensors under the names that weight updates use (checked at start);
- layers of multi-token prediction, which a checkpoint may have and an update has not, are left out;
- staged weights are invisible until they are committed.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from megasao.families import families
from megasao.families.names import carried_names, optional_names
from megasao.rollout.engines.checkpoint_names import CheckpointLayout
from megasao.rollout.engines.routing_recorder import RoutingRecorder
from megasao.rollout.engines.sampler import SampleRow, sample
from megasao.rollout.engines.slot_attention import ATTENTION_NAME, SlotCache, StepBatch, StepRow, register

_loading = threading.Lock()
"""from_pretrained patches global state while it runs; two engines of one process must not load at once."""

_SELF_CHECK_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ModelStep:
    """Work of one step. ``samples[i]`` is None where row i still has tokens to prefill after this step."""

    rows: Sequence[StepRow]
    samples: Sequence[SampleRow | None]
    record_routing: bool = False


@dataclass(frozen=True)
class StepOutput:
    """``samples``: (token, log-probability) by row index where a sample was asked for. ``routed_experts``: where they
    were to be recorded, [N, M, K], the choices of all N tokens of the step, row after row."""

    samples: dict[int, tuple[int, float]]
    routed_experts: np.ndarray | None


class EmbeddedModel:
    """A model, its KV cache, and at most one staged set of weights."""

    def __init__(self, path: Path, *, slots: int, max_tokens: int) -> None:
        """ValueError if the checkpoint does not fit its model, or if the model cannot run on the slot cache."""
        tensors = _read_checkpoint(path)
        self.model = _load(path, tensors)
        self.layout = CheckpointLayout(self.model)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.cache = SlotCache(slots, max_tokens)
        self._staged: tuple[int, dict[str, torch.Tensor]] | None = None
        self.recorder = RoutingRecorder(self.model, self.model.config.get_text_config().to_dict())
        _check_loaded(self.layout, tensors, path)
        self._check_forward()

    @torch.inference_mode()
    def logits(self, rows: Sequence[StepRow], wanted: Sequence[int]) -> torch.Tensor:
        """Run ``rows`` (single-token rows first); logits [len(wanted), V] after the last token of the wanted rows."""
        batch = StepBatch(rows, self.cache)
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.last[torch.tensor(wanted, dtype=torch.long)],
            step_batch=batch,
        )
        return output.logits[0]

    @torch.inference_mode()
    def step(self, work: ModelStep) -> StepOutput:
        """Run one step."""
        wanted = [index for index, row in enumerate(work.samples) if row is not None]
        self.recorder.recording = work.record_routing
        logits = self.logits(work.rows, wanted)
        routed = self.recorder.taken()
        if not wanted:
            return StepOutput({}, routed)
        tokens, logprobs = sample(logits, [row for row in work.samples if row is not None])
        return StepOutput({index: (t, p) for index, t, p in zip(wanted, tokens, logprobs, strict=True)}, routed)

    def stage(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Copy a complete set of checkpoint tensors; an earlier staged one is replaced. ValueError if wrong."""
        self._staged = (version, self.layout.assemble(tensors))

    def staged_version(self) -> int | None:
        """The version that ``commit`` would make current."""
        return None if self._staged is None else self._staged[0]

    def discard(self, version: int) -> None:
        """Forget the staged weights if they are ``version``."""
        if self.staged_version() == version:
            self._staged = None

    @torch.no_grad()
    def commit(self, version: int) -> None:
        """Copy the staged weights into the live parameters."""
        assert self._staged is not None and self._staged[0] == version
        for name, live in self.layout.live.items():
            live.copy_(self._staged[1][name])
        self._staged = None

    def _check_forward(self) -> None:
        """The slot attention must compute what the model's own attention does, for this architecture too."""
        length = min(8, self.cache.max_tokens)
        tokens = [(7 * index + 3) % self.vocab_size for index in range(length)]
        parts = [StepRow(0, 0, tokens[:-1])] if length > 1 else []
        for part in parts:
            self.logits([part], [0])
        ours = self.logits([StepRow(0, length - 1, tokens[-1:])], [0])
        self.model.set_attn_implementation("eager")
        with torch.inference_mode():
            theirs = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        self.model.set_attn_implementation(ATTENTION_NAME)
        error = float((ours - theirs).abs().max())
        if not error <= _SELF_CHECK_TOLERANCE * max(1.0, float(theirs.abs().max())):
            raise ValueError(
                f"the embedded engine does not support {type(self.model).__name__}: its logits differ by {error:.3g} "
                "from the model's own forward; use another rollout.engine for this architecture"
            )


def _load(path: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    register()
    with _loading:
        transformers_logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):  # names and shapes only: transformers would fill what is missing at random
            skeleton = AutoModelForCausalLM.from_config(config)
        try:
            CheckpointLayout(skeleton).check(tensors)
        except ValueError as error:
            raise ValueError(f"{path} is not a complete Hugging Face checkpoint: {error}") from None
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # it would warn of the tensors that are left out
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                experts_implementation="eager",
                local_files_only=True,
            )
        finally:
            transformers_logging.set_verbosity(verbosity)
    if config.model_type == "glm_moe_dsa":
        from megasao.rollout.engines.latent_slots import use_latent_slots

        use_latent_slots(model, config.rms_norm_eps)
    return model.eval().requires_grad_(False)


def _check_loaded(layout: CheckpointLayout, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    expected = layout.assemble(tensors)
    for name, live in layout.live.items():
        if not torch.equal(live, expected[name]):
            raise ValueError(
                f"the embedded engine does not know how {path} stores {name}: the loaded parameter differs from the "
                "checkpoint tensors that weight updates would put there"
            )


def _read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is not a Hugging Face checkpoint: it has no config.json")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    known = config.get("model_type") in families()
    ignored = carried_names(config) | optional_names(config) if known else set()
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"{path} is not a complete Hugging Face checkpoint: it has no {name}")
        try:
            with safe_open(path / name, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys() if key not in ignored})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path / name} is damaged or cut off ({error}); write the checkpoint again") from error
    return tensors
