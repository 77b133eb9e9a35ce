"""Cache blocks: their pool, and the blocks that each request holds."""
