"""Two OpenEnv servers in one process, run by a Python that has openenv-core: the echo environment that the package
carries as a template, at ``/echo``, and a guessing game with seeds, at ``/guess``.

    python openenv_server.py PORT DIRECTORY
"""

import random
import sys
import time
from pathlib import Path

import openenv.cli
import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


def echo_app(directory):
    """The package's template with its names filled in, as ``openenv init`` does."""
    source = Path(openenv.cli.__file__).parent / "templates" / "openenv_env"
    names = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}
    for name in ("models.py", "server/__ENV_NAME___environment.py"):
        text, target = (source / name).read_text(), directory / Path(name.replace("__ENV_NAME__", "echo")).name
        for mark, value in names.items():
            text = text.replace(mark, value)
        target.write_text(text.replace("from ..models", "from models"))
    sys.path.insert(0, str(directory))
    from echo_environment import EchoEnvironment
    from models import EchoAction, EchoObservation

    return create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=8)


class Guess(Action):
    number: int
    patience: int = 0


class Answer(Observation):
    said: str = ""


class Guessing(Environment):
    """A number from 0 to 9, by seed: said to be higher or lower until it is found."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.wanted = None

    def reset(self, seed=None, episode_id=None, **_):
        self.wanted = random.Random(seed).randrange(10)
        return Answer(said=f"It is in row {self.wanted // 5}.")

    def step(self, action, **_):
        if action.number == 13:
            raise RuntimeError("bad luck")
        if action.number == 14:
            time.sleep(5)
        right = action.number == self.wanted
        return Answer(said="higher" if action.number < self.wanted else "lower", reward=float(right), done=right)

    @property
    def state(self):
        return State()


app = FastAPI()
app.mount("/echo", echo_app(Path(sys.argv[2])))
app.mount("/guess", create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=4))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
