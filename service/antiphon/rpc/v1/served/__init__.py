"""Parts of one served model, and the defaults of its requests."""
