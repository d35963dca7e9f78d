"""Latent attention of the embedded engine against transformers, where the indexer's selection matters and where not."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import (
    VOCAB,
    Reference,
    load_tensors,
    new_cache,
    perturb,
    save_tensors,
)

from megasao.config.architecture import read_hf_config
from megasao.families.names import published_names
from megasao.rollout.engines import latent_slots
from megasao.rollout.engines.embedded_model import EmbeddedModel
from megasao.rollout.engines.slot_attention import StepRow
from tests.megatron.tiny_families import write_tiny_family
from tests.training.router_margin import router_margins

TOLERANCE = 1e-5
SLOTS, MAX_TOKENS = 4, 64
LENGTHS = (40, 6, 25, 1)
"""Rows longer than the six keys that are selected, and shorter."""


def sequences(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def sure(path: Path, row: list[int]) -> bool:
    """Whether every choice of a router or an indexer is beyond rounding."""
    return bool((router_margins(path, [*row, 0]) > 2e-6).all())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2's kinds of layers: three dense, indexers in the first three and in the seventh, shared by the others."""
    return write_tiny_family(tmp_path_factory.mktemp("glm"), "glm_moe_dsa", mtp=False)


@pytest.fixture(scope="module")
def rows(checkpoint: Path) -> list[list[int]]:
    """Sequences without a near-tie."""
    for seed in range(100):
        found = sequences(seed)
        if all(sure(checkpoint, row) for row in found):
            return found
    raise AssertionError("every seed has a near-tie")


def next_logprobs(reference: Reference, row: Sequence[int]) -> torch.Tensor:
    """[T]: at each place of ``row`` the log-probability of what follows it, and of token 0 at the end."""
    return of_next(torch.log_softmax(reference.logits(row), -1), row)


def of_next(logprobs: torch.Tensor, row: Sequence[int]) -> torch.Tensor:
    return logprobs.gather(-1, torch.tensor([*row[1:], 0])[:, None])[:, 0]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """Those of transformers for each sequence alone."""
    reference = Reference(checkpoint)
    return [next_logprobs(reference, row) for row in rows]


def open_model(path: Path) -> EmbeddedModel:
    return EmbeddedModel(path, slots=SLOTS, max_tokens=MAX_TOKENS)


def run(model: EmbeddedModel, rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[dict[int, float]]:
    """All rows side by side, the next ``sizes`` tokens of each in a step, the last size again and again.

    For each row, by the place of the last token of every step, the log-probability of what follows it.
    """
    found: list[dict[int, float]] = [{} for _ in rows]
    done, step = [0] * len(rows), 0
    while any(at < len(row) for at, row in zip(done, rows, strict=True)):
        size = sizes[min(step, len(sizes) - 1)]
        parts = [StepRow(i, at, row[at : at + size]) for i, (at, row) in enumerate(zip(done, rows, strict=True))]
        parts = sorted((part for part in parts if part.tokens), key=lambda part: len(part.tokens) > 1)
        logprobs = torch.log_softmax(model.logits(parts, range(len(parts))), -1)
        for part, line in zip(parts, logprobs, strict=True):
            done[part.slot] += len(part.tokens)
            last = done[part.slot] - 1
            found[part.slot][last] = float(line[[*rows[part.slot], 0][last + 1]])
        step += 1
    return found


def off(found: Sequence[dict[int, float]], expected: Sequence[torch.Tensor]) -> list[float]:
    """The largest difference in each row."""
    pairs = zip(found, expected, strict=True)
    return [max(abs(each - float(row[place])) for place, each in lines.items()) for lines, row in pairs]


@pytest.mark.parametrize("sizes", [(MAX_TOKENS,), (1,), (5,), (17, 1), (3, 9, 1)])
def test_every_way_through_a_row_gives_transformers_logprobs(
    checkpoint: Path, rows: list[list[int]], expected: list[torch.Tensor], sizes: tuple[int, ...]
) -> None:
    """Rows at once, token by token, in chunks, and long rows that prefill beside short ones that decode."""
    found = run(open_model(checkpoint), rows, sizes)
    assert max(off(found, expected)) < TOLERANCE


def test_attention_to_all_keys_is_noticed_in_rows_longer_than_the_selection(
    checkpoint: Path, rows: list[list[int]], expected: list[torch.Tensor]
) -> None:
    model = open_model(checkpoint)
    for layer in model.model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = MAX_TOKENS
    long, short, middle, single = off(run(model, rows, (1,)), expected)
    assert max(short, single) < TOLERANCE
    assert min(long, middle) > 1000 * TOLERANCE


def test_a_selection_of_its_own_in_a_layer_that_shares_is_noticed(
    checkpoint: Path, rows: list[list[int]], expected: list[torch.Tensor]
) -> None:
    model = open_model(checkpoint)
    layers = [layer.self_attn for layer in model.model.model.layers]
    assert layers[2].indexer is not None and layers[3].indexer is None
    layers[3].indexer = copy.deepcopy(layers[2].indexer)
    layers[3].indexer.layer_idx = 3
    long, short, _, _ = off(run(model, rows, (5, 1)), expected)
    assert short < TOLERANCE < long / 1000


@pytest.mark.parametrize("kept", [True, False], ids=["keep", "recompute"])
def test_new_weights_in_the_middle_of_a_row(checkpoint: Path, tmp_path: Path, kept: bool) -> None:
    """What slots keep (latents, rotated keys, the indexer's keys) is that of the weights that computed it."""
    changed, split = perturb(load_tensors(checkpoint), 1), 20
    after = save_tensors(checkpoint, tmp_path / "changed", changed)
    references = {0: Reference(checkpoint), 1: Reference(after)}
    row = next(row for row, *_ in map(sequences, range(100)) if sure(checkpoint, row) and sure(after, row))
    model = open_model(checkpoint)
    run(model, [row[:split]], (7, 1))
    model.stage(1, changed)
    model.commit(1)
    if not kept:
        model.logits([StepRow(0, 0, row[:split])], [0])
    lines = [model.logits([StepRow(0, place, [row[place]])], [0]) for place in range(split, len(row))]
    found = torch.log_softmax(torch.cat(lines), -1)
    cache = new_cache(references)
    references[0].logits(row[:split], cache)
    mixed = torch.log_softmax(torch.cat([references[1].logits([token], cache) for token in row[split:]]), -1)
    fresh = torch.log_softmax(references[1].logits(row), -1)[split:]
    found, mixed, fresh = (of_next(each, row[split:]) for each in (found, mixed, fresh))
    right, wrong = (mixed, fresh) if kept else (fresh, mixed)
    assert float((found - right).abs().max()) < TOLERANCE
    assert float((found - wrong).abs().max()) > 1000 * TOLERANCE


def test_a_slot_that_is_cut_back_holds_what_comes_next(
    checkpoint: Path, rows: list[list[int]], expected: list[torch.Tensor]
) -> None:
    """A turn is retracted, or another session gets the slot: what lay there before is not seen."""
    model = open_model(checkpoint)
    run(model, [rows[2][:10] + rows[0][::-1]], (9,))
    last = torch.log_softmax(model.logits([StepRow(0, 10, rows[2][10:])], [0]), -1)[0, 0]
    assert abs(float(last - expected[2][-1])) < TOLERANCE


def test_what_is_kept_of_a_token(checkpoint: Path, rows: list[list[int]]) -> None:
    """Latents and rotated keys, once for all heads; the indexer's keys where there is one."""
    model = open_model(checkpoint)
    run(model, rows, (5,))
    kept = sum(each[0, 0].numel() for each in model.cache._kept.values())
    assert kept == 8 * (24 + 8) + 4 * 16
    assert kept < 8 * 4 * (16 + 8 + 12) / 3, "keys and values of heads"


def test_the_norms_of_latents_have_the_configs_epsilon(tmp_path: Path) -> None:
    """As the trainer and SGLang have it; transformers does not read it there."""
    path = write_tiny_family(tmp_path / "model", "glm_moe_dsa", mtp=False, rms_norm_eps=1e-2)
    row = sequences(0)[1]
    reference = Reference(path)
    own = next_logprobs(reference, row)
    for layer in reference.model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-2
    as_config = next_logprobs(reference, row)
    found = run(open_model(path), [row], (1,))
    assert off(found, [as_config])[0] < TOLERANCE < off(found, [own])[0] / 10


@pytest.mark.parametrize("family", ["glm4_moe", "glm_moe_dsa"])
def test_layers_of_multi_token_prediction_are_left_out(family: str, tmp_path: Path) -> None:
    without = write_tiny_family(tmp_path / "without", family, mtp=False)
    whole = write_tiny_family(tmp_path / "with", family, mtp=True)
    names = load_tensors(whole).keys() - load_tensors(without).keys()
    assert names and load_tensors(without).keys() < load_tensors(whole).keys()
    model, other = open_model(whole), open_model(without)
    assert model.layout.shapes == other.layout.shapes
    assert model.layout.shapes.keys() == published_names(read_hf_config(whole), "actor", fp8=False)
    assert all(torch.equal(tensor, other.layout.live[name]) for name, tensor in model.layout.live.items())
    odd: dict[str, Any] = {**load_tensors(without), "model.layers.99.enorm.weight": torch.zeros(64)}
    with pytest.raises(ValueError, match=r"model\.layers\.99\.enorm"):
        open_model(save_tensors(without, tmp_path / "odd", odd))


def test_choosing_for_few_queries_at_a_time(
    checkpoint: Path, rows: list[list[int]], expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_slots, "SCORES_AT_A_TIME", 3000)  # the longest row alone has 40 * 40 * 8
    assert max(off(run(open_model(checkpoint), rows, (MAX_TOKENS,)), expected)) < TOLERANCE
