"""Several runs side by side: what is compared, the processes that train, and what came of them."""
