"""Errors of the model packages that cross modules. A command reports each of them as one line, see `ModelError`."""

from __future__ import annotations


class ModelError(Exception):
    """Base of the errors of the model packages.

    The message is one line for a user: it names the file, field or value, and is clear without the class's name.
    """


class BundleError(ModelError):
    """A bundle cannot be used; the message names the file or field and what was expected."""


class CheckpointError(ModelError):
    """A checkpoint cannot be used; the message names the file or tensor."""


class SourceError(ModelError):
    """A checkpoint cannot be imported; the message names the file, the setting or the tensors, and what to do."""


class TokenizerError(ModelError):
    """A tokenizer file cannot be used; the message names it."""


class NoTokenizersFile(TokenizerError):
    """A checkpoint has no tokenizer.json; it can possibly be made from the checkpoint's other files."""


class ExportError(ModelError):
    """A checkpoint cannot be exported; the message names the reason."""


class LoweringError(ExportError):
    """A lowering has no operator for a node of the graph."""


class VerificationError(ModelError):
    """Exported graphs disagree with the model; the message names the graphs, the measure and the limit."""


class GraphError(ModelError):
    """A graph cannot be loaded or run; the message names the file and the graph.

    Line breaks in ONNX Runtime's messages are replaced, so that the message is one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class StepError(ModelError):
    """The outputs of a decoder graph contradict each other; the message names them."""


class WorkspaceError(ModelError):
    """The native library is missing or does not fit this installation; the message names the file and the reason."""


class KernelError(ModelError):
    """A run that this processor cannot make; the message names the kernels."""


class CudaError(ModelError):
    """The driver, the card or the kernels cannot be used; the message names what is missing or what the driver said."""


class BudgetError(ModelError):
    """A kernel uses more than it may; the message names the kernel, the resource and the limit."""


class RecipeError(ModelError):
    """A recipe or its data cannot be used; the message names the file or field."""


class TrainingDiverged(ModelError):
    """The loss is infinite or not a number; the message names the step."""


class PruneError(ModelError):
    """A model cannot be pruned with these options; the message names the field or file."""


class CorpusError(ModelError):
    """A corpus cannot be made; the message names the package or file."""


class UncoveredModelError(ModelError):
    """The arithmetic does not cover this kind of model; the message names the field and the covered values."""
