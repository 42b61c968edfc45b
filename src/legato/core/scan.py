"""A backward recurrence along a row without a Python loop over tokens."""

from legato.core.shapes import PerToken


def reverse_recurrence(inputs: PerToken, decay: PerToken) -> PerToken:
    """y[t] = inputs[t] + decay[t] * y[t + 1], y beyond the end 0, by doubling: log2(T) passes.

    >>> reverse_recurrence(torch.tensor([[1.0, 1.0, 1.0]]), torch.full((1, 3), 0.5))
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    total, factor = inputs.clone(), decay.clone()
    width, reach = inputs.shape[1], 1
    while reach < width:
        # After this pass total[t] holds the recurrence over t .. t + 2 * reach - 1.
        total[:, :-reach] = total[:, :-reach] + factor[:, :-reach] * total[:, reach:]
        factor[:, :-reach] = factor[:, :-reach] * factor[:, reach:]
        factor[:, -reach:] = 0.0
        reach *= 2
    return total
