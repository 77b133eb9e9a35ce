"""`antiphon load`: open-loop load on a running server, and its results. A client: needs grpcio and protobuf only."""
