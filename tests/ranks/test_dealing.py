"""Rows are dealt to ranks evenly and completely; pieces of weights make the whole; saved states are read in any cut."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from legato.core.texts import Texts
from legato.errors import InputError
from legato.training.pieces import Piece, run_of
from legato.training.plan import deal, plan
from legato.training.saved import SavedState, SavedTensors


def texts_of(prompts: list[int], lengths: list[list[int]]) -> Texts:
    rows = [length for group in lengths for length in group]
    group = [number for number, each in enumerate(lengths) for _ in each]
    widest = max(rows)
    return Texts(
        prompts=torch.zeros(len(prompts), max(prompts), dtype=torch.int64),
        prompt_lengths=torch.tensor(prompts),
        tokens=torch.zeros(len(rows), widest, dtype=torch.int64),
        lengths=torch.tensor(rows),
        mask=torch.arange(widest) < torch.tensor(rows)[:, None],
        group=torch.tensor(group),
        temperature=torch.ones(len(rows)),
    )


groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 60), min_size=2, max_size=8)), min_size=1, max_size=9
)


@given(groups, st.integers(2, 6), st.integers(20, 200), st.booleans(), st.randoms(use_true_random=False))
def test_every_row_is_dealt_to_one_rank(
    drawn: list[tuple[int, list[int]]], ranks: int, tokens: int, shared: bool, random: Any
) -> None:
    texts = texts_of([prompt for prompt, _ in drawn], [lengths for _, lengths in drawn])
    silent = torch.tensor([random.random() < 0.3 for _ in range(len(texts))])
    shares = deal(texts, range(len(drawn)), tokens, ranks, shared=shared, silent=silent)
    rows = sorted(row for share in shares for batch in share for row in batch.tolist())
    assert len(shares) == ranks and rows == list(range(len(texts)))
    again = deal(texts, range(len(drawn)), tokens, ranks, shared=shared, silent=silent)
    assert [[batch.tolist() for batch in share] for share in shares] == [[b.tolist() for b in share] for share in again]


def load_of(texts: Texts, share: Any, silent: torch.Tensor) -> int:
    """The tokens that a rank computes: prompts once a micro-batch, and responses that are not silent."""
    total = 0
    for batch in share:
        alive = batch[~silent[batch]]
        total += int(texts.prompt_lengths[texts.group[alive].unique()].sum() + (texts.lengths[alive] - 1).sum())
    return total


def test_shares_are_even_even_with_fewer_groups_than_ranks() -> None:
    texts = texts_of([8, 8], [[200] * 8, [100] * 8])
    silent = torch.zeros(16, dtype=torch.bool)
    loads = [load_of(texts, share, silent) for share in deal(texts, range(2), 10_000, 4)]
    assert max(loads) < 1.1 * sum(loads) / 4


def test_silent_rows_cost_a_rank_nothing() -> None:
    texts = texts_of([4] * 4, [[100] * 4] * 4)
    silent = torch.tensor([True] * 8 + [False] * 8)
    shares = deal(texts, range(4), 10_000, 2, silent=silent)
    loads = [load_of(texts, share, silent) for share in shares]
    assert loads[0] == loads[1] > 0


def test_the_groups_of_an_update_do_not_depend_on_the_number_of_ranks() -> None:
    texts = texts_of([5] * 7, [[9, 12, 7]] * 7)
    options: dict[str, Any] = {"updates": 3, "epochs": 2, "tokens_per_pack": 50, "seed": 4, "packing": True}
    alone = plan(texts, **options)
    for ranks in (2, 5):
        several = plan(texts, **options, ranks=ranks)
        assert [update.rows.tolist() for update in several] == [update.rows.tolist() for update in alone]
        assert all(list(update.owners) == sorted(update.owners) for update in several)


@given(st.integers(1, 40), st.integers(1, 9))
def test_runs_are_those_of_torch_chunk(rows: int, size: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(size)]
    assert [len(run_of(rows, rank, size)) for rank in range(size)] == chunks + [0] * (size - len(chunks))


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 5))
def test_a_state_saved_by_some_ranks_is_read_by_others(count: int, before: int, after: int) -> None:
    values = torch.arange(float(count))
    runs = [run_of(count, rank, before) for rank in range(before)]
    tensors = {f"exp_avg|w|{run.start}": values[run.start : run.stop] for run in runs if run}
    tensors |= {f"step|w|{run.start}": torch.tensor(7.0) for run in runs if run}
    state = SavedState(SavedTensors(tensors), {"updates": 7})
    assert state.kinds("w") == {"exp_avg", "step"}
    for rank in range(after):
        run = run_of(count, rank, after)
        piece = Piece(run.start, run.stop, count, values, False)
        if run:
            assert torch.equal(state.read("exp_avg", "w", piece), values[run.start : run.stop])
        assert float(state.read("step", "w", piece)) == 7


def test_a_whole_state_of_one_process_is_read_in_pieces_from_its_file(tmp_path: Any) -> None:
    save_file({"exp_avg|w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "optimizer.safetensors")
    state = SavedState(SavedTensors(files=[tmp_path / "optimizer.safetensors"]), {})
    assert state.read("exp_avg", "w", Piece(4, 12, 12, torch.empty(8), True)).tolist() == list(range(4, 12))


def test_a_state_with_a_gap_is_refused() -> None:
    state = SavedState(SavedTensors({"exp_avg|w|0": torch.zeros(4), "exp_avg|w|8": torch.zeros(4)}), {})
    with pytest.raises(InputError, match="0 to 4, 8 to 12"):
        state.read("exp_avg", "w", Piece(2, 6, 12, torch.empty(4), True))
