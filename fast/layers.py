"""Parts for upstream's modules: the same function from fewer kernels, or in less of Python.

Upstream's model and layer forwards stay and call these, with the masks and caches that the graphs give them. Without
`use_fewer_kernels` everything works, slower. In bfloat16 the norms round once where upstream's round twice.
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def answer_directly(*configs):
    """transformers looks every attribute of a config up in a table of renamed ones first, and upstream asks for 2,000
    attributes a prompt, which is most of the time that it takes. Where that table is empty, these configs, and no
    others of their kind, do without."""
    for config in configs:
        if not config.attribute_map and type(config).__getattribute__ is not object.__getattribute__:
            kind = type(config)
            config.__class__ = type(kind.__name__, (kind,), {"__getattribute__": object.__getattribute__})


def use_fewer_kernels(talker, length):
    """Changes upstream's talker and its predictor in place, for positions up to `length`. The rows of the talker's
    multimodal RoPE, for time, height and width, are equal in speech: the predictor's plain RoPE serves both. Returns
    the tensors it makes, to keep for as long as a graph may read them."""
    made, rotary = [], type(talker.code_predictor.model.rotary_emb)
    for model in (talker.model, talker.code_predictor.model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight,
                                         eps=module.variance_epsilon)
        for layer in model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            qkv = stack(attn.q_proj, attn.k_proj, attn.v_proj)
            qk_norm = torch.cat([norm.weight.expand(len(proj.weight) // attn.head_dim, -1) for norm, proj in (
                (attn.q_norm, attn.q_proj), (attn.k_norm, attn.k_proj))])              # (Q + KV, D)
            made.append(qk_norm)
            attn.forward = partial(attention, attn, qkv, qk_norm)
            mlp.forward = partial(feed_forward, mlp, stack(mlp.gate_proj, mlp.up_proj))
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        cos, sin = rotary.forward(model.rotary_emb, like, torch.arange(length, device=model.device)[None])
        sin[..., :sin.shape[-1] // 2] *= -1                       # `attention` swaps the halves and negates neither
        made += [cos, sin]
        model.rotary_emb.forward = partial(look_up, cos[0], sin[0])
    return made


def use_constants(codec_decoder):
    """Codebooks divide their sums, activations take the exponentials of their parameters, and cuDNN lays the weights of
    convolutions out with the channels last, in every call: once will do."""
    for module in codec_decoder.modules():
        if hasattr(module, "embedding_sum"):
            table = module.embedding_sum / module.cluster_usage.clamp(min=module.epsilon)[:, None]
            module.decode = partial(F.embedding, weight=table)
        elif hasattr(module, "no_div_by_zero"):
            alpha, beta = (parameter.exp()[:, None] for parameter in (module.alpha, module.beta))      # (C, 1)
            module.forward = partial(snake, alpha, 1.0 / (beta + module.no_div_by_zero))
        elif isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.groups == 1 and module.kernel_size[0] > 1:
            module.forward = partial(convolve, module, module.weight[:, :, None].contiguous(
                memory_format=torch.channels_last))


def convolve(conv, weight, x):
    """As an image one row high: convolutions in one dimension know no layouts. Much longer ones are very slow so."""
    if x.shape[-1] > 2048:
        return type(conv).forward(conv, x)
    function = F.conv2d if isinstance(conv, nn.Conv1d) else F.conv_transpose2d
    out = function(x[:, :, None], weight, conv.bias, stride=(1, *conv.stride), dilation=(1, *conv.dilation))
    return out[:, :, 0]


def snake(alpha, scale, x):
    return x + scale * torch.sin(x * alpha).pow(2)


def stack(*linears):
    """One weight for several projections of the same input; their own become views of it."""
    assert all(linear.bias is None for linear in linears)
    weights = [linear.weight.data for linear in linears]
    if len({w.untyped_storage().data_ptr() for w in weights}) == 1 and all(
            a.data_ptr() + a.nbytes == b.data_ptr() for a, b in zip(weights, weights[1:])):        # done before
        return weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())
    weight = torch.cat(weights)
    for linear, part in zip(linears, weight.split([len(linear.weight) for linear in linears])):
        linear.weight.data = part
    return weight


def look_up(cos, sin, _, position_ids):
    position_ids = position_ids if position_ids.dim() == 2 else position_ids[0]        # (B, L)
    return [F.embedding(position_ids, table)[:, :, None] for table in (cos, sin)]      # (B, L, 1, D)


def attention(attn, qkv, qk_norm, hidden_states, position_embeddings, attention_mask, past_key_values, cache_position,
              **_):
    """One projection; queries and keys normed and rotated together; keys and values read once, not repeated: the query
    heads that share them become rows of one head."""
    batch, length, _ = hidden_states.shape
    (both, width), kv = qk_norm.shape, attn.k_proj.out_features // attn.head_dim
    cos, sin = position_embeddings
    heads = F.linear(hidden_states, qkv).view(batch, length, both + kv, width)
    qk = F.rms_norm(heads[:, :, :both], (width,), eps=attn.q_norm.variance_epsilon) * qk_norm
    qk = qk * cos + qk.roll(width // 2, -1) * sin
    query, key, value = (x.transpose(1, 2) for x in (qk[:, :, :-kv], qk[:, :, -kv:], heads[:, :, both:]))
    key, value = past_key_values.update(key, value, attn.layer_idx, {"cache_position": cache_position})
    query = query.reshape(batch, kv, -1, width)                                        # (B, KV, G * L, D)
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, query.shape[2] // length, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=attn.scaling)
    out = out.reshape(batch, -1, length, width).transpose(1, 2)                        # (B, L, Q, D)
    return attn.o_proj(out.reshape(batch, length, -1)), None


def feed_forward(mlp, gate_up, x):
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return mlp.down_proj(mlp.act_fn(gate) * up)
