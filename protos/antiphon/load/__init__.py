"""`antiphon load`: drives a running server open loop and says how it fared. A client: grpcio and protobuf only."""
