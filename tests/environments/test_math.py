"""The environment of mathematical problems: published formats, splits, chats, and real episodes."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from megasao.config.load import load_config
from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Prompt
from megasao.environments.chat import ChatTemplate
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.mathematics import MathEnvironment, MathOptions
from megasao.environments.registry import make_environment
from megasao.environments.rows import load_problems
from megasao.environments.verifiers.pool import VerifierError
from megasao.studies.play import Player
from megasao.studies.tiny_model import write_model, write_tokenizer
from tests.benchmark_rows import ROWS, write_rows
from tests.chat_checkpoint import chat_checkpoint

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"


def write_data(path, count=40):
    rows = [{"problem": f"<problem>{n}+{n}</problem>", "answer": str(2 * n)} for n in range(count)]
    path.write_text(json.dumps(rows))
    return path


def tagged(data, **options):
    plain = {"template": "{problem}", "chat": False, "answer": "tag", "stop": "</answer>"}
    return make_environment(EnvironmentConfig(name="math", options={"data": str(data), **plain, **options}))


@pytest.mark.parametrize("name", ROWS)
def test_published_formats_are_read(tmp_path, name):
    problems = load_problems(write_rows(tmp_path, name))
    rows = ROWS[name][1]
    assert len(problems) == len(rows)
    for problem, row in zip(problems, rows, strict=True):
        assert problem.text == next(row[k] for k in ("problem", "question", "Problem") if k in row)
        assert "####" not in problem.reference and not problem.reference.endswith(".0")
    assert load_problems(tmp_path) == problems


def test_references_come_out_of_what_is_published(tmp_path):
    def references(name):
        return [problem.reference for problem in load_problems(write_rows(tmp_path, name))]

    assert references("gsm8k")[0] == "5" and references("amc23")[:2] == ["5", "14"]
    assert references("math500")[0] == "\\frac{7}{2}" and references("aime2025")[0] == "5"
    path = tmp_path / "solutions.jsonl"
    path.write_text(json.dumps({"problem": "p", "solution": "so $\\boxed{\\frac{1}{2}}$"}) + "\n")
    assert load_problems(path)[0].reference == "\\frac{1}{2}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"answer": "1"}]', "row 0: no column with a problem, or it is empty; known are problem"),
        ('[{"problem": "x"}]', "row 0: no column with an answer"),
        (
            '[{"problem": "x", "answer": "1", "id": 1}, {"problem": "y", "answer": "1", "id": 1}]',
            "two rows have the id",
        ),
        ('{"problem": "x"}', "expected a list of objects"),
        ("[]", "no rows"),
        ("[", "data.json cannot be read as .json: "),
        ("", "data.json cannot be read as .json: "),
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "row 0: expected an object with columns, got int"),
        ('[{"problem": ["x"], "answer": "1"}]', "row 0: column problem: expected text or a number, got list ['x']"),
        ('[{"problem": "x", "answer": true}]', "row 0: column answer: expected text or a number, got bool True"),
        ('[{"problem": "x", "answer": NaN}]', "row 0: column answer: expected text or a number, got float nan"),
        ('[{"problem": "x", "answer": -Infinity}]', "row 0: column answer: expected text or a number, got float -inf"),
        (f'[{{"problem": "x", "answer": 1{"0" * 5000}}}]', "data.json cannot be read as .json: Exceeds the limit"),
        ('[{"problem": "x \\ud800", "answer": "1"}]', "row 0: column problem: half of a surrogate pair"),
        ('[{"problem": "x", "answer": "1", "id": {"a": 1}}]', "row 0: column id: expected text or a number, got dict"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, text, message):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"data\.json") as caught:
        load_problems(path)
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"environment\.options\.data: "):
        tagged(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", b'{"problem": "x", "answer": "1"}\n{oops\n', "data.jsonl cannot be read as .jsonl: line 2: "),
        ("data.jsonl", b"\xff\xfe{}", "data.jsonl cannot be read as .jsonl: 'utf-8' codec"),
        ("data.jsonl", b"", "no rows"),
        ("data.csv", b"problem,answer\n1,2,3\n", "data.csv cannot be read as .csv: line 2: more values than columns"),
        ("data.csv", b"problem,answer\n1\n", "row 0: no column with an answer"),
        ("data.parquet", b"PAR1junk", "data.parquet cannot be read as .parquet: "),
        ("data.parquet", b"", "data.parquet cannot be read as .parquet: "),
        ("data.txt", b"x", "the ending '.txt' is none of"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.") as caught:
        load_problems(tmp_path / name)
    assert message in str(caught.value)


def test_marks_and_odd_line_breaks_are_text(tmp_path):
    """A byte order mark at the beginning, and a line separator within a text, which is no end of a row."""
    path = tmp_path / "data.jsonl"
    path.write_text('\ufeff{"problem": "one\u2028two", "answer": 7.0}\r\n', encoding="utf-8")
    [problem] = load_problems(path)
    assert (problem.text, problem.reference) == ("one\u2028two", "7")


def test_training_problems_come_in_a_new_order_each_epoch_and_splits_share_none(tmp_path):
    environment = tagged(write_data(tmp_path / "data.json"))
    train, held_out = environment.size("train"), environment.size("eval")
    assert train + held_out == 40 and held_out > 0
    epochs = [[environment.prompt("train", e * train + i).prompt_id for i in range(train)] for e in range(3)]
    assert set(epochs[0]) == set(epochs[1]) and len(set(epochs[0])) == train
    assert epochs[0] != epochs[1] != epochs[2]
    again = tagged(tmp_path / "data.json")
    assert [again.prompt("train", i).prompt_id for i in range(train)] == epochs[0]
    texts = {split: {environment.prompt(split, i).text for i in range(40)} for split in ("train", "eval")}
    assert not texts["train"] & texts["eval"]
    other = write_data(tmp_path / "other.json", 4)
    both = tagged(tmp_path / "data.json", eval_data=str(other))
    assert (both.size("train"), both.size("eval")) == (36, 4)


def test_a_response_is_graded_and_one_without_an_answer_earns_nothing(tmp_path):
    environment = tagged(write_data(tmp_path / "data.json"), answer="boxed")

    async def body():
        prompt = Prompt("p", "math", "", {"reference": "\\frac{1}{2}"})
        try:
            texts = ["so \\boxed{0.5}", "\\boxed{0.6}", "0.5", "<think>\\boxed{0.5}</think>"]
            return [await environment.start(prompt, 0).step(text) for text in texts]
        finally:
            await environment.close()

    found = asyncio.run(body())
    assert [result.reward for result in found] == [1.0, 0.0, 0.0, 0.0] and all(result.done for result in found)
    assert [result.metrics["answered"] for result in found] == [1.0, 1.0, 0.0, 0.0]


def test_an_answer_that_cannot_be_graded_is_a_failure(tmp_path):
    environment = tagged(write_data(tmp_path / "data.json"), answer="boxed", time_limit_s=0.02)

    async def body():
        try:
            await environment.start(Prompt("p", "math", "", {"reference": "2.5"}), 0).step(
                "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}"
            )
        finally:
            await environment.close()

    with pytest.raises(VerifierError, match=r"longer than 0\.02 s"):
        asyncio.run(body())


async def graded(environment, prompt, said):
    [problem] = [p for p in map(partial(environment.prompt, "train"), range(40)) if p.text == prompt.text][:1]
    try:
        return (await environment.start(problem, 0).step(said)).reward
    finally:
        await environment.close()


def test_demonstrations_earn_one(tmp_path):
    gsm = tagged(write_rows(tmp_path, "gsm8k"), answer="hashes", eval_data=str(write_data(tmp_path / "d.json")))
    prompt, action = gsm.demonstration(0, 0)
    assert prompt.text in {row["question"] for row in ROWS["gsm8k"][1]} and not prompt.is_action
    assert action.text in {row["answer"] + "</answer>" for row in ROWS["gsm8k"][1]}
    assert asyncio.run(graded(gsm, prompt, action.text)) == 1.0, (
        "with the token that ends the turn, as an engine gives it"
    )
    plain = tagged(tmp_path / "d.json")
    index, problem = 3, plain.prompt("train", 3)
    assert plain.demonstration(index, 0)[1].text == f"<answer>{problem.payload['reference']}</answer>"
    with pytest.raises(ValueError, match="needs plain prompts"):
        tagged(tmp_path / "d.json", chat=True).demonstration(0, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "data: missing"),
        ({"data": "absent.json"}, "absent.json does not exist"),
        ({"data": "x", "template": "no place"}, "template"),
        ({"data": "x", "answer": "box"}, "answer"),
        ({"data": "x", "verifiers": 0}, "verifiers"),
        ({"data": "x", "memory_mb": 8}, "memory_mb"),
        ({"dta": "x"}, "did you mean 'data'"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=rf"environment\.options\..*{named}"):
        make_environment(EnvironmentConfig(name="math", options=options))


def test_a_chat_is_rendered_as_transformers_does(tmp_path):
    from transformers import AutoTokenizer

    path = chat_checkpoint(tmp_path / "model")
    messages = [{"role": "system", "content": "{{ 1 }}"}, {"role": "user", "content": "é <b> \\boxed{}\n"}]
    theirs = AutoTokenizer.from_pretrained(path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ours = ChatTemplate.from_directory(path)
    assert ours.render(messages) == theirs and theirs.endswith("assistant\n") and "{{ 1 }}" in theirs
    for bad, message in (("{{ raise_exception('only users') }}", "only users"), ("{% if %}", "chat template")):
        with pytest.raises(ValueError, match=message):
            ChatTemplate(bad, {}).render(messages)
    with pytest.raises(ValueError, match=r"unsafe|access"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render(messages)
    assert ChatTemplate.from_directory(tmp_path) is None


def test_stops_and_prompts_of_a_chat_come_from_the_checkpoint(tmp_path):
    codec = TokenizerCodec.from_directory(chat_checkpoint(tmp_path / "model"))
    environment = tagged(write_data(tmp_path / "data.json"), chat=True, stop="")
    prompt = environment.prompt("eval", 0)
    assert codec.stop_ids(environment) == (257, 9)
    text = codec.decode(codec.encode_prompt(prompt))
    assert text.startswith("<s><|im_start|>user") and text.endswith("assistant\n")
    write_tokenizer(tmp_path)
    plain = TokenizerCodec.from_directory(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        plain.encode_prompt(prompt)
    with pytest.raises(ValueError, match="names no stop token"):
        plain.stop_ids(environment)


def test_episodes_on_the_embedded_engine_earn_what_the_verifier_says(tmp_path):
    """The references are made from what the random model says greedily, so both rewards occur."""
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    write_model(model, seed=1, hidden=32, layers=1, experts=0, moe_hidden=32)
    data = write_data(tmp_path / "data.json", 24)
    options = {"data": str(data), "template": "{problem}", "chat": False, "answer": "number", "stop": "</answer>"}

    def play():
        changes = ["environment.name=math", f"environment.options={json.dumps(options)}", "environment.max_tokens=48"]
        config = load_config(
            LAPTOP,
            [*changes, f"model.path={model}", "evaluation.problems=3", "environment.max_turn_tokens=30"],
        )
        with Player(model, config) as player:
            leases = player.evaluation_leases(0.0)
            return player.play(leases, 0, {})

    codec = TokenizerCodec.from_directory(model)
    first = play()
    said = [codec.decode([t for t, acted in zip(e.tokens, e.action_mask, strict=True) if acted]) for e in first]
    from megasao.environments.answers import find_answer

    rows = json.loads(data.read_text())
    for episode, text, shift in zip(first, said, (0, 1, 0), strict=True):
        answer = find_answer(text, "number")
        assert answer is not None, text
        row = next(r for r in rows if codec.decode(episode.tokens).startswith(r["problem"]))
        row["answer"] = str(int(answer.replace(",", "")) + shift)
    data.write_text(json.dumps(rows))
    second = play()
    assert [e.tokens for e in second] == [e.tokens for e in first]
    assert [sum(e.rewards) for e in second] == [1.0, 0.0, 1.0]
    assert isinstance(make_environment(EnvironmentConfig(name="math", options=options)), MathEnvironment)
    assert MathOptions(**options).answer == "number"
