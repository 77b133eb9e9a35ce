"""Adapter in the original model of transformers, as peft computes it: beside the weights, not merged into them."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from antiphon.checkpoints.adapters.adapter import PREFIX, Adapter
from antiphon.errors import VerificationError


def insert_adapter(original: Any, adapter: Adapter) -> None:
    """Replace modules of a model of transformers by those of peft with the adapter's tensors.

    Raises VerificationError if peft does not find a place for every tensor.
    """
    import peft
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    trained = _trained_part(original, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on training
        described = peft.PeftConfig.from_pretrained(str(adapter.folder))
        peft.inject_adapter_in_model(described, trained)
        tensors = load_peft_weights(str(adapter.folder), device="cpu")
        try:
            placed: Any = set_peft_model_state_dict(trained, {_without_prefix(name): tensors[name] for name in tensors})
        except (KeyError, RuntimeError) as error:
            kind = type(original).__name__
            raise VerificationError(f"peft cannot read the adapter {adapter.folder} for {kind}: {error}") from None
    if placed.unexpected_keys:
        raise VerificationError(
            f"peft finds no place for {', '.join(placed.unexpected_keys[:3])} in {type(original).__name__}, so the "
            "import cannot be compared with it; --no-verify skips the comparison"
        )
    original.eval()


def _without_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


def _trained_part(original: Any, adapter: Adapter) -> nn.Module:
    """Return the model whose modules have the paths of the adapter: the original, its part without heads, or a parent.

    The adapter was trained in another class than the original if only one of them has heads.
    """
    prefix: str = original.base_model_prefix
    candidates: list[nn.Module] = [original, getattr(original, prefix, original), nn.ModuleDict({prefix: original})]
    for candidate in candidates:
        if adapter.products.keys() <= {name for name, _ in candidate.named_modules()}:
            return candidate
    raise VerificationError(
        f"the modules of the adapter, such as {min(adapter.products)}, are not in {type(original).__name__} of "
        "transformers, so the import cannot be compared with it; --no-verify skips the comparison"
    )
