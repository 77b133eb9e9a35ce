"""Ways to run requests: the engine, static batches, a batcher, and arrivals in open loop."""
