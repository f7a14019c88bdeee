"""How many rows fit into the GPU's memory once the weights are loaded."""

MAX_ROWS = 64
ROWS_ON_A_CPU = 4
GIB = 2**30
OTHER_BYTES_PER_ROW = 8 * 2**20  # state of the codec and small tensors: 5 MiB on an H200
OVERHEAD = GIB * 3 // 2  # graphs, workspaces, kernels, prompts
MARGIN = 0.05  # share of the free memory that is left for reference recordings and other programs


def bytes_per_row(talker: dict, max_seq_len: int, element_size: int) -> int:
    """Memory of one row: keys and values, embeddings of the text, codes. talker: a model's talker_config"""
    head_dim = talker.get("head_dim") or talker["hidden_size"] // talker["num_attention_heads"]
    cache = 2 * talker["num_hidden_layers"] * talker["num_key_value_heads"] * head_dim * element_size
    text = talker["hidden_size"] * element_size
    codes = 8 * talker["num_code_groups"]
    return max_seq_len * (cache + text + codes) + OTHER_BYTES_PER_ROW


def rows_that_fit(free: int, per_row: int, models: int = 1) -> int:
    """How many rows a model may have, which shares the free memory with `models` - 1 others."""
    share = int(free * (1 - MARGIN)) // models - OVERHEAD
    rows = share // per_row
    if rows < 1:
        missing = models * (OVERHEAD + per_row) / (1 - MARGIN) - free
        raise ValueError(
            f"the GPU has {free / GIB:.1f} GiB free with the weights loaded, {missing / GIB:.1f} GiB too little for "
            "one listener: use a smaller model or --max-seq-len, or free some"
        )
    return min(rows, MAX_ROWS)
