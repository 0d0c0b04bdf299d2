"""The models by name, with their published figures.

All figures are those of the `config.json` in the public checkpoint that `source` names. Modules for multi-token
prediction, which serving may leave out, are not part of the models here, nor of the totals that their authors give.
"""

import difflib
from collections.abc import Callable
from functools import cache

from jreshard.models import _blocks as blocks
from jreshard.models._weights import Block, Experts, Model, Weight


def names() -> tuple[str, ...]:
    """The names of the models that there are shapes of, small ones first."""
    return tuple(_MODELS)


@cache
def model(name: str) -> Model:
    """The model called `name`; upper and lower case, `_` and `-` are the same.

    Raises:
        ValueError: there is no such model.
    """
    key = name.lower().replace("_", "-")
    if key not in _MODELS:
        near = difflib.get_close_matches(key, _MODELS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"there is no model {name!r}: {hint}the models are {', '.join(_MODELS)}")
    return _MODELS[key](key)


def _transformer(
    name: str, source: str, vocab: int, embed: int, layers: dict[str, Block], kinds: tuple[str, ...]
) -> Model:
    """A decoder whose input and output embeddings are two arrays."""
    first = {"embed": Weight((vocab, embed), ("vocab", "embed"))}
    last = {"final_norm": blocks.norm(embed), "lm_head": Weight((embed, vocab), ("embed", "vocab"))}
    return Model(name, source, first, layers, kinds, last)


def _layer(embed: int, mixer: Block, feed_forward: Block) -> Block:
    return {"mixer_norm": blocks.norm(embed), "mixer": mixer, "mlp_norm": blocks.norm(embed), "mlp": feed_forward}


def _llama(depth: int, embed: int, width: int, heads: int, size: str) -> Callable[[str], Model]:
    def build(name: str) -> Model:
        layer = _layer(embed, blocks.attention(embed, heads, 8, 128), blocks.mlp(embed, width))
        source = f"meta-llama/Llama-3.1-{size}; arXiv:2407.21783, table 3"
        return _transformer(name, source, 128256, embed, {"dense": layer}, ("dense",) * depth)

    return build


def _qwen3_32b(name: str) -> Model:
    attention = blocks.attention(5120, 64, 8, 128, qk_norm=True)
    layer = _layer(5120, attention, blocks.mlp(5120, 25600))
    source = "Qwen/Qwen3-32B; arXiv:2505.09388"
    return _transformer(name, source, 151936, 5120, {"dense": layer}, ("dense",) * 64)


def _qwen3_moe(depth: int, embed: int, width: int, heads: int, size: str) -> Callable[[str], Model]:
    def build(name: str) -> Model:
        attention = blocks.attention(embed, heads, 4, 128, qk_norm=True)
        feed_forward: Block = {
            "router": blocks.router(embed, 128),
            "experts": Experts(128, blocks.mlp(embed, width)),
        }
        layers = {"moe": _layer(embed, attention, feed_forward)}
        return _transformer(name, f"Qwen/Qwen3-{size}; arXiv:2505.09388", 151936, embed, layers, ("moe",) * depth)

    return build


def _deepseek(source: str, *, vocab: int, heads: int, experts: int, dense: int) -> Callable[[str], Model]:
    """DeepSeek-V3 and what was built on its architecture: 61 layers, the first ones dense."""

    def build(name: str) -> Model:
        embed, width = 7168, 2048
        attention = blocks.latent_attention(
            embed, heads, q_lora=1536, kv_lora=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128
        )
        feed_forward: Block = {
            "router": blocks.router(embed, experts, bias=True),
            "experts": Experts(experts, blocks.mlp(embed, width)),
            "shared": blocks.mlp(embed, width),
        }
        layers = {
            "dense": _layer(embed, attention, blocks.mlp(embed, 18432)),
            "moe": _layer(embed, attention, feed_forward),
        }
        return _transformer(name, source, vocab, embed, layers, ("dense",) * dense + ("moe",) * (61 - dense))

    return build


def _gpt_oss_120b(name: str) -> Model:
    embed, experts = 2880, 128
    feed_forward: Block = {
        "router": blocks.router(embed, experts, bias=True),
        "experts": blocks.biased_experts(embed, 2880, experts),
    }
    layer = _layer(embed, blocks.attention(embed, 64, 8, 64, bias=True, sinks=True), feed_forward)
    return _transformer(name, "openai/gpt-oss-120b; arXiv:2508.10925", 201088, embed, {"moe": layer}, ("moe",) * 36)


def _nemotron_3_ultra(name: str) -> Model:
    """Each layer is a Mamba-2 mixer, an attention, or a mixture of experts that work in a latent space."""
    embed, latent, experts = 8192, 2048, 512
    mixers: dict[str, Block] = {
        "mamba": blocks.mamba2(embed, heads=256, head_dim=64, groups=8, state=128, conv=4),
        "attention": blocks.attention(embed, 64, 2, 128),
        "moe": {
            "router": blocks.router(embed, experts, bias=True),
            "latent_in": Weight((embed, latent), ("embed", "moe_latent")),
            "experts": Experts(experts, blocks.mlp(latent, 5120, gated=False, embed_axis="moe_latent")),
            "latent_out": Weight((latent, embed), ("moe_latent", "embed")),
            "shared": blocks.mlp(embed, 10240, gated=False),
        },
    }
    layers: dict[str, Block] = {kind: {"norm": blocks.norm(embed), "mixer": mixer} for kind, mixer in mixers.items()}
    # layers_block_type of the config: M a Mamba-2 layer, E a mixture of experts, * an attention.
    short, long = "MEMEM*E", "MEMEMEM*E"
    pattern = 4 * (long + short + long) + "MEMEMEME"
    kinds = tuple({"M": "mamba", "E": "moe", "*": "attention"}[letter] for letter in pattern)
    source = "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16; arXiv:2606.15007"
    return _transformer(name, source, 131072, embed, layers, kinds)


def _qwen38_2t4(name: str) -> Model:
    """Three layers with a gated delta net, then one with gated attention; a mixture of experts in each."""
    embed, width, experts = 8192, 2048, 512
    feed_forward: Block = {
        "router": blocks.router(embed, experts),
        "experts": Experts(experts, blocks.mlp(embed, width)),
        "shared": blocks.mlp(embed, width),
        "shared_gate": Weight((embed, 1), ("embed", None)),
    }
    linear = blocks.delta_net(embed, key_heads=16, value_heads=128, head_dim=128, conv=4)
    attention = blocks.attention(embed, 64, 4, 256, qk_norm=True, gated=True)
    layers = {"linear": _layer(embed, linear, feed_forward), "attention": _layer(embed, attention, feed_forward)}
    kinds = ("linear", "linear", "linear", "attention") * 23
    return _transformer(name, "Qwen/Qwen3.8-2.4T-A95B", 248320, embed, layers, kinds)


_MODELS: dict[str, Callable[[str], Model]] = {
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, "8B"),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32, "30B-A3B"),
    "qwen3-32b": _qwen3_32b,
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, "70B"),
    "gpt-oss-120b": _gpt_oss_120b,
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64, "235B-A22B"),
    "llama-3.1-405b": _llama(126, 16384, 53248, 128, "405B"),
    "nemotron-3-ultra": _nemotron_3_ultra,
    "deepseek-v3": _deepseek(
        "deepseek-ai/DeepSeek-V3; arXiv:2412.19437", vocab=129280, heads=128, experts=256, dense=3
    ),
    "kimi-k2": _deepseek("moonshotai/Kimi-K2-Instruct; arXiv:2507.20534", vocab=163840, heads=64, experts=384, dense=1),
    "qwen3.8-2.4t-a95b": _qwen38_2t4,
}
