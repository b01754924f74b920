"""What build b11434 hard-codes per architecture about windows, state and caches.

A GGUF header does not carry these facts: they are properties of the server's graph code.
"""

from __future__ import annotations

from typing import Final

MEASURED: Final = frozenset(
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3moe",
        "phi3",
        "glm4",
        "glm4moe",
        "seed_oss",
        "granite",
        "deci",
        "mistral3",
        "minimax-m2",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4-assistant",
        "gpt-oss",
        "cohere2",
        "llama4",
        "olmo2",
        "exaone4",
        "exaone-moe",
        "smallthinker",
        "afmoe",
        "mimo2",
        "step35",
        "deepseek2",
        "deepseek32",
        "kimi-linear",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "falcon-h1",
        "granitehybrid",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "jamba",
        "mamba",
        "mamba2",
        "rwkv7",
        "bert",
    ]
)
"""Architectures whose allocations were measured and are reproduced."""

PERIODS: Final = {
    "gemma2": 2,
    "gpt-oss": 2,
    "cohere2": 4,
    "llama4": 4,
    "olmo2": 4,
    "exaone4": 4,
    "exaone-moe": 4,
    "afmoe": 4,
    "mellum": 4,
    "muse-glimmer": 4,
    "gemma3n": 5,
    "gemma3": 6,
    "gemma-embedding": 6,
    "plamo3": 8,
}
"""Layer ``il`` has a window when ``il % period`` is not the last of its period."""

DENSE_FIRST: Final = {"smallthinker": 4, "cohere2moe": 4, "laguna": 4, "modern-bert": 3}
"""Layer ``il`` has a window when ``il % period`` is not zero."""

ALWAYS_WINDOW: Final = {"smallthinker": 4096}
"""The window whatever the header says."""

DEFAULT_WINDOW: Final = {"gemma2": 4096, "exaone-moe": 128}
"""The window when the header names none."""

LLAMA4_CHUNK: Final = 8192
EXAONE4_WINDOWED_LAYERS: Final = 64
GEMMA3N_KV_LAYERS: Final = 20

PATTERN_ONLY: Final = frozenset(
    {"gemma4", "mimo2", "step35", "granite-swa", "maple", "spark2-5", "dots3note"}
)
"""Architectures whose header must carry the mask."""

WINDOW_IGNORED: Final = frozenset(
    {
        "llama",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2moe",
        "qwen2vl",
        "qwen3",
        "qwen3moe",
        "qwen3vl",
        "qwen3vlmoe",
        "mistral3",
        "mistral4",
        "glm4",
        "glm4moe",
        "starcoder2",
        "deepseek2",
        "deepseek32",
        "glm-dsa",
    }
)
"""Architectures that keep every cell although a header may declare a window."""

ALL_WINDOWED: Final = frozenset({"lfm2", "lfm2moe"})
"""Every attention layer has the window when the header declares one."""

NO_MEMORY: Final = frozenset(
    {
        "bert",
        "nomic-bert",
        "nomic-bert-moe",
        "jina-bert-v2",
        "jina-bert-v3",
        "neo-bert",
        "eurobert",
        "modern-bert",
        "gemma-embedding",
        "wavtokenizer-dec",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
    }
)
"""Architectures without any cache: each batch is evaluated on its own."""

INDEXED: Final = frozenset({"deepseek32", "glm-dsa"})
"""Sparse attention with a second, keys-only indexer cache."""

INTERVAL: Final = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
"""Hybrids in which one layer of each ``full_attention_interval`` (default 4) is attention."""

FULL_ATTENTION_INTERVAL: Final = 4

ZERO_HEADS_RECUR: Final = frozenset(
    {"granitehybrid", "jamba", "lfm2", "lfm2moe", "kimi-linear", "kimi-k3", "plamo2", "bailingmoe3"}
)
"""Hybrids in which a layer without KV heads is recurrent."""

FEED_FORWARD_APART: Final = frozenset({"nemotron_h", "nemotron_h_moe"})
"""Hybrids whose layers are one of: attention, recurrent, feed-forward."""

BOTH_IN_EACH: Final = frozenset({"falcon-h1"})
"""Hybrids in which each layer has attention and state."""

ALL_RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7"})

NEXTN_IN_TRUNK: Final = FEED_FORWARD_APART
"""The next-token layer counts as a layer of the target's own cache."""

ROLLS_BACK: Final = frozenset(
    {
        "qwen35",
        "qwen35moe",
        "qwen4exp",
        "nemotron_h",
        "nemotron_h_moe",
        "lfm2",
        "lfm2moe",
        "deepseek4",
        "kimi-k3",
        "glm5-next",
        "bailingmoe3",
    }
)
"""Architectures that keep one snapshot of the state for each drafted token."""

SHARES_TARGET_CACHE: Final = frozenset({"gemma4-assistant"})
"""Drafters that only view the target's cache."""
