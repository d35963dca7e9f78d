"""JSON documents beside the tensors of a checkpoint. No torch."""

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object that is all of ``file``.

    Raises:
        ValueError: it cannot be read, or is something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}; copy it again") from None
    if text.startswith("\ufeff"):
        raise ValueError(f"{file} begins with a byte order mark, which no loader takes; save it as UTF-8 without")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: a number of 5,000 digits
        raise ValueError(f"{file} is not valid JSON: {error}; copy it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object; copy it again")
    return found
