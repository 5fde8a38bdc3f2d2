"""Models of any family, through transformers' own modules with our attention and packed weights inside."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.torch_attention import PASS_KEYWORD
from engine.model.attention_probe import refusal
from engine.model.forward_batch import ForwardBatch
from engine.model.hidden_state_taps import NO_TAP, HiddenStateTaps, joined
from engine.model.linear.packed_linear import Linear

_FINAL = -1  # the place of the states behind the final norm


class StockDecoder:
    """The forward of one model.

    Attributes:
        features: what `tap` asks for of the last pass, [T, F].
    """

    def __init__(self, model: PreTrainedModel, tap: HiddenStateTaps = NO_TAP) -> None:
        """Raises ConfigError if the family does not show the states that `tap` asks for."""
        self.features: Tensor | None = None
        self._model = model
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._tap = tap
        self._tapped: dict[int, Tensor] = {}
        if tap:
            self._hook()

    @property
    def lm_head(self) -> Linear:
        """From the states behind the final norm to logits."""
        return self._model.get_output_embeddings()

    def logits(self, flat_pass: ForwardBatch) -> Tensor:
        """Logits of the pass's rows, [R, V]."""
        rows = flat_pass.logit_rows
        keywords: dict[str, Any] = {PASS_KEYWORD: flat_pass.attention}
        if rows is not None and self._keeps_rows:
            keywords["logits_to_keep"] = rows
        logits = self._model(
            input_ids=flat_pass.input_ids[None], position_ids=flat_pass.position_ids[None], use_cache=False, **keywords
        ).logits[0]
        self.features = joined([self._tapped[place] for place in self._places])
        return logits if rows is None or self._keeps_rows else logits[rows]

    @property
    def _places(self) -> tuple[int, ...]:
        return (*self._tap.layers, *((_FINAL,) if self._tap.is_final else ()))

    def _hook(self) -> None:
        decoder = self._model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if self._tap.layers and not isinstance(layers, nn.ModuleList):
            raise refusal(self._model, "its layers cannot be tapped for a head")
        for place in self._tap.layers:
            assert layers is not None, "checked above"
            if place < len(layers):
                layers[place].register_forward_pre_hook(partial(self._see_input, place), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(self._see_output, place))
        if self._tap.is_final:
            decoder.register_forward_hook(partial(self._see_output, _FINAL))

    def _see_input(self, place: int, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._tapped[place] = (inputs[0] if inputs else keywords["hidden_states"])[0]

    def _see_output(self, place: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._tapped[place] = (output if isinstance(output, Tensor) else output[0])[0]
