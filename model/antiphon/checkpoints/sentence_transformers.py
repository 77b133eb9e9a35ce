"""Parts of a checkpoint of sentence-transformers beside the encoder: what modules.json and its directories declare.

    modules.json                        the modules in order: Transformer, Pooling, Dense, Normalize
    1_Pooling/config.json               poolings of the states
    2_Dense/                            config.json and weights of a dense layer
    sentence_bert_config.json           length limit and lower case
    config_sentence_transformers.json   prompts; for cross-encoders the function from logits to scores

A cross-encoder has at most the first of the modules. What the served model cannot do is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from tokenizers import normalizers

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadActivation, Pooling, Scores
from antiphon.checkpoints.settings import describe, read_json
from antiphon.checkpoints.source_weights import open_tensors
from antiphon.errors import SourceError
from antiphon.transformer.heads import Head
from antiphon.transformer.transformer import Transformer

_Name = TypeVar("_Name", bound=str)
_MODULES, _PROMPTS = "modules.json", "config_sentence_transformers.json"
# In this order sentence-transformers concatenates the poolings of these flags; newer files list names instead.
_POOLING_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS: Mapping[str, HeadActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_SCORE_FUNCTIONS: Mapping[str, Scores] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_ENCODER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Settings of the Transformer module that change its result, each with the values that do not.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "transformer_task": (None, "feature-extraction", "sequence-classification"),
    "module_output_name": (None, "token_embeddings", "scores"),
    "processing_kwargs": (None, {}),
    "config_args": (None, {}),
    "config_kwargs": (None, {}),
    "tokenizer_name_or_path": (None,),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """Entry of modules.json: the last part of its class name, and its directory."""

    kind: str
    folder: Path

    @property
    def path(self) -> Path:
        """Path of its config.json."""
        return self.folder / "config.json"


def with_declared_parts(config: ModelConfig, folder: Path, notes: list[str], *, keeps_len: bool = False) -> ModelConfig:
    """Return the configuration with the declared embedding, length limit and scores; unchanged for other directories.

    notes: gets what is left out. keeps_len: True: max_source_len stays as it is.
    Raises SourceError naming the file and the setting.
    """
    changes: dict[str, Any] = {}
    if (scores := declared_scores(folder)) is not None:
        heads = [head.model_dump() for head in config.heads]
        changes["heads"] = [head | {"scores": scores} if head["task"] == "classify" else head for head in heads]
    modules = _modules(folder)
    if modules:
        _check_encoder(_encoder_settings(folder))
        if not keeps_len and (limit := _max_len(folder)) is not None and limit < config.max_source_len:
            changes["max_source_len"] = limit
            notes.append(f"texts of more than {limit} tokens are refused, where sentence-transformers cuts them")
    if len(modules) > 1:
        if config.architecture != "encoder":
            raise SourceError(
                f"{folder / _MODULES} declares embeddings, which only encoder-only models have; this one is "
                f"architecture={config.architecture!r}. Remove {_MODULES} to import it without them"
            )
        changes |= _embedding(config, folder, modules, notes)
    return describe(**{**config.model_dump(), **changes}) if changes else config


def declared_scores(folder: Path) -> Scores | None:
    """Return the function from logits to scores that a cross-encoder names; None if it names none.

    Raises SourceError if the function is not supported.
    """
    path, config = folder / _PROMPTS, read_json(folder / "config.json")
    own = read_json(path).get("activation_fn")
    named = own or (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return None
    name = f"{path if own else folder / 'config.json'}: the activation of a cross-encoder"
    return _torch_class(str(named), name, _SCORE_FUNCTIONS)


def load_dense(model: Transformer, folder: Path, *, on_meta: bool = False) -> None:
    """Fill the dense layer of the declared embedding, if it has one. Raises SourceError naming the tensors."""
    if "embed" not in model.heads:
        return
    head = model.heads["embed"]
    assert isinstance(head, Head)
    assert head.transform is not None
    (dense,) = (module for module in _modules(folder) if module.kind == "Dense")
    with open_tensors(dense.folder, "model", "pytorch_model", on_meta=on_meta) as weights:
        weights.fill_module(head.transform, "linear")
        weights.check(dense.folder.name)


def lower_first(tokenizer: Any, folder: Path) -> None:
    """Make a tokenizer of transformers lower texts before its own steps, if do_lower_case is set.

    Raises SourceError for a tokenizer without such steps.
    """
    if not _modules(folder) or not _encoder_settings(folder).get("do_lower_case"):
        return
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise SourceError(f"{folder}: do_lower_case of sentence-transformers does not fit {type(tokenizer).__name__}")
    backend = tokenizer.backend_tokenizer
    own = backend.normalizer
    steps: Any = own if isinstance(own, normalizers.Sequence) else [own] if own is not None else []
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def _modules(folder: Path) -> Sequence[_Module]:
    """Return the modules in order, the Transformer first, without Dropout; empty without modules.json."""
    path = folder / _MODULES
    if not path.is_file():
        return ()
    try:
        entries = json.loads(path.read_bytes())
        modules = [(str(entry["type"]), str(entry["path"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} cannot be read: {error!r}") from None
    for kind, place in modules:
        if not kind.startswith("sentence_transformers."):
            raise SourceError(f"{path}: {kind} is code from outside sentence-transformers, which is never run")
        if not (folder / place).resolve().is_relative_to(folder.resolve()):
            raise SourceError(f"{path}: the path {place!r} is outside the checkpoint's directory")
    in_order = [_Module(kind=kind.rpartition(".")[2], folder=folder / place) for kind, place in modules]
    _check_order(path, in_order)
    return [module for module in in_order if module.kind != "Dropout"]


def _check_order(path: Path, modules: Sequence[_Module]) -> None:
    """Raise SourceError unless the modules are a Transformer alone, or one that Pooling and others follow."""
    kinds = [module.kind for module in modules if module.kind != "Dropout"]
    known = ["Transformer", "Pooling", "Dense", "Normalize"]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise SourceError(f"{path}: the module {unknown[0]} is not supported; supported are {', '.join(known)}")
    is_ordered = kinds == [kind for kind in known if kind in kinds]
    if not is_ordered or kinds[:2] not in (known[:1], known[:2]):
        raise SourceError(
            f"{path}: the modules are {', '.join(kinds)}; supported are Transformer, Pooling, then at most one Dense, "
            "then at most one Normalize"
        )
    if modules[0].folder.resolve() != path.parent.resolve():
        raise SourceError(f"{path}: the Transformer must be in {path.parent} itself, not in {modules[0].folder}")


def _embedding(config: ModelConfig, folder: Path, modules: Sequence[_Module], notes: list[str]) -> dict[str, Any]:
    """Return the fields of ModelConfig for Pooling, Dense, Normalize and the default prompt."""
    by_kind = {module.kind: module for module in modules}
    poolings = _poolings(by_kind["Pooling"], config)
    heads = [head.model_dump() for head in config.heads]
    if (dense := by_kind.get("Dense")) is not None:
        heads.append(_dense(dense, config.d_model * len(poolings)))
    if (norm := by_kind.get("Normalize")) is not None:
        _refuse_other_names(norm)
    described = read_json(folder / _PROMPTS)
    return dict(
        heads=heads,
        embedding=dict(
            poolings=poolings,
            normalize="Normalize" in by_kind,
            width=described.get("truncate_dim"),
            prompt=_prompt(folder / _PROMPTS, described, by_kind["Pooling"], notes),
        ),
    )


def _poolings(module: _Module, config: ModelConfig) -> tuple[Pooling, ...]:
    """Return the poolings in the order of their outputs; the mean if the file names none."""
    settings = read_json(module.path)
    named = settings.get("pooling_mode") or [mode for flag, mode in _POOLING_FLAGS.items() if settings.get(flag)]
    modes = tuple([named] if isinstance(named, str) else named or ["mean"])
    flags = {name for name, value in settings.items() if name.startswith("pooling_mode_") and value}
    if unknown := {*modes} - {*get_args(Pooling)} | (flags - _POOLING_FLAGS.keys()):
        supported = ", ".join(get_args(Pooling))
        raise SourceError(f"{module.path}: the pooling {min(unknown)} is not supported; supported are {supported}")
    width = settings.get("embedding_dimension", settings.get("word_embedding_dimension", config.d_model))
    if width != config.d_model:
        raise SourceError(f"{module.path}: the poolings read {width} numbers, and the states have {config.d_model}")
    return modes


def _dense(module: _Module, width: int) -> dict[str, Any]:
    """Return the fields of HeadConfig for a dense layer after poolings of this width."""
    settings = read_json(module.path)
    _refuse_other_names(module)
    if settings.get("use_residual"):
        raise SourceError(f"{module.path}: use_residual is true; only false is supported")
    if settings.get("in_features") != width:
        raise SourceError(f"{module.path}: in_features is {settings.get('in_features')}; the poolings have {width}")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return dict(
        task="embed",
        input_width=width,
        transform_width=settings.get("out_features"),
        activation=_torch_class(activation, f"{module.path}: activation_function", _DENSE_ACTIVATIONS),
        bias=bool(settings.get("bias", True)),
    )


def _refuse_other_names(module: _Module) -> None:
    """Raise SourceError unless a module changes the vector of the text."""
    for name, value in read_json(module.path).items():
        if name in ("module_input_name", "module_output_name") and value not in (None, "sentence_embedding"):
            raise SourceError(f"{module.path}: {name} is {value!r}; only 'sentence_embedding' is supported")


def _prompt(path: Path, described: Mapping[str, Any], pooling: _Module, notes: list[str]) -> str | None:
    """Return the default prompt; the others are noted, because a request cannot name them."""
    prompts: dict[str, str] = {name: text for name, text in (described.get("prompts") or {}).items() if text}
    default = described.get("default_prompt_name")
    if default is not None and default not in (described.get("prompts") or {}):
        raise SourceError(f"{path}: default_prompt_name is {default!r}, which prompts does not have")
    prompt = None if default is None else prompts.pop(default, None)
    if prompt and not read_json(pooling.path).get("include_prompt", True):
        raise SourceError(f"{pooling.path}: include_prompt is false, which is not supported with a default prompt")
    if prompts:
        named = ", ".join(f"{name} ({text!r})" for name, text in prompts.items())
        notes.append(f"the prompts of {path.name} are left out; a client puts them before its texts: {named}")
    return prompt


def _encoder_settings(folder: Path) -> dict[str, Any]:
    return next(filter(None, (read_json(folder / name) for name in _ENCODER_FILES)), {})


def _check_encoder(settings: Mapping[str, Any]) -> None:
    """Raise SourceError for a setting of the Transformer module that changes its result."""
    for name, allowed in _PLAIN.items():
        if settings.get(name) not in allowed:
            raise SourceError(f"{_ENCODER_FILES[0]}: {name} is {settings[name]!r}, which is not supported")
    text = (settings.get("modality_config") or {}).get("text") or {}
    read = (text.get("method", "forward"), text.get("method_output_name", "last_hidden_state"))
    if read not in (("forward", "last_hidden_state"), ("forward", "logits")):
        raise SourceError(f"{_ENCODER_FILES[0]}: modality_config of text is {text!r}; only its states are supported")


def _max_len(folder: Path) -> int | None:
    """Return the longest source in tokens, beyond which sentence-transformers cuts texts; None: no own limit."""
    settings = _encoder_settings(folder)
    tokenizer = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    limits = (
        tokenizer.get("model_max_length"),
        settings.get("max_seq_length"),
        read_json(folder / "tokenizer_config.json").get("model_max_length"),
    )
    return next((int(limit) for limit in limits if isinstance(limit, int | float)), None)


def _torch_class(value: str, name: str, known: Mapping[str, _Name]) -> _Name:
    """Return our name of a class of PyTorch such as "torch.nn.modules.activation.Tanh", the value of `name`.

    known: our name of each supported class. Raises SourceError with the supported names.
    """
    package, _, kind = value.rpartition(".")
    if package.split(".")[:2] != ["torch", "nn"] or kind not in known:
        raise SourceError(f"{name} is {value!r}; supported are the classes {', '.join(known)} of torch.nn")
    return known[kind]
