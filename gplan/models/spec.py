"""What a model is, read from its Hugging Face config: the architectures that the one decoder covers, and no other.

What the decoder would compute wrongly is refused here, by name, before anything is loaded. Defaults of keys that a
config leaves out are those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from gplan.errors import GplanError, UnsupportedError
from gplan.models.config import ConfigReader, Json
from gplan.models.rope import RopeSpec, check_rope_length, read_rope

DTYPES = ("float32", "bfloat16", "float16")
CONFIG = "config.json"
FULL_HINT = "Every layer must attend to all tokens before it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture differs from the others.

    Attributes:
        bias_key: the config key that gives attention biases to all four projections; empty where there is none.
        always_qkv_bias: q, k and v have biases whatever the config says.
        mlp_bias_key: the config key that gives the MLP biases; empty where there is none.
        default_head_dim: where the config states none; 0 for hidden_size / heads.
        default_window: the sliding window of a config that states none; 0 for none.
        window_flag: the config key without which a stated window does nothing; empty where a stated window is live.
        has_window: whether the architecture looks at a sliding window at all.
        kv_heads_default: whether a config may leave out num_key_value_heads and mean num_attention_heads.
    """

    qk_norm: bool = False
    bias_key: str = ""
    always_qkv_bias: bool = False
    mlp_bias_key: str = ""
    default_head_dim: int = 0
    default_window: int = 0
    window_flag: str = ""
    has_window: bool = True
    kv_heads_default: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(
        bias_key="attention_bias", mlp_bias_key="mlp_bias", has_window=False, kv_heads_default=True
    ),
    "MistralForCausalLM": Family(default_window=4096),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True, window_flag="use_sliding_window"),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, bias_key="attention_bias", default_head_dim=128, window_flag="use_sliding_window"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model with grouped-query attention, RMS norms and a SiLU-gated MLP.

    Attributes:
        head_dim: of each head; the heads together need not be as wide as the hidden size.
        max_position: tokens of one request at most.
        qkv_bias, o_bias, mlp_bias: which projections have biases (mlp: gate, up and down).
        qk_norm: whether each head's queries and keys are normed.
        tied_head: whether the vocabulary head is the embedding.
        dtype: of the checkpoint: `float32`, `bfloat16` or `float16`.
        eos_token_ids: tokens that end an answer.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_qo_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def from_config(
        config: Json,
        *,
        generation_config: Json | None = None,
        tensor_dtype: str | None = None,
        max_len: int | None = None,
    ) -> ModelSpec:
        """Reads a config.

        Args:
            generation_config: of generation_config.json, whose end-of-sequence tokens go before the config's.
            tensor_dtype: dtype of the checkpoint's tensors, for a config that states none.
            max_len: tokens of one request that are asked for; None for as many as the model was made for. A sliding
                window no shorter than this is never felt.

        Raises:
            UnsupportedError: what the decoder does not cover, by name.
            GplanError: a missing or malformed value, with its key.
        """
        reader = ConfigReader(config, CONFIG)
        architecture = _architecture(reader)
        family = FAMILIES[architecture]
        _refuse_quantised(reader)
        _refuse_activation(reader)
        heads, kv_heads = _heads(reader, family)
        max_position, rope = _positions(reader)
        window = _window(reader, family, max_len or max_position)
        spec = ModelSpec(
            architecture=architecture,
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=reader.integer("num_hidden_layers"),
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(reader, family, heads),
            vocab_size=reader.integer("vocab_size"),
            max_position=min(max_position, window or max_position),
            norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=family.always_qkv_bias or _has_bias(reader, family.bias_key),
            o_bias=_has_bias(reader, family.bias_key),
            mlp_bias=_has_bias(reader, family.mlp_bias_key),
            qk_norm=family.qk_norm,
            tied_head=reader.flag("tie_word_embeddings", False),
            dtype=_dtype(reader, tensor_dtype),
            eos_token_ids=_eos_token_ids(reader, generation_config),
        )
        if max_len is not None:
            spec.check_max_len(max_len)
        return spec

    def check_max_len(self, max_len: int) -> None:
        """Refuses requests longer than the model can follow.

        Raises:
            UnsupportedError
        """
        check_rope_length(self.rope, max_len)
        if max_len > self.max_position:
            raise UnsupportedError(
                f"{max_len} tokens: the model was made for {self.max_position}",
                f"Use --max-len {self.max_position} or less.",
            )


def _architecture(reader: ConfigReader) -> str:
    names = reader.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise GplanError(
            f"{CONFIG}: architectures is {names!r}, expected a list with one name",
            "Only checkpoints in the Hugging Face layout can be read.",
        )
    if names[0] not in FAMILIES:
        raise UnsupportedError(f"architecture {names[0]} is not supported", f"gplan runs {', '.join(FAMILIES)}.")
    return names[0]


def _refuse_quantised(reader: ConfigReader) -> None:
    for key in ("quantization_config", "compression_config"):
        section = reader.section(key)
        if section is not None:
            method = section.values.get("quant_method", "of an unnamed method")
            raise UnsupportedError(
                f"{CONFIG}: {key}: quantised checkpoints ({method}) are not supported",
                "Use the checkpoint in float32, bfloat16 or float16.",
            )


def _refuse_activation(reader: ConfigReader) -> None:
    activation = reader.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(f"{CONFIG}: hidden_act {activation!r} is not supported", "gplan runs silu.")


def _heads(reader: ConfigReader, family: Family) -> tuple[int, int]:
    heads = reader.integer("num_attention_heads")
    key = "num_key_value_heads"
    means_all = family.kv_heads_default or key in reader.values
    kv_heads = reader.integer(key, heads if means_all else None)
    if heads % kv_heads:
        raise GplanError(
            f"{CONFIG}: num_attention_heads {heads} is no multiple of {key} {kv_heads}",
            "Correct the checkpoint's config.",
        )
    return heads, kv_heads


def _head_dim(reader: ConfigReader, family: Family, heads: int) -> int:
    hidden = reader.integer("hidden_size")
    if reader.has("head_dim") or family.default_head_dim:
        head_dim = reader.integer("head_dim", family.default_head_dim)
    elif hidden % heads:
        raise GplanError(
            f"{CONFIG}: hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing",
            "Correct the checkpoint's config.",
        )
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise UnsupportedError(f"{CONFIG}: head_dim {head_dim} is odd", "Rotary embedding needs an even one.")
    return head_dim


def _positions(reader: ConfigReader) -> tuple[int, RopeSpec]:
    """The longest request, and the rotation. A yarn config may state the length before stretching."""
    stated = reader.integer("max_position_embeddings")
    rope = read_rope(reader, stated)
    stretched = int(rope.original_max * rope.factor) if rope.kind == "yarn" else 0
    return max(stated, stretched), rope


def _window(reader: ConfigReader, family: Family, max_len: int) -> int:
    """The sliding window that no request may outgrow; 0 for none.

    Raises:
        UnsupportedError: one that requests of `max_len` tokens would feel.
    """
    _refuse_mixed_layers(reader)
    if not family.has_window:
        return 0
    if family.window_flag:
        if reader.flag(family.window_flag, False):
            raise UnsupportedError(f"{CONFIG}: {family.window_flag}: a live sliding window is not supported", FULL_HINT)
        return 0
    key = "sliding_window"
    if key in reader.values and not reader.has(key):
        return 0
    window = reader.integer(key, family.default_window)
    if window < max_len:
        raise UnsupportedError(
            f"{CONFIG}: {key} {window} is live for requests of {max_len} tokens, and not supported",
            f"Use --max-len {window} or less, where the window is never felt.",
        )
    return window


def _refuse_mixed_layers(reader: ConfigReader) -> None:
    kinds = reader.values.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list):
        raise GplanError(f"{CONFIG}: layer_types is {kinds!r}, expected a list", "Correct the checkpoint's config.")
    others = sorted({str(kind) for kind in kinds if kind != "full_attention"})
    if others:
        raise UnsupportedError(f"{CONFIG}: layer_types: {', '.join(others)} layers are not supported", FULL_HINT)


def _has_bias(reader: ConfigReader, key: str) -> bool:
    return bool(key) and reader.flag(key, False)


def _dtype(reader: ConfigReader, tensor_dtype: str | None) -> str:
    for key in ("dtype", "torch_dtype"):
        if reader.has(key):
            return _known_dtype(reader.text(key).removeprefix("torch."), f"{CONFIG}: {key}")
    if tensor_dtype is None:
        raise GplanError(f"{CONFIG}: dtype is missing", "Add torch_dtype to the checkpoint's config.")
    return _known_dtype(tensor_dtype, "tensors")


def _known_dtype(name: str, where: str) -> str:
    if name not in DTYPES:
        raise UnsupportedError(f"{where} {name!r} is not supported", f"gplan runs {', '.join(DTYPES)}.")
    return name


def _eos_token_ids(reader: ConfigReader, generation_config: Json | None) -> tuple[int, ...]:
    generation = ConfigReader(generation_config or {}, "generation_config.json")
    return generation.token_ids("eos_token_id") or reader.token_ids("eos_token_id")
