"""Problems with short answers out of the files in which data sets are published. No torch.

A file is JSON (a list of objects), JSON lines, CSV or parquet; a directory is all such files in it, in order of name.
The columns are found by the names that are in use: gsm8k (question, answer with ``####``), MATH (problem, solution with
a boxed answer), MATH-500 and the competition sets (problem, answer), IMO-AnswerBench (Problem, Short Answer).

Invariants:
- a row without a problem or without an answer is refused by file and row, never passed over; so is one whose text is
  no text or number, or cannot be written as UTF-8;
- ids are unique in a data set; a row without an id has its number;
- the references are text as published, except that the float of a whole number is written as one (``27.0`` is ``27``).
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from megasao.environments.answers import after_hashes, last_boxed

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")

_PROBLEM = ("problem", "question", "Problem", "Question", "prompt")
_ANSWER = ("answer", "Answer", "Short Answer", "expected_answer", "final_answer")
_SOLUTION = ("solution", "Solution")
_ID = ("unique_id", "Problem ID", "id", "ID", "problem_idx", "problem_id")

_ENCODING = "utf-8-sig"
"""UTF-8, with a mark at the beginning or without."""
_NOT_FINITE = (float("inf"), float("-inf"))

Row = Mapping[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Problem:
    """``solution`` is the worked solution, where the data set has one."""

    problem_id: str
    text: str
    reference: str
    solution: str | None = None


def load_problems(path: str | Path) -> list[Problem]:
    """All problems of a file or directory. ValueError says which file and row, and what was expected."""
    return load_rows(
        path, lambda row, where, number: to_problem(row, where, default_id=str(number)), attrgetter("problem_id")
    )


def load_rows(path: str | Path, make: Callable[[Row, str, int], Item], id_of: Callable[[Item], str]) -> list[Item]:
    """What ``make`` makes of each row of a file or directory, told where it is and its number. ValueError: no rows, or
    an id twice."""
    found: list[Item] = []
    for file in data_files(Path(path)):
        for number, row in enumerate(read_rows(file)):
            found.append(make(row, f"{file}, row {number}", len(found)))
    if not found:
        raise ValueError(f"{path}: no rows")
    seen: set[str] = set()
    for item in found:
        if id_of(item) in seen:
            raise ValueError(f"{path}: two rows have the id {id_of(item)!r}")
        seen.add(id_of(item))
    return found


def data_files(path: Path) -> list[Path]:
    """The files of a data set: ``path`` itself, or what lies in it, in order of name."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; a file ({', '.join(SUFFIXES)}) or a directory of such is expected")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no file with an ending of {', '.join(SUFFIXES)}")
    return files


def read_rows(file: Path) -> Sequence[Row]:
    """The rows of one file, as written. ValueError names the file."""
    try:
        match file.suffix:
            case ".jsonl":
                rows: Any = _json_lines(file.read_text(encoding=_ENCODING))
            case ".json":
                rows = json.loads(file.read_text(encoding=_ENCODING))
            case ".csv":
                rows = _csv_rows(file)
            case ".parquet":
                import pyarrow.parquet

                rows = pyarrow.parquet.read_table(file).to_pylist()
            case other:
                raise ValueError(f"the ending {other!r} is none of {', '.join(SUFFIXES)}")
    except RecursionError as error:
        raise ValueError(f"{file}: nested too deeply; expected a list of objects") from error
    except (OSError, ValueError, csv.Error) as error:  # also bad JSON, bad UTF-8, and Arrow's errors
        raise ValueError(f"{file} cannot be read as {file.suffix}: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file}: expected a list of objects, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, row {number}: expected an object with columns, got {type(row).__name__}")
    return rows


def _json_lines(text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return rows


def _csv_rows(file: Path) -> list[Any]:
    with file.open(encoding=_ENCODING, newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        rows = []
        for row in reader:
            if None in row:  # where DictReader puts what has no column
                raise ValueError(f"line {reader.line_num}: more values than columns in the first line")
            rows.append(row)
    return rows


def to_problem(row: Row, where: str, *, default_id: str) -> Problem:
    """The problem of one row. ValueError names ``where`` and the columns."""
    try:
        text, reference = _first(row, _PROBLEM), _reference(row)
        solution, name = _first(row, _SOLUTION), _first(row, _ID) or default_id
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not text or not reference:
        missing = "a problem" if not text else "an answer"
        raise ValueError(
            f"{where}: no column with {missing}, or it is empty; known are {', '.join(_ANSWER if text else _PROBLEM)}"
            f"{' or a boxed answer in solution' if text else ''}; the row has {', '.join(map(str, row))}"
        )
    if solution is None and (answer := _first(row, _ANSWER)) and "####" in answer:
        solution = answer
    return Problem(name, text, reference, solution)


def _reference(row: Row) -> str | None:
    answer = _first(row, _ANSWER)
    if answer is not None:
        return after_hashes(answer) if "####" in answer else answer
    solution = _first(row, _SOLUTION)
    return last_boxed(solution) if solution is not None else None


def _first(row: Row, names: Sequence[str]) -> str | None:
    """The text of the first of these columns that has a value. ValueError for a value that is no text or number."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, str | int | float)
            or value in _NOT_FINITE
            or value != value
        ):
            raise ValueError(f"column {name}: expected text or a number, got {type(value).__name__} {value!r}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = str(value).strip()
        if any(0xD800 <= ord(sign) < 0xE000 for sign in text):
            raise ValueError(f"column {name}: half of a surrogate pair, which no encoding can write: {text!r}")
        if text:
            return text
    return None
