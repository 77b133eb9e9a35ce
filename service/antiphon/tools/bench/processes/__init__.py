"""Child processes of a benchmark: the server, its client, and a process whose memory is measured."""
