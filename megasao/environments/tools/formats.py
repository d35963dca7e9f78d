"""Formats of calls by name."""

from megasao.environments.tools.calls import ToolFormat
from megasao.environments.tools.glm import GlmFormat
from megasao.environments.tools.llama3 import Llama3Format
from megasao.environments.tools.qwen3 import Qwen3Format

FORMATS: dict[str, ToolFormat] = {known.name: known for known in (Qwen3Format(), GlmFormat(), Llama3Format())}
"""By the name that ``environment.options.format`` gives."""
