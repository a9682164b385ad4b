"""Facts about a model that decide how its calls are divided, checked and completed."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from burst_portable.integrations.transformers.batches.padding import is_encoder
from burst_portable.integrations.transformers.loss import loss_of, shifts_labels
from burst_portable.integrations.transformers.masked_loss import has_masked_loss, ignores_count
from burst_portable.integrations.transformers.models.checks import drops_layers
from burst_portable.integrations.transformers.models.model_parts import text_model_of
from burst_portable.integrations.transformers.models.padding_positions import padding_index
from burst_portable.integrations.transformers.models.recurrent_layers import recurrent_layers
from burst_portable.integrations.transformers.models.signatures import parameters_of


class ModelFacts:
    """Facts about a model, read once in the constructor; properties follow changes of the model.

    Attributes:
        model: The model.
        text: The part whose sequence is sharded: the model itself, or the text model among several parts.
        padding_idx: Id of the padding token, if positions count from it. None: they count from 0.
        is_encoder: Whether tokens attend to later ones.
        has_masked_loss: Whether the model computes its loss itself, from the labels that it gets.
        ignores_count: Whether it takes the mean over its labels, whatever `num_items_in_batch` is.
        has_recurrent_layers: Whether layers have states along the sequence.
        drops_layers: Whether layers may be skipped at random.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.text = model, text_model_of(model)
        self.padding_idx = padding_index(self.text)
        self.is_encoder = is_encoder(model)
        self.has_masked_loss, self.ignores_count = has_masked_loss(model), ignores_count(model)
        self.has_recurrent_layers = bool(recurrent_layers(self.text))
        self.drops_layers = drops_layers(model)

    @property
    def has_parts(self) -> bool:
        """Return whether the model has a text model among several parts, which divides its rows itself."""
        return self.text is not self.model

    @property
    def shifts_labels(self) -> bool:
        """Return whether a token is compared with the label of the next one: true for all models but encoders."""
        if self.separates_padding and self.model.base_model is self.model:
            return False  # an encoder without a head, which names no loss
        if self.has_masked_loss:
            return False  # it does not call its loss function
        return shifts_labels(loss_of(self.model))

    @property
    def separates_padding(self) -> bool:
        """Return whether padding of batches becomes a document. Models of several parts have causal text models."""
        config: Any = self.model.config
        return not self.has_parts and (self.is_encoder or getattr(config, "is_causal", None) is False)

    def called_models(self) -> list[PreTrainedModel]:
        """Return the models that may be called. Callers that compute a loss themselves call the inner model."""
        models = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        if self.has_parts:
            around = (model for model in models if model is not self.text)
            return [model for model in around if any(part is self.text for part in model.modules())]
        return [model for model in models if "position_ids" in parameters_of(model)]
