"""Log records: their formats, and the thread that writes them."""
