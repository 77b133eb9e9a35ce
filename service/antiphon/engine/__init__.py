"""Path of a request from the queue to its last token: scheduler, cache blocks, steps."""
