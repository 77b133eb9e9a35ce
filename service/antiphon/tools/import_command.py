"""`antiphon import`: the command, and the last check of an imported bundle, which is served and asked for answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from antiphon.bundle.manifest import Precision, load_bundle
from antiphon.cli.common import report_error
from antiphon.client import AsyncClient, Generation, NextToken, Options
from antiphon.errors import ModelError, VerificationError
from antiphon.export.export import ALL_PRECISIONS, CACHE_TYPES, chosen_precisions
from antiphon.importer.generation_settings import compared_tokens
from antiphon.importer.importer import EXPLAINED_PARAMETERS, ImportOptions, import_checkpoint
from antiphon.importer.original import OriginalAnswer
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.standard_services import HealthServicer
from antiphon.rpc.v1.handlers import Handlers
from antiphon.rpc.v1.models import Models
from antiphon.server.app import build_server, build_waits, shared_resources
from antiphon.server.models.loading import StartupError, load
from antiphon.server.settings import ModelSettings, ServerConfig
from antiphon.text.tokenizer import open_tokenizer

# A token at the limit of a filter can be kept on one side only, which changes the others by its share.
_MAX_LOGPROB_ERROR = 0.02


def check_served(directory: Path, expected: Sequence[OriginalAnswer]) -> None:
    """Open a bundle as a server does, and compare the answers that clients get with those of the original.

    Answers are compared at float32 if the bundle has such graphs for CPUs; other precisions round differently.
    Raises VerificationError naming the reason why it cannot be served, or the text and both answers.
    """
    precisions = [graphs.precision for graphs in load_bundle(directory).manifest.graphs if graphs.lowering == "native"]
    if not precisions:
        return
    precision = "float32" if "float32" in precisions else precisions[0]
    try:
        asyncio.run(_compare_answers(directory, precision, expected if precision == "float32" else ()))
    except StartupError as error:
        raise VerificationError(f"a server refuses the imported bundle: {error}") from None


async def _compare_answers(directory: Path, precision: Precision, expected: Sequence[OriginalAnswer]) -> None:
    manifest = load_bundle(directory).manifest
    tokenizer = open_tokenizer(directory, manifest.text)
    longest = compared_tokens(manifest.generation, manifest.model)
    shortest = min(manifest.generation.min_new_tokens or 0, longest)
    # All other options are the checkpoint's own; random samples could not be compared.
    options = Options(
        max_new_tokens=longest, min_new_tokens=shortest, temperature=0.0, typical_p=1.0, num_return_sequences=1
    )
    async with _serving(directory, precision) as client:
        for answer in expected:
            served = await client.generate_text(answer.prompt.text, replace(options, beam_width=answer.beam_width))
            _compare_answer(answer, served)
            if answer.first_logprobs:
                _compare_first(
                    answer, await client.next_token(answer.prompt.text, num_tokens=len(answer.first_logprobs))
                )
            if manifest.model.architecture == "encoder-decoder" and served.text != tokenizer.decode(served.token_ids):
                raise VerificationError(f"the text {served.text!r} is not that of the tokens {served.token_ids}")
    if expected:
        print(f"served: the answers to {len(expected)} texts are those of the original")


def _compare_answer(answer: OriginalAnswer, served: Generation) -> None:
    """Raise VerificationError unless the answer is the original's, or one that a tie of scores makes as good."""
    is_tie = any(served.token_ids[: len(tie)] == tie for tie in answer.ties)
    if served.token_ids != answer.ids and not is_tie:
        raise VerificationError(
            f"the imported model answers {answer.prompt.text!r} with the tokens {list(served.token_ids)}, and "
            f"the original with {list(answer.ids)}; --no-verify skips the comparison"
        )


def _compare_first(answer: OriginalAnswer, served: NextToken) -> None:
    """Raise VerificationError unless the first token is sampled from the original's distribution."""
    logprobs = dict(zip(served.token_ids, served.stages[-1].logprobs, strict=True))
    for token_id, expected in answer.first_logprobs.items():
        logprob = logprobs.get(token_id, -math.inf)
        if not abs(logprob - expected) < _MAX_LOGPROB_ERROR:
            raise VerificationError(
                f"after {answer.prompt.text!r} token {token_id} has the log-probability {expected:.3f} in transformers "
                f"and {logprob:.3f} here; --no-verify skips the comparison"
            )


@contextlib.asynccontextmanager
async def _serving(directory: Path, precision: Precision) -> AsyncIterator[AsyncClient]:
    """Serve a bundle on a socket file, and yield a client."""
    config = ServerConfig(
        models={"imported": ModelSettings(path=directory, precision=precision, lanes=1)}, device="cpu", max_num_seqs=16
    )
    shared = shared_resources(config, CollectorRegistry())
    served = load(config.plans[0], shared)
    models = Models()
    models.add(served)
    calls = Handlers(
        models, CallMiddleware(Telemetry(shared.families), build_waits(config, shared.families)), shared.pacing
    )
    server = build_server(config, calls, HealthServicer())
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{folder}/grpc"
        server.add_insecure_port(target)
        served.engine.start()
        await server.start()
        try:
            async with AsyncClient(target) as client:
                yield client
        finally:
            served.engine.stop()
            await server.stop(None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source",
        metavar="DIRECTORY_OR_HUB_NAME",
        help="a checkpoint, which can be a GGUF file; an existing path takes precedence",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="directory to write, for `antiphon serve`")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="a LoRA adapter that peft saved, to merge into the weights"
    )
    parser.add_argument("--name", help="the model's name for clients (default: the bundle directory's name)")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=ALL_PRECISIONS,
        help="default: float32 int8, and bfloat16 with --lowering cuda",
    )
    parser.add_argument(
        "--lowering",
        nargs="+",
        choices=("native", "cuda"),
        default=["native"],
        help="graphs for CPUs (native, the default), for an NVIDIA GPU (cuda), or both",
    )
    parser.add_argument(
        "--cache-type",
        choices=CACHE_TYPES,
        help="type of cached keys and values (default: float16 with integer weights, else float32)",
    )
    parser.add_argument(
        "--explain",
        action=argparse.BooleanOptionalAction,
        help="export the graph that returns attention weights (default: for models up to "
        f"{EXPLAINED_PARAMETERS // 1_000_000} million parameters)",
    )
    for side in ("source", "target"):
        parser.add_argument(f"--max-{side}-len", type=int, help=f"longest {side} in tokens (default: the checkpoint's)")
    parser.add_argument("--overwrite", action="store_true", help="replace BUNDLE if it is a bundle")
    parser.add_argument("--revision", help="branch, tag or commit of a checkpoint on the hub")
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare model, texts and answers with the original's",
    )
    parser.add_argument("--licence", help="licence of the weights (default: that of the checkpoint's README.md)")
    parser.add_argument("--attribution", help="authors to name with the weights")


def _options(args: argparse.Namespace) -> ImportOptions:
    return ImportOptions(
        source=args.source,
        target=args.bundle,
        name=args.name,
        precisions=chosen_precisions(args.precision, args.lowering),
        lowerings=tuple(dict.fromkeys(args.lowering)),
        cache=args.cache_type,
        adapter=args.adapter,
        explain=args.explain,
        overwrite=args.overwrite,
        verify=args.verify,
        revision=args.revision,
        max_source_len=args.max_source_len,
        max_target_len=args.max_target_len,
        licence=args.licence,
        attribution=args.attribution,
    )


def run(args: argparse.Namespace) -> int:
    """Import a checkpoint; return 0 when the bundle is written, 2 after an error, with one line on standard error."""
    try:
        bundle = import_checkpoint(_options(args), check_served)
    except (ModelError, OSError) as error:
        return report_error("import", error)
    size = sum(entry.size for entry in bundle.manifest.files.values())
    described = ", ".join(f"{graphs.lowering} {graphs.precision}" for graphs in bundle.manifest.graphs)
    print(f"{bundle.path}: {described}; {size / 1e6:.1f} MB, graphs verified against the model")
    return 0
