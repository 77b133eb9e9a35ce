"""Cache blocks: the pool of them, and the blocks that each request holds."""
