"""Upstream's layers from fewer kernels, and configs with faster attribute access.

`replace_layers` replaces the forward of norms, attention and MLP blocks; upstream's model and layer forwards stay and
call these, with the masks and caches that the graphs pass in. The results are the same function of the same weights. In
bfloat16 the layer norms round once where upstream's round twice; the norms of q and k round as upstream's.

Shapes: B rows, L positions, S cache length, D head dimension, Q query heads, KV key-value heads, G = Q / KV.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from cudagraph_talker import round_up

LONGEST_EFFICIENT = 512  # positions; for longer prompts cuDNN's attention is faster


def bypass_config_getattr(*configs) -> None:
    """Skip transformers' __getattribute__, which looks up every attribute in `attribute_map` first.

    Upstream reads about 2,000 attributes per prompt, which is most of the time a prompt takes. Where `attribute_map` is
    empty nothing changes but the speed. Only these objects are affected. They pickle as their original class.
    """
    for config in configs:
        original = type(config)
        if config.attribute_map or original.__getattribute__ is object.__getattribute__:
            continue
        methods = {
            "__getattribute__": object.__getattribute__,
            "__reduce_ex__": lambda config, protocol: (object.__new__, (type(config).__base__,), vars(config)),
        }
        config.__class__ = type(original.__name__, (original,), methods)


def replace_layers(talker, max_seq_len: int) -> list[torch.Tensor]:
    """Replace the layers' forwards of upstream's talker and its code predictor, in place.

    The three rows of the talker's multimodal RoPE (time, height, width) are equal in speech, so the predictor's plain
    RoPE serves both. Returns the new tensors; keep them for as long as a captured graph may read them.
    """
    # One table for all codes, made before the megakernel keeps the tables' addresses.
    concatenate(*talker.code_predictor.get_input_embeddings())
    keepalive = []
    rotary = type(talker.code_predictor.model.rotary_emb)
    for model in (talker.model, talker.code_predictor.model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(
                    F.rms_norm,
                    normalized_shape=module.weight.shape,
                    weight=module.weight,
                    eps=module.variance_epsilon,
                )
        for layer in model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            qkv_weight = concatenate(attn.q_proj, attn.k_proj, attn.v_proj)
            gate_up_weight = concatenate(mlp.gate_proj, mlp.up_proj)
            q_heads = attn.q_proj.out_features // attn.head_dim
            kv_heads = attn.k_proj.out_features // attn.head_dim
            qk_norm = torch.cat(  # (Q + KV, D)
                [attn.q_norm.weight.expand(q_heads, -1), attn.k_norm.weight.expand(kv_heads, -1)]
            )
            keepalive.append(qk_norm)
            attn.forward = partial(fused_attention, attn, qkv_weight, qk_norm)
            mlp.forward = partial(feed_forward, mlp, gate_up_weight)

        like = torch.empty(0, dtype=model.dtype, device=model.device)
        positions = torch.arange(round_up(max_seq_len), device=model.device)
        cos, sin = rotary.forward(model.rotary_emb, like, positions[None])
        sin[..., : sin.shape[-1] // 2] *= -1  # `fused_attention` swaps the halves and negates neither
        keepalive += [cos, sin]
        model.rotary_emb.forward = partial(lookup_rope, cos[0], sin[0])
    return keepalive


def concatenate(*modules: nn.Linear | nn.Embedding) -> torch.Tensor:
    """One weight for several projections of the same input, or tables. Their own weights become views of it."""
    assert all(getattr(module, "bias", None) is None for module in modules)
    weights = [module.weight.data for module in modules]
    sizes = [len(weight) for weight in weights]
    shared_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if shared_storage and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in zip(weights, weights[1:])):
        return weights[0].as_strided((sum(sizes), weights[0].shape[1]), weights[0].stride())  # done before
    joined = torch.cat(weights)
    for module, view in zip(modules, joined.split(sizes)):
        module.weight.data = view
    return joined


def lookup_rope(cos: torch.Tensor, sin: torch.Tensor, _, position_ids: torch.Tensor) -> list[torch.Tensor]:
    """Stands in for the rotary embedding: rows of two tables. -> cos and sin, (B, L, 1, D)"""
    if position_ids.dim() == 3:  # multimodal RoPE passes the same positions three times
        position_ids = position_ids[0]
    return [F.embedding(position_ids, table)[:, :, None] for table in (cos, sin)]


def rope_tables(model, length: int) -> list[torch.Tensor]:
    """What `model.rotary_emb` looks up for the positions below `length`: cos and sin, length * D elements each."""
    with model.device:
        like, positions = torch.empty(0, dtype=model.dtype), torch.arange(length)
    return [table.contiguous() for table in model.rotary_emb(like, positions[None])]


def fused_attention(
    attn, qkv_weight, qk_norm, hidden_states, position_embeddings, attention_mask, past_key_values, cache_position, **_
) -> tuple[torch.Tensor, None]:
    """One projection for Q, K and V; norm and RoPE of Q and K together; K and V read once per group of query heads.

    The query heads of a group become rows of one head, so that SDPA needs no repeated keys and values.
    """
    batch, length, _ = hidden_states.shape
    qk_heads, head_dim = qk_norm.shape
    kv_heads = attn.k_proj.out_features // head_dim
    cos, sin = position_embeddings
    heads = F.linear(hidden_states, qkv_weight).view(batch, length, qk_heads + kv_heads, head_dim)
    qk = F.rms_norm(heads[:, :, :qk_heads], (head_dim,), eps=attn.q_norm.variance_epsilon) * qk_norm
    qk = qk * cos + qk.roll(head_dim // 2, -1) * sin
    query = qk[:, :, :-kv_heads].transpose(1, 2)  # (B, Q, L, D)
    key = qk[:, :, -kv_heads:].transpose(1, 2)  # (B, KV, L, D)
    value = heads[:, :, qk_heads:].transpose(1, 2)
    key, value = past_key_values.update(key, value, attn.layer_idx, {"cache_position": cache_position})

    query = query.reshape(batch, kv_heads, -1, head_dim)  # (B, KV, G * L, D)
    groups = query.shape[2] // length
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, groups, 1)
    is_prompt = 1 < length <= LONGEST_EFFICIENT
    attend = efficient_attention if is_prompt and is_hopper(query.device) else F.scaled_dot_product_attention
    out = attend(query, key, value, attn_mask=mask, scale=attn.scaling)
    out = out.reshape(batch, -1, length, head_dim).transpose(1, 2)  # (B, L, Q, D)
    return attn.o_proj(out.reshape(batch, length, -1)), None


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def efficient_attention(query, key, value, attn_mask: torch.Tensor, scale: float) -> torch.Tensor:
    """SDPA by its memory-efficient kernel. On Hopper torch would choose cuDNN, which takes 80 ms to plan for each new
    shape and is faster for long prompts only."""
    mask = attn_mask.expand(*query.shape[:-1], -1)  # (B, heads, L, S)
    with_log_sum = False
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, with_log_sum, scale=scale)[0]


def feed_forward(mlp, gate_up_weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up_weight).chunk(2, -1)
    return mlp.down_proj(mlp.act_fn(gate) * up)
