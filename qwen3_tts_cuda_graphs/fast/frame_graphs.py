"""The two graphs of a frame, for 1 to N rows: `predict` computes the codes of the current frame, `step` the next token.

They do what FrameGraphs of generate.py does, on rows that the caller provides. There are three implementations, from
the one that runs everywhere to the fastest:

    PlainGraphs       upstream's model, with the layers of layers.py, in any dtype, on a CPU too
    KernelGraphs      the kernels of batched.cu around the matrix products, or, for 32 to 128 rows on Hopper, those of
                      overlapped_stack.cu; bfloat16
    MegakernelGraphs  two launches of megakernel.cu; bfloat16, 1, 2, 4, 8 or 16 rows

Rows that must wait (`advance` is False) are computed with the others but keep their state. What they write to the cache
and to `codes` is overwritten by their next frame.
"""

import torch
import torch.nn.functional as F

from cudagraph_predictor import PredictorGraph
from cudagraph_talker import GraphPool, TalkerGraph
from qwen3_tts_cuda_graphs.fast.batched import SOURCE
from qwen3_tts_cuda_graphs.fast.layers import concatenate
from qwen3_tts_cuda_graphs.fast.megakernel import PredictorStep, TalkerStep, projected_embeddings
from qwen3_tts_cuda_graphs.fast.overlapped_stack import make_stack
from qwen3_tts_cuda_graphs.fast.rows import SharedRows


class PlainGraphs:
    def __init__(self, talker, rows: SharedRows):
        self.rows = rows
        self.device = talker.device
        self.predictor = PredictorGraph(talker, rows, rows.code_keys, rows.code_values)
        self.talker = TalkerGraph(talker, rows, rows.keys, rows.values)
        self.inputs = []  # embedding tables of the predictor's positions, see projected_embeddings
        self.waiting_launches = ()  # launches whose thread blocks wait for each other; each has `why_failed`

    def inputs_of(self, like: "PlainGraphs | None") -> list[torch.Tensor]:
        """The embedding tables of other graphs of the same model; new ones if these have none."""
        return (like and like.inputs) or projected_embeddings(self.predictor)

    def capture(self, pool: GraphPool) -> "PlainGraphs":
        self.predict = pool.capture(self.predict)
        self.step = pool.capture(self.step)
        return self

    def predict(self) -> None:
        """Compute the codes of the frame, and the talker's input for the next one."""
        self.predictor.step()

    def step(self) -> None:
        """Run the talker and choose the next frame's first code."""
        rows = self.rows
        state = (rows.hidden, rows.token, rows.frame, rows.seen, rows.ended)
        before = [tensor.clone() for tensor in state]
        self.talker.step()
        for tensor, old in zip(state, before):
            advance = rows.advance.view(-1, *[1] * (tensor.dim() - 1))
            tensor.copy_(torch.where(advance, tensor, old))


class KernelGraphs(PlainGraphs):
    def __init__(self, talker, rows: SharedRows, like: PlainGraphs | None = None):
        """like: graphs of the same model, whose embedding tables are shared"""
        super().__init__(talker, rows)
        self.inputs = self.inputs_of(like)
        self.code_embeddings = concatenate(*self.predictor.embed_code)  # (15 * V', H)
        count = len(rows.token)
        predictor = self.predictor.model
        self.talker_stack = make_stack(talker.model, rows.keys, rows.values, count, count)
        self.predictor_stack = make_stack(predictor, rows.code_keys, rows.code_values, count, 2 * count)
        with self.device:
            self.row_indices = torch.arange(count)
            self.code_positions = torch.arange(talker.config.num_code_groups)[:, None].repeat(1, count)  # (16, B)
            self.first_indices = torch.arange(count).repeat(2)  # (2 B): positions 0 and 1 of each row
            # the first row of each code's table in code_embeddings
            self.first_embeddings = torch.arange(0, len(self.code_embeddings), len(self.predictor.embed_code[0].weight))

    def predict(self) -> None:
        """As PredictorGraph.step. Positions 0 and 1 of all rows are one pass of 2 B tokens."""
        rows, predictor, stack = self.rows, self.predictor, self.predictor_stack
        codes = [rows.token]  # (B, 1) each
        embeds = predictor.embed_token(rows.token)  # (B, 1, H)
        first = predictor.project(torch.cat([rows.hidden[:, 0], embeds[:, 0]]))  # (2 B, H')
        hidden = stack.forward(first, self.code_positions[:2].flatten(), self.first_indices)[len(self.row_indices) :]
        for i, head in enumerate(predictor.heads):
            if i > 0:
                hidden = stack.forward(self.inputs[i], self.code_positions[i + 1], tokens=codes[-1][:, 0])
            codes.append(stack.sample_rows(head(hidden), rows.code_sampling, rows.code_noise[:, i]))
        index = self.row_indices, rows.frame[:, 0]
        rows.codes[index] = codes = torch.cat(codes, dim=1)
        embeds = torch.cat([embeds, F.embedding(codes[:, 1:] + self.first_embeddings, self.code_embeddings)], dim=1)
        rows.embedding.copy_((embeds.sum(1) + rows.text[index])[:, None])

    def step(self) -> None:
        rows = self.rows
        length = rows.keys[0].shape[2]
        positions = (rows.prompt_length + rows.frame).clamp(max=length - 1)[:, 0]
        hidden = self.talker_stack.forward(rows.embedding[:, 0], positions)
        rows.hidden.copy_(torch.where(rows.advance[:, None, None], hidden[:, None], rows.hidden))
        self.talker_stack.choose_rows(self.talker.head(hidden), rows, rows.sampling, rows.noise[:, 0])


class MegakernelGraphs(PlainGraphs):
    def __init__(self, talker, rows: SharedRows, like: PlainGraphs | None = None):
        """like: as in KernelGraphs"""
        super().__init__(talker, rows)
        self.inputs = self.inputs_of(like)
        self.predict = PredictorStep(self.predictor, self.inputs)
        self.step = TalkerStep(talker, rows)
        self.waiting_launches = self.predict, self.step


def has_kernels(talker) -> bool:
    """Whether the kernels of batched.cu, and so KernelGraphs, run here."""
    return not SOURCE.why_not(talker.model, talker.code_predictor.model)


def graphs_without_megakernel(talker, rows: SharedRows, like: PlainGraphs | None = None) -> PlainGraphs:
    """KernelGraphs where they run, otherwise PlainGraphs. `like` as in KernelGraphs."""
    return KernelGraphs(talker, rows, like) if has_kernels(talker) else PlainGraphs(talker, rows)
