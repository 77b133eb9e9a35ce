"""Description of a model for clients: the facts of its bundle as a message."""

from __future__ import annotations

from antiphon.architecture.config import Architecture
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import Bundle
from antiphon.rpc.v1.requests.options import default_options
from antiphon.runtime.runners import AnyRunner
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb

_PRECISIONS = {
    "float32": pb.PRECISION_FLOAT32,
    "int8": pb.PRECISION_INT8,
    "int4": pb.PRECISION_INT4,
    "bfloat16": pb.PRECISION_BFLOAT16,
    "float16": pb.PRECISION_FLOAT16,
}
_ARCHITECTURES: dict[Architecture, pb.Architecture.ValueType] = {
    "encoder-decoder": pb.ARCHITECTURE_ENCODER_DECODER,
    "encoder": pb.ARCHITECTURE_ENCODER,
    "decoder": pb.ARCHITECTURE_DECODER,
}
_TASKS: dict[Task, pb.Task.ValueType] = {
    "fill_mask": pb.TASK_FILL_MASK,
    "classify": pb.TASK_CLASSIFY,
    "tag": pb.TASK_TAG,
    "next_sentence": pb.TASK_NEXT_SENTENCE,
    "pool": pb.TASK_POOL,
}


def describe(
    bundle: Bundle,
    runner: AnyRunner,
    tokenizer: Tokenizer,
    *,
    max_source_len: int,
    max_message_bytes: int,
    max_text_bytes: int,
) -> pb.Model:
    """Return the description of a model that this runner serves. Raises InvalidArgument for invalid bundle defaults.

    max_source_len: length of the longest source that the server accepts, which may be below the runner's limit.
    """
    manifest = bundle.manifest
    config, text = manifest.model, manifest.text
    model = pb.Model(
        name=manifest.name,
        precision=_PRECISIONS[runner.precision],
        vocabulary_size=config.vocab_size,
        limits=pb.Limits(
            max_source_len=max_source_len,
            max_target_len=runner.max_target_len,
            max_message_bytes=max_message_bytes,
            max_text_bytes=max_text_bytes,
        ),
        device=pb.DEVICE_CUDA if runner.lowering == "cuda" else pb.DEVICE_CPU,
        architecture=_ARCHITECTURES[config.architecture],
        tasks=[
            pb.TaskDescription(task=_TASKS[head.task], labels=head.labels)
            for head in config.heads
            if head.task in _TASKS  # the head for embed is a part of Embed
        ],
        languages=sorted(text.languages),
        mask_token="" if text.mask_id is None else tokenizer.piece(text.mask_id),
    )
    if runner.has_decoder:
        model.default_options.CopyFrom(default_options(manifest.generation))
        model.cache.block_tokens = runner.block_size
        model.cache.block_bytes = runner.block_size * runner.cache_bytes_per_token
        model.cache.num_blocks = runner.num_blocks
    if manifest.provenance is not None:
        model.provenance.source = manifest.provenance.source
        model.provenance.licence = manifest.provenance.licence
        model.provenance.attribution = manifest.provenance.attribution
    return model
