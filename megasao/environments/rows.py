"""Problems with short answers out of the files in which data sets are published. No torch.

A file is JSON (a list of objects), JSON lines, CSV or parquet; a directory is all such files in it, in order of name.
The columns are found by the names that are in use: gsm8k (question, answer with ``####``), MATH (problem, solution with
a boxed answer), MATH-500 and the competition sets (problem, answer), IMO-AnswerBench (Problem, Short Answer).

Invariants:
- a row without a problem or without an answer is refused by file and row, never passed over;
- ids are unique in a data set; a row without an id has its number;
- the references are text as published, except that the float of a whole number is written as one (``27.0`` is ``27``).
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasao.environments.answers import after_hashes, last_boxed

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")

_PROBLEM = ("problem", "question", "Problem", "Question", "prompt")
_ANSWER = ("answer", "Answer", "Short Answer", "expected_answer", "final_answer")
_SOLUTION = ("solution", "Solution")
_ID = ("unique_id", "Problem ID", "id", "ID", "problem_idx", "problem_id")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """``solution`` is the worked solution, where the data set has one."""

    problem_id: str
    text: str
    reference: str
    solution: str | None = None


def load_problems(path: str | Path) -> list[Problem]:
    """All problems of a file or directory. ValueError says which file and row, and what was expected."""
    found: list[Problem] = []
    for file in data_files(Path(path)):
        for number, row in enumerate(read_rows(file)):
            found.append(to_problem(row, f"{file}, row {number}", default_id=str(len(found))))
    if not found:
        raise ValueError(f"{path}: no rows")
    seen: set[str] = set()
    for problem in found:
        if problem.problem_id in seen:
            raise ValueError(f"{path}: two rows have the id {problem.problem_id!r}")
        seen.add(problem.problem_id)
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
                rows: Any = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            case ".json":
                rows = json.loads(file.read_text(encoding="utf-8"))
            case ".csv":
                with file.open(encoding="utf-8", newline="") as lines:
                    rows = list(csv.DictReader(lines))
            case ".parquet":
                import pyarrow.parquet

                rows = pyarrow.parquet.read_table(file).to_pylist()
            case other:
                raise ValueError(f"the ending {other!r} is none of {', '.join(SUFFIXES)}")
    except (OSError, ValueError) as error:  # also bad JSON, bad UTF-8, and Arrow's errors
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file}: expected a list of objects")
    return rows


def to_problem(row: Row, where: str, *, default_id: str) -> Problem:
    """The problem of one row. ValueError names ``where`` and the columns."""
    text, reference = _first(row, _PROBLEM), _reference(row)
    if not text or not reference:
        missing = "a problem" if not text else "an answer"
        raise ValueError(
            f"{where}: no column with {missing}; known are {', '.join(_ANSWER if text else _PROBLEM)}"
            f"{' or a boxed answer in solution' if text else ''}; the row has {', '.join(map(str, row))}"
        )
    solution = _first(row, _SOLUTION)
    if solution is None and (answer := _first(row, _ANSWER)) and "####" in answer:
        solution = answer
    return Problem(_first(row, _ID) or default_id, text, reference, solution)


def _reference(row: Row) -> str | None:
    answer = _first(row, _ANSWER)
    if answer is not None:
        return after_hashes(answer) if "####" in answer else answer
    solution = _first(row, _SOLUTION)
    return last_boxed(solution) if solution is not None else None


def _first(row: Row, names: Sequence[str]) -> str | None:
    """The text of the first of these columns that has a value."""
    for name in names:
        value = row.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and str(value).strip():
            return str(value).strip()
    return None
