"""The experiments of the laboratory, one file each."""
