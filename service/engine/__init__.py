"""From a request that waits to its last token: queue, scheduler, cache blocks, step after step. Knows no gRPC."""
