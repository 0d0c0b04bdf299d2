"""The weights of two models: shapes as published, one array a weight, experts stacked."""

Shapes = dict[str, tuple[int, ...]]


def llama_3_1_8b() -> Shapes:
    """Llama-3.1-8B: 291 leaves, 8.03e9 parameters."""
    hidden, ffn, vocab, kv = 4096, 14336, 128256, 1024
    shapes: Shapes = {"embed": (vocab, hidden), "lm_head": (hidden, vocab), "norm": (hidden,)}
    for i in range(32):
        shapes |= {
            f"{i}.q": (hidden, hidden),
            f"{i}.k": (hidden, kv),
            f"{i}.v": (hidden, kv),
            f"{i}.o": (hidden, hidden),
            f"{i}.gate": (hidden, ffn),
            f"{i}.up": (hidden, ffn),
            f"{i}.down": (ffn, hidden),
            f"{i}.norm1": (hidden,),
            f"{i}.norm2": (hidden,),
        }
    return shapes


def qwen3_30b_a3b() -> Shapes:
    """Qwen3-30B-A3B: 579 leaves, 3.05e10 parameters."""
    hidden, ffn, vocab, experts, q, kv, head = 2048, 768, 151936, 128, 4096, 512, 128
    shapes: Shapes = {"embed": (vocab, hidden), "lm_head": (hidden, vocab), "norm": (hidden,)}
    for i in range(48):
        shapes |= {
            f"{i}.q": (hidden, q),
            f"{i}.k": (hidden, kv),
            f"{i}.v": (hidden, kv),
            f"{i}.o": (q, hidden),
            f"{i}.q_norm": (head,),
            f"{i}.k_norm": (head,),
            f"{i}.router": (hidden, experts),
            f"{i}.gate": (experts, hidden, ffn),
            f"{i}.up": (experts, hidden, ffn),
            f"{i}.down": (experts, ffn, hidden),
            f"{i}.norm1": (hidden,),
            f"{i}.norm2": (hidden,),
        }
    return shapes
