"""Errors over GPU memory are told as what they are: something to make room for, and no fault of ours."""

import sys

import pytest
import torch

from legato.core import out_of_memory
from legato.core.out_of_memory import explain_out_of_memory, is_out_of_memory
from legato.errors import InputError

GIB = 2**30
TORCHS = (
    "CUDA out of memory. Tried to allocate 154.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 6.62 MiB is free."
    " Process 657 has 66.00 MiB memory in use."
)


def test_an_error_that_hides_another_is_recognised() -> None:
    inner = torch.OutOfMemoryError(TORCHS)
    try:
        try:
            raise inner
        except RuntimeError:
            raise RuntimeError("the capture was invalidated")  # noqa: B904 - as torch does it
    except RuntimeError as outer:
        assert is_out_of_memory(outer)
    assert is_out_of_memory(inner) and not is_out_of_memory(RuntimeError("CUDA error")) and not is_out_of_memory(None)


def test_an_error_of_another_kind_while_memory_had_run_out_is_none() -> None:
    """A save that fails after it, say, or a fault of ours in what handles it: both have words of their own."""
    for outer in (InputError("no room for a checkpoint"), KeyError("a fault")):
        try:
            try:
                raise torch.OutOfMemoryError(TORCHS)
            except RuntimeError:
                raise outer  # noqa: B904 - its context is the error above
        except Exception as error:
            assert error.__context__ is not None and not is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_outside_of_the_allocator_is_recognised(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A GPU that others fill has no room for a context either, and torch has no class of its own for that."""
    monkeypatch.setattr(out_of_memory, "_held", lambda: None)
    error = torch.AcceleratorError(text) if text.startswith("CUDA error: out") else RuntimeError(text)
    assert is_out_of_memory(error) and not is_out_of_memory(KeyError(text))
    assert explain_out_of_memory(error).startswith("expected more room on the GPU, got out of memory; ")


def test_a_hidden_error_keeps_its_words() -> None:
    outer = RuntimeError("the capture was invalidated")
    outer.__context__ = torch.OutOfMemoryError("out of memory with one sequence at a time")
    assert explain_out_of_memory(outer) == "out of memory with one sequence at a time"


@pytest.mark.parametrize(("others", "named"), [(120, True), (2, False)])
def test_the_message_says_who_holds_the_memory_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, others: int, named: bool
) -> None:
    monkeypatch.setattr(out_of_memory, "_held", lambda: (18 * GIB, others * GIB, 140 * GIB))
    text = explain_out_of_memory(torch.OutOfMemoryError(TORCHS))
    assert text.startswith(
        "expected room for 154.00 MiB more on the GPU, got out of memory: this process holds 18.0 of 140.0 GiB"
    )
    assert f"others hold {others}.0 GiB" in text and ("end what else runs there" in text) == named
    assert "training.tokens_per_pack" in text and "Process 657" not in text


def test_words_of_our_own_stay() -> None:
    ours = "out of memory with one sequence at a time: lower rollouts.max_response_tokens"
    assert explain_out_of_memory(torch.OutOfMemoryError(ours)) == ours


def test_the_command_line_does_not_call_it_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from legato.cli import main

    def fails(**options: object) -> None:
        raise torch.OutOfMemoryError(TORCHS)

    monkeypatch.setattr(main, "app", fails)
    monkeypatch.setattr(sys, "argv", ["legato", "train"])
    with pytest.raises(SystemExit) as ending:
        main._run()
    assert ending.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("legato: expected room for 154.00 MiB more on the GPU, got out of memory")
    assert "fault" not in printed and printed.count("\n") == 1
