"""Run by the Python that has SGLang: starts a server from a file of its arguments, or says what is wrong with them.

    python sglang_serve.py check ARGS.json     JSON: {"version", "known": [...], "unknown": [...], "error": null | text}
    python sglang_serve.py serve ARGS.json [KEY_FILE]     the server

ARGS.json maps names of SGLang's ServerArgs to values. They go through SGLang's own command line, so its types, choices
and messages apply. Whoever calls the server must show the key in KEY_FILE; it is on no command line and in no log. A
plain script: it imports nothing of our package.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def make_parser() -> argparse.ArgumentParser:
    """The command line of the installed SGLang, plugins included."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="server_args", add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def command_line(parser: argparse.ArgumentParser, arguments: dict[str, Any]) -> list[str]:
    """``arguments`` as words; ValueError names one whose value has no spelling there."""
    actions = actions_by_name(parser)
    words: list[str] = []
    for name, value in arguments.items():
        if value is not None:
            words += spell(name, actions[name], value)
    return words


def actions_by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What may be passed; of two spellings of one field the first, which is the one that is not deprecated."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, action)
    del actions["config"]
    return actions


def spell(name: str, action: argparse.Action, value: Any) -> list[str]:
    """One argument as words of the command line."""
    long = [option for option in action.option_strings if option.startswith("--")]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected true or false, got {value!r}")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [next(option for option in long if option.startswith("--no-") is not value)]
        return long[:1] if value else []
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [long[0], *map(text, value)]
    return [f"{long[0]}={text(value)}"]


def text(value: Any) -> str:
    """A value as one word: mappings and lists as JSON."""
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def check(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the installed SGLang says to ``arguments``."""
    parser = make_parser()
    known = actions_by_name(parser)
    unknown = [name for name in arguments if name not in known]
    said = io.StringIO()
    error = None
    if not unknown:
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(["--model-path=unused", *command_line(parser, arguments)])
        except ValueError as problem:
            error = str(problem)
        except SystemExit:
            error = said.getvalue().strip().rpartition("error: ")[2]
    return {"version": version("sglang"), "known": sorted(known), "unknown": unknown, "error": error}


def hide(secret: str) -> None:
    """Keep ``secret`` out of this process's log: SGLang logs all of its arguments."""
    make = logging.getLogRecordFactory()

    def without_secret(*given: Any, **named: Any) -> logging.LogRecord:
        record = make(*given, **named)
        with contextlib.suppress(TypeError, ValueError):  # of a message that cannot be put together
            record.msg, record.args = record.getMessage().replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(without_secret)


def quantization(model: Path) -> str:
    """How the weights that are served are quantised, from config.json; ``none`` if they are not."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return str((config.get("quantization_config") or {}).get("quant_method", "none"))


def serve(arguments: dict[str, Any]) -> None:
    """Run the server until it is killed."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    os.environ["MEGASAO_SGLANG_QUANTIZATION"] = quantization(Path(arguments["model_path"]))
    server_args = prepare_server_args(command_line(make_parser(), arguments))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    if sys.argv[1] == "check":
        with contextlib.redirect_stdout(sys.stderr):  # plugins and loggers may print
            answer = check(given)
        print(json.dumps(answer))
    else:
        if len(sys.argv) > 3:
            given["api_key"] = Path(sys.argv[3]).read_text(encoding="utf-8")
            hide(given["api_key"])
        serve(given)
