"""eval, sample, export and report: on a run, a recipe, a model and a file."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.errors import InputError
from legato.run.evaluate import evaluate
from legato.run.export import export
from legato.run.sample import sample
from legato.run.target import find
from legato.training import checkpoint
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.runs import records, run_small, words

EARLY = f"{verdicts.__file__}:early"


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"training.steps": 2, "reward.kind": EARLY, "task.held_out": 6, "training.lr": 1e-2}
    return run_small(tmp_path_factory.mktemp("run"), options).directory


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"training.steps": 2, "reward.kind": EARLY, "policy.lora.rank": 2, "training.lr": 3e-2}
    return run_small(tmp_path_factory.mktemp("adapted"), options).directory


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(find(str(run)), folder)
    return folder


# eval


def test_eval_of_a_run_equals_its_own_last_evaluation(run: Path) -> None:
    last = [record for record in records(run) if record["kind"] == "evaluation"][-1]
    rows = {row.name: row for row in evaluate(find(str(run))).rows}
    assert rows["greedy"].value == last["eval/accuracy_greedy"]
    assert rows["avg@1"].value == last["eval/accuracy_sampled"]


def test_eval_measures_avg_and_pass_with_intervals(run: Path) -> None:
    result = evaluate(find(str(run), [f"reward.kind={verdicts.__file__}:odd"]), samples=4, problems=5)
    rows = {row.name: row for row in result.rows}
    assert (result.problems, result.samples, len(result.answered)) == (5, 4, 5)
    assert list(rows) == ["greedy", "avg@4", "pass@2", "pass@4"]
    assert all(0 <= row.low <= row.value <= row.high <= 1 for row in result.rows)
    right = [[float(answer.rollout.tokens.sum() % 2) for answer in row] for row in result.answered]
    assert rows["avg@4"].value == pytest.approx(sum(map(sum, right)) / 20)
    assert rows["pass@4"].value == pytest.approx(sum(any(row) for row in right) / 5)
    pairs = [1 - (1 if (n := 4 - sum(row)) >= 2 and n == 4 else n * (n - 1) / 12) for row in right]
    assert rows["pass@2"].value == pytest.approx(sum(pairs) / 5)


def test_eval_repeats_exactly(run: Path) -> None:
    one, other = (evaluate(find(str(run)), samples=2) for _ in range(2))
    assert one.rows == other.rows


def test_eval_at_temperature_0_is_greedy(run: Path) -> None:
    accuracies = {row.name: row.value for row in evaluate(find(str(run)), samples=1, temperature=0.0).rows}
    assert accuracies["avg@1"] == accuracies["greedy"]


def test_eval_of_a_file_and_of_a_model(legato: Command, model: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "problems.jsonl", tmp_path / "result.json"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(7)))
    code, out, error = legato("eval", str(model), "--file", str(file), "--samples", "2", "--output", str(output))
    assert code == 0, error
    assert "7 problems" in out and "pass@2" in out and "greedy" in out
    result = json.loads(output.read_text())
    assert (result["problems"], result["samples"]) == (7, 2)
    assert set(result["measures"]) == {"greedy", "avg@2", "pass@2"}
    assert set(result["measures"]["greedy"]) == {"value", "low", "high"}


def test_a_file_with_other_columns_is_refused_with_a_way_that_works(legato: Command, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    assert_refused(legato("eval", str(model), "--file", str(file)), "--sets", "task.kind = 'jsonl'", "task.prompt=question")


def test_eval_of_a_file_counts_right_answers(run: Path, tmp_path: Path) -> None:
    """The answers are what the model says, so that all of them are right."""
    texts = {each.prompt: each.responses[0].text for each in sample(find(str(run)), ["1+1=", "2+2="], temperature=0)}
    file = tmp_path / "problems.jsonl"
    rows = [{"prompt": prompt, "answer": text or "-"} for prompt, text in texts.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = find(str(run), ["reward.kind=exact"])
    expected = sum(bool(text) for text in texts.values()) / 2
    assert evaluate(target, samples=0, file=file).rows[0].value == expected


def test_eval_of_a_recipe_measures_the_untrained_model(legato: Command, run: Path) -> None:
    first = next(record for record in records(run) if record["kind"] == "evaluation")
    accuracies = {row.name: row.value for row in evaluate(find(str(run / "config.toml"))).rows}
    assert accuracies["greedy"] == first["eval/accuracy_greedy"]


@pytest.mark.parametrize("words", [["--samples", "-1"], ["--problems", "0"], ["--temperature", "-1"]])
def test_eval_with_numbers_that_make_no_sense_is_refused(words: list[str], legato: Command, run: Path) -> None:
    code, _, error = legato("eval", str(run), *words)
    assert code == 2
    assert "Traceback" not in error


def test_eval_uses_the_checkpoint_before_a_damaged_one_and_names_the_damage(
    legato: Command, run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step-000002" / "trainer.json").write_text("{}")
    code, _, error = legato("eval", str(copy))
    assert code == 0
    assert "step-000002 is damaged" in error


# sample


def test_sample_from_words_a_file_and_the_terminal(legato: Command, run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("3+3=\n\n4+4=\n")
    code, out, error = legato("sample", str(run), "1+1=", "2+2=")
    assert code == 0, error
    assert "1+1=" in out and "2+2=" in out
    code, out, _ = legato("sample", str(run), "--file", str(tmp_path / "prompts.txt"), "--samples", "2")
    assert code == 0
    assert out.count("3+3=") == out.count("4+4=") == 1
    code, out, _ = legato("sample", str(run), typed="5+5=\n6+6=\n\nnot this\n")
    assert code == 0
    assert "5+5=" in out and "6+6=" in out and "not this" not in out


def test_sample_is_greedy_at_temperature_0_and_repeats(run: Path) -> None:
    target = find(str(run))
    greedy = next(iter(sample(target, ["1+1="], samples=3, temperature=0)))
    assert len({response.text for response in greedy.responses}) == 1
    one, other = (next(iter(sample(target, ["1+1="], samples=6))) for _ in range(2))
    assert [response.text for response in one.responses] == [response.text for response in other.responses]
    assert len({response.text for response in one.responses}) > 1


def test_sample_keeps_to_max_response_tokens(run: Path) -> None:
    sampled = next(iter(sample(find(str(run)), ["1+1="], samples=4, max_response_tokens=1)))
    assert all(len(response.tokens) == 1 for response in sampled.responses)


def test_a_prompt_file_that_does_not_exist_is_refused(legato: Command, run: Path, tmp_path: Path) -> None:
    assert_refused(legato("sample", str(run), "--file", str(tmp_path / "none")), str(tmp_path / "none"))


def test_an_empty_prompt_is_refused(legato: Command, run: Path) -> None:
    assert_refused(legato("sample", str(run), ""), "prompt")


# export


def logits(folder: Path, **more: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **more).eval()
    tokens = AutoTokenizer.from_pretrained(folder)("12+3=")["input_ids"]
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits


def trained_logits(run: Path) -> torch.Tensor:
    """The logits of the policy of a run."""
    policy = find(str(run)).policy()
    tokens = policy.tokenizer("12+3=")["input_ids"]
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([tokens])).logits


def test_an_exported_model_gives_the_same_logits(run: Path, model: Path) -> None:
    assert torch.equal(logits(model), trained_logits(run))
    assert not torch.equal(logits(model), logits(run / "checkpoints" / "step-000001" / "model"))


def test_adapters_are_merged_into_the_weights(adapted: Path, tmp_path: Path) -> None:
    export(find(str(adapted)), tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert torch.allclose(logits(tmp_path / "merged"), trained_logits(adapted), atol=1e-5)
    fresh = find(str(adapted / "config.toml")).policy().body
    with torch.no_grad():
        tokens = find(str(adapted)).policy().tokenizer("12+3=")["input_ids"]
        untrained = fresh(input_ids=torch.tensor([tokens])).logits
    assert not torch.allclose(logits(tmp_path / "merged"), untrained, atol=1e-4)


def test_adapters_may_stay_adapters(adapted: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    export(find(str(adapted)), tmp_path / "adapter", merge=False)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    fresh = find(str(adapted / "config.toml"), ["policy.lora=false"]).policy()
    adapted_model = PeftModel.from_pretrained(fresh.model, str(tmp_path / "adapter")).eval()
    tokens = fresh.tokenizer("12+3=")["input_ids"]
    with torch.no_grad():
        assert torch.allclose(adapted_model(input_ids=torch.tensor([tokens])).logits, trained_logits(adapted), atol=1e-5)


def dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for path in folder.glob("*.safetensors") for tensor in load_file(path).values()}


def test_an_export_has_the_dtype_asked_for_or_that_of_the_trained_model(run: Path, model: Path, tmp_path: Path) -> None:
    export(find(str(run)), tmp_path / "half", dtype="bfloat16")
    assert dtypes(tmp_path / "half") == {torch.bfloat16} and dtypes(model) == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    # A model published in 16 bits is trained in float32 on a CPU and exported in 16 bits again.
    small = {"policy.model": str(tmp_path / "half"), "training.steps": 1, "evaluation.every_steps": 0}
    trained = run_small(tmp_path / "again", small).directory
    assert dtypes(trained / "checkpoints" / "step-000001" / "model") == {torch.float32}
    export(find(str(trained)), tmp_path / "published")
    assert dtypes(tmp_path / "published") == {torch.bfloat16}
    export(find(str(trained)), tmp_path / "full", dtype="float32")
    assert dtypes(tmp_path / "full") == {torch.float32}
    with pytest.raises(InputError, match=r"expected float32, bfloat16, float16, got 'int8' \(--dtype\)"):
        export(find(str(run)), tmp_path / "whole", dtype="int8")


def test_every_exported_file_has_the_permissions_of_its_folder(run: Path, model: Path) -> None:
    for folder in (model, run / "checkpoints" / "step-000001"):
        mode = folder.stat().st_mode & 0o666
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {mode}


def test_an_earlier_checkpoint_can_be_exported(legato: Command, run: Path, tmp_path: Path) -> None:
    code, out, error = legato("export", str(run), str(tmp_path / "first"), "--step", "1")
    assert code == 0, error
    assert str(tmp_path / "first") in out
    assert torch.equal(logits(tmp_path / "first"), logits(run / "checkpoints" / "step-000001" / "model"))
    assert_refused(legato("export", str(run), str(tmp_path / "none"), "--step", "7"), "step 7", "1, 2")
    assert not (tmp_path / "none").exists()


def test_export_refuses_a_folder_with_content(legato: Command, run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert_refused(legato("export", str(run), str(tmp_path / "mine")), str(tmp_path / "mine"), "never overwritten")
    assert_refused(legato("export", str(run), str(tmp_path / "mine" / "thesis.txt")), "never overwritten")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert legato("export", str(run), str(tmp_path / "empty"))[0] == 0


def test_every_verb_warns_when_the_newest_checkpoint_is_damaged(legato: Command, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "checkpoints/step-000002/random.safetensors").write_bytes(b"")
    warning = "step-000002 is damaged and is not used"
    line = assert_refused(legato("export", str(copy), str(tmp_path / "out")), warning, "--allow-older")
    assert "step-000001 is used instead" in line and not (tmp_path / "out").exists()
    words_of_verbs = (
        ["export", str(copy), str(tmp_path / "out"), "--allow-older"],
        ["sample", str(copy), "1+1="],
        ["eval", str(copy), "task.held_out=2"],
        ["mismatch", str(copy), "--kinds", "none", "--prompts", "2", "--output", str(tmp_path / "mismatch")],
    )
    for verb in words_of_verbs:
        code, _, error = legato(*verb)
        assert code == 0 and warning in error, (verb, error)
    assert legato("export", str(run), str(tmp_path / "whole"))[2] == ""


def test_a_damaged_checkpoint_is_not_exported_by_name(legato: Command, adapted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(adapted, copy)
    (copy / "checkpoints" / "step-000001" / "random.safetensors").unlink()
    assert_refused(legato("export", str(copy), str(tmp_path / "out"), "--step", "1"), "damaged", "random.safetensors")
    assert not (tmp_path / "out").exists()
    assert checkpoint.latest(copy / "checkpoints")[0].name == "step-000002"


# report


def test_a_report_can_be_written_again(legato: Command, run: Path) -> None:
    (run / "report.html").unlink()
    code, out, _ = legato("report", str(run))
    assert code == 0
    assert str(run / "report.html") in out
    page = (run / "report.html").read_text()
    assert "<html" in page and "gspo" in page


def test_a_run_of_the_command_line_ends_with_the_next_command(legato: Command, tmp_path: Path) -> None:
    code, out, error = legato("train", *words(tmp_path, {"training.steps": 2, "evaluation.every_steps": 1}))
    assert code == 0, error
    for wanted in (f"legato sample {tmp_path / 'run'}", "report.html", "step-000002"):
        assert wanted in out.replace("\n", "")
    assert (tmp_path / "run" / "report.html").is_file()
