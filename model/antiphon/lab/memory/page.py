"""Page of `antiphon memory`: as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from antiphon.lab.memory.lengths import crossings, lecture_rows, longest
from antiphon.lab.memory.terms import Case, Prediction, Term

Native = tuple[Prediction, tuple[int | None, ...]]
"""Terms of the native graphs, and the measured bytes of each term; None where it was not measured."""
_MIB = 1 << 20
_NOTES = (
    "256 MiB, 4 GiB and 64 GiB are ONE float32 matrix T x T: one head, one layer, one sequence",
    "GiB are powers of two; in GB (10^9 bytes) the matrices are 0.27, 4.29 and 68.72",
    "times B H, and one for each attention of a layer; training keeps them all, and works with two more of one layer",
    "fused attention keeps 4 H bytes a token instead; a padding mask in PyTorch is still e B T^2 a layer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case: predicted and measured peak, and seconds of a step where they were measured."""

    case: Case
    prediction: Prediction
    measured_bytes: int | None = None
    seconds: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.prediction.peak_bytes / self.measured_bytes - 1 if self.measured_bytes else None

    @property
    def options(self) -> str:
        """Options of the case as text."""
        chosen = [self.case.backend, "checkpointing" * self.case.checkpointing, "bf16" * self.case.bf16]
        return ", ".join(filter(None, chosen))


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Content of the page. limit: longest source and target that the model itself supports.

    native: None for training.
    """

    name: str
    predict: Callable[[Case], Prediction]
    is_training: bool
    rows: tuple[Row, ...]
    native: Native | None
    free_bytes: int
    memory_bytes: int | None
    limit: int

    def longest_lengths(self) -> list[int]:
        """Return the longest T of every row, in memory_bytes; empty without a size."""
        size = self.memory_bytes
        return [] if size is None else [longest(row.case, self.predict, size) for row in self.rows]

    def as_json(self) -> dict[str, object]:
        """Return the page as JSON values; sizes in bytes."""
        case = self.rows[0].case
        return {
            "model": self.name,
            "training": self.is_training,
            "length": case.length,
            "batch": case.batch,
            "rows": [self._row_json(row) for row in self.rows],
            "native": None if self.native is None else [
                {**asdict(term), "measured_bytes": measured}
                for term, measured in zip(self.native[0].terms, self.native[1], strict=True)
            ],
            "crossings": [asdict(crossing) for crossing in crossings(case.config)],
            "lecture": [asdict(row) for row in lecture_rows(case.config)],
            "memory_bytes": self.memory_bytes,
            "longest": self.longest_lengths(),
        }  # fmt: skip

    @staticmethod
    def _row_json(row: Row) -> dict[str, object]:
        return {
            "backend": row.case.backend,
            "checkpointing": row.case.checkpointing,
            "bf16": row.case.bf16,
            "terms": [asdict(term) for term in row.prediction.terms],
            "predicted_bytes": row.prediction.peak_bytes,
            "measured_bytes": row.measured_bytes,
            "error": row.error,
            "seconds": row.seconds,
        }


def print_page(page: Page) -> None:
    """Print the page."""
    case = page.rows[0].case
    kind = "one training step" if page.is_training else "one translation"
    print(f"{page.name}: {kind} in PyTorch, B = {case.batch}, T = {case.length}; n = B T, sizes in MiB")
    if case.length > page.limit:
        print(f"the model supports {page.limit} tokens; its tables of positions are extended here")
    eager, sdpa = page.rows[0], page.rows[len(page.rows) // 2]
    print(f"\n{'term, float32':<40}{'eager':>11}{'sdpa':>11}  formula")
    _print_terms(eager.prediction.terms, sdpa.prediction.terms)
    print(
        f"\n{'peak':<40}{'predicted':>11}{'measured':>11}{'error':>8}{'saved':>8}"
        + f"{'s/step':>9}" * bool(eager.seconds)
    )
    for row in page.rows:
        print(_peak_line(row, eager if row.case.backend == "eager" else sdpa))
    if any(row.measured_bytes is None and row.prediction.peak_bytes > page.free_bytes for row in page.rows):
        print(f"- not measured: {_mib(page.free_bytes)} MiB are free")
    if page.native is not None:
        _print_native(*page.native)
    _print_lengths(page)


def _mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / _MIB:,.1f}"


def _print_terms(eager: tuple[Term, ...], sdpa: tuple[Term, ...]) -> None:
    sizes = {term.name: term.num_bytes for term in sdpa}
    own = {term.name: term.num_bytes for term in eager}
    formulas: dict[str, dict[str, None]] = {}
    for term in (*eager, *sdpa):
        formulas.setdefault(term.name, {})[term.formula] = None  # the formula of sdpa second, if it differs
    for name, texts in formulas.items():
        if own.get(name) or sizes.get(name):
            text = "; sdpa: ".join(texts)
            print(f"{name:<40}{_mib(own.get(name, 0)):>11}{_mib(sizes.get(name, 0)):>11}  {text}")


def _peak_line(row: Row, plain: Row) -> str:
    """Return the line of a row. saved: share of the peak of `plain` that its options save."""
    error = "-" if row.error is None else f"{row.error:+.1%}"
    line = f"{row.options:<40}{_mib(row.prediction.peak_bytes):>11}{_mib(row.measured_bytes):>11}{error:>8}"
    line += f"{1 - row.prediction.peak_bytes / plain.prediction.peak_bytes:>8.0%}"
    return line if row.seconds is None else f"{line}{row.seconds:>9.3f}"


def _print_native(prediction: Prediction, measured: tuple[int | None, ...]) -> None:
    print(f"\n{'native graphs':<40}{'predicted':>11}{'measured':>11}  formula")
    for term, size in zip(prediction.terms, measured, strict=True):
        print(f"{term.name:<40}{_mib(term.num_bytes):>11}{_mib(size):>11}  {term.formula}")


def _print_lengths(page: Page) -> None:
    config = page.rows[0].case.config
    print("\nattention exceeds the feed-forward layer of an encoder layer from length")
    for crossing in crossings(config):
        print(f"{crossing.name:<40}{crossing.length:>11,.0f}  {crossing.formula}")
    if page.memory_bytes is not None:
        print(f"\nlongest T in {_mib(page.memory_bytes)} MiB, B = {page.rows[0].case.batch}")
        for row, length in zip(page.rows, page.longest_lengths(), strict=True):
            print(f"{row.options:<40}{length:>11,}")
    print(f"\n{'lecture: T':<20}{'claim':>10}{'one matrix':>14}{'all of ' + page.name:>20}, one sequence")
    for entry in lecture_rows(config):
        print(f"{entry.length:<20,}{entry.claim:>10}{_mib(entry.matrix_bytes):>14}{_mib(entry.model_bytes):>20}")
    for note in _NOTES:
        print(f"- {note}")
