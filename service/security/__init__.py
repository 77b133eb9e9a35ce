"""Who may call: certificates, tokens, and the gate before every service."""
