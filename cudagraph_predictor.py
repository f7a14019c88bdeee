"""The code predictor as a CUDA graph: hidden state and token go in, 15 codes and the next embedding come out.

The loop over the codebooks is unrolled into one graph. Every frame overwrites the cache from position 0, so masks
and positions are the same in all of them. The graph reads the rows' `hidden`, `token`, `frame`, `text` and
`code_noise`, and writes `codes` and the talker's next input, `embedding`. H' is the predictor's hidden size.
"""

import torch

from cudagraph_talker import RowCache, Rows, additive_mask, sample


class PredictorGraph:
    def __init__(self, talker, rows: Rows, keys: list, values: list):
        """keys, values: of each layer's static cache, (B, KV, S, D)"""
        predictor = talker.code_predictor
        self.model = predictor.model
        self.heads = predictor.lm_head
        self.project = predictor.small_to_mtp_projection
        self.embed_token = talker.get_input_embeddings()
        self.embed_code = predictor.get_input_embeddings()
        self.rows = rows
        self.keys = keys
        self.values = values
        self.positions = torch.arange(keys[0].shape[2], device=talker.device)
        self.masks = additive_mask(self.positions <= self.positions[:, None], talker.dtype)[None, None]  # (1, 1, S, S)

    def forward(self, embeds: torch.Tensor, first: int) -> torch.Tensor:
        """Run the layers from position `first` on, return the last hidden state. (B, L, H) -> (B, H')"""
        end = first + embeds.shape[1]
        positions = self.positions[None, first:end]
        cache = RowCache(self.keys, self.values, positions.expand(len(embeds), -1), len(self.positions))
        return self.model(
            inputs_embeds=self.project(embeds),
            attention_mask={"full_attention": self.masks[:, :, first:end]},
            position_ids=positions,
            cache_position=positions[0],
            past_key_values=cache,
        ).last_hidden_state[:, -1]

    def step(self) -> None:
        rows = self.rows
        codes = [rows.token]
        embeds = [self.embed_token(rows.token)]  # (B, 1, H) each
        hidden = self.forward(torch.cat([rows.hidden, embeds[0]], dim=1), 0)  # positions 0 and 1
        for i, (head, embed) in enumerate(zip(self.heads, self.embed_code)):
            if i > 0:
                hidden = self.forward(embeds[-1], i + 1)
            codes.append(sample(head(hidden).float(), rows.code_sampling, rows.code_noise[:, i]))
            embeds.append(embed(codes[-1]))

        index = torch.arange(len(rows.token), device=rows.token.device), rows.frame[:, 0]
        rows.codes[index] = torch.cat(codes, dim=1)
        rows.embedding.copy_(torch.cat(embeds, dim=1).sum(1, keepdim=True) + rows.text[index][:, None])
