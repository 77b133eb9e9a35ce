"""Evaluation of models on test sets: `antiphon evaluate`."""


class EvaluationError(Exception):
    """The evaluation cannot run; the message names the argument or file."""
