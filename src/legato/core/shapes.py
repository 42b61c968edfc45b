"""Shape legend, used by every module.

B: rows (one response each, unless `rollout` ids join rows). T: positions from the first sampled token to the last.
Entry t of a `PerToken` value belongs to token t itself. A `PerSequence` value is one number per row. A `Spread` value is
`[B, 1]` if it is constant along a row, else `[B, T]`; both broadcast against `[B, T]`.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

PerToken = Float[Tensor, "B T"]
PerSequence = Float[Tensor, "B"]
Spread = Float[Tensor, "B #T"]
Scalar = Float[Tensor, ""]
SpreadMask = Bool[Tensor, "B #T"]
TokenMask = Bool[Tensor, "B T"]
TokenIds = Int[Tensor, "B T"]
RowIds = Int[Tensor, "B"]
RowMask = Bool[Tensor, "B"]
