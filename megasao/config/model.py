"""Which model is trained, and how it is laid out over the trainer's ranks."""

from typing import Literal

from pydantic import Field, model_validator

from megasao.config.base import Section


class ModelConfig(Section):
    """The Hugging Face checkpoint that actor and critic start from."""

    path: str = Field(description="Directory of a Hugging Face checkpoint: config.json, tokenizer.json, *.safetensors.")
    architecture: str | None = Field(
        None, description="A config.json that `megasao plan` reads where path has none: planning needs no weights."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Parameter and activation dtype.")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="Megatron layer implementation; auto is TransformerEngine where CUDA is present, else local.",
    )


class ParallelConfig(Section):
    """Megatron parallel layout; data parallelism fills what is left of ``ranks``."""

    ranks: int = Field(2, ge=1, description="Trainer processes (world size).")
    tensor: int = Field(1, ge=1, description="Tensor parallel size (TP).")
    sequence: bool = Field(False, description="Sequence parallelism (SP); required for MoE with tensor > 1.")
    pipeline: int = Field(1, ge=1, description="Pipeline parallel size (PP).")
    pipeline_layers: list[int] | None = Field(
        None, description="Decoder layers of each pipeline stage, first to last; null splits evenly."
    )
    virtual_pipeline: int = Field(
        1, ge=1, description="Model chunks of each pipeline stage (VPP, interleaved schedule); 1 is the plain schedule."
    )
    context: int = Field(
        1, ge=1, description="Context parallel size (CP): the tokens of a row are split, each sequence zig-zag."
    )
    expert: int = Field(1, ge=1, description="Expert parallel size (EP).")
    expert_tensor: int = Field(1, ge=1, description="Tensor parallel size inside an expert (ETP).")
    dispatcher: Literal["alltoall", "allgather", "flex"] = Field(
        "alltoall",
        description="How tokens reach their experts; allgather pads the rows of all ranks to one length, flex is "
        "DeepEP (GPUs, package deep_ep).",
    )
    distributed_optimizer: bool = Field(
        False, description="Split optimizer state and main weights over data and context parallel ranks."
    )
    overlap: bool = Field(
        False,
        description="Reduce gradients during the backward pass and, with distributed_optimizer, gather weights during "
        "the next forward pass.",
    )
    timeout_s: float = Field(120.0, gt=0, description="Bound on every collective, seconds.")

    @model_validator(mode="after")
    def _divides(self) -> "ParallelConfig":
        model_size = self.tensor * self.pipeline * self.context
        if self.ranks % model_size:
            raise ValueError(
                f"ranks = {self.ranks} is not a multiple of tensor x pipeline x context = {model_size}; "
                "data parallelism needs a whole number of copies"
            )
        expert_size = self.expert * self.expert_tensor * self.pipeline
        if self.ranks % expert_size:
            raise ValueError(
                f"ranks = {self.ranks} is not a multiple of expert x expert_tensor x pipeline = {expert_size}"
            )
        if self.pipeline_layers is not None:
            if len(self.pipeline_layers) != self.pipeline:
                raise ValueError(
                    f"pipeline_layers has {len(self.pipeline_layers)} numbers; expected one for each of the "
                    f"pipeline = {self.pipeline} stages"
                )
            if min(self.pipeline_layers) < 1:
                raise ValueError(f"pipeline_layers = {self.pipeline_layers}: every stage needs at least one layer")
            if self.virtual_pipeline > 1:
                raise ValueError(
                    f"pipeline_layers does not go with virtual_pipeline = {self.virtual_pipeline}, whose chunks are "
                    "equal; leave it out, or set virtual_pipeline = 1"
                )
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence = true has no meaning with tensor = 1; set tensor > 1 or sequence = false")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline = {self.virtual_pipeline} has no meaning with pipeline = 1; set pipeline > 1 or "
                "virtual_pipeline = 1"
            )
        return self

    @property
    def data(self) -> int:
        """Data parallel size (DP) of the dense part."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    def stages(self, layers: int) -> list[range]:
        """The decoder layers, from 0, of each pipeline stage of a model with ``layers`` of them.

        With a virtual pipeline those of each model chunk, in the order in which a token meets them.

        Raises:
            ValueError: they cannot be split so.
        """
        parts = self.pipeline * self.virtual_pipeline
        if self.pipeline_layers is None and layers % parts:
            if self.virtual_pipeline > 1:
                raise ValueError(
                    f"{layers} layers cannot be split evenly over pipeline x virtual_pipeline = {parts} model chunks"
                )
            raise ValueError(
                f"{layers} layers cannot be split evenly over pipeline = {self.pipeline} stages; give each stage's "
                "number in pipeline_layers"
            )
        counts = self.pipeline_layers or [layers // parts] * parts
        if sum(counts) != layers:
            raise ValueError(f"pipeline_layers = {counts} are {sum(counts)} layers; the model has {layers}")
        starts = [sum(counts[:stage]) for stage in range(parts)]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
