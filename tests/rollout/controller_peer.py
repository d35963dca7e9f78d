"""The controller's end of the wire as a test plays it: a real ROUTER, messages in the order they came."""

import asyncio
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import zmq.asyncio
from scripted_engine import ScriptedEngine

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.launch.ports import free_ports
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.link import ControllerLink
from megasao.rollout.service import RolloutService
from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import bind_router, connect_dealer
from megasao.transport.messages import (
    SAY_HELLO,
    Credit,
    FromWorker,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    Refused,
    Stop,
    Welcome,
)
from megasao.weights.publisher import WeightPublisher
from megasao.weights.receiver import WeightReceiver

WAIT_S = 60.0


def config(**sections) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "unused"},
            "actor": {"optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 0},
            "loop": {"steps": 1, "batch_size": 4},
            "rollout": {"concurrency": 4},
            "transport": {"heartbeat_s": 0.1, "weights_timeout_s": 5.0},
            **sections,
        }
    )


def lease(name: str, **changes) -> Lease:
    fields = {
        "lease_id": name,
        "prompt_id": f"prompt-{name}",
        "group_id": f"group-{name}",
        "split": "train",
        "prompt_index": 0,
        "task": "calculator_2",
        "seed": 1,
        "temperature": 1.0,
        "min_version": 0,
    }
    return Lease(**{**fields, **changes})


def free_address() -> str:
    """A loopback address that nobody binds at this moment."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


class ControllerPeer:
    """Binds where a controller would. ``welcome`` is sent for each Hello."""

    def __init__(self, context, address: str) -> None:
        self._socket = bind_router(context, address, high_water_mark=64)
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"tcp://127.0.0.1:{port}"
        self.welcome = Welcome([], f"incarnation-{id(self)}")
        self.seen = []
        self._known = False
        self._peer = b""

    async def receive(self, *kinds, where=lambda message: True):
        """The next message of one of these kinds; Hello is answered, others are only recorded."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self._peer, *frames = await self._socket.recv_multipart()
                message, payload = decode(frames, FromWorker)
                self.seen.append(message)
                await self._answer(message)
                if isinstance(message, kinds) and where(message):
                    return (message, payload) if payload else message

    async def _answer(self, message):
        """What a controller says at once: Welcome to Hello and Heartbeat, and a request for Hello to strangers."""
        if isinstance(message, Hello):
            self._known = True
        if isinstance(message, Hello | Heartbeat | Credit) and not self._known:
            await self.send(Refused(SAY_HELLO))
        elif isinstance(message, Hello | Heartbeat):
            await self.send(self.welcome)

    async def send(self, message, payload=b""):
        await self._socket.send_multipart([self._peer, *encode(message, payload)])

    async def grant(self, *leases):
        """Wait for credit, then lease."""
        credit = await self.receive(Credit, where=lambda m: m.free > 0)
        await self.send(Leases(list(leases)))
        return credit

    async def never_sees(self, kind, seconds):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                message = await self.receive(kind)
                raise AssertionError(f"unexpected {message}")

    def close(self):
        self._socket.close(linger=0)


class Bench:
    """A service under test with everything around it."""

    def __init__(self, peer, context, publisher, train, evaluation, service, task):
        self.peer, self.context, self.publisher = peer, context, publisher
        self.train, self.evaluation, self.service, self.task = train, evaluation, service, task

    async def publish(self, version):
        tensors = {"w": torch.full((3,), float(version))}
        await asyncio.to_thread(self.publisher.publish, version, tensors)
        await asyncio.to_thread(self.publisher.wait, WAIT_S)

    async def restart_controller(self):
        self.peer.close()
        async with asyncio.timeout(WAIT_S):
            while True:  # its address is free once ZeroMQ's own thread has closed the socket
                try:
                    self.peer = ControllerPeer(self.context, self.peer.address)
                    return self.peer
                except ValueError:
                    await asyncio.sleep(0.05)

    async def stop(self):
        await self.peer.send(Stop("the test is over"))
        async with asyncio.timeout(WAIT_S):
            return await self.task


@asynccontextmanager
async def bench(environment, codec, script, *, weights=True, settings=None, benchmarks=(), payload=None):
    """``script(engine, request)`` plays both engines; ``benchmarks``: (name, environment); ``payload``: its own
    journal."""
    settings = settings or config()
    engines = []
    for _ in range(2):
        engine = ScriptedEngine(lambda request: None)
        engine.script = lambda request, engine=engine: script(engine, request)
        engines.append(engine)
    context = zmq.asyncio.Context()
    peer = ControllerPeer(context, "tcp://127.0.0.1:*")
    weights_address = free_address()
    publisher = WeightPublisher(weights_address, config=settings.transport)
    receiver = WeightReceiver(weights_address, engines[0], identity=b"rollout-0", config=settings.transport)
    dealer = connect_dealer(context, peer.address, identity=b"rollout-0", high_water_mark=64)
    link = ControllerLink(
        dealer, peer.address, "rollout-0", heartbeat_s=0.1, give_up_after_s=settings.supervision.start_timeout_s
    )
    runners = [EpisodeRunner.build(environment, engine, codec, settings.environment) for engine in engines]
    directory = TemporaryDirectory()
    others = {n: EpisodeRunner.build(one, engines[1], codec, settings.environment) for n, one in benchmarks}
    sign = LifeSign(Path(directory.name) / "beat")
    service = RolloutService(settings, link, *runners, receiver, sign, others, payload=payload)
    receiving = asyncio.create_task(receiver.run())
    made = Bench(peer, context, publisher, *engines, service, asyncio.create_task(service.run()))
    try:
        if weights:
            await made.publish(0)
        yield made
    finally:
        for task in (made.task, receiving):
            task.cancel()
        await asyncio.gather(made.task, receiving, return_exceptions=True)
        await asyncio.to_thread(publisher.close)
        made.peer.close()
        dealer.close(linger=0)
        context.term()


async def heartbeat(peer, **expected):
    """Wait for a heartbeat with these values."""
    return await peer.receive(
        Heartbeat, where=lambda m: all(m.stats.get(name) == value for name, value in expected.items())
    )
