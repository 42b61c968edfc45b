"""Clients of others against `legato serve`, unchanged: OpenAI's, lm-eval and verifiers, in an environment of their own.

`make slow` builds that environment (.venv-clients); without it these tests are skipped.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.policy.policy import Policy
from legato.rollouts.scoring import score_texts
from tests.serve.running import chat_policy

ROOT = Path(__file__).parents[2]
FOREIGN = Path(__file__).parent / "foreign"
CLIENTS = Path(os.environ.get("LEGATO_CLIENTS_VENV", ROOT / ".venv-clients")) / "bin"
KEY, ADDRESS = "a-key-for-foreign-clients", "http://127.0.0.1:8000"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CLIENTS / "python").exists(), reason=f"{CLIENTS.parent} is missing: make slow builds it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder that is served."""
    path, policy = tmp_path_factory.mktemp("model") / "chat-model", chat_policy()
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """`legato serve FOLDER`, as a person starts it."""
    words = [sys.executable, "-m", "legato.cli.main", "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "LEGATO_SERVER_KEY": KEY}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://[\d.:]+", line)
    assert address is not None, line
    yield address[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stdout.close()


def run_client(*words: str, **variables: str) -> str:
    """What a program of the other environment prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(FOREIGN), **variables}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_client_of_openai(url: str, folder: Path) -> None:
    printed = run_client(
        str(CLIENTS / "python"), str(FOREIGN / "openai_client.py"), OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY=KEY
    )
    result = json.loads(printed.splitlines()[-1])
    assert result["different"] == 64 and len(result["token_ids"]) <= 4


def test_the_python_example_of_the_page(url: str) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for written, meant in {ADDRESS: url, "KEY": KEY, "NAME": "chat-model"}.items():
        code = code.replace(written, meant)
    assert run_client(str(CLIENTS / "python"), "-c", code).strip().endswith("legato-0")


def test_lm_eval_scores_as_the_policy_does(url: str, folder: Path, tmp_path: Path) -> None:
    documents = [{"question": f"{n}+3=", "choices": [str(n + 3), str(n + 4), "a b"], "label": 0} for n in range(2, 8)]
    data = tmp_path / "additions.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    common += 'doc_to_text: "{{question}}"\ntarget_delimiter: ""\nmetadata: {version: 1.0}\n'
    choice = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n'
    text = 'output_type: generate_until\ndoc_to_target: "{{choices[label]}}"\n'
    text += 'generation_kwargs: {until: [" "], max_gen_toks: 8, do_sample: false}\nmetric_list: [{metric: exact_match}]\n'
    (tmp_path / "choice.yaml").write_text(f"task: legato_choice\n{common}{choice}metric_list: [{{metric: acc}}]\n")
    (tmp_path / "text.yaml").write_text(f"task: legato_text\n{common}{text}")
    # The command of the page, with our tasks in place of one that must be downloaded.
    page = (ROOT / "docs" / "serve.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("lm_eval ")]
    changes = {"NAME": "chat-model", ADDRESS: url, "FOLDER": str(folder), "gsm8k": "legato_choice,legato_text"}
    for written, meant in changes.items():
        line = line.replace(written, meant)
    words = shlex.split(line)
    more = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    run_client(str(CLIENTS / "lm_eval"), *words[1:], *more, OPENAI_API_KEY=KEY)
    policy = chat_policy()
    (file,) = (tmp_path / "out").rglob("samples_legato_choice*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(documents)
    for sample in samples:
        for choice_text, answered in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            expected, greedy = loglikelihood(policy, sample["doc"]["question"], choice_text)
            assert float(answered[0]) == pytest.approx(expected, abs=1e-3) and str(answered[1]) == str(greedy)
    (file,) = (tmp_path / "out").rglob("samples_legato_text*.jsonl")
    assert len(file.read_text().splitlines()) == len(documents)


def loglikelihood(policy: Policy, question: str, choice: str) -> tuple[float, bool]:
    """The log-prob of a choice after a question, and whether it is the likeliest continuation token by token."""
    context, whole = (policy.tokenizer(text)["input_ids"] for text in (question, question + choice))
    (scores,) = score_texts(policy, [torch.tensor(whole)], count=1)
    first = len(context) - 1
    return float(scores.logprobs[first:].sum()), bool((scores.ranks[first:] == 1).all())


def test_environments_of_verifiers(url: str, folder: Path) -> None:
    printed = run_client(
        str(CLIENTS / "python"),
        str(FOREIGN / "verifiers_client.py"),
        *(url, "chat-model", str(folder)),
        LEGATO_SERVER_KEY=KEY,
    )
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert len(result["evaluated"]) == len(result["trained"]) == 4
    assert result["rounds"] == [[1 + number % 3, 1.5] for number in range(6)]
    policy = chat_policy()
    for each in result["trained"]:
        answer = each["answer"]
        sampled = [token for token, own in zip(answer["token_ids"], answer["mask"], strict=True) if own]
        before = each["prompt"] + answer["token_ids"][: len(answer["token_ids"]) - len(sampled)]
        (scores,) = score_texts(policy, [torch.tensor(before + sampled)], [0.8])
        assert answer["logprobs"] == pytest.approx(scores.logprobs[len(before) - 1 :].tolist(), abs=1e-3)


def test_two_environments_of_verifiers_are_trained_on(folder: Path) -> None:
    # torch and the other packages of Legato come from this environment, verifiers and its packages from its own.
    path = [str(FOREIGN), str(ROOT / "src"), sysconfig.get_paths()["purelib"]]
    printed = run_client(
        str(CLIENTS / "python"), str(FOREIGN / "verifiers_training.py"), str(folder), PYTHONPATH=os.pathsep.join(path)
    )
    additions, rounds = json.loads(printed.splitlines()[-1])
    for each in (additions, rounds):
        assert each["unscorable"] == 0, each["reasons"]
        assert each["rows"] == [1] and each["gap"] < 1e-4
    assert additions["turns"] == [1] and set(additions["rewards"]) <= {0.0, 1.0}
    assert len(rounds["turns"]) > 1 and rounds["rewards"] == [1.5]
    assert rounds["dialogue"][1].strip().startswith("user and 0?")
