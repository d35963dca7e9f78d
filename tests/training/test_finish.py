"""A step and the end of a run: every step has its line, and no rank waits in one long collective."""

from types import SimpleNamespace
from typing import Any

import pytest

from megasao.config.rollout import EvaluationConfig
from megasao.training import loop
from megasao.training.checkpoint import Progress
from megasao.training.loop import Trainer
from megasao.training.step import StepResult
from megasao.transport.messages import Manifest, ManifestEntry, Status


class Answers:
    """A client whose evaluations end one by one."""

    def __init__(self, *open_evaluations: list[str]) -> None:
        self.left = list(open_evaluations)

    def request(self, message: Any, *, timeout_s: float) -> tuple[Status, bytes]:
        return Status({}, self.left.pop(0) if len(self.left) > 1 else self.left[0]), b""


class World:
    """Both ranks of a world in turn: what rank 0 broadcasts is what rank 1 receives."""

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        self.rank, self.sent = rank, sent

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        if payload is not None:
            self.sent.append(payload)
            return payload
        return self.sent.pop(0)


def trainer(rank: int, client: Any, sent: list[bytes], timeout_s: float) -> Trainer:
    config: Any = SimpleNamespace(evaluation=EvaluationConfig(timeout_s=timeout_s))
    parts: dict[str, Any] = dict.fromkeys(("run", "actor", "critic", "estimator", "codec", "publisher", "writer"))
    parts["source"] = SimpleNamespace(lifesign=SimpleNamespace(beat=lambda: None))
    world: Any = World(rank, sent)
    return Trainer(**parts, config=config, topology=world, client=client)


def test_every_question_is_shared_by_all_ranks() -> None:
    sent: list[bytes] = []
    trainer(0, Answers(["a", "b"], ["b"], []), sent, 60.0).wait_for_evaluations()
    assert sent == [b"a, b", b"b", b""]
    trainer(1, None, sent, 60.0).wait_for_evaluations()
    assert sent == [], "rank 1 takes part in every question, and asks none itself"


def test_evaluations_that_do_not_end_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"evaluations step-000003/greedy did not end.*evaluation\.timeout_s = 0\.1"):
        trainer(0, Answers(["step-000003/greedy"]), [], 0.1).wait_for_evaluations()


class Killed(Trainer):
    """Dies in its checkpoint."""

    def checkpoint_when_due(self, *, final: bool = False) -> None:
        raise InterruptedError


def test_a_step_killed_in_its_checkpoint_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint may be complete already: then nobody writes the line again."""
    monkeypatch.setattr(loop, "sao_step", lambda *_, **__: StepResult({"critic/loss": 2.0}))
    manifest = Manifest(1, [ManifestEntry("a", 5, 3, 0, 0, 1.0, False)], {})
    source = SimpleNamespace(next_manifest=lambda *_: manifest, load=lambda _: SimpleNamespace(tokens=5))
    lines: list[tuple[int, dict[str, Any]]] = []
    parts: dict[str, Any] = dict.fromkeys(("run", "actor", "critic", "estimator", "codec", "client", "publisher"))
    parts |= {
        "source": source,
        "writer": SimpleNamespace(log=lambda *line: lines.append(line)),
        "topology": SimpleNamespace(rank=0),
        "config": SimpleNamespace(observability=SimpleNamespace(examples_every=10), warmup_steps=9),
    }
    with pytest.raises(InterruptedError):
        Killed(**parts, progress=Progress(step=1)).train_step()
    [(step, line)] = lines
    assert (step, line["reward/mean"], line["critic/loss"]) == (1, 1.0, 2.0)
