"""The Open Inference Protocol v2: converts tensors to requests of antiphon.v1 and answers to tensors."""
