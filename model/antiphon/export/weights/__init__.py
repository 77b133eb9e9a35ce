"""Weights of exported graphs: quantisation, packing and the file of weights."""
