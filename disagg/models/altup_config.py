"""Reads what Gemma 3n adds to a decoder from config.json. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.models.family import Fields

_MOST_STREAMS = 64  # the published models have 4


@dataclass(frozen=True, kw_only=True)
class AltUpConfig:
    """The settings of layers with several residual streams (AltUp, arXiv 2301.13310).

    A layer computes one of the streams, and predicts and corrects the others.

    Attributes:
        num_streams: residual streams.
        active: the stream that layers compute.
        scales_output: whether the computed stream is scaled before it meets the embedding.
        laurel_rank: rank of the second residual branch of a layer (LAuReL, arXiv 2411.07501).
        embedding_rows, embedding_size: of the table with an embedding of each token for each layer.
        sparsities: of each layer, the share of its MLP's inner values that are cut to 0, if they
            are distributed normally; 0.0: none are.
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
    embedding_rows: int
    embedding_size: int
    sparsities: tuple[float, ...]


def altup_config(fields: Fields, num_layers: int) -> AltUpConfig:
    """Read the settings. Raises `ModelError` if one is missing or wrong."""
    num_streams = fields.size("altup_num_inputs", _MOST_STREAMS)
    active = fields.raw["altup_active_idx"]
    if num_streams < 2:
        raise fields.wrong(f"altup_num_inputs must be at least 2, not {num_streams}")
    if not isinstance(active, int) or isinstance(active, bool) or not 0 <= active < num_streams:
        raise fields.wrong(
            f"altup_active_idx must be one of the {num_streams} streams (altup_num_inputs), from 0"
            f" to {num_streams - 1}, not {active!r}"
        )
    return AltUpConfig(
        num_streams=num_streams,
        active=active,
        scales_output=fields.flag("altup_correct_scale"),
        laurel_rank=fields.size("laurel_rank"),
        embedding_rows=fields.size("vocab_size_per_layer_input"),
        embedding_size=fields.size("hidden_size_per_layer_input"),
        sparsities=_sparsities(fields, num_layers),
    )


def one_inner_size(fields: Fields, num_layers: int) -> int:
    """The inner size of the MLPs, of which a file has one, or one for each layer."""
    stated = fields.raw.get("intermediate_size")
    if not isinstance(stated, list):
        return fields.size("intermediate_size")
    if len(stated) != num_layers or len(set(map(str, stated))) != 1:
        raise fields.wrong(
            f"intermediate_size must have the same size for each of the {num_layers} layers, not"
            f" {stated!r}; MLPs of several sizes are not supported"
        )
    return Fields({**fields.raw, "intermediate_size": stated[0]}, fields.place).size(
        "intermediate_size"
    )


def _sparsities(fields: Fields, num_layers: int) -> tuple[float, ...]:
    """What the file states, or else the class's default: the first 10 of more layers are sparse."""
    stated = fields.raw["activation_sparsity_pattern"]
    if stated is None:
        num_sparse = 10 if num_layers > 10 else 0
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    is_list = isinstance(stated, list) and len(stated) == num_layers
    if not is_list or not all(type(each) in (int, float) and 0 <= each < 1 for each in stated):
        raise fields.wrong(
            f"activation_sparsity_pattern must have a share from 0 to less than 1 for each of the"
            f" {num_layers} layers, not {stated!r}"
        )
    return tuple(map(float, stated))
