"""Antiphon: Transformer models over gRPC. The base install is the client: grpcio and protobuf only."""
