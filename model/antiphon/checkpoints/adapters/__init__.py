"""Adapters of `peft`: their settings, their tensors, and the change of a checkpoint's tensors that they stand for."""
