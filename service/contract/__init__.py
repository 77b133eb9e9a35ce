"""The contract's messages and the domain's values, each turned into the other. Decides nothing."""
