"""Take the chat templates of GLM-4.6 to GLM-5.3 out of the wheel of xinference, whose lists of models carry them.

    python tools/chat_templates.py WHEEL DIRECTORY

Writes DIRECTORY/NAME.jinja for each; tests fuzz them. The wheel's GLM-4.5 is left out, since its line breaks are lost
there: the package trl has that one.
"""

import json
import re
import sys
import zipfile
from pathlib import Path

_MODELS = re.compile(r"/llm/models/(glm-(?:4\.[67]|5)[^/v]*)\.json$", re.IGNORECASE)


def main(wheel: str, directory: str) -> None:
    """Write each different template once; ValueError if the wheel holds none."""
    written: set[str] = set()
    with zipfile.ZipFile(wheel) as packed:
        for name in sorted(packed.namelist()):
            if found := _MODELS.search(name):
                for model in json.loads(packed.read(name)):
                    if (template := model.get("chat_template")) and template not in written:
                        written.add(template)
                        (Path(directory) / f"{found[1].lower()}.jinja").write_text(template, encoding="utf-8")
    if not written:
        raise ValueError(f"{wheel}: no chat template of GLM; has the package moved its lists of models?")


if __name__ == "__main__":
    main(*sys.argv[1:])
