"""Value pretraining: the critic regressed on the returns of trajectories at hand, before RL asks it for values.

Model, packing, frozen attention and loss are those of RL; the target is the Monte-Carlo return of each action token,
with the estimator's gamma.

Invariants, asserted by the tests:
- trajectories of one prompt are all trained on or all held out, whatever file they are in;
- data, their order and the results do not depend on the layout;
- the held-out explained variance of rewards that have nothing to do with their trajectories is not above 0.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from megasao.algorithms.advantages import estimate_from_values
from megasao.algorithms.value_loss import summarize, value_loss
from megasao.config import Config
from megasao.config.algorithm import Gae, SkipObservationGae
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory, write_atomically
from megasao.config.training import ValuePretrainingConfig
from megasao.megatron.checkpoint import save_model
from megasao.megatron.runtime import Topology
from megasao.observability.metrics import MetricsWriter
from megasao.training.batch import Batch, TrainRow, pack_trajectories
from megasao.training.critic import Critic
from megasao.training.sft import batches
from megasao.training.stats import reduce_stats
from megasao.training.world import trainer_world
from megasao.trajectories.files import StoredTrajectories, read_trajectories


@dataclass(frozen=True)
class Corpus:
    """All trajectories, and which of them (by position) are trained on and which are held out."""

    stored: StoredTrajectories
    train: list[int]
    held_out: list[int]


def split_by_prompt(prompt_ids: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """(train, held out), positions. A prompt is held out by a hash of its name, with probability ``share``.

    ValueError where either part is empty.
    """
    chosen = {name for name in prompt_ids if _uniform(name, seed) < share}
    held_out = [row for row, name in enumerate(prompt_ids) if name in chosen]
    train = [row for row, name in enumerate(prompt_ids) if name not in chosen]
    if not train or not held_out:
        raise ValueError(
            f"value_pretraining.held_out = {share:g} of {len(set(prompt_ids))} prompts: {len(train)} trajectories to "
            f"train on and {len(held_out)} held out; give more prompts, or another share"
        )
    return train, held_out


def _uniform(name: str, seed: int) -> float:
    """In [0, 1), a function of the name and the seed."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") / 2**64


def monte_carlo_returns(row: TrainRow, options: SkipObservationGae | Gae) -> torch.Tensor:
    """float32 [T]: the discounted rewards from each action token on; 0 at observation tokens."""
    exact = options.model_copy(update={"value_lambda": 1.0})
    estimate = estimate_from_values(row.rewards, torch.zeros_like(row.rewards), row.action_mask, row.cu_seqlens, exact)
    assert estimate.returns is not None
    return estimate.returns


def run(run: RunDirectory, config: Config) -> None:
    """Pretrain into ``run.value``. One process of the trainer's world."""
    if config.value_pretraining is None:
        raise ValueError("this config has no section `value_pretraining`: there is nothing to pretrain")
    section, config = config.value_pretraining, config.of_critic
    with trainer_world(config) as topology:
        writer = MetricsWriter(run, "value", tensorboard=True) if topology.rank == 0 else None
        pretrain(run, config, section, topology, writer)
        if writer is not None:
            writer.close()


def pretrain(
    run: RunDirectory,
    config: Config,
    section: ValuePretrainingConfig,
    topology: Topology,
    writer: MetricsWriter | None,
) -> dict[str, float | None]:
    """The loop; ends with a complete model checkpoint without optimizer state. Returns the last held-out metrics.

    ValueError: what ``read_trajectories`` and ``split_by_prompt`` refuse, or trajectories of another vocabulary.
    """
    corpus = read_corpus(config, section)
    critic = Critic.build(run.policy_path(config), stage_config(config, section), topology)
    check_vocabulary(corpus.stored, critic.model.hf_config["vocab_size"])
    stage = Stage(config, section, topology, critic, corpus, LifeSign(run.heartbeat(f"value-{topology.rank}")))
    held_out = stage.evaluate()
    source = batches(corpus.train, section.batch_size, config.run.seed)
    for step in range(section.steps):
        started = time.perf_counter()
        before = {"value/before/explained_variance": held_out["explained_variance"]} if step == 0 else {}
        metrics, tokens = stage.train_step(next(source), step)
        metrics |= {"value/tokens_per_s": tokens / (time.perf_counter() - started), **before}
        if (step + 1) % section.evaluate_every == 0 or step + 1 == section.steps:
            held_out = stage.evaluate()
            metrics |= {f"value/held_out/{name}": value for name, value in held_out.items()}
        if writer is not None:
            writer.log(step, metrics)
    critic.optimizer.reset()
    save_model(critic.model, critic.optimizer, run.value)
    if topology.rank == 0:
        write_atomically(run.value / "COMPLETE", "")
    topology.barrier()
    return held_out


def read_corpus(config: Config, section: ValuePretrainingConfig) -> Corpus:
    """The trajectories, split by prompt; the same on every rank."""
    stored = read_trajectories([Path(path) for path in section.trajectories])
    return Corpus(stored, *split_by_prompt(stored.prompt_ids, section.held_out, config.run.seed))


def check_vocabulary(stored: StoredTrajectories, vocabulary: int) -> None:
    """ValueError where the trajectories hold tokens that the model does not have."""
    if stored.largest_token >= vocabulary:
        raise ValueError(
            f"value_pretraining.trajectories: token {stored.largest_token}, but the model has a vocabulary of "
            f"{vocabulary}; these are trajectories of another model"
        )


def stage_config(config: Config, section: ValuePretrainingConfig) -> Config:
    """``config`` with the section's optimizer and number of steps for the critic, and no value clipping."""
    critic = config.value_model.model_copy(update={"optimizer": section.optimizer, "value_clip": None})
    loop = config.loop.model_copy(update={"steps": section.steps})
    return config.model_copy(update={"critic": critic, "loop": loop})


@dataclass(frozen=True)
class Stage:
    """What a rank needs for a step, and for a look at the held-out part; every rank enters both."""

    config: Config
    section: ValuePretrainingConfig
    topology: Topology
    critic: Critic
    corpus: Corpus
    lifesign: LifeSign

    def train_step(self, rows: list[int], step: int) -> tuple[dict[str, float | None], int]:
        """One regression on these trajectories: metrics over the whole step, and its tokens."""
        self.lifesign.beat()
        batch = self._pack(rows)
        metrics = self.critic.update(batch, [self._returns(row) for row in batch.rows], step=step)
        return {f"value/{name}": value for name, value in metrics.items()}, batch.tokens

    def evaluate(self) -> dict[str, float | None]:
        """Explained variance, mean square error and means over all held-out action tokens, and how many there are."""
        stats = []
        held_out, size = self.corpus.held_out, self.section.batch_size
        for start in range(0, len(held_out), size):
            self.lifesign.beat()
            batch = self._pack(held_out[start : start + size])
            for row, values in zip(batch.rows, self.critic.values(batch), strict=True):
                stats.append(value_loss(values, self._returns(row), row.action_mask, denominator=1.0)[1])
        totals = reduce_stats(stats, self.topology)
        return {**summarize(totals), "tokens": float(totals["tokens"]), "trajectories": float(len(held_out))}

    def _pack(self, rows: list[int]) -> Batch:
        return pack_trajectories(
            self.corpus.stored.fetch(rows),
            data_rank=self.topology.data_rank,
            data_size=self.topology.data_size,
            token_budget=self.config.trainer.token_budget,
        )

    def _returns(self, row: TrainRow) -> torch.Tensor:
        options = self.config.algorithm.advantages
        assert isinstance(options, SkipObservationGae | Gae), (
            "the config was checked: a critic is there for these alone"
        )
        return monte_carlo_returns(row, options)
