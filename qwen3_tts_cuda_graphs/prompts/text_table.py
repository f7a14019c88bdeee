"""A table on the host with the projected embedding of each text token, so that prompts are built there.

Upstream embeds a text token and projects it to the talker's width. The result depends on the token alone, so it is
computed once for the whole vocabulary, on the GPU, and kept on the host. The embedding's own GPU memory is freed. All
other steps of a prompt are lookups and sums of two embeddings, which give the same bits on a CPU.

`HostTalker` lets upstream's prompt code run on the host. On the GPU it takes a hundred small kernels and a dozen
synchronizations, which would wait for the frames of other streams.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

ROWS_AT_ONCE = 4096  # limits the memory of text_projection's intermediate results


class TextTable(nn.Module):
    """Replaces the text embedding and its projection. The table is not a parameter, so that it stays on the host."""

    @torch.no_grad()
    def __init__(self, talker):
        super().__init__()
        weight = talker.get_text_embeddings().weight
        self.table = torch.empty(len(weight), talker.config.hidden_size, dtype=weight.dtype, device="cpu")
        for rows, embedded in zip(self.table.split(ROWS_AT_ONCE), weight.split(ROWS_AT_ONCE)):
            rows.copy_(talker.text_projection(embedded))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids.cpu(), self.table).to(token_ids.device)


class HostTalker(nn.Module):
    """Has the attributes of a talker that upstream's prompt code reads, on the host. The caller sets `generate`."""

    def __init__(self, talker):
        super().__init__()
        self.device = torch.device("cpu")
        self.dtype = talker.dtype
        self.text_projection = talker.text_projection
        self.text_embedding = talker.get_text_embeddings()
        self.codec_embedding = copy.deepcopy(talker.get_input_embeddings()).cpu()

    def get_text_embeddings(self) -> nn.Module:
        return self.text_embedding

    def get_input_embeddings(self) -> nn.Module:
        return self.codec_embedding


def use_text_table(talker) -> HostTalker:
    """Replace the talker's text embedding and its projection by a table, in place."""
    if not isinstance(talker.get_text_embeddings(), TextTable):
        talker.model.text_embedding = TextTable(talker)
        talker.text_projection = nn.Identity()
    return HostTalker(talker)
