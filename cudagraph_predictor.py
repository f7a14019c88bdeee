"""The code predictor as a CUDA graph: hidden state and token go in, 15 more codes and the next embedding come out.

One frame's loop over the codebooks is unrolled into a single graph: each of its positions has a mask and a rotary
embedding that never change, and its StaticCache is simply written over in the next frame. It reads the talker's
`hidden`, `token` and `frame` and writes its `embedding`; `text`, `codes` and `hiddens` are its own, one row a frame.
"""
import torch

from cudagraph_talker import Sampling, additive_mask, aligned, capture, clear, sample, static_cache
from fused_layers import predictor_step


class PredictorGraph:
    def __init__(self, talker, graph, pool=None):
        """`talker` is upstream's, `graph` the TalkerGraph to work with."""
        predictor, device = talker.code_predictor, talker.device
        self.talker, self.model, self.heads = graph, predictor.model, predictor.lm_head
        self.project = predictor.small_to_mtp_projection
        self.embed_token, self.embed_code = talker.get_input_embeddings(), predictor.get_input_embeddings()
        batch, length, width = graph.prompt.shape
        groups, dtype = talker.config.num_code_groups, talker.dtype
        self.cache = static_cache(self.model, batch, aligned(groups))
        with device:
            self.sampling = Sampling(predictor.config.vocab_size)
            self.text = torch.zeros(batch, length, width, dtype=dtype)
            self.hiddens = torch.zeros(batch, length, width, dtype=dtype)
            self.codes = torch.zeros(batch, length, groups, dtype=torch.long)
            self.positions = torch.arange(self.cache.max_cache_len)
            self.masks = additive_mask(self.positions <= self.positions[:, None], dtype)[None, None]
        self.fused = predictor_step(self, graph) if graph.fused else None
        self.step = capture(self.fused or self.step, device, pool)

    def begin(self, trailing_text_hidden, tts_pad_embed):
        """What each frame adds to its embedding: the text (B, T, H), and when that is over, padding (1, 1, H)."""
        length = min(trailing_text_hidden.shape[1], self.text.shape[1])
        self.text[:, :length] = trailing_text_hidden[:, :length]
        self.text[:, length:] = tts_pad_embed
        clear(self.cache)

    def forward(self, embeds, first):
        """Embeddings at the positions from `first` on -> last hidden state. (B, L, H) -> (B, H')"""
        rows = slice(first, first + embeds.shape[1])
        return self.model(
            inputs_embeds=self.project(embeds), attention_mask={"full_attention": self.masks[:, :, rows]},
            position_ids=self.positions[None, rows], cache_position=self.positions[rows], past_key_values=self.cache,
        ).last_hidden_state[:, -1]

    def step(self):
        codes, embeds = [self.talker.token], [self.embed_token(self.talker.token)]
        hidden = self.forward(torch.cat([self.talker.hidden, embeds[0]], dim=1), 0)                # positions 0 and 1
        for i, (head, embed) in enumerate(zip(self.heads, self.embed_code)):
            if i > 0:
                hidden = self.forward(embeds[-1], i + 1)
            codes.append(sample(head(hidden).float(), self.sampling))
            embeds.append(embed(codes[-1]))
        frame = self.talker.frame
        self.codes.index_copy_(1, frame, torch.cat(codes, dim=1)[:, None])                         # (B, 1, 16)
        self.hiddens.index_copy_(1, frame, self.talker.hidden)
        text = self.text.index_select(1, frame)
        self.talker.embedding.copy_(torch.cat(embeds, dim=1).sum(1, keepdim=True) + text)          # (B, 1, H)
