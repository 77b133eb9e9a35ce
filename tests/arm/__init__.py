"""Antiphon on 64-bit Arm, under emulation: `make test-arm`."""
