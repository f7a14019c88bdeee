"""The code predictor as a CUDA graph: hidden state and token go in, 15 more codes and the next embedding come out.

The loop over the codebooks is unrolled into one graph. Masks and positions are the same in every frame, and each frame
overwrites the StaticCache from position 0. The graph reads the talker's `hidden`, `token` and `frame`, writes `codes`
and `hiddens`, and adds the frame's embedding in `text` to the talker's `embedding`. H' is the predictor's hidden size.
"""

import torch

from cudagraph_talker import GraphCache, Sampling, TalkerGraph, additive_mask, capture, round_up, sample


class PredictorGraph:
    def __init__(self, talker, talker_graph: TalkerGraph):
        predictor = talker.code_predictor
        rows, length, hidden_size = talker_graph.prompt.shape
        groups = talker.config.num_code_groups
        self.talker_graph = talker_graph
        self.model = predictor.model
        self.heads = predictor.lm_head
        self.project = predictor.small_to_mtp_projection
        self.embed_token = talker.get_input_embeddings()
        self.embed_code = predictor.get_input_embeddings()
        self.cache = GraphCache(self.model, rows, round_up(groups))

        with talker.device:
            self.sampling = Sampling(predictor.config.vocab_size, talker_graph.generator)
            self.text = torch.zeros(rows, length, hidden_size, dtype=talker.dtype)
            self.hiddens = torch.zeros(rows, length, hidden_size, dtype=talker.dtype)
            self.codes = torch.zeros(rows, length, groups, dtype=torch.long)
            self.positions = torch.arange(self.cache.length)
            self.masks = additive_mask(self.positions <= self.positions[:, None], talker.dtype)[None, None]

    def capture(self, pool=None) -> None:
        self.replay = capture(self.step, self.talker_graph.device, pool, self.talker_graph.generator)

    def configure(self, subtalker_dosample, subtalker_temperature, subtalker_top_k, subtalker_top_p, **_) -> None:
        self.sampling.set(subtalker_dosample, subtalker_temperature, subtalker_top_k, subtalker_top_p)

    def begin(self, trailing_text_hidden: torch.Tensor, tts_pad_embed: torch.Tensor, **_) -> None:
        """Set what each frame adds to its embedding: the text (B, T, H), then padding (1, 1, H)."""
        rows, length = trailing_text_hidden[:, : self.text.shape[1]].shape[:2]
        self.text[:rows, :length] = trailing_text_hidden[:, :length]
        self.text[:rows, length:] = tts_pad_embed
        self.cache.reset()

    def forward(self, embeds: torch.Tensor, first: int) -> torch.Tensor:
        """Run the layers from position `first` on, return the last hidden state. (B, L, H) -> (B, H')"""
        span = slice(first, first + embeds.shape[1])
        return self.model(
            inputs_embeds=self.project(embeds),
            attention_mask={"full_attention": self.masks[:, :, span]},
            position_ids=self.positions[None, span],
            cache_position=self.positions[span],
            past_key_values=self.cache,
        ).last_hidden_state[:, -1]

    def predict(self, hidden: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The frame's codes and the sum of their embeddings. (B, 1, H), (B, 1) -> (B, 16), (B, 1, H)"""
        codes = [token]
        embeds = [self.embed_token(token)]
        hidden = self.forward(torch.cat([hidden, embeds[0]], dim=1), 0)  # positions 0 and 1
        for i, (head, embed) in enumerate(zip(self.heads, self.embed_code)):
            if i > 0:
                hidden = self.forward(embeds[-1], i + 1)
            codes.append(sample(head(hidden).float(), self.sampling))
            embeds.append(embed(codes[-1]))
        return torch.cat(codes, dim=1), torch.cat(embeds, dim=1).sum(1, keepdim=True)

    def step(self) -> None:
        talker = self.talker_graph
        codes, embedding = self.predict(talker.hidden, talker.token)
        self.codes.index_copy_(1, talker.frame, codes[:, None])
        self.hiddens.index_copy_(1, talker.frame, talker.hidden)
        talker.embedding.copy_(embedding + self.text.index_select(1, talker.frame))
