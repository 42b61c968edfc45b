"""How per-token losses become one number: the weight n_it of each token in the loss.

All five return rows of weights. `survivors` (rows that survive a rejection), if not None, shrinks the denominators.
"""

from collections.abc import Callable

from tests.reference.batch import Batch, Rows


def counted_rows(batch: Batch, survivors: set[int] | None) -> list[int]:
    """Rows that enter the denominators: all rows with tokens, or only the surviving ones."""
    return [row for row in batch.filled_rows() if survivors is None or row in survivors]


def token_mean(batch: Batch, survivors: set[int] | None = None) -> Rows:
    """n_it = 1 / T_tot."""
    total = sum(len(batch.positions(row)) for row in counted_rows(batch, survivors))
    return spread(batch, lambda row: share(total))


def group_token_mean(batch: Batch, survivors: set[int] | None = None) -> Rows:
    """n_it = 1 / (number of groups * tokens of the group)."""
    tokens: dict[int, int] = {}
    for row in counted_rows(batch, survivors):
        tokens[batch.group[row]] = tokens.get(batch.group[row], 0) + len(batch.positions(row))
    shares = {group: 1 / (len(tokens) * count) for group, count in tokens.items()}
    return spread(batch, lambda row: shares.get(batch.group[row], 0.0))


def sequence_mean(batch: Batch, survivors: set[int] | None = None) -> Rows:
    """n_it = 1 / (N L_i): the mean over sequences of the mean over tokens."""
    sequences = len(counted_rows(batch, survivors))
    return spread(batch, lambda row: share(sequences * len(batch.positions(row))))


def sequence_sum(batch: Batch, survivors: set[int] | None = None) -> Rows:
    """n_it = 1 / N: the mean over sequences of the sum over tokens."""
    sequences = len(counted_rows(batch, survivors))
    return spread(batch, lambda row: share(sequences))


def sequence_sum_over_constant(batch: Batch, constant: float) -> Rows:
    """n_it = 1 / (N C), C the generation budget."""
    sequences = len(batch.filled_rows())
    return spread(batch, lambda row: 1 / (sequences * constant))


def share(count: int) -> float:
    """1 / count, or 0 if count is 0: without surviving rows there is no loss."""
    return 1 / count if count else 0.0


def spread(batch: Batch, weight_of_row: Callable[[int], float]) -> Rows:
    """Give each token of a row the weight of the row."""
    weights = batch.zeros()
    for row, position in batch.tokens():
        weights[row][position] = weight_of_row(row)
    return weights


def times(batch: Batch, *fields: Rows) -> Rows:
    """The token-wise product of weight fields, inside the mask."""
    product = batch.zeros()
    for row, position in batch.tokens():
        product[row][position] = 1.0
        for field in fields:
            product[row][position] *= field[row][position]
    return product
