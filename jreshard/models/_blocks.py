"""The parts that layers are made of, with their logical axes."""

from typing import Any

from jreshard.models._weights import Block, Experts, Weight


def norm(size: int) -> Weight:
    """The scale of an RMS norm."""
    return Weight((size,), ("norm",))


def attention(
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qk_norm: bool = False,
    bias: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> Block:
    """Grouped-query attention.

    Args:
        embed: the width of the model.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: the width of each.
        qk_norm: queries and keys are normalised, by one scale for all heads.
        bias: the projections have biases.
        sinks: every head has a learned sink.
        gated: the query projection makes a gate of the output besides, head by head.
    """
    query_dim = 2 * head_dim if gated else head_dim
    out: dict[str, Any] = {
        "q": Weight((embed, heads, query_dim), ("embed", "heads", "head_dim")),
        "k": Weight((embed, kv_heads, head_dim), ("embed", "kv_heads", "head_dim")),
        "v": Weight((embed, kv_heads, head_dim), ("embed", "kv_heads", "head_dim")),
        "o": Weight((heads, head_dim, embed), ("heads", "head_dim", "embed")),
    }
    if qk_norm:
        out |= {"q_norm": norm(head_dim), "k_norm": norm(head_dim)}
    if bias:
        out |= {"q_bias": Weight((heads, head_dim), ("heads", "head_dim")), "o_bias": norm(embed)}
        out |= {f"{name}_bias": Weight((kv_heads, head_dim), ("kv_heads", "head_dim")) for name in "kv"}
    if sinks:
        out["sinks"] = Weight((heads,), ("heads",))
    return out


def latent_attention(
    embed: int, heads: int, *, q_lora: int, kv_lora: int, qk_nope_dim: int, qk_rope_dim: int, v_dim: int
) -> Block:
    """Multi-head latent attention: queries, and keys with values, are made from low-rank latents.

    The latents are whole on every tensor-parallel rank; the heads that are made from them are split.
    """
    return {
        "q_a": Weight((embed, q_lora), ("embed", "q_lora")),
        "q_a_norm": norm(q_lora),
        "q_b": Weight((q_lora, heads, qk_nope_dim + qk_rope_dim), ("q_lora", "heads", "head_dim")),
        "kv_a": Weight((embed, kv_lora + qk_rope_dim), ("embed", None)),
        "kv_a_norm": norm(kv_lora),
        "kv_b": Weight((kv_lora, heads, qk_nope_dim + v_dim), ("kv_lora", "heads", "head_dim")),
        "o": Weight((heads, v_dim, embed), ("heads", "head_dim", "embed")),
    }


def mlp(embed: int, width: int, *, gated: bool = True, embed_axis: str = "embed") -> Block:
    """A feed-forward layer: up, down, and a gate if `gated`."""
    out = {
        "up": Weight((embed, width), (embed_axis, "mlp")),
        "down": Weight((width, embed), ("mlp", embed_axis)),
    }
    return {"gate": out["up"], **out} if gated else out


def router(embed: int, experts: int, *, bias: bool = False) -> Block:
    """What chooses the experts; every rank needs the scores of all, so its experts are not split."""
    kernel = {"kernel": Weight((embed, experts), ("embed", None))}
    return {**kernel, "bias": Weight((experts,), (None,))} if bias else kernel


def biased_experts(embed: int, width: int, experts: int) -> Experts:
    """Experts with biases, whose gate and up projections are one array, column by column in turn."""
    return Experts(
        experts,
        {
            "gate_up": Weight((embed, 2 * width), ("embed", "mlp")),
            "gate_up_bias": Weight((2 * width,), ("mlp",)),
            "down": Weight((width, embed), ("mlp", "embed")),
            "down_bias": norm(embed),
        },
    )


def mamba2(embed: int, *, heads: int, head_dim: int, groups: int, state: int, conv: int) -> Block:
    """A Mamba-2 mixer.

    Checkpoints fuse the input projections z, x, B, C and dt into one matrix. Here they are apart, as they must be for
    tensor parallelism to split each of them by its heads or groups.
    """
    inner = ((heads, head_dim), ("ssm_heads", "head_dim"))
    shared = ((groups, state), ("ssm_groups", "ssm_state"))
    parts = {"x": inner, "B": shared, "C": shared}
    out: dict[str, Any] = {
        "z": Weight((embed, *inner[0]), ("embed", *inner[1])),
        "dt": Weight((embed, heads), ("embed", "ssm_heads")),
        "out": Weight((*inner[0], embed), (*inner[1], "embed")),
        "norm": Weight(*inner),
    }
    for name, (shape, axes) in parts.items():
        out[name] = Weight((embed, *shape), ("embed", *axes))
        out[f"conv_{name}"] = Weight((*shape, conv), (*axes, "conv"))
        out[f"conv_{name}_bias"] = Weight(shape, axes)
    return {**out, **{name: Weight((heads,), ("ssm_heads",)) for name in ("A_log", "D", "dt_bias")}}


def delta_net(embed: int, *, key_heads: int, value_heads: int, head_dim: int, conv: int) -> Block:
    """A gated delta-rule mixer (linear attention); queries and keys are shared by groups of value heads."""
    keys = ((key_heads, head_dim), ("ssm_groups", "head_dim"))
    values = ((value_heads, head_dim), ("ssm_heads", "head_dim"))
    out: dict[str, Any] = {
        "z": Weight((embed, *values[0]), ("embed", *values[1])),
        "out": Weight((*values[0], embed), (*values[1], "embed")),
        "norm": norm(head_dim),
    }
    for name, (shape, axes) in {"q": keys, "k": keys, "v": values}.items():
        out[name] = Weight((embed, *shape), ("embed", *axes))
        out[f"conv_{name}"] = Weight((*shape, conv), (*axes, "conv"))
    out |= {name: Weight((embed, value_heads), ("embed", "ssm_heads")) for name in ("a", "b")}
    return {**out, **{name: Weight((value_heads,), ("ssm_heads",)) for name in ("A_log", "dt_bias")}}
