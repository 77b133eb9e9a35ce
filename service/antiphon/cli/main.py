"""The `antiphon` command: its subcommands, and the packages that each one needs.

Only the chosen subcommand is imported. A client installation can therefore run `generate`, and a server never loads
torch. Each module, or an object in it, has `add_arguments(parser)` and `run(arguments) -> exit code`.
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
from typing import Any

from antiphon.cli.common import EXIT_USER_ERROR, report_error

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# Errors of a write to a full disk, beyond a quota, beyond a file size limit, and to a failing disk.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subcommand:
    """One subcommand: its module, its help texts and the extra that installs its packages.

    command: name of the object in the module that has the functions; None is the module itself.
    """

    module: str
    summary: str
    examples: str
    extra: str | None = None
    command: str | None = None


SUBCOMMANDS = {
    "serve": Subcommand(
        module="antiphon.server.process",
        extra="server",
        summary="serve an exported model over gRPC",
        examples="""\
  antiphon serve                            the shipped English-German model, on 127.0.0.1:50051
  antiphon serve BUNDLE --port 0            your own model, on any free port
  ANTIPHON_THREADS=4 antiphon serve --config antiphon.toml
  antiphon serve --model de=EN-DE --model fr=EN-FR          several models; requests name one, or use the first
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

prints one line for each input line (or --num-return-sequences lines), in order; the line of a failed request is empty,
and standard error names it
exit codes: 0 success, 1 some lines failed, 2 no request could be sent (wrong option, server unreachable)""",
    ),
    "classify": Subcommand(
        module="antiphon.cli.encoder_heads",
        command="CLASSIFY",
        summary="label texts with a running server's encoder",
        examples="""\
  antiphon classify "Play some jazz"        the most likely label and its probability
  antiphon classify --top-k 0 < texts.txt   every label of each line, best first, separated by tabs
  printf 'It rains.\\tTake an umbrella.\\n' | antiphon classify --next-sentence      a tab separates the texts of a pair
  antiphon classify --json "Play some jazz"

prints one line for each input line, in order; the line of a failed request is empty, and standard error names it
exit codes: 0 success, 1 some lines failed, 2 no request could be sent (wrong option, no server, no such head)""",
    ),
    "tag": Subcommand(
        module="antiphon.cli.encoder_heads",
        command="TAG",
        summary="find names and other spans with a running server's encoder",
        examples="""\
  antiphon tag "Ada Lovelace was born in London"        prints PER: Ada Lovelace, a tab, LOC: London
  antiphon tag --json < texts.txt           every token with its label, and the spans, by code points

prints one line for each input line, in order; exit codes are those of antiphon classify""",
    ),
    "fill-mask": Subcommand(
        module="antiphon.cli.encoder_heads",
        command="FILL_MASK",
        summary="fill masked words with a running server's encoder",
        examples="""\
  antiphon fill-mask "Paris is the [MASK] of France."   five tokens with their probabilities, most likely first
  antiphon fill-mask --top-k 1 < texts.txt  of each line; several places are separated by |

the mask token depends on the model: [MASK] of BERT, <mask> of RoBERTa
prints one line for each input line, in order; exit codes are those of antiphon classify""",
    ),
    "load": Subcommand(
        module="antiphon.load.command",
        extra="load",
        summary="put load on a running server and measure its latency",
        examples="""\
  antiphon load                             everyday sentences, 10 requests a second for 10 seconds
  antiphon load --rate 200 --duration 60 --warmup 5 --input texts.txt --json load.json
  antiphon load --rates 50,100,200,400 --plot curve.png --objective-p99-ms 250
  antiphon load --search --objective-ttft-ms 100 --objective-p99-ms 250       the highest sustainable rate
  antiphon load --trace arrivals.csv --check        times and lengths of a trace; compare the answers to equal texts
  antiphon load --rate 2000 --processes 4   if one client process is not enough

open loop: requests are sent at their scheduled times, also while the server is slow; latencies count from these times;
see docs/LOAD.md
exit codes: 0 success, 1 the client could not keep up, nothing was answered, answers to equal texts differed or, with
--fail, the objective was missed; 2 the server could not be loaded (wrong option, server unreachable)""",
    ),
    "models": Subcommand(
        module="antiphon.cli.models",
        summary="list, load and unload a running server's models",
        examples="""\
  antiphon models list                      the served models, the default first
  antiphon models load fr /models/en-fr     add one from the server's disk; needs antiphon serve --admin-port 50052
  antiphon models unload fr                 remove one after its running requests have ended
  antiphon models memory                    memory of each, of the server's --memory-limit-bytes
  antiphon models cache                     cache blocks of each, and the running requests that hold them""",
    ),
    "health": Subcommand(
        module="antiphon.cli.health",
        summary="check the readiness of a running server",
        examples="""\
  antiphon health                           the server on 127.0.0.1:50051
  antiphon health --service liveness        check that its process works, also while it loads or drains
  antiphon health --service antiphon.v1.InferenceService/en-de --target translate:50051

in a container it checks the port of ANTIPHON_PROBE_PORT or ANTIPHON_PORT, the settings of the server there
exit codes: 0 SERVING, 1 anything else or no answer, 2 wrong option""",
    ),
    "explain": Subcommand(
        module="antiphon.cli.explain",
        extra="train",
        summary="show the attention of a running server's model",
        examples="""\
  antiphon explain "How are you?"           entropy of every head, and the alignment of the greedy translation
  antiphon explain "How are you?" --target-text "Wie geht es dir?" --png map.png       the alignment as a picture
  antiphon explain "How are you?" --layer 0 --head 3 --target 127.0.0.1:50051
  antiphon explain "A cat sleeps." --pair "It dreams." --model bert     entropy of an encoder-only model

pictures need matplotlib; the server's bundle needs an explain graph, which antiphon export and import write""",
    ),
    "play": Subcommand(
        module="antiphon.play.command",
        extra="play",
        summary="open a page that shows a running server's models at work",
        examples="""\
  antiphon play                             the server on 127.0.0.1:50051, as a page on http://127.0.0.1:8050
  antiphon play --admin-target 127.0.0.1:50052      and the requests that hold its cache blocks
  antiphon play --target translate:50051 --tls-ca ca.pem --token-file token --metrics-url https://translate:9090/metrics

translations with the probability of each token and its alternatives, sampling, attention, beams, memory, labels;
the page is for this machine only and loads nothing from elsewhere; Ctrl-C ends it""",
    ),
    "train": Subcommand(
        module="antiphon.training.command",
        extra="train",
        summary="train a model from a recipe",
        examples="""\
  antiphon train tatoeba-en-de --data DATA            a recipe of Antiphon; DATA holds the files that it names
  antiphon train my-recipe.toml --data DATA --output runs/mine
  antiphon train mlm-small --data DATA                an encoder, pre-trained on plain text
  antiphon train snips --init runs/mlm-small/averaged --data DATA         fine-tuned; wnut17 tags words
  antiphon train snips --init CHECKPOINT --freeze-encoder --data DATA     trains only the new head
  torchrun --nproc-per-node 4 -m antiphon.cli.main train my-recipe.toml --data DATA

after an interruption, the same command resumes from the last checkpoint; export needs the final averaged checkpoint""",
    ),
    "corpus": Subcommand(
        module="antiphon.training.corpora.command",
        extra="train",
        summary="make data files of recipes from packages of Debian",
        examples="""\
  antiphon corpus debian-docs --output DATA           prose of Debian's documentation packages; needs apt-get and dpkg
  antiphon corpus debian-docs --output DATA --debs DEBS       packages that are in DEBS are not downloaded
  antiphon corpus ding --output DATA                  English-German sentences and words of a dictionary
  antiphon corpus jane-austen --output DATA           six novels

writes to DATA/CORPUS; packages are pinned by version and hash, and the same packages give the same bytes""",
    ),
    "lab": Subcommand(
        module="antiphon.lab.command",
        extra="server,train",
        summary="run the experiments of the laboratory",
        examples="""\
  antiphon lab ablations --data DATA        trains small models; writes table, picture and JSON to runs/lab
  antiphon lab all --data DATA --jobs 8     every experiment, eight runs at a time
  antiphon lab depth --scale toy            artificial data, a few steps: shows that the experiment works
  antiphon lab depth --data DATA --scale 4 --seeds 5

after an interruption, the same command resumes; finished runs are read from their folders""",
    ),
    "compare": Subcommand(
        module="antiphon.lab.command",
        command="COMPARE_COMMAND",
        extra="server,train",
        summary="train and serve five kinds of encoders at one budget",
        examples="""\
  antiphon compare --data DATA              BERT, RoBERTa, ALBERT, DeBERTa, DistilBERT; DATA has debian-docs, clinc150,
                                            sst2 and wnut17
  antiphon compare --scale toy              artificial data, a few steps: shows that it works

the same as antiphon lab compare; after an interruption, the same command resumes""",
    ),
    "export": Subcommand(
        module="antiphon.export.export",
        extra="server,train",
        summary="export a checkpoint to a bundle that serve reads",
        examples="""\
  antiphon export CHECKPOINT BUNDLE         float32 and int8 graphs, verified against PyTorch
  antiphon export CHECKPOINT BUNDLE --lowering native cuda           graphs for an NVIDIA GPU as well
  antiphon serve BUNDLE""",
    ),
    "import": Subcommand(
        module="antiphon.tools.import_command",
        extra="server,import",
        summary="import a public checkpoint as a bundle",
        examples="""\
  antiphon import ./opus-mt-en-de BUNDLE    a directory of the Hugging Face libraries: config.json, weights, tokenizer
  antiphon import Helsinki-NLP/opus-mt-en-de BUNDLE --precision int8       by name, through the hub's cache
  antiphon import google/flan-t5-small BUNDLE --max-source-len 2048
  antiphon import facebook/bart-base BUNDLE --adapter ./adapter            with a LoRA adapter that peft saved
  antiphon import ./ct2-en-de BUNDLE        a CTranslate2 directory: model.bin and its vocabularies
  antiphon serve BUNDLE

model, texts and answers are compared with those of the original in transformers, in float32""",
    ),
    "evaluate": Subcommand(
        module="antiphon.tools.evaluation.evaluate",
        extra="server,train",
        summary="score a model on a test set",
        examples="""\
  antiphon evaluate BUNDLE --recipe tatoeba-en-de --data DATA             the part held out before training
  antiphon evaluate BUNDLE --source news.en --reference news.de --output news.hyp
  antiphon evaluate BUNDLE --recipe snips --data DATA                     accuracy of an encoder's labels; wnut17: F1
  antiphon evaluate BUNDLE --source news.en --reference news.de --record      BLEU of every precision, to its manifest
  antiphon evaluate BUNDLE --text news.en --record                        perplexity of a decoder, one text per line
  antiphon evaluate CHECKPOINT --ctranslate2 --source a --reference b     PyTorch, and CTranslate2 with the same weights

sacreBLEU and chrF; --json prints one object per system""",
    ),
    "prune": Subcommand(
        module="antiphon.training.pruning",
        extra="train",
        summary="remove the least important attention heads",
        examples="""\
  antiphon prune CHECKPOINT OUTPUT --heads 6 --data DATA         every attention keeps its 6 most important heads
  antiphon prune CHECKPOINT OUTPUT --share 0.3 --data DATA       30 % of all heads are removed, unevenly over the layers
  antiphon prune CHECKPOINT OUTPUT --heads 6 --source news.en --reference news.de
  antiphon export OUTPUT BUNDLE             the output is a normal checkpoint""",
    ),
    "shortlist": Subcommand(
        module="antiphon.training.shortlist",
        extra="server,train",
        summary="learn a model's lexical shortlist from sentence pairs",
        examples="""\
  antiphon shortlist BUNDLE --source train.en --reference train.de        writes it into the bundle
  antiphon shortlist CHECKPOINT --source train.en --reference train.de    antiphon export copies it
  antiphon shortlist BUNDLE --source train.en --reference train.de --best 100 --frequent 200

prints the number of candidates, and the share of the reference tokens among them, for pairs that it did not learn""",
    ),
    "profile": Subcommand(
        module="antiphon.export.profile",
        extra="server,train",
        summary="measure a bundle's attention workspace against T^2",
        examples="""\
  antiphon profile BUNDLE                   measure, write the fit into the bundle and a plot next to it
  antiphon profile --random base --plot memory.png       every lowering of random weights, up to 4,096 tokens""",
    ),
    "memory": Subcommand(
        module="antiphon.lab.memory.command",
        extra="server,train",
        summary="calculate and measure a model's memory",
        examples="""\
  antiphon memory base --length 256 --batch 4 --train        a training step: each term with its formula, and measured
  antiphon memory BUNDLE --length 128 --batch 16             a translation: PyTorch and the bundle's native graphs
  antiphon memory big --length 8192 --train --memory 16GiB --no-measure      longest texts that fit
  antiphon memory base --length 256 --batch 4 --train --time --json memory.json

sizes are deterministic; times need an idle machine; see docs/MEMORY.md""",
    ),
    "size": Subcommand(
        module="antiphon.tools.capacity.size",
        extra="server",
        summary="size a deployment: memory, cores, cache, replicas",
        examples="""\
  antiphon size                             needs of one replica of the shipped model, each term with its formula
  antiphon size BUNDLE --rate 1000 --load-result load.json --zones 3      and replicas for a rate after a zone failure
  antiphon size BUNDLE --rate 100 --requests-per-s 250 --cores 4 --source-tokens 64 --target-tokens 64
  antiphon size --rate 100 --load-result load.json --kustomize deploy/components/cpu/kustomization.yaml

memory comes from the bundle's profile (antiphon profile) and from measurements of the server; see docs/MEMORY.md""",
    ),
    "simulate": Subcommand(
        module="antiphon.tools.capacity.simulate",
        extra="server,load",
        summary="simulate the autoscaler under a day's traffic",
        examples="""\
  antiphon simulate --curve deploy/capacity/en-de.json --scaled-object deploy/components/autoscaling/scaledobject.yaml
  antiphon simulate --curve CURVE --scaled-object FILE --compare --plot day.png       with other thresholds, and CPU
  antiphon simulate --curve CURVE --replicas 1 --steady 40 --hours 1      one replica, to compare with antiphon load

the speed of a replica is a measurement; see docs/MEMORY.md""",
    ),
    "bench": Subcommand(
        module="antiphon.tools.bench.command",
        extra="server",
        summary="measure a bundle on this machine",
        examples="""\
  antiphon bench                            every section, with the shipped English-German model and a random one
  antiphon bench --section decode --model random --rows 64        against CTranslate2, same weights, same cores
  antiphon bench BUNDLE --section engine --source test.en --json bench.json
  antiphon bench --profile nodes.txt        time of each operator

decode, encode, poisson, memory: against CTranslate2 (pip install ctranslate2) at its best settings, outputs compared
grpc_overhead: a client with 64 streams against the engine alone
engine: continuous batching against static batches with the same graphs
growth: the engine by rows, for every division of the threads into lanes
host: CPU time of the engine's own work, with a runner that computes nothing
startup: time until ready, and resident memory
kernels: rates of products and attention on one core, against a bare loop of the same instruction""",
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
    """Run the chosen subcommand and flush its output. Raises OSError if the output cannot be written."""
    try:
        parsed = _parser(chosen).parse_args(arguments)
        code: int = parsed.run(parsed)
        return code
    finally:
        sys.stdout.flush()


def _can_write_output() -> bool:
    """Return whether standard output accepts an empty line. If it does, the earlier error was of another file."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _discard_output() -> None:
    """Discard the buffered output; otherwise the interpreter prints another error when it exits."""
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
            command = load(subcommand)
            command.add_arguments(child)
            child.set_defaults(run=command.run)
    return parser


def load(subcommand: Subcommand) -> Any:
    """Import and return the module or object that has the functions of a subcommand."""
    module = importlib.import_module(subcommand.module)
    return module if subcommand.command is None else getattr(module, subcommand.command)


def _version() -> str:
    try:
        return importlib.metadata.version("antiphon")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _report_missing(chosen: str | None, error: ModuleNotFoundError) -> int:
    extra = SUBCOMMANDS[chosen].extra if chosen in SUBCOMMANDS else None
    if extra is None or (error.name or "antiphon").startswith("antiphon"):
        raise error
    return report_error(str(chosen), f"{error.name} is not installed; run: pip install 'antiphon[{extra}]'")


if __name__ == "__main__":
    sys.exit(main())
