"""Runner of cuda graphs: a bundle on an NVIDIA GPU."""
