"""The `antiphon` command: which subcommands there are, and what each one needs installed.

Only the chosen subcommand is imported, so that a client install runs `generate` and a server install never loads
torch. Each module brings `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# What a full disk, a quota, a limit of file sizes and a failing disk answer to a write.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subcommand:
    """One subcommand: where it lives, what its help says and the extra that installs what it imports."""

    module: str
    summary: str
    examples: str
    extra: str | None = None


SUBCOMMANDS = {
    "serve": Subcommand(
        module="antiphon.service.server.process",
        extra="server",
        summary="serve an exported model over gRPC",
        examples="""\
  antiphon serve                            the shipped English-German model, on 127.0.0.1:50051
  antiphon serve BUNDLE --port 0            your own model, on any free port
  ANTIPHON_THREADS=4 antiphon serve --config antiphon.toml
  antiphon serve --model de=EN-DE --model fr=EN-FR          several models; requests say which, or get the first
  antiphon serve --print-config             settings in effect, as TOML

stops on SIGTERM or Ctrl-C after running requests have ended (--drain-grace-s), at once on a second one""",
    ),
    "generate": Subcommand(
        module="antiphon.cli.generate",
        summary="translate text with a running server",
        examples="""\
  antiphon generate "How are you?"          prints the answer as it streams
  antiphon generate < english.txt > german.txt
  antiphon generate --temperature 0.8 --top-p 0.9 --seed 7 "A cold morning."
  antiphon generate --beam-width 4 --num-return-sequences 4 "A cold morning."      best first
  antiphon generate --prefix-text "Es ist" --stop-strings , --json --num-logprobs 2 "It is cold today, isn't it?"

one line out for each line in (or as many as --num-return-sequences says), in order; a line that fails is empty, and is
named on standard error
exit codes: 0 all well, 1 some lines failed, 2 nothing could be asked (wrong option, server unreachable)""",
    ),
    "classify": Subcommand(
        module="antiphon.cli.classify",
        summary="label texts with a running server's encoder",
        examples="""\
  antiphon classify "Play some jazz"        the likeliest label and its probability
  antiphon classify --top-k 0 < texts.txt   every label of each line, best first, parted by tabs
  printf 'It rains.\\tTake an umbrella.\\n' | antiphon classify --next-sentence      a tab parts the texts of a pair
  antiphon classify --json "Play some jazz"

one line out for each line in, in order; a line that fails is empty, and is named on standard error
exit codes: 0 all well, 1 some lines failed, 2 nothing could be asked (wrong option, no server, no such head)""",
    ),
    "tag": Subcommand(
        module="antiphon.cli.tag",
        summary="find names and other spans with a running server's encoder",
        examples="""\
  antiphon tag "Ada Lovelace was born in London"        prints PER: Ada Lovelace, a tab, LOC: London
  antiphon tag --json < texts.txt           every token with its label, and the spans, by code points

one line out for each line in, in order; exit codes as of antiphon classify""",
    ),
    "fill-mask": Subcommand(
        module="antiphon.cli.fill_mask",
        summary="fill masked words with a running server's encoder",
        examples="""\
  antiphon fill-mask "Paris is the [MASK] of France."   five tokens with their probabilities, likeliest first
  antiphon fill-mask --top-k 1 < texts.txt  of each line; several places are parted by |

the mask token is the model's own: [MASK] of BERT, <mask> of RoBERTa
one line out for each line in, in order; exit codes as of antiphon classify""",
    ),
    "load": Subcommand(
        module="antiphon.load.command",
        extra="load",
        summary="load a running server and measure how it fares",
        examples="""\
  antiphon load                             everyday sentences, 10 requests a second for 10 seconds
  antiphon load --rate 200 --duration 60 --warmup 5 --input texts.txt --json load.json
  antiphon load --rates 50,100,200,400 --plot curve.png --objective-p99-ms 250
  antiphon load --search --objective-ttft-ms 100 --objective-p99-ms 250       the highest sustainable rate
  antiphon load --trace arrivals.csv --check        arrival times and lengths of a trace; equal texts, equal answers
  antiphon load --rate 2000 --processes 4   where one client process is not enough

open loop: requests go out when they are due, whatever the server does; latencies count from then; docs/LOAD.md
exit codes: 0 all well, 1 the client could not keep up, nothing was answered, answers to equal texts differed or, with
--fail, the objective was missed; 2 nothing could be loaded (wrong option, server unreachable)""",
    ),
    "models": Subcommand(
        module="antiphon.cli.models",
        summary="list, load and unload a running server's models",
        examples="""\
  antiphon models list                      what is served, the default first
  antiphon models load fr /models/en-fr     one more, from the server's disk; needs antiphon serve --admin-port 50052
  antiphon models unload fr                 once its running requests have ended
  antiphon models memory                    what each holds of the server's --memory-limit-bytes""",
    ),
    "health": Subcommand(
        module="antiphon.cli.health",
        summary="ask a running server whether it is ready",
        examples="""\
  antiphon health                           of the server on 127.0.0.1:50051
  antiphon health --service liveness        whether its process does its work: also while it loads or drains
  antiphon health --service antiphon.v1.InferenceService/en-de --target translate:50051

in a container it asks the port of ANTIPHON_PROBE_PORT or ANTIPHON_PORT, as the server there is told them
exit codes: 0 SERVING, 1 anything else or no answer, 2 wrong option""",
    ),
    "explain": Subcommand(
        module="antiphon.cli.explain",
        extra="train",
        summary="show what a running server's model looks at",
        examples="""\
  antiphon explain "How are you?"           entropy of every head, and what its greedy translation is aligned with
  antiphon explain "How are you?" --target-text "Wie geht es dir?" --png map.png       the alignment as a picture
  antiphon explain "How are you?" --layer 0 --head 3 --target 127.0.0.1:50051

pictures need matplotlib; the server's bundle needs an explain graph, which antiphon export writes""",
    ),
    "train": Subcommand(
        module="antiphon.model.training.train",
        extra="train",
        summary="train a model from a recipe",
        examples="""\
  antiphon train tatoeba-en-de --data DATA            a recipe that comes with Antiphon; DATA holds the files it names
  antiphon train my-recipe.toml --data DATA --output runs/mine
  antiphon train mlm-small --data DATA                an encoder, pre-trained on plain text
  antiphon train snips --init runs/mlm-small/averaged --data DATA         fine-tuned; wnut17 tags words
  antiphon train snips --init CHECKPOINT --freeze-encoder --data DATA     only the new head learns
  torchrun --nproc-per-node 4 -m antiphon.cli.main train my-recipe.toml --data DATA

killed, the same command resumes from the last checkpoint; the averaged checkpoint it ends with is what export wants""",
    ),
    "export": Subcommand(
        module="antiphon.model.export.export",
        extra="server,train",
        summary="export a checkpoint to a bundle that serve reads",
        examples="""\
  antiphon export CHECKPOINT BUNDLE         float32 and int8 graphs, verified against PyTorch
  antiphon export CHECKPOINT BUNDLE --precision int8 --contrib       ONNX Runtime's own operators as well as ours
  antiphon serve BUNDLE""",
    ),
    "import": Subcommand(
        module="antiphon.model.importer.importer",
        extra="server,import",
        summary="import a public checkpoint as a bundle",
        examples="""\
  antiphon import ./opus-mt-en-de BUNDLE    a directory of the Hugging Face libraries: config.json, weights, tokenizer
  antiphon import Helsinki-NLP/opus-mt-en-de BUNDLE --precision int8       by name, through the hub's cache
  antiphon import google/flan-t5-small BUNDLE --max-source-len 2048
  antiphon import ./ct2-en-de BUNDLE        a CTranslate2 directory: model.bin and its vocabularies
  antiphon serve BUNDLE

what it writes was compared with the original in transformers, in float32, before it was exported""",
    ),
    "evaluate": Subcommand(
        module="antiphon.service.tools.evaluation.evaluate",
        extra="server,train",
        summary="score a model on a test set",
        examples="""\
  antiphon evaluate BUNDLE --recipe tatoeba-en-de --data DATA             the part held out before training
  antiphon evaluate BUNDLE --source news.en --reference news.de --output news.hyp
  antiphon evaluate BUNDLE --recipe snips --data DATA                     accuracy of an encoder's labels; wnut17: F1
  antiphon evaluate BUNDLE --source news.en --reference news.de --record      BLEU of every precision, into its manifest
  antiphon evaluate BUNDLE --text news.en --record                        so too a decoder's perplexity, a line a text
  antiphon evaluate CHECKPOINT --ctranslate2 --source a --reference b     PyTorch, and CTranslate2 with the same weights

sacreBLEU and chrF; --json for one object a system""",
    ),
    "prune": Subcommand(
        module="antiphon.model.training.prune",
        extra="train",
        summary="drop the attention heads that matter least",
        examples="""\
  antiphon prune CHECKPOINT OUTPUT --heads 6 --data DATA         every attention keeps its 6 most important heads
  antiphon prune CHECKPOINT OUTPUT --heads 6 --source news.en --reference news.de
  antiphon export OUTPUT BUNDLE             what it writes is a checkpoint like any other""",
    ),
    "profile": Subcommand(
        module="antiphon.model.export.profile",
        extra="server,train",
        summary="measure a bundle's attention workspace against T^2",
        examples="""\
  antiphon profile BUNDLE                   measures, fits, writes the fit into the bundle and a plot next to it
  antiphon profile --random base --plot memory.png       every lowering of random weights, up to 4,096 tokens""",
    ),
    "size": Subcommand(
        module="antiphon.service.tools.capacity.size",
        extra="server",
        summary="size a deployment: memory, cores, cache, replicas",
        examples="""\
  antiphon size                             what one replica of the shipped model needs, each term with its formula
  antiphon size BUNDLE --rate 1000 --load-result load.json --zones 3      and how many carry a rate, a zone lost
  antiphon size BUNDLE --rate 100 --requests-per-s 250 --cores 4 --source-tokens 64 --target-tokens 64
  antiphon size --rate 100 --load-result load.json --kustomize deploy/components/cpu/kustomization.yaml

memory is the bundle's own profile (antiphon profile) and what was measured of the server; docs/CAPACITY.md""",
    ),
    "simulate": Subcommand(
        module="antiphon.service.tools.capacity.simulate",
        extra="server,load",
        summary="simulate the autoscaler under a day's traffic",
        examples="""\
  antiphon simulate --curve deploy/capacity/en-de.json --scaled-object deploy/components/autoscaling/scaledobject.yaml
  antiphon simulate --curve CURVE --scaled-object FILE --compare --plot day.png       beside other thresholds, and CPU
  antiphon simulate --curve CURVE --replicas 1 --steady 40 --hours 1      one replica, to compare with antiphon load

what it needs to know of a replica is measured; docs/CAPACITY.md""",
    ),
    "bench": Subcommand(
        module="antiphon.service.tools.bench.command",
        extra="server",
        summary="measure a bundle on this machine",
        examples="""\
  antiphon bench                            every section, with the shipped English-German model and a random one
  antiphon bench --section decode --model random --rows 64        beside CTranslate2, same weights, same cores
  antiphon bench BUNDLE --section engine --source test.en --json bench.json
  antiphon bench --profile nodes.txt        which operators take the time

decode, encode, poisson, memory: beside CTranslate2 (pip install ctranslate2) at its best settings, outputs compared
grpc_overhead: what a client sees over 64 streams, against the engine alone
engine: continuous batching against static batches through the same graphs
startup: time until ready, and resident memory""",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if sys.stdout is None:
        print("antiphon: standard output is closed", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        return _run(arguments, chosen)
    except ModuleNotFoundError as error:
        return _report_missing(chosen, error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _NO_SPACE or _can_write_output():
            raise
        name = "antiphon" if chosen is None else f"antiphon {chosen}"
        print(f"{name}: standard output cannot be written: {error.strerror}", file=sys.stderr)
        _discard_output()
        return EXIT_USER_ERROR


def _run(arguments: Sequence[str], chosen: str | None) -> int:
    """Run the chosen subcommand; what it printed has left this process, or an OSError says why not."""
    try:
        parsed = _parser(chosen).parse_args(arguments)
        code: int = parsed.run(parsed)
        return code
    finally:
        sys.stdout.flush()


def _can_write_output() -> bool:
    """Return whether standard output takes an empty line: what was refused before may have been another file."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _discard_output() -> None:
    """Write what is left nowhere; without this the interpreter complains once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon",
        description="Serve Transformer encoder-decoders over gRPC, and train and export them.",
        epilog='start here:\n  antiphon serve\n  antiphon generate "How are you?"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"antiphon {_version()}")
    group = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for name, subcommand in SUBCOMMANDS.items():
        child = group.add_parser(
            name,
            help=subcommand.summary,
            description=f"{subcommand.summary[0].upper()}{subcommand.summary[1:]}.",
            epilog=f"examples:\n{subcommand.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module = _module(subcommand)
            module.add_arguments(child)
            child.set_defaults(run=module.run)
    return parser


def _module(subcommand: Subcommand) -> ModuleType:
    return importlib.import_module(subcommand.module)


def _version() -> str:
    try:
        return importlib.metadata.version("antiphon")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _report_missing(chosen: str | None, error: ModuleNotFoundError) -> int:
    extra = SUBCOMMANDS[chosen].extra if chosen in SUBCOMMANDS else None
    if extra is None or (error.name or "antiphon").startswith("antiphon"):
        raise error
    print(f"antiphon {chosen}: {error.name} is not installed; run: pip install 'antiphon[{extra}]'", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
