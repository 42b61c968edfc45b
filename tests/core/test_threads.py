"""Code that runs torch on one thread because more threads are slower."""

from collections.abc import Iterator

import pytest
import torch

from legato.core.texts import Texts
from legato.core.threads import one_thread
from legato.policy.layout.packs import Pack, pack


@pytest.fixture
def several() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("several")
def test_one_thread_and_then_as_before() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="x"), one_thread():
        raise ValueError("x")
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("several")
def test_the_tables_of_a_pack_are_made_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_counts = []
    monkeypatch.setattr(
        torch,
        "argsort",
        lambda *arguments, argsort=torch.argsort, **options: (
            thread_counts.append(torch.get_num_threads()) or argsort(*arguments, **options)
        ),
    )
    tokens = torch.arange(12).reshape(2, 6)
    texts = Texts(
        prompts=tokens[:1, :3],
        prompt_lengths=torch.tensor([3]),
        tokens=tokens,
        lengths=torch.tensor([6, 4]),
        mask=torch.ones(2, 6, dtype=torch.bool),
        group=torch.zeros(2, dtype=torch.int64),
        temperature=torch.ones(2),
    )
    assert isinstance(pack(texts, torch.arange(2)), Pack)
    assert thread_counts == [1] and torch.get_num_threads() == 2
