"""Problems from files and data sets: how they are read, and refusals in one sentence."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from legato.core.parts import lookup, names
from legato.tasks.data import CompetitionMath, Gsm8k, Jsonl, NamedDataset, Parquet

ROWS = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "2+2=", "answer": 4, "level": 2}]
CHAT = [{"role": "user", "content": "hello"}]


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, object]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_json_lines_become_problems(tmp_path: Path) -> None:
    first, second = Jsonl(path=write(tmp_path / "a.jsonl", ROWS)).load()
    assert (first.prompt, first.answer, first.fields) == ("1+1=", "2", {"level": 1})
    assert second.answer == "4"


def test_compression_blank_lines_crlf_and_byte_order_marks_change_nothing(tmp_path: Path) -> None:
    plain = Jsonl(path=write(tmp_path / "a.jsonl", ROWS)).load()
    data = b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row).encode() for row in ROWS) + b"\r\n"
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    assert Jsonl(path=str(tmp_path / "b.jsonl.gz")).load() == plain


def test_parquet_becomes_the_same_problems(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(700)]
    assert (
        Parquet(path=write_parquet(tmp_path / "a.parquet", rows)).load()
        == Jsonl(path=write(tmp_path / "a.jsonl", rows)).load()
    )


def test_columns_may_have_other_names_and_answers_may_be_absent(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "1+1=", "a": 2.5, "answer": "other"}])
    [problem] = Jsonl(path=path, prompt="q", answer="a").load()
    assert (problem.prompt, problem.answer, problem.fields) == ("1+1=", "2.5", {"a": 2.5, "answer": "other"})
    [problem] = Jsonl(path=path, prompt="q", answer=None).load()
    assert (problem.answer, problem.fields) == (None, {"a": 2.5, "answer": "other"})


def test_messages_are_prompts_and_a_system_message_goes_first(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "answer": "a"}, {"prompt": "hi", "answer": "b"}]
    plain = Jsonl(path=write(tmp_path / "a.jsonl", rows)).load()
    assert [problem.prompt for problem in plain] == [CHAT, "hi"]
    system = {"role": "system", "content": "be brief"}
    problems = Jsonl(path=str(tmp_path / "a.jsonl"), system_prompt="be brief").load()
    assert [problem.prompt for problem in problems] == [[system, *CHAT], [system, {"role": "user", "content": "hi"}]]
    # Parquet fills in keys that only some messages have.
    mixed = [{"prompt": [{**CHAT[0], "name": None}], "answer": "a"}]
    assert Parquet(path=write_parquet(tmp_path / "a.parquet", mixed)).load() == plain[:1]


def test_data_may_have_no_answers(tmp_path: Path) -> None:
    [problem] = Jsonl(path=write(tmp_path / "a.jsonl", [{"prompt": "write a poem", "topic": "rain"}])).load()
    assert (problem.answer, problem.fields) == (None, {"topic": "rain"})
    named = Jsonl(path=str(tmp_path / "a.jsonl"), answer="solution")
    assert_refused(
        named, "expected a column 'solution', got 'prompt', 'topic'; set task.answer to one of them, or task.answer=false"
    )
    typed = Jsonl(path=str(tmp_path / "a.jsonl"), answer="topc")
    assert_refused(typed, "expected a column 'topc', got 'prompt', 'topic'; set task.answer=topic")


def test_duplicate_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    contents = Jsonl(path=write(tmp_path / "a.jsonl", [*ROWS, {"prompt": "1+1=", "answer": "3"}, ROWS[0]])).read()
    assert [problem.answer for problem in contents.problems] == ["2", "4"]
    assert contents.duplicates == 2


def line(**changes: object) -> bytes:
    return json.dumps({"prompt": "x", "answer": "y"} | changes).encode()


GOOD = line(prompt="good") + b"\n"

BAD_LINES = {
    b"": "holds no problems",
    b"\n \n": "holds no problems",
    GOOD + b"{": "line 2: is not JSON",
    GOOD + b"\n[1]": "line 3: expected an object with a value for each column, got a list",
    b"null": "line 1: expected an object with a value for each column, got a NoneType",
    b"[" * 100_000: "line 1: is not JSON",
    b'{"prompt": ' + b"9" * 5000 + b"}": "line 1: is not JSON",
    GOOD + b'{"prompt": "\xff"}': "line 2: is not UTF-8 at byte 12",
    GOOD + b"\0\0": "line 2: holds a NUL byte",
    GOOD + b'{"question": "x", "answer": "y"}': "line 2: expected a column 'prompt', got 'question', 'answer'; set"
    " task.prompt=question",
    b"{}": "line 1: expected a column 'prompt', got none",
    GOOD + b'{"prompt": "x"}': "line 2: expected a column 'answer', got 'prompt'",
    line(prompt=None): "line 1: expected text in 'prompt', got null",
    line(prompt=7): "line 1: expected text in 'prompt', got 7",
    line(prompt=" \n"): "line 1: 'prompt' is empty",
    line(prompt="a\0"): "line 1: 'prompt' holds a NUL character",
    line(prompt="\ud800"): "line 1: 'prompt' holds half of a surrogate pair",
    line(answer=None): "line 1: expected text or a finite number in 'answer', got null",
    line(answer=""): "line 1: 'answer' is empty",
    line(answer=["y"]): "line 1: expected text or a finite number in 'answer', got a list",
    line(answer=True): "line 1: expected text or a finite number in 'answer', got True",
    line(answer=float("nan")): "line 1: expected text or a finite number in 'answer', got nan",
    line(prompt=[]): "line 1: 'prompt' is an empty list of messages",
    line(prompt=["hi"]): "line 1: expected a message with role and content in 'prompt[0]', got a str",
    line(prompt=[{"role": "me", "content": "x"}]): "one of system, user, assistant, tool as role in 'prompt[0]', got 'me'",
    line(prompt=[{"content": "x"}]): "as role in 'prompt[0]', got None",
    line(prompt=[*CHAT, {"role": "user"}]): "expected text in 'prompt[1].content', got null",
    line(prompt=[*CHAT, {"role": "user", "content": ""}]): "'prompt[1].content' is empty",
    line(prompt=[CHAT[0] | {"name": "Ann"}]): "expected only role and content in 'prompt[0]', got 'name'",
}


@pytest.mark.parametrize("content", BAD_LINES, ids=BAD_LINES.values())
def test_a_bad_line_is_refused_with_its_line_number(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert_refused(Jsonl(path=str(tmp_path / "a.jsonl")), BAD_LINES[content])


def assert_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        data.load()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_line_of_ten_megabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(GOOD + line(prompt="x" * 11_000_000)))
    assert_refused(Jsonl(path=str(tmp_path / "a.jsonl.gz")), "line 2: expected at most 10485760 bytes, got more")


def test_files_that_do_not_match_their_extension_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(GOOD * 1000)
    cases = {
        "plain.jsonl.gz": (GOOD, "is not a complete gzip file"),
        "cut.jsonl.gz": (whole[:-20], "is not a complete gzip file"),
        "damaged.jsonl.gz": (whole[:20] + b"\xff\xff\xff" + whole[23:], "is not a complete gzip file"),
        "a.pkl": (pickle.dumps(1), ".pkl files can run code when they are read and are refused"),
        "a.pt": (b"", ".pt files can run code"),
        "a.csv": (b"prompt,answer", "expected a name that ends in .jsonl or .jsonl.gz"),
        "a.parquet": (b"PAR1", "expected a name that ends in .jsonl or .jsonl.gz"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        assert_refused(Jsonl(path=str(tmp_path / name)), message)
    assert_refused(Jsonl(path=str(tmp_path / "none.jsonl")), "none.jsonl: there is no such file")
    assert_refused(Jsonl(path=str(tmp_path)), "expected a .jsonl or .jsonl.gz file, got a folder")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert_refused(Jsonl(path=str(tmp_path / "pipe.jsonl")), "expected a .jsonl or .jsonl.gz file, got no regular file")


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    for content in (b"", GOOD, b"PAR1" + b"\0" * 100 + b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(content)
        assert_refused(Parquet(path=str(tmp_path / "a.parquet")), "cannot be read as Parquet after row 0")
    empty = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.string())]).empty_table()
    pyarrow.parquet.write_table(empty, tmp_path / "b.parquet")
    assert_refused(Parquet(path=str(tmp_path / "b.parquet")), "holds no problems")
    path = write_parquet(tmp_path / "c.parquet", [{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}])
    assert_refused(Parquet(path=path), "c.parquet row 2: expected text in 'prompt', got null")
    assert_refused(Parquet(path=path, prompt="question"), "row 1: expected a column 'question', got 'prompt', 'answer'")


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "system", "content": "x"}, *CHAT], "answer": "y"}])
    assert_refused(Jsonl(path=path, system_prompt="be brief"), "already has a system message; leave system_prompt out")


GSM8K = [
    {"question": "Ducks?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"},
    {"question": "Dollars?", "answer": "It is #### of them\n#### 1,234,000 "},
]


def test_gsm8k_answers_follow_the_hashes(tmp_path: Path) -> None:
    first, second = Gsm8k(path=write(tmp_path / "train.jsonl", GSM8K)).load()
    assert (first.prompt, first.answer) == ("Ducks?", "13")
    assert first.fields == {"solution": "16 - 3 = <<16-3=13>>13\n#### 13"}
    assert second.answer == "1234000"
    assert_refused(
        Gsm8k(path=write(tmp_path / "a.jsonl", [{"question": "x", "answer": "13"}])), "line 1: the answer '13' has no '####"
    )
    assert_refused(Gsm8k(path=write(tmp_path / "a.jsonl", [{"question": "x", "answer": "a ####"}])), "line 1: the answer")
    assert_refused(Gsm8k(path=write(tmp_path / "a.jsonl", [{"question": "x"}])), "line 1: expected a column 'answer'")


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GSM8K)
    write_parquet(tmp_path / "test-00000-of-00002.parquet", GSM8K[1:])
    write_parquet(tmp_path / "test-00001-of-00002.parquet", GSM8K[:1])
    assert [problem.answer for problem in Gsm8k(path=str(tmp_path)).load()] == ["13", "1234000"]
    assert [problem.answer for problem in Gsm8k(path=str(tmp_path), split="test").load()] == ["1234000", "13"]
    (tmp_path / "empty").mkdir()
    assert_refused(Gsm8k(path=str(tmp_path / "empty")), "has none of train.jsonl, train.jsonl.gz, train.parquet")


def test_math_answers_come_from_the_last_box(tmp_path: Path) -> None:
    row = {
        "problem": "Half?",
        "solution": r"Not \boxed{1} but $\boxed{\frac{1}{2}}$.",
        "level": "Level 1",
        "type": "Algebra",
    }
    [problem] = CompetitionMath(path=write(tmp_path / "a.jsonl", [row])).load()
    assert (problem.prompt, problem.answer) == ("Half?", r"\frac{1}{2}")
    assert problem.fields == {"solution": row["solution"], "level": "Level 1", "type": "Algebra"}
    assert_refused(
        CompetitionMath(path=write(tmp_path / "a.jsonl", [row, row | {"solution": "a half"}])), "line 2: the solution ends"
    )


def test_a_data_set_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Uses the real `datasets` library with a stand-in for the download."""
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*arguments: object, **options: object) -> object:
        calls.append((arguments, options))
        return datasets.Dataset.from_list(GSM8K)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [problem.answer for problem in Gsm8k(split="test").load()] == ["13", "1234000"]
    assert NamedDataset(dataset="a/b", config="c", split="train[:2]", prompt="question").load()[0].answer.endswith("13")
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"}), (("a/b", "c"), {"split": "train[:2]"})]
    assert_refused(NamedDataset(dataset="a/b"), "data set 'a/b' split 'train' row 1: expected a column 'prompt'")


def test_a_data_set_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert_refused(NamedDataset(dataset="../a/b"), "expected a name such as 'openai/gsm8k'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    assert_refused(NamedDataset(dataset="local"), "there is a file or folder of this name; give it as path")
    program = """
from legato.tasks.data import NamedDataset
try:
    NamedDataset(dataset="nobody/nothing-at-all").load()
except ValueError as error:
    print(error)
"""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", program], env=offline, capture_output=True, text=True, timeout=100, check=True
    )
    assert process.stdout.startswith("data set 'nobody/nothing-at-all' split 'train': could not be loaded: ")
    assert process.stdout.count("\n") == 1


@pytest.mark.parametrize("package", ["datasets", "pyarrow"])
def test_without_the_package_it_says_what_to_install(package: str, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    program = f"""
import sys
from legato.tasks.data import NamedDataset, Parquet
sys.modules[{package!r}] = None
data = {{"datasets": NamedDataset(dataset="a/b"), "pyarrow": Parquet(path={str(tmp_path / "a.parquet")!r})}}
try:
    data[{package!r}].load()
except ValueError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'legato[data]'" in process.stdout


def test_data_kinds_are_listed_and_found_by_name() -> None:
    assert {"dataset", "gsm8k", "jsonl", "math", "parquet", "math-500", "aime-24"} <= {*names("data")}
    assert lookup("data", "math") is CompetitionMath
    with pytest.raises(TypeError, match="path"):
        Jsonl()
    with pytest.raises(ValueError, match=r"data 'jsonl'.path: expected a text that is not empty, got ''"):
        Jsonl(path="")
