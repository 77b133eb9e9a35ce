"""What every RPC goes through, whatever it asks: sockets, limits, health, load reports, refusals."""
