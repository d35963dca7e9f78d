"""The class that the environment names, from the SGLang module that defines it."""

import importlib
import os
from pathlib import Path
from typing import Any


def find(architecture: str) -> list[Any]:
    """``[class]``, or nothing if no module of SGLang defines it. The modules are searched as text."""
    import sglang.srt.models as models

    for file in sorted(Path(models.__path__[0]).glob("*.py")):
        if f"\nclass {architecture}(" in file.read_text(encoding="utf-8"):
            return [getattr(importlib.import_module(f"sglang.srt.models.{file.stem}"), architecture)]
    return []


EntryClass = find(os.environ["MEGASAO_SGLANG_ARCHITECTURE"])
