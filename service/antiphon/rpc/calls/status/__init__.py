"""Final status of a call: refusals, the deadline, and the end of the call."""
