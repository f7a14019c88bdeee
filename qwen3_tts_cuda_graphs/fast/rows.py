"""Rows that come and go: each belongs to another request, and is at a position of its own.

    row 0   [ prompt | frame 0 | frame 1 | frame 2 |  ...            position 37
    row 1   [ prompt      | frame 0 |                                position 12
    row 2   [ a longer prompt            | frame 0 | frame 1 |       position 51
    row 3     free
            every frame adds one position to each row that may advance; a row joins and leaves between two frames

Copies are exact. On a CPU in float32 the codes of a row do not depend on what runs beside it.
"""

import copy
from collections.abc import Sequence

import torch

from cudagraph_talker import Rows, Sampling, round_up


def draw_seeded(noise: torch.Tensor, generator: torch.Generator) -> None:
    """`draw_noise` from a generator: (B, N, V), on a CPU code by code."""
    for draw in noise.unbind(1) if noise.device.type == "cpu" else [noise]:
        draw.exponential_(generator=generator)


class SharedRows(Rows):
    """Rows of which a frame takes the first n: `rows[:n]` is a view of them."""

    def __init__(self, config, row_count: int, length: int, dtype: torch.dtype, device: torch.device):
        super().__init__(config, row_count, length, dtype, device)
        self.advance = torch.ones(row_count, dtype=torch.bool, device=device)  # whether it takes part in the next frame
        cache = new_cache(config, row_count, length, dtype, device)
        code_cache = new_cache(config.code_predictor_config, row_count, round_up(config.num_code_groups), dtype, device)
        self.keys, self.values = map(list, cache)
        self.code_keys, self.code_values = map(list, code_cache)
        self.whole_cache = cache.movedim(2, 0)  # (B, 2, layers, KV, S, D)

    def __getitem__(self, index: slice | int) -> "SharedRows":
        return view_of(self, index)

    def settings(self) -> list[torch.Tensor]:
        """All tensors that `configure` writes."""
        rules = [self.repetition_penalty, self.suppressed, self.end_token, self.min_tokens]
        return rules + tensors_of(self.sampling) + tensors_of(self.code_sampling)

    def begin(self, prompt_lengths: torch.Tensor) -> None:
        """prompt_lengths: (B), above 0 where there is a new prompt. The next step reads its last position."""
        is_new = prompt_lengths > 0
        self.advance.copy_(is_new)
        self.ended.masked_fill_(is_new, False)
        is_new = is_new[:, None]
        self.prompt_length.copy_(torch.where(is_new, prompt_lengths[:, None], self.prompt_length))
        self.frame.masked_fill_(is_new, -1)  # the step advances it to 0
        self.seen.masked_fill_(is_new, False)

    def state(self) -> list[torch.Tensor]:
        """Settings and progress."""
        return [*self.settings(), self.prompt_length, self.frame, self.token, self.hidden, self.seen, self.ended]

    def cache(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values]


def batch_sizes(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for: powers of two, and the largest."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def new_cache(config, row_count: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Keys and values of all layers in one tensor, so that a prefix is one copy: (2, layers, B, KV, S, D)"""
    shape = (2, config.num_hidden_layers, row_count, config.num_key_value_heads, length, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def copy_row(source: SharedRows, target: SharedRows, length: int, clear: bool = True) -> None:
    """Copy a row, `rows[i]`, that has `length` positions. `clear` the rest if attention reads it: 0 x NaN is NaN."""
    torch._foreach_copy_([*target.state(), target.text, target.codes], [*source.state(), source.text, source.codes])
    target.whole_cache[..., :length, :] = source.whole_cache[..., :length, :]
    if clear:
        target.whole_cache[..., length:, :] = 0


def tensors_of(sampling: Sampling) -> list[torch.Tensor]:
    return [sampling.temperature, sampling.topk_rank, sampling.one_minus_top_p, sampling.greedy]


def view_of(part, index: slice | int | torch.Tensor | list[int]):
    """These rows of all tensors of an object or a list: views if `index` is a slice or a number, else copies."""
    if torch.is_tensor(part):
        return part[index]
    if isinstance(part, list):
        return [view_of(item, index) for item in part]
    if not isinstance(part, Rows | Sampling):
        return part
    view = copy.copy(part)
    vars(view).update({name: view_of(value, index) for name, value in vars(part).items()})
    return view


# ---- Random states, to test kernels with

# Choices are flat among few candidates: temperature 100, so that one candidate too many is often chosen.
# Top-p keeps 2.5 of 20: no candidate is so near the limit that rounding decides.
SETTINGS = [(True, 100.0, 2, 1.0), (True, 100.0, 20, 0.125), (True, 100.0, 3, 1.0), (False, 1.0, 1, 1.0)]


def fill_with_random_states(rows: SharedRows, prompts: Sequence[int], frames: int) -> None:
    """Give each row another state, with room for this many frames. The third of four rows does not advance.

    prompts: their lengths, in turn, where the cache is long enough"""
    count, device = len(rows.token), rows.token.device
    generator = torch.Generator(device).manual_seed(0)
    room = rows.text.shape[1] - count - frames + 1
    lengths = [min(prompts[row % len(prompts)], room) for row in range(count)]
    row = torch.arange(count, device=device)[:, None]
    for tensor in (rows.hidden, rows.text[:, : count + frames], rows.whole_cache[..., : max(lengths) + count, :]):
        tensor.normal_(generator=generator)
    rows.token.random_(rows.code_sampling.vocab_size, generator=generator)
    rows.suppressed.random_(2, generator=generator)
    torch._foreach_zero_([rows.ended, rows.end_token, rows.min_tokens])
    rows.advance.copy_((row % 4 != 2)[:, 0])
    rows.frame.copy_(row)
    rows.prompt_length.copy_(torch.tensor(lengths)[:, None])
    rows.repetition_penalty.copy_(1.5 - 0.05 * row)
    draw_choices(rows, 0)


def draw_choices(rows: SharedRows, seed: int) -> None:
    """Draw new noise and seen tokens, and give each row other sampling settings."""
    generator = torch.Generator(rows.token.device).manual_seed(seed)
    for tensor in (rows.noise, rows.code_noise):
        tensor.exponential_(generator=generator)
    rows.seen.random_(2, generator=generator)
    for sampling in (rows.sampling, rows.code_sampling):
        for row in range(len(rows.token)):
            view_of(sampling, slice(row, row + 1)).set(*SETTINGS[(seed + row) % len(SETTINGS)])
