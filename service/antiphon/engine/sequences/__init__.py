"""Generation state of requests, and the streams that carry their tokens to event loops."""
