"""Environments by name.

Invariant: a name or an option that nobody reads is refused with the nearest right one, before anything starts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Environment
from megasao.environments.calculator import CalculatorEnvironment
from megasao.environments.chain import ChainEnvironment
from megasao.environments.code_agent import CodeAgentEnvironment
from megasao.environments.gymnasium_text import GymnasiumEnvironment
from megasao.environments.mathematics import MathEnvironment
from megasao.environments.openenv import OpenEnvEnvironment
from megasao.environments.options import nearest
from megasao.environments.reasoning_gym import ReasoningGymEnvironment
from megasao.environments.swebench.environment import SwebenchEnvironment
from megasao.environments.tool_agent import ToolEnvironment
from megasao.environments.verifiers_tasks import VerifiersEnvironment

_ENVIRONMENTS: dict[str, Callable[[Mapping[str, Any]], Environment]] = {
    CalculatorEnvironment.name: CalculatorEnvironment.from_options,
    ChainEnvironment.name: ChainEnvironment.from_options,
    CodeAgentEnvironment.name: CodeAgentEnvironment.from_options,
    GymnasiumEnvironment.name: GymnasiumEnvironment.from_options,
    MathEnvironment.name: MathEnvironment.from_options,
    OpenEnvEnvironment.name: OpenEnvEnvironment.from_options,
    ReasoningGymEnvironment.name: ReasoningGymEnvironment.from_options,
    SwebenchEnvironment.name: SwebenchEnvironment.from_options,
    ToolEnvironment.name: ToolEnvironment.from_options,
    VerifiersEnvironment.name: VerifiersEnvironment.from_options,
}


def make_environment(config: EnvironmentConfig) -> Environment:
    """The environment that ``config`` names; ValueError for an unknown name or a bad option."""
    factory = _ENVIRONMENTS.get(config.name)
    if factory is None:
        known = sorted(_ENVIRONMENTS)
        raise ValueError(
            f"environment.name: unknown environment {config.name!r}{nearest(config.name, known)}; "
            f"known are {', '.join(known)}"
        )
    return factory(config.options)
