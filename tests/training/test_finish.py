"""A step and the end of a run: every step has its line, and no rank waits in one long collective."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasao.config.rollout import EvaluationConfig, ObservabilityConfig
from megasao.config.rundir import RunDirectory
from megasao.config.training import CheckpointConfig
from megasao.training import loop
from megasao.training import source as source_module
from megasao.training.checkpoint import Progress
from megasao.training.loop import Trainer
from megasao.training.payload import PayloadUnreachable
from megasao.training.publishing import StreamPublishing
from megasao.training.source import BatchSource
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
    parts: dict[str, Any] = dict.fromkeys(("run", "actor", "critic", "estimator", "codec", "publishing", "writer"))
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
    with pytest.raises(TimeoutError, match=r"evaluations step-000003/greedy longer than evaluation\.timeout_s = 0\.1"):
        trainer(0, Answers(["step-000003/greedy"]), [], 0.1).wait_for_evaluations()


class Offered(BatchSource):
    """These manifests in turn, or None to leave; a rollout host does not give the trajectory ``gone``.

    Time passes only while it sleeps, and there is one rank. A step may be asked for again at 4 further moments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offered: list[Manifest | None]) -> None:
        now = [100.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
        monkeypatch.setattr(source_module, "time", clock)
        monkeypatch.setattr(source_module, "gather_counts", lambda value: [value])
        config: Any = SimpleNamespace(loop=SimpleNamespace(batch_timeout_s=4 * source_module.ASK_AGAIN_S))
        nobody: Any = SimpleNamespace(beat=lambda: None)
        super().__init__(nobody, nobody, config, nobody, nobody)
        self.offered = offered

    def next_manifest(self, step: int, version: int) -> Manifest | None:
        return self.offered.pop(0)

    def load(self, manifest: Manifest) -> Any:
        if any(entry.trajectory_id == "gone" for entry in manifest.entries):
            raise PayloadUnreachable("payload at tcp://host:1: no")
        return SimpleNamespace(tokens=5, entries=tuple(manifest.entries))


class Killed(Trainer):
    """Dies in its checkpoint."""

    def checkpoint_when_due(self, *, final: bool = False) -> None:
        raise InterruptedError


def killed_in_step_1(
    monkeypatch: pytest.MonkeyPatch, *offered: list[ManifestEntry]
) -> tuple[Killed, list[tuple[int, dict[str, Any]]]]:
    """The trainer and the lines of a step whose manifests are these, in turn, until its payload is had."""
    monkeypatch.setattr(loop, "sao_step", lambda *_, **__: StepResult({"critic/loss": 2.0}))
    lines: list[tuple[int, dict[str, Any]]] = []
    parts: dict[str, Any] = dict.fromkeys(("run", "actor", "critic", "estimator", "codec", "client"))
    parts |= {
        "publishing": StreamPublishing(None),
        "source": Offered(monkeypatch, [Manifest(1, entries, {}) for entries in offered]),
        "writer": SimpleNamespace(log=lambda *line: lines.append(line)),
        "topology": SimpleNamespace(rank=0),
        "config": SimpleNamespace(observability=ObservabilityConfig(examples_every=10), warmup_steps=9),
    }
    trainer = Killed(**parts, progress=Progress(step=1))
    with pytest.raises(InterruptedError):
        trainer.train_step()
    return trainer, lines


def test_a_step_killed_in_its_checkpoint_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint may be complete already: then nobody writes the line again."""
    _, [(step, line)] = killed_in_step_1(monkeypatch, [ManifestEntry("a", 5, 3, 0, 0, 1.0, False)])
    assert (step, line["reward/mean"], line["critic/loss"]) == (1, 1.0, 2.0)


def test_a_line_is_about_what_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that lost payload is assembled again while it is fetched, of other trajectories and maybe fewer."""
    asked = [ManifestEntry("gone", 5, 3, 0, 0, 1.0), ManifestEntry("kept", 5, 3, 0, 0, 0.0)]
    trainer, [(_, line)] = killed_in_step_1(monkeypatch, asked, [asked[1]])
    assert (line["reward/mean"], line["data/trajectories"]) == (0.0, 1.0)
    assert trainer.progress.trained_trajectories == 1


class Lacked(Trainer):
    """Its critic, elsewhere, cannot have the payload of the trajectory ``lost``."""

    def learn(self, batch: Any, step: int) -> StepResult:
        if any(entry.trajectory_id == "lost" for entry in batch.entries):
            raise PayloadUnreachable("the critic at tcp://there:1: nobody has it")
        return StepResult({"trained": float(len(batch.entries))})


class BoundApart(Offered):
    """A wrong one: payload of its own is asked for again within a bound of its own."""

    def load(self, manifest: Manifest) -> Any:
        asked = iter([manifest])

        def attempt() -> Any:
            again = next(asked, None) or self.next_manifest(manifest.step, 0)
            assert again is not None
            return Offered.load(self, again)

        return self.until_payload_is_had(manifest.step, attempt)


def learned(
    monkeypatch: pytest.MonkeyPatch, offered: list[list[str] | None], source: type[Offered] = Offered
) -> tuple[Any, int]:
    """What a step comes to that is offered these trajectories in turn, and how often it was asked for."""
    manifests = [
        None if names is None else Manifest(4, [ManifestEntry(name, 1, 1, 0, 0, 1.0) for name in names], {})
        for names in offered
    ]
    batches = source(monkeypatch, manifests)
    parts: dict[str, Any] = dict.fromkeys(("run", "actor", "critic", "estimator", "codec", "client", "publishing"))
    topology: Any = SimpleNamespace(rank=0)
    trainer = Lacked(**parts, config=batches.config, topology=topology, source=batches, writer=None)
    try:
        came: Any = batches.until_payload_is_had(4, lambda: trainer.learn_next(4, 3, {}, show=False))
    except TimeoutError as error:
        came = str(error)
    return came, len(offered) - len(manifests)


def test_payload_that_is_lacked_makes_the_step_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    (manifest, batch, _, result), asked = learned(monkeypatch, [["lost", "a"], ["gone", "a"], ["lost", "a"], ["a"]])
    assert [entry.trajectory_id for entry in manifest.entries] == ["a"] and asked == 4
    assert list(batch.entries) == manifest.entries and result.metrics == {"trained": 1.0}
    for lacked in ("lost", "gone"):
        assert learned(monkeypatch, [[lacked], None]) == (None, 2), "asked to leave meanwhile"


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize(("one", "other"), [("gone", "lost"), ("lost", "gone")])
def test_one_bound_holds_over_all_that_is_lacked(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str, first: int
) -> None:
    """Whoever could not have payload, and in whatever order: asked for once, and then for as long as the bound says."""
    reason = {
        "lost": "step 4: the critic at tcp://there:1: nobody has it",
        "gone": "step 4: payload at tcp://host:1: no",
    }
    offered: list[list[str] | None] = [[one]] * first + [[other]] * 20
    assert learned(monkeypatch, offered) == (reason[other], 5)
    assert learned(monkeypatch, [[one], [other]] * 20) == (reason[one], 5)
    _, asked = learned(monkeypatch, [["gone"]] * 4 + [["lost"]] * 20, BoundApart)
    assert asked == 9, "a bound for each is longer than one for both"


class Written:
    """A checkpoint that is written after so many questions."""

    def __init__(self, step: int, questions: int, form: str) -> None:
        self.progress, self.directory = Progress(step=step), f"step_{step:06d}"
        self.questions, self.completed, self.form = questions, 0, form

    def written(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def complete(self, keep: int) -> None:
        self.completed += 1


def saving(monkeypatch: pytest.MonkeyPatch, questions: int, **options: Any) -> tuple[Trainer, list[Written], list[Any]]:
    """A trainer at step 0 that saves after each second step, the checkpoints it begins, and what it says of them."""
    begun: list[Written] = []
    said: list[Any] = []

    def begin(run: Any, progress: Progress, *_: Any, format: str, **__: Any) -> Written:
        begun.append(Written(progress.step, questions, format))
        return begun[-1]

    monkeypatch.setattr(loop.checkpoint, "begin", begin)
    monkeypatch.setattr(loop, "ask", lambda _, message, kind: said.append(message) or SimpleNamespace(state={}))
    parts: dict[str, Any] = dict.fromkeys(("run", "actor", "critic", "estimator", "codec", "client", "publishing"))
    parts |= {
        "writer": None,
        "source": SimpleNamespace(lifesign=SimpleNamespace(beat=lambda: None)),
        "topology": SimpleNamespace(rank=0),
        "config": SimpleNamespace(checkpoint=CheckpointConfig(every=2, **options)),
    }
    return Trainer(**parts), begun, said


def steps(trainer: Trainer, last: int) -> None:
    for step in range(trainer.progress.step + 1, last + 1):
        trainer.progress = Progress(step=step)
        trainer.checkpoint_when_due()


def test_a_checkpoint_is_complete_at_once_unless_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, begun, said = saving(monkeypatch, 3)
    steps(trainer, 2)
    assert [each.completed for each in begun] == [1]
    assert [type(message).__name__ for message in said] == ["StateRequest", "CheckpointSaved"]
    assert trainer.pending is None


def test_an_asynchronous_checkpoint_is_announced_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, begun, said = saving(monkeypatch, 0, asynchronous=True)
    steps(trainer, 2)
    assert [each.completed for each in begun] == [0]
    assert [type(message).__name__ for message in said] == ["StateRequest"]
    steps(trainer, 3)
    assert [each.completed for each in begun] == [1] and trainer.pending is None
    assert said[-1].step == 2


def test_the_next_checkpoint_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, begun, _ = saving(monkeypatch, 3, asynchronous=True)
    steps(trainer, 4)
    assert [each.completed for each in begun] == [1, 0]
    assert trainer.pending is not None and trainer.pending.progress.step == 4


def test_a_checkpoint_is_of_the_format_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"format": "torch_dist"}):
        trainer, begun, _ = saving(monkeypatch, 0, **options)
        steps(trainer, 2)
        assert [each.form for each in begun] == [options.get("format", "safetensors")]


def test_a_checkpoint_that_is_never_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = saving(monkeypatch, 10**9, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"step_000002 longer than checkpoint\.timeout_s = 0\.1 s"):
        steps(trainer, 2)


def leaving(config: Any, rank: int, sent: list[bytes], asked: bool, answer: Any) -> BatchSource:
    """A source of one rank; ``answer`` is what the controller says to rank 0."""
    world: Any = World(rank, sent)
    client: Any = SimpleNamespace(request=lambda *_, **__: (answer, b""))
    lifesign: Any = SimpleNamespace(beat=lambda: None)
    payload: Any = None
    return BatchSource(client, world, config, lifesign, payload, asked_to_leave=lambda: asked)


def test_all_ranks_leave_when_the_first_is_asked_to() -> None:
    """A rank that gets the signal earlier than the first must not leave the others in a collective."""
    config: Any = SimpleNamespace(loop=SimpleNamespace(batch_timeout_s=5.0))
    manifest = Manifest(3, [], {})
    sent: list[bytes] = []
    assert leaving(config, 0, sent, True, manifest).next_manifest(3, 2) is None
    assert leaving(config, 1, sent, False, None).next_manifest(3, 2) is None
    sent.clear()
    assert leaving(config, 0, sent, False, manifest).next_manifest(3, 2) == manifest
    assert leaving(config, 1, sent, True, None).next_manifest(3, 2) == manifest


def test_whoever_leaves_saves_first_and_tells_the_controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer, begun, said = saving(monkeypatch, 0)
    trainer.run = RunDirectory(tmp_path)
    trainer.progress = Progress(step=5)
    trainer.leave()
    assert [(each.progress.step, each.completed) for each in begun] == [(5, 1)]
    assert [type(message).__name__ for message in said] == ["StateRequest", "CheckpointSaved", "FinishRequest"]
    assert "left before step 5" in said[-1].reason
