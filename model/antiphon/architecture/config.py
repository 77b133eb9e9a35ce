"""Validated shape of a Transformer: the one description that the model, the exporter and the cache use.

It covers the model of Vaswani et al. 2017 and the variants that later models added. Imports no torch, because the
server reads it from the manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from antiphon.architecture.heads import EmbeddingConfig, HeadConfig

Architecture = Literal["encoder-decoder", "encoder", "decoder"]
Part = Literal["encoder", "decoder"]
Norm = Literal["layernorm", "rmsnorm", "none"]
NormPlacement = Literal["post", "pre"]
Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"]
Positions = Literal["sinusoidal", "learned", "t5_relative", "rope", "alibi", "none"]
Sinusoids = Literal["interleaved", "halves", "fairseq"]
DecoderSelf = Literal["attention", "ssru", "average"]


class Disentangled(BaseModel):
    """Settings of disentangled attention (DeBERTa, He et al. 2021), see ops/disentangled.py.

    span: half the rows of the table of relative positions.
    max_distance: distance at which the logarithmic rows end; None: every distance up to span has its own row.
    content_to_position, position_to_content: terms of the score; at least one must be on.
    share_projections: the content's query and key projections also project the positions.
    norm: a LayerNorm on the table.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    span: int = Field(ge=4, le=65536)
    max_distance: int | None = Field(default=None, ge=4, le=65536)
    content_to_position: bool = True
    position_to_content: bool = True
    share_projections: bool = False
    norm: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not (self.content_to_position or self.position_to_content):
            raise ValueError("content_to_position and position_to_content are both False; one of them must be True")
        if self.max_distance is not None and self.max_distance - 1 <= self.span // 2:
            raise ValueError(f"max_distance={self.max_distance} must be above span / 2 + 1, span={self.span}")
        return self


class LinearScaling(BaseModel):
    """Division of all rotary angles by `factor`: position interpolation (Chen et al. 2023, section 2.3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["linear"] = "linear"
    factor: float = Field(ge=1, le=65536)


class Llama3Scaling(BaseModel):
    """Scaling of rotary angles in Llama 3.1; it depends on the number of turns within the original training length.

    An angle with at least high_freq_factor turns does not change. An angle with at most low_freq_factor turns is
    divided by `factor`. Between the two limits both rates are interpolated. Fields have the names of config.json;
    original_max_position_embeddings is in tokens. See `rotary_rates` in transformer/positions.py.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1, le=65536)
    low_freq_factor: float = Field(gt=0, le=65536)
    high_freq_factor: float = Field(gt=0, le=65536)
    original_max_position_embeddings: int = Field(ge=1, le=2**24)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )
        return self


class AverageConfig(BaseModel):
    """Average attention (Zhang et al. 2018, section 3.1): feed-forward after the average, and gates.

    d_ff: inner width of the feed-forward; None: there is no feed-forward.
    gated: the result is a sum of input and average with a gate for each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_ff: int | None = Field(default=None, ge=1, le=131072)
    activation: Activation = "relu"
    gated: bool = True


class ModuleHeads(BaseModel):
    """Number of heads of each attention module, by layer, for models whose modules differ: see docs/EXPLAIN.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encoder_self: tuple[int, ...]
    decoder_self: tuple[int, ...]
    decoder_cross: tuple[int, ...]


RopeScaling = Annotated[LinearScaling | Llama3Scaling, Field(discriminator="kind")]


class ModelConfig(BaseModel):
    """Shape and options of the network. Raises pydantic.ValidationError naming the wrong field.

    Lengths are in tokens and include begin and end tokens. head_dim=None means d_model / num_heads. num_heads is the
    number of heads of every attention module, with module_heads only their upper limit.
    attention_scale=None means 1 / sqrt(head_dim) (section 3.2.1 of the paper); T5 uses 1. Section numbers refer to
    Vaswani et al. 2017.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: Architecture = "encoder-decoder"
    vocab_size: int = Field(ge=4, le=1_000_000)
    source_vocab_size: int | None = Field(
        default=None, ge=4, le=1_000_000, description="Rows of a separate encoder embedding; None: vocab_size."
    )
    d_model: int = Field(ge=8, le=16384)
    encoder_layers: int = Field(ge=0, le=128)
    decoder_layers: int = Field(ge=0, le=128)
    num_heads: int = Field(ge=1, le=256)
    module_heads: ModuleHeads | None = Field(default=None, description="Heads of each module; None: num_heads.")
    head_dim: int | None = Field(default=None, ge=1, le=1024)
    d_ff: int = Field(ge=1, le=131072)
    norm: Norm = "layernorm"
    norm_placement: NormPlacement = "post"
    post_norms: bool = Field(default=False, description="A norm also after each sublayer, before the sum (Gemma 2).")
    decoder_self: DecoderSelf = Field(
        default="attention",
        description="How a target token reads those before it; ssru: Kim et al. 2019, section 3.2; average: see below.",
    )
    average: AverageConfig | None = Field(
        default=None, description="Parts after the average, with decoder_self='average'; None: as in the paper."
    )
    residual: bool = Field(default=True, description="Residual connections (section 3.1); False only for experiments.")
    norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    activation: Activation = "relu"
    gated: bool = Field(default=False, description="Gated feed-forward: act(x W) * (x V), Shazeer 2020.")
    positions: Positions = "sinusoidal"
    sinusoids: Sinusoids = Field(default="interleaved", description="Layout of sinusoidal tables, see positions.py.")
    positions_offset: int = Field(
        default=0, ge=0, le=1024, description="Row of the position table for the first token."
    )
    max_source_len: int = Field(default=256, ge=1, le=65536)
    max_target_len: int = Field(default=256, ge=1, le=65536)
    relative_buckets: int = Field(default=32, ge=4, le=1024)
    relative_max_distance: int = Field(default=128, ge=2, le=65536)
    rope_theta: float = Field(default=10000.0, gt=1)
    rope_scaling: RopeScaling | None = Field(default=None, description="Scaling of rotary angles for longer texts.")
    tie_source_target: bool = Field(default=True, description="Encoder and decoder share one embedding.")
    tie_output: bool = Field(default=True, description="The output projection is the target embedding, transposed.")
    output_bias: bool = Field(default=False, description="A bias on the logits (Marian, BART).")
    scale_embeddings: bool = Field(default=True, description="Multiply embeddings by sqrt(d_model), section 3.4.")
    embedding_norm: bool = Field(default=False, description="A norm after embeddings and positions (BART).")
    token_types: int = Field(default=0, ge=0, le=16, description="Rows of the encoder's token type table (BERT).")
    embedding_width: int | None = Field(
        default=None, ge=1, le=16384, description="Embedding width, projected to d_model; None: d_model (ALBERT)."
    )
    share_layers: bool = Field(default=False, description="All layers of a stack share one set of weights (ALBERT).")
    attention_scale: float | None = Field(default=None, gt=0)
    attention_cap: float | None = Field(default=None, gt=0, description="Limit of scores, cap * tanh(score / cap).")
    output_cap: float | None = Field(default=None, gt=0, description="Limit of logits, cap * tanh(logit / cap).")
    bias: bool = Field(default=True, description="Biases in the linear layers of attention and feed-forward.")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="On embeddings and sublayer outputs, section 5.4.")
    activation_dropout: bool = Field(default=False, description="Dropout also inside the feed-forward.")
    disentangled: Disentangled | None = Field(default=None, description="Disentangled attention (DeBERTa).")
    heads: tuple[HeadConfig, ...] = Field(default=(), description="Heads of an encoder-only model.")
    embedding: EmbeddingConfig | None = Field(default=None, description="Declared vector of a text, for Embed.")
    pad_id: int = Field(default=0, ge=0)
    bos_id: int = Field(default=1, ge=0, description="First decoder input.")
    eos_id: int = Field(default=2, ge=0)
    unk_id: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}; set head_dim or change one of them"
            )
        for side, layers in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            wanted = side in self.architecture
            if wanted != (layers > 0):
                raise ValueError(f"{side}_layers={layers} does not fit architecture={self.architecture!r}")
        if self.source_vocab_size not in (None, self.vocab_size) and (
            self.tie_source_target or self.architecture != "encoder-decoder"
        ):
            raise ValueError(
                f"source_vocab_size={self.source_vocab_size} differs from vocab_size={self.vocab_size}; it needs "
                "architecture='encoder-decoder' and tie_source_target=False"
            )
        tasks = [head.task for head in self.heads]
        if len(tasks) != len(set(tasks)) or (tasks and self.architecture != "encoder"):
            raise ValueError(
                f"heads={tasks} do not fit architecture={self.architecture!r}: "
                "at most one head for each task, and only with architecture='encoder'"
            )
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} must be below vocab_size={self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _check_encoder(self) -> Self:
        for name in ("token_types", "embedding_width", "share_layers", "disentangled", "embedding"):
            if getattr(self, name) and self.architecture != "encoder":
                raise ValueError(f"{name}={getattr(self, name)} does not fit architecture={self.architecture!r}")
        for head in self.heads:
            width = self.head_input_width(head)
            if head.task == "embed" and width != self.d_model * len(self.embedding.poolings if self.embedding else ()):
                raise ValueError(f"heads: embed reads {width} numbers, which is not the width of embedding.poolings")
            width = head.transform_width or self.d_model
            if head.tied and width != self.resolved_embedding_width:
                raise ValueError(
                    f"heads: {head.task} is tied to embeddings of width {self.resolved_embedding_width}, "
                    f"but its input has width {width}"
                )
        return self

    @model_validator(mode="after")
    def _check_decoder_self(self) -> Self:
        if self.average is not None and self.decoder_self != "average":
            raise ValueError(f"average does not fit decoder_self={self.decoder_self!r}")
        if self.decoder_self != "attention":
            if self.architecture != "encoder-decoder":
                raise ValueError(f"decoder_self={self.decoder_self!r} does not fit architecture={self.architecture!r}")
            if self.positions not in ("sinusoidal", "learned", "none"):
                raise ValueError(f"decoder_self={self.decoder_self!r} does not fit positions={self.positions!r}")
            if self.module_heads is not None:
                raise ValueError(f"decoder_self={self.decoder_self!r} does not fit module_heads")
            # A block of the cache stores two states of a layer: 64 bytes for each number of a key at least.
            if 8 * self.attention_width < self.d_model:
                raise ValueError(
                    f"decoder_self={self.decoder_self!r} needs num_heads * head_dim of at least d_model / 8 = "
                    f"{self.d_model / 8:g}, not {self.attention_width}"
                )
        return self

    @model_validator(mode="after")
    def _check_gemma(self) -> Self:
        if self.post_norms and (self.norm_placement != "pre" or self.norm == "none"):
            raise ValueError(
                f"post_norms=True does not fit norm={self.norm!r}, norm_placement={self.norm_placement!r}; it needs a "
                "norm before each sublayer too"
            )
        if self.attention_cap is not None and self.disentangled is not None:
            raise ValueError(f"attention_cap={self.attention_cap} does not fit disentangled attention")
        if self.output_cap is not None and self.architecture == "encoder":
            raise ValueError(f"output_cap={self.output_cap} does not fit architecture={self.architecture!r}")
        return self

    @model_validator(mode="after")
    def _check_module_heads(self) -> Self:
        if self.module_heads is None:
            return self
        if self.architecture != "encoder-decoder":
            raise ValueError(f"module_heads does not fit architecture={self.architecture!r}; it needs encoder-decoder")
        if self.positions in ("t5_relative", "alibi"):
            raise ValueError(
                f"module_heads does not fit positions={self.positions!r}: all layers share one bias for num_heads heads"
            )
        for name, heads in self.module_heads:
            stack = f"{name.split('_')[0]}_layers"
            layers: int = getattr(self, stack)
            if len(heads) != layers or not all(1 <= count <= self.num_heads for count in heads):
                raise ValueError(
                    f"module_heads.{name}={list(heads)} must have {layers} numbers ({stack}), each from 1 to "
                    f"num_heads={self.num_heads}"
                )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        if self.positions == "rope" and self.resolved_head_dim % 2:
            raise ValueError(f"head_dim={self.resolved_head_dim} must be even for rotary positions")
        if self.positions != "rope" and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling={self.rope_scaling.kind!r} does not fit positions={self.positions!r}")
        if self.positions == "t5_relative" and self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance={self.relative_max_distance} must be above half of "
                f"relative_buckets={self.relative_buckets}: smaller distances have one bucket each"
            )
        if self.positions == "sinusoidal" and self.resolved_embedding_width % 2:
            name = "d_model" if self.embedding_width is None else "embedding_width"
            raise ValueError(f"{name}={self.resolved_embedding_width} must be even for sinusoidal positions")
        if self.positions != "sinusoidal" and self.sinusoids != "interleaved":
            raise ValueError(f"sinusoids={self.sinusoids!r} does not fit positions={self.positions!r}")
        if self.positions not in ("sinusoidal", "learned") and self.positions_offset:
            raise ValueError(f"positions_offset={self.positions_offset} does not fit positions={self.positions!r}")
        return self

    def head_input_width(self, head: HeadConfig) -> int:
        """Return the number of inputs of a head."""
        return head.input_width or self.d_model

    @property
    def resolved_head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def resolved_average(self) -> AverageConfig:
        """Parts of average attention; by default both gates and a feed-forward like those of other sublayers."""
        return self.average or AverageConfig(d_ff=self.d_ff, activation=self.activation)

    @property
    def resolved_module_heads(self) -> ModuleHeads:
        """Number of heads of each attention module, by layer; of a missing module for each layer of its stack."""
        encoder, decoder = (self.num_heads,) * self.encoder_layers, (self.num_heads,) * self.decoder_layers
        return self.module_heads or ModuleHeads(encoder_self=encoder, decoder_self=decoder, decoder_cross=decoder)

    @property
    def cache_heads(self) -> int:
        """Number of heads of every layer in the pool of caches: the most that a module of the decoder has."""
        heads = self.resolved_module_heads
        return max((*heads.decoder_self, *heads.decoder_cross, 1))

    @property
    def resolved_attention_scale(self) -> float:
        """Factor on query-key products. Each term of a disentangled score reduces it (He et al. 2021, section 3.1)."""
        kind = self.disentangled
        terms = 1 + (kind.content_to_position + kind.position_to_content if kind is not None else 0)
        return self.attention_scale or (self.resolved_head_dim * terms) ** -0.5

    @property
    def resolved_embedding_width(self) -> int:
        """Width of token embeddings, of absolute positions and of the norm after them."""
        return self.embedding_width or self.d_model

    @property
    def resolved_source_vocab_size(self) -> int:
        """Number of source token ids; every source id is below it."""
        return self.source_vocab_size or self.vocab_size

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that the model has: encoder, decoder or both, in execution order."""
        counts: tuple[tuple[Part, int], ...] = (("encoder", self.encoder_layers), ("decoder", self.decoder_layers))
        return tuple(part for part, layers in counts if layers)

    @property
    def longest_cached(self) -> tuple[int, int]:
        """Maximum number of cached source and target tokens of one sequence; 0 for a part that the model lacks."""
        if not self.decoder_layers:
            return 0, 0
        return self.max_source_len if self.encoder_layers else 0, self.max_target_len

    @property
    def attention_width(self) -> int:
        """Width of all heads together, num_heads x head_dim; it differs from d_model in some T5 checkpoints."""
        return self.num_heads * self.resolved_head_dim


def preset(name: str, **overrides: object) -> ModelConfig:
    """Return a named configuration, with fields replaced by `overrides`.

    `base` and `big` are the models of the paper's table 3 (37k shared vocabulary); `tiny` is for tests. `nllb` has the
    shape of NLLB-200's distilled model of 600 million weights (Costa-jussa et al. 2022). `bert-base` and `bert-large`
    are the uncased models of Devlin et al. 2019 (section 3) with the pooler, without other heads.
    Raises ValueError with the list of known presets.
    """
    presets: dict[str, dict[str, object]] = {
        "base": dict(vocab_size=37000, d_model=512, encoder_layers=6, decoder_layers=6, num_heads=8, d_ff=2048),
        "big": dict(
            vocab_size=37000, d_model=1024, encoder_layers=6, decoder_layers=6, num_heads=16, d_ff=4096, dropout=0.3
        ),
        "nllb": dict(
            vocab_size=256_206, d_model=1024, encoder_layers=12, decoder_layers=12, num_heads=16, d_ff=4096,
            norm_placement="pre",
        ),
        "tiny": dict(
            vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=64, dropout=0.0,
            max_source_len=64, max_target_len=64,
        ),
        "bert-base": _bert(d_model=768, layers=12, num_heads=12),
        "bert-large": _bert(d_model=1024, layers=24, num_heads=16),
    }  # fmt: skip
    if name not in presets:
        raise ValueError(f"preset={name!r} is unknown; choose from {', '.join(presets)}")
    return ModelConfig.model_validate({**presets[name], **overrides})


def _bert(*, d_model: int, layers: int, num_heads: int) -> dict[str, object]:
    """Return the fields of BERT's published uncased models, which differ in these three numbers only."""
    pooler = dict(task="pool", transform_width=d_model, activation="tanh")
    return dict(
        architecture="encoder", vocab_size=30522, d_model=d_model, encoder_layers=layers, decoder_layers=0,
        num_heads=num_heads, d_ff=4 * d_model, activation="gelu", norm_placement="post", norm_eps=1e-12,
        positions="learned", max_source_len=512, token_types=2, embedding_norm=True, scale_embeddings=False,
        heads=[pooler], pad_id=0, unk_id=100, bos_id=101, eos_id=102,
    )  # fmt: skip
