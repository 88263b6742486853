"""Job files: allowed content, and refusals that name file, key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutekernels.autotune.job import DEFAULT_TRIALS, Job, Task, bundled, load, parse
from cutekernels.errors import JobError
from tests.tuner.toys import TOY, ToyProblem, find


def read(text: str) -> Job:
    return parse(text, "my.toml", find=find)


def problems(job: Job) -> list[str]:
    return [str(task.problem) for task in job.tasks]


def test_problems_in_order_with_the_jobs_trials() -> None:
    job = read(
        """
        name = "mine"
        trials = 7
        budget_s = 150
        [[tasks]]
        op = "toy"
        problems = ["m=16 n=64", "m=32 n=64 dtype=fp16"]
        [[tasks]]
        op = "toy"
        trials = 3
        problems = ["m=1 n=1"]
        """
    )
    assert (job.name, job.budget_s, job.source) == ("mine", 150.0, "my.toml")
    assert job.tasks[0] == Task(TOY, ToyProblem(16, 64), 7)
    assert problems(job) == ["m=16 n=64", "m=32 n=64 dtype=fp16", "m=1 n=1"]
    assert [task.trials for task in job.tasks] == [7, 7, 3]


def test_defaults() -> None:
    job = read('name = "x"\n[[tasks]]\nop = "toy"\nproblems = ["m=1 n=1"]')
    assert job.budget_s is None
    assert job.tasks[0].trials == DEFAULT_TRIALS


def test_problems_of_one_bucket_are_one_task() -> None:
    job = read('name = "x"\n[[tasks]]\nop = "toy"\nproblems = ["m=100 n=64", "m=128 n=64", "m=97 n=64", "m=128 n=65"]')
    assert problems(job) == ["m=128 n=64", "m=128 n=65"]


def test_grid_is_every_combination_of_axes_and_joined_fields() -> None:
    job = read(
        """
        name = "x"
        [[tasks]]
        op = "toy"
        [tasks.grid]
        "m n" = [[1, 10], [2, 20]]
        dtype = ["bf16", "fp16"]
        [[tasks]]
        op = "toy"
        problems = ["m=64 n=1"]
        grid = { m = [3, 4], n = 30, dtype = "fp16" }
        """
    )
    assert problems(job) == [
        "m=1 n=10",
        "m=1 n=10 dtype=fp16",
        "m=2 n=20",
        "m=2 n=20 dtype=fp16",
        "m=64 n=1",
        "m=3 n=30 dtype=fp16",
        "m=4 n=30 dtype=fp16",
    ]


TASK = 'name = "x"\n[[tasks]]\nop = "toy"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", ["not TOML"]),
        ("", ["name", "None"]),
        ("name = 3", ["name", "3"]),
        ('name = "x"', ["tasks", "[[tasks]]"]),
        ('name = "x"\ntasks = []', ["tasks", "[]"]),
        ('name = "x"\ntasks = [3]', ["tasks", "[3]"]),
        ('name = "x"\nbudget = 3\n[[tasks]]\nop = "toy"', ["'budget'", "3", "budget_s"]),
        ('name = "x"\nbudget_s = -1\n[[tasks]]\nop = "toy"', ["budget_s", "-1"]),
        ('name = "x"\nbudget_s = nan\n[[tasks]]\nop = "toy"', ["budget_s", "nan"]),
        ('name = "x"\nbudget_s = inf\n[[tasks]]\nop = "toy"', ["budget_s", "inf"]),
        ('name = "x"\nbudget_s = true\n[[tasks]]\nop = "toy"', ["budget_s", "True"]),
        ('name = "x"\ntrials = 0\n[[tasks]]\nop = "toy"', ["trials", "0"]),
        ('name = "x"\ntrials = true\n[[tasks]]\nop = "toy"', ["trials", "True"]),
        ('name = "x"\n[[tasks]]\nproblems = ["m=1 n=1"]', ["tasks[1].op", "None"]),
        ('name = "x"\n[[tasks]]\nop = "gem"\nproblems = ["m=1"]', ["tasks[1].op", "'gem'", "known: toy"]),
        (TASK, ["tasks[1]", "no problem", "m=16 n=64"]),
        (TASK + 'problem = ["m=1 n=1"]', ["tasks[1]", "'problem'", "problems"]),
        (TASK + 'problems = "m=1 n=1"', ["tasks[1].problems", "list"]),
        (TASK + "problems = [1]", ["tasks[1].problems", "[1]"]),
        (TASK + 'problems = ["m=1 n=1", "m=1 k=2"]', ["tasks[1].problems[2]", "'m=1 k=2'", "'k=2'", "m, n, dtype"]),
        (TASK + 'problems = ["m=1 n=1 dtype=fp64"]', ["problems[1]", "fp64", "bf16, fp16"]),
        (TASK + 'problems = ["m=1"]', ["needs n"]),
        (TASK + 'problems = ["m=0 n=1"]', ["problems[1]", "empty extent"]),
        (TASK + "grid = 3", ["tasks[1].grid", "3"]),
        (TASK + "grid = {}", ["tasks[1].grid", "{}"]),
        (TASK + "grid = { m = [], n = 1 }", ["grid.'m'", "[]"]),
        (TASK + "grid = { m = [1.5], n = 1 }", ["grid.'m'", "1.5"]),
        (TASK + "grid = { m = [true], n = 1 }", ["grid.'m'", "extent", "True"]),
        (TASK + 'grid = { "m n" = [[1, false]] }', ["grid.'m n'", "n is an extent", "False"]),
        (TASK + 'grid = { "m n" = [[1, 2], [3]] }', ["grid.'m n'", "2 values", "[3]"]),
        (TASK + 'grid = { "m n" = [1, 2] }', ["grid.'m n'", "2 values"]),
        (TASK + "grid = { m = [1], k = [1] }", ["tasks[1].grid", "'k=1'"]),
        (TASK + f"grid = {{ m = {list(range(1, 200))}, n = {list(range(1, 200))} }}", ["39601", "10000"]),
    ],
)
def test_refusals_name_file_key_value(text: str, says: list[str]) -> None:
    with pytest.raises(JobError) as error:
        read(text)
    for words in ["my.toml", *says]:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trials = " + "9" * 5000, "not TOML"),
        ("trials = 0x" + "f" * 5000, "64 bits"),
        (f"trials = {2**63}", "64 bits"),
        ("a = " + "[" * 3000 + "]" * 3000, "not TOML"),
        (".".join(["a"] * 3000) + " = 1", "16 levels"),
        ("a = " + "{b = " * 20 + "1" + "}" * 20, "16 levels"),
        (TASK + "grid = { m = [" + "9" * 5000 + "], n = 1 }", "not TOML"),
        (TASK + f"problems = ['m={'9' * 5000} n=1']", "problems[1]"),
    ],
    ids=["digits", "hex digits", "65 bits", "lists", "dotted keys", "tables", "a grid's digits", "a problem's digits"],
)
def test_numbers_and_nesting_have_bounds(text: str, says: str) -> None:
    with pytest.raises(JobError) as error:
        read(text)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_file_and_a_missing_one(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text(TASK + 'problems = ["m=1 n=1"]')
    assert load(file, find=find).source == str(file)
    with pytest.raises(JobError, match="neither a file nor a bundled job. .*Bundled: .*demo"):
        load(tmp_path / "nowhere.toml", find=find)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="UTF-8"):
        load(str(file), find=find)


def test_bundled_jobs_hold_real_problems() -> None:
    models = {"demo", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"}
    assert {*models, "square"} <= set(bundled())
    for name in bundled():
        job = load(name)
        assert job.name == name
        ops = {task.op.name for task in job.tasks}
        assert ops and (name not in models or ops >= {"gemm", "silu_mul"})
    assert len(load("demo").tasks) == 4
    llama = [str(task.problem) for task in load("llama-3-8b").tasks]
    assert any(text.startswith("m=1 n=28672 k=4096") for text in llama)
    assert any(text.startswith("m=8192 n=4096 k=14336") for text in llama)
    # An extent that is 0 unless said, of what may be absent, is not an empty one.
    assert any("heads_kv" not in str(task.problem) for task in load("rope").tasks)


def test_repeated_problems_are_counted_too() -> None:
    text = 'name = "x"\n' + 4 * f"[[tasks]]\nop = 'toy'\ngrid = {{ m = {list(range(1, 9001))}, n = [64] }}\n"
    with pytest.raises(JobError, match=r"at most 30000 problems, repeated ones counted; tasks\[4\] passes that: split"):
        read(text)
