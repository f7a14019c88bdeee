// The choice of a token, for megakernel.cu and batched.cu: `sample` of cudagraph_talker.py for one row, by one
// block. Each thread has N scores of the vocabulary.

constexpr int TOKEN_BITS = 12;                        // bits of the highest token, see `rank` below

struct Sampling {
    float temperature;
    u64 topk_rank;                                    // rank of the k-th best score, counted from the worst
    float one_minus_top_p;
};

// A token that may be chosen: weight / noise as the bits of a float, which are ordered like the float as it is not
// negative; and the token's place in the order of the scores, see `rank` below.
struct alignas(16) Choice {
    u64 rank;
    u32 ratio;
};

// What the warps exchange. There are two sets, used in turn, so that each reduction needs only one barrier.
template <int WARPS>
struct alignas(16) SamplerShared {
    Choice of_warp[2][WARPS];
};

// The repetition penalty if the token was chosen before, then suppression.
__device__ float apply_rules(float score, bool is_seen, float repetition_penalty, bool is_suppressed) {
    if (is_seen) {
        score = score < 0 ? score * repetition_penalty : score / repetition_penalty;
    }
    return is_suppressed ? __uint_as_float(0xff800000) : score;             // -infinity
}

// Floats as unsigned integers of the same order, and back. Adding 0 turns -0 into 0, as the two are equal.
__device__ u32 ordered_bits(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ float from_ordered_bits(u32 ordered) {
    return __uint_as_float(ordered >> 31 ? ordered & ~(1u << 31) : ~ordered);
}

// Sum over a warp of integers below 2^51: upper and lower bits are added separately, by one instruction each.
__device__ u64 warp_sum_wide(u64 x) {
    constexpr u32 LOW_BITS = 24;
    const u64 high = __reduce_add_sync(~0u, (u32)(x >> LOW_BITS));
    const u32 low = __reduce_add_sync(~0u, (u32)x & ((1u << LOW_BITS) - 1));
    return (high << LOW_BITS) + low;
}

// Top-k, top-p, and the largest weight / noise. There is no sort.
//
// Score i and noise i of this thread belong to token_of(i). Noise is exponentially distributed, or 1 for a greedy
// choice. SCORE_BITS is the number of significant ordered bits of the scores: 16 if they are bfloat16, else 32.
// barrier() waits for all threads that take part. With a NaN some token of the vocabulary is chosen.
//
// Ranks are in the order of a stable sort: 32 bits of the score, divided by the temperature, then the bits of the
// token, so that no two are equal. Torch's sort is stable on a GPU for this many scores, though it does not
// promise that.
template <int SCORE_BITS, int WARPS, int N, class TokenOf, class Barrier>
__device__ int sample_scores(const float (&score)[N], const float (&noise)[N], Sampling sampling,
                             SamplerShared<WARPS> &in_shared, TokenOf token_of, Barrier barrier) {
    int reductions = 0;
    const auto over_warps = [&](auto x, auto combine) {
        using T = decltype(x);
        ++reductions;
        T(&of_warp)[WARPS] = (T(&)[WARPS])in_shared.of_warp[reductions % 2];
        return combine_warps(x, of_warp, lane_index() == 0, combine, barrier);
    };
    const auto add = [](auto a, auto b) { return a + b; };
    const auto larger = [](u32 a, u32 b) { return max(a, b); };

    u32 ordered[N];
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        ordered[i] = ordered_bits(score[i] / sampling.temperature);
        best = max(best, ordered[i]);
    }
    const float best_score = from_ordered_bits(over_warps(__reduce_max_sync(~0u, best), larger));
    float weight[N];                                  // softmax without its denominator
#pragma unroll
    for (int i = 0; i < N; ++i) {
        weight[i] = expf(from_ordered_bits(ordered[i]) - best_score);
    }
    const auto rank = [&](int i) {
        return (u64)ordered[i] << TOKEN_BITS | token_of(i);
    };

    // Top-p drops the lowest ranks, as many as have at most 1 - p of the weight together, after top-k. Both
    // thresholds are found bit by bit.
    u64 first_kept = 0;
    if (sampling.one_minus_top_p > 0) {
        // The k-th best score is the highest number with at most `topk_rank` scores below it. Scores that equal
        // it stay.
        u32 threshold = 0;
        for (int bit = SCORE_BITS - 1; bit >= 0; --bit) {
            const u32 candidate = threshold | 1u << bit;
            u32 below = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                below += ordered_bits(score[i]) >> (32 - SCORE_BITS) < candidate;
            }
            if (over_warps(__reduce_add_sync(~0u, below), add) <= sampling.topk_rank) {
                threshold = candidate;
            }
        }
        if (SCORE_BITS == 16) {                       // a negative score's lower bits are inverted zeros
            threshold = threshold << 16 | (threshold >> 15 ? 0 : 0xffff);
        }
        const float threshold_score = from_ordered_bits(threshold) / sampling.temperature;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            weight[i] = from_ordered_bits(ordered[i]) < threshold_score ? 0 : weight[i];
        }

        // Weights are summed as integers, 2^40 for the best, so that every order of summation gives the same
        // sum.
        const auto weight_below = [&](u64 candidate) {
            u64 sum = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum += rank(i) < candidate ? (u64)(weight[i] * (1ull << 40)) : 0;
            }
            return over_warps(warp_sum_wide(sum), add);
        };
        const u64 limit = sampling.one_minus_top_p * (float)weight_below(~0ull);
        for (int bit = 32 + TOKEN_BITS - 1; bit >= 0; --bit) {
            const u64 candidate = first_kept | 1ull << bit;
            if (weight_below(candidate) <= limit) {
                first_kept = candidate;
            }
        }
    }

    // The largest ratio, and among equal ones the lowest rank. If that token is not among the k best, neither is
    // any token with its score or a lower one: choose again among the others. This is top-k without finding the
    // k-th best score. Likely tokens are chosen first, so it rarely takes more than a few rounds, even if all
    // tokens are equally likely.
    u32 ratio[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        ratio[i] = __float_as_uint(weight[i] / noise[i]);
    }
    while (true) {
        Choice choice = {~0ull, 0};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 kept = rank(i) < first_kept ? 0 : ratio[i];
            if (kept > choice.ratio || (kept == choice.ratio && rank(i) < choice.rank)) {
                choice = {rank(i), kept};
            }
        }
        const u32 best_ratio = __reduce_max_sync(~0u, choice.ratio);
        const bool has_best = choice.ratio == best_ratio;
        const u32 score_bits = choice.rank >> TOKEN_BITS;
        const u32 lowest_score = __reduce_min_sync(~0u, has_best ? score_bits : ~0u);
        const bool is_lowest = has_best && score_bits == lowest_score;
        const u32 token = __reduce_min_sync(~0u, is_lowest ? (u32)choice.rank % (1 << TOKEN_BITS) : ~0u);
        choice = over_warps(Choice{(u64)lowest_score << TOKEN_BITS | token, best_ratio}, [](Choice a, Choice b) {
            return a.ratio > b.ratio || (a.ratio == b.ratio && a.rank < b.rank) ? a : b;
        });
        const u32 chosen_score = choice.rank >> TOKEN_BITS;
        u32 not_above = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            not_above += ordered[i] <= chosen_score;
        }
        const bool is_kept = over_warps(__reduce_add_sync(~0u, not_above), add) > sampling.topk_rank;
        if (is_kept || choice.ratio == 0) {           // ratio 0: invalid noise
            return choice.rank % (1 << TOKEN_BITS);
        }
        first_kept = ((u64)chosen_score + 1) << TOKEN_BITS;
    }
}
