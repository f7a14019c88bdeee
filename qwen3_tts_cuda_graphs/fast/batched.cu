// The small kernels between the matrix products of a decoding step of B tokens, each at its own position: one token
// of each row, or several of a row's prompt.
//
// batched.py compiles this file with NVRTC for one GPU and one model. It puts these definitions before it:
//
//     HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM, EPSILON     of the stack of decoder layers
//     THREADS            of a block of qk_norm_rope_store, attention, short_attention and silu_and_multiply
//     SAMPLER_THREADS    of a block of sample and choose
//
// batched_reference.py has the kernels of a layer in a few lines of torch; add_and_norm and silu_and_multiply
// are in layer_kernels.h. Sums are float; values are rounded to bfloat16 where the model's own forward rounds
// them. No block waits for another one.
//
//
// One layer
// ---------
//     kernel                reads                   writes                          blocks, threads of each
//     -------------------   ---------------------   -----------------------------   -------------------------
//     (GEMM)                normalized              qkv
//     attention             qkv, cos, sin, keys,    output; one position of keys    (KV_HEADS * B, splits), 128
//                           values                  and of values
//     or short_attention                                                            (KV_HEADS / 4 * B, 1), 128
//     (GEMM)                output                  x
//     add_and_norm          x, residual             residual, normalized            B, HIDDEN / 8
//     (GEMM)                normalized              gate_up
//     silu_and_multiply     gate_up                 inner                           B * INNER / 1024, 128
//     (GEMM)                inner                   x
//     add_and_norm          x, residual             residual, normalized            B, HIDDEN / 8
//
// If several tokens belong to one row, the keys and values of all of them must be in the cache before one of them
// attends. Then qk_norm_rope_store runs before attention and does its first part: norm and RoPE of queries and
// keys, in place; keys and values to the cache.
//
// The last kernel of a layer applies the norm of the next layer, or the final norm. `add_and_norm` without a
// residual runs before the first layer. `sample`, or `choose` for the talker, runs after a head, with a block of
// 256 threads for each row.
//
// In the comments, a vector is 8 consecutive bfloat16: 16 bytes, what a thread loads at once (uint4). A head
// of 128 dimensions is 16 vectors, for the 16 lanes of a half-warp.

#include "kernels.h"
#include "attention.h"
#include "layer_kernels.h"
#include "sampler.h"


// ---- Sizes

constexpr int WARPS = THREADS / 32;                   // of a block
constexpr int ATTENTION_BLOCKS = 4;                   // on a multiprocessor; the registers for all loads limit it
constexpr int SAMPLER_WARPS = SAMPLER_THREADS / 32;
constexpr int SCORES_PER_THREAD = VOCAB / SAMPLER_THREADS;

static_assert(QKV_HEADS % (THREADS / 16) == 0, "unsupported sizes: heads of q, k and v must be a multiple of 8");
static_assert(VOCAB % SAMPLER_THREADS == 0, "unsupported sizes: VOCAB must be a multiple of 256");
static_assert(VOCAB <= 1 << TOKEN_BITS, "unsupported sizes: VOCAB must be at most 4096");


// ---- Arguments, one struct for each kernel. batched.py writes them and checks their layout when it compiles.

struct QkNormRopeStore {
    uint4 *qkv;                                       // (B, QKV_HEADS, HEAD_DIM)
    const uint4 *q_norm;                              // (HEAD_DIM)
    const uint4 *k_norm;                              // (HEAD_DIM)
    const uint4 *cos;                                 // (cache_length, HEAD_DIM)
    const uint4 *sin;                                 // (cache_length, HEAD_DIM), its first half negated
    const i64 *positions;                             // (B)
    const i64 *row_indices;                           // (B), each token's row of the cache
    u64 cache_length;
    uint4 *keys;                                      // (rows, KV_HEADS, cache_length, HEAD_DIM)
    uint4 *values;                                    // (rows, KV_HEADS, cache_length, HEAD_DIM)
};

struct Attention {
    QkNormRopeStore input;
    u64 is_stored;                                    // whether qk_norm_rope_store has processed qkv
    u64 splits;                                       // maximum number of splits of a token's positions
    u64 min_split_length;                             // least number of positions in a split
    float *split_best;                                // (B, HEADS, splits), highest score of a split
    float *split_weight;                              // (B, HEADS, splits), sum of its weights
    float *split_sum;                                 // (B, HEADS, splits, HEAD_DIM), of values times weights
    u32 *finished_splits;                             // (B, KV_HEADS), 0 before and after a launch
    bf16 *output;                                     // (B, HEADS, HEAD_DIM)
};
using ShortAttention = Attention;

struct Sample {
    const bf16 *logits;                               // (B, VOCAB)
    const float *temperature;                         // (B)
    const i64 *topk_rank;                             // (B), rank of the k-th best score, from the worst
    const float *one_minus_top_p;                     // (B)
    const bool *greedy;                               // (B)
    const float *noise;                               // (B, VOCAB), exponentially distributed
    u64 noise_stride;                                 // between two rows
    i64 *token;                                       // (B)
};

struct Choose {
    Sample sample;
    const float *repetition_penalty;                  // (B)
    const bool *suppressed;                           // (B, VOCAB), tokens never to choose
    const i64 *end_token;                             // (B)
    const i64 *min_tokens;                            // (B)
    const bool *advance;                              // (B), whether the row's state may change
    i64 *frame;                                       // (B)
    bool *seen;                                       // (B, VOCAB), tokens to apply the penalty to
    bool *ended;                                      // (B)
};


// ---- Norm and RoPE of queries and keys; keys and values to the cache

// Half-warp h of block (b, token) computes head 8 b + h of that token, in the order of qkv: queries, keys, values.
// Lane l of 16 holds dimensions 8 l .. 8 l + 7.
extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope_store(QkNormRopeStore arguments) {
    const int token = blockIdx.y;
    const int head = blockIdx.x * (THREADS / 16) + threadIdx.x / 16;
    const int lane = threadIdx.x % 16;
    const u64 position = arguments.positions[token];
    const u64 row = arguments.row_indices[token];
    const bool is_query = head < HEADS;
    const bool is_value = head >= HEADS + KV_HEADS;

    uint4 &of_head = arguments.qkv[((u64)token * QKV_HEADS + head) * HEAD_VECTORS + lane];
    const uint4 x = of_head;
    const uint4 weight = is_query ? arguments.q_norm[lane] : arguments.k_norm[lane];
    const uint4 cos = arguments.cos[position * HEAD_VECTORS + lane];
    const uint4 sin = arguments.sin[position * HEAD_VECTORS + lane];

    // Half-warps that hold a value compute this, too, because all lanes of a warp take part in the shuffles.
    const uint4 rotated = norm_and_rope<16>(x, weight, cos, sin, EPSILON);

    const auto in_cache = [&](int kv_head) {
        return ((row * KV_HEADS + kv_head) * arguments.cache_length + position) * HEAD_VECTORS + lane;
    };
    if (is_value) {
        arguments.values[in_cache(head - HEADS - KV_HEADS)] = x;
        return;
    }
    of_head = rotated;
    if (!is_query) {
        arguments.keys[in_cache(head - HEADS)] = rotated;
    }
}


// ---- Attention

// The result of each warp over its positions, for each query head of the group.
struct alignas(16) AttentionShared {
    float sum[WARPS][GROUP][HEAD_DIM];
    float best[WARPS][GROUP];
    float weight[WARPS][GROUP];
    bool is_last;
};

// Merges the warps of a block in shared memory. The blocks of a token and KV head, one for each split, are merged in
// global memory by the block that finishes last.
__device__ void merge_warps(const Attention &arguments, const WarpAttention &attended, u64 first_head, int split,
                            int splits_in_use) {
    AttentionShared &merge = static_shared<AttentionShared>();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        if (lane < 16) {
            *(Eight *)&merge.sum[warp_index()][g][8 * lane] = attended.sum[g];
        }
        if (lane == 0) {
            merge.best[warp_index()][g] = attended.best[g];
            merge.weight[warp_index()][g] = attended.weight[g];
        }
    }
    __syncthreads();

    // Thread t computes outputs t, t + THREADS, ... of the block's GROUP * HEAD_DIM.
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const int g = i / HEAD_DIM;
        const int dimension = i % HEAD_DIM;
        const PartialAttention block = merge_attention(WARPS, [&](int warp) -> PartialAttention {
            return {merge.best[warp][g], merge.weight[warp][g], merge.sum[warp][g][dimension]};
        });
        if (splits_in_use == 1) {
            arguments.output[first_head * HEAD_DIM + i] = pack_bf16x2(block.sum / block.weight, 0);
            continue;
        }
        const u64 this_split = (first_head + g) * arguments.splits + split;
        arguments.split_sum[this_split * HEAD_DIM + dimension] = block.sum;
        if (dimension == 0) {
            arguments.split_best[this_split] = block.best;
            arguments.split_weight[this_split] = block.weight;
        }
    }
    if (splits_in_use == 1) {
        return;
    }

    // Release: this block's partial results before its count. Acquire: the counts of the others before their
    // results. atomicInc wraps to 0 at the last block, ready for the next launch.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        u32 *finished = &arguments.finished_splits[first_head / GROUP];
        merge.is_last = atomicInc(finished, splits_in_use - 1) == splits_in_use - 1;
        __threadfence();
    }
    __syncthreads();
    if (!merge.is_last) {
        return;
    }
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const u64 first_split = (first_head + i / HEAD_DIM) * arguments.splits;
        const PartialAttention row_result = merge_attention(splits_in_use, [&](int s) -> PartialAttention {
            const u64 index = first_split + s;
            return {arguments.split_best[index], arguments.split_weight[index],
                    arguments.split_sum[index * HEAD_DIM + i % HEAD_DIM]};
        });
        arguments.output[first_head * HEAD_DIM + i] = pack_bf16x2(row_result.sum / row_result.weight, 0);
    }
}

// A token attends to its own position and to earlier ones, which are in the cache. If each token has a row of its own,
// its key and value need not be there yet: this kernel computes and stores them.
//
// The cached positions are split into equal parts, one block each (as in flash-decoding):
//
//     token at 50      |split 0|                                splits 1, 2, ... exit at once
//     token at 2,048   |  split 0  |  split 1  |  split 2  | ...
//
// So the grid does not depend on the lengths, but the work of a block does. Blocks (i, split) of higher splits come
// last, so that those that exit do so while others work. All warps of a block share a KV head with its GROUP query
// heads. For short caches one warp computes it, and there is one split. The last split begins with the token's own
// position.
template <int SHARING_WARPS>
__device__ void attend(const Attention &arguments) {
    constexpr int LOOP_POSITIONS = SHARING_WARPS * WARP_POSITIONS;
    constexpr int HEADS_OF_BLOCK = WARPS / SHARING_WARPS;
    constexpr int BLOCKS = (KV_HEADS + HEADS_OF_BLOCK - 1) / HEADS_OF_BLOCK;     // for a split of a token
    const QkNormRopeStore &input = arguments.input;
    const int token = blockIdx.x / BLOCKS;
    const int kv_head = blockIdx.x % BLOCKS * HEADS_OF_BLOCK + warp_index() / SHARING_WARPS;
    const int split = blockIdx.y;
    const int warp = warp_index() % SHARING_WARPS;
    if (kv_head >= KV_HEADS) {
        return;
    }

    const int own_position = input.positions[token];
    int splits_in_use = 1;
    int first = 0;
    int end = own_position;
    if constexpr (SHARING_WARPS > 1) {
        const int splits = arguments.splits;
        const int equal_parts = (own_position + splits - 1) / splits;
        const int whole_loops = (equal_parts + LOOP_POSITIONS - 1) / LOOP_POSITIONS;
        const int split_length = max((int)arguments.min_split_length, whole_loops * LOOP_POSITIONS);
        splits_in_use = max(1, (own_position + split_length - 1) / split_length);
        first = split * split_length;
        end = min(first + split_length, own_position);
    }
    if (split >= splits_in_use) {
        return;
    }
    first += warp * WARP_POSITIONS;

    const u64 row = input.row_indices[token];
    const u64 in_cache = (row * KV_HEADS + kv_head) * input.cache_length * HEAD_VECTORS;
    const u64 at_position = (u64)own_position * HEAD_VECTORS;
    const HeadOfToken head = {
        kv_head, own_position, input.keys + in_cache, input.values + in_cache, input.q_norm, input.k_norm,
        input.cos + at_position, input.sin + at_position, arguments.is_stored != 0};
    const u64 first_head = (u64)token * HEADS + kv_head * GROUP;            // of all tokens
    const int lane = threadIdx.x % 16;
    const uint4 *of_token = input.qkv + (u64)token * QKV_HEADS * HEAD_VECTORS + lane;
    const bool has_own = split == splits_in_use - 1 && warp == 0;
    const auto load_own = [&](uint4 (&own)[OWN_HEADS]) {
#pragma unroll
        for (int i = 0; i < OWN_HEADS; ++i) {
            own[i] = of_token[own_head(kv_head, i) * HEAD_VECTORS];
        }
    };
    WarpAttention attended = attend_positions(head, first, end, LOOP_POSITIONS, has_own, load_own);
    if constexpr (SHARING_WARPS > 1) {
        merge_warps(arguments, attended, first_head, split, splits_in_use);
    } else {
        finish_attention(attended, [&](int g, uint4 vector) {
            *(uint4 *)&arguments.output[(first_head + g) * HEAD_DIM + 8 * lane] = vector;
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ATTENTION_BLOCKS) attention(Attention arguments) {
    attend<WARPS>(arguments);
}

// For short caches: one warp per KV head.
extern "C" __global__ void __launch_bounds__(THREADS, ATTENTION_BLOCKS) short_attention(ShortAttention arguments) {
    attend<1>(arguments);
}


// ---- Sampling

// The token that score i of a thread belongs to.
__device__ int token_of_score(int i) {
    return i * SAMPLER_THREADS + threadIdx.x;
}

// Chooses the token of a row.
template <int SCORE_BITS>
__device__ int sample_row(const float (&score)[SCORES_PER_THREAD], const Sample &arguments, int row) {
    const bool greedy = arguments.greedy[row];
    float noise[SCORES_PER_THREAD];
#pragma unroll
    for (int i = 0; i < SCORES_PER_THREAD; ++i) {
        noise[i] = greedy ? 1 : arguments.noise[row * arguments.noise_stride + token_of_score(i)];
    }
    const Sampling sampling = {arguments.temperature[row], (u64)arguments.topk_rank[row],
                               arguments.one_minus_top_p[row]};
    return sample_scores<SCORE_BITS>(score, noise, sampling, static_shared<SamplerShared<SAMPLER_WARPS>>(),
                                     token_of_score, [] { __syncthreads(); });
}

__device__ void load_logits(float (&score)[SCORES_PER_THREAD], const bf16 *logits, int row) {
#pragma unroll
    for (int i = 0; i < SCORES_PER_THREAD; ++i) {
        score[i] = low_half(logits[(u64)row * VOCAB + token_of_score(i)]);
    }
}

// One block per row.
extern "C" __global__ void __launch_bounds__(SAMPLER_THREADS) sample(Sample arguments) {
    const int row = blockIdx.x;
    float score[SCORES_PER_THREAD];
    load_logits(score, arguments.logits, row);
    const int token = sample_row<16>(score, arguments, row);
    if (threadIdx.x == 0) {
        arguments.token[row] = token;
    }
}

// Rows.choose_token of cudagraph_talker.py: the rules, the choice, and the new state. Rows that may not advance keep
// their state.
extern "C" __global__ void __launch_bounds__(SAMPLER_THREADS) choose(Choose arguments) {
    const int row = blockIdx.x;
    if (!arguments.advance[row]) {
        return;
    }
    const i64 frame = arguments.frame[row] + 1;
    const i64 end_token = arguments.end_token[row];
    const bool too_early = frame < arguments.min_tokens[row];
    const float penalty = arguments.repetition_penalty[row];
    const bool *suppressed = arguments.suppressed + (u64)row * VOCAB;
    bool *seen = arguments.seen + (u64)row * VOCAB;

    float score[SCORES_PER_THREAD];
    load_logits(score, arguments.sample.logits, row);
#pragma unroll
    for (int i = 0; i < SCORES_PER_THREAD; ++i) {
        const int token = token_of_score(i);
        const bool ends_too_early = too_early && token == end_token;
        score[i] = apply_rules(score[i], seen[token], penalty, suppressed[token] || ends_too_early);
    }
    const int token = sample_row<32>(score, arguments.sample, row);
    if (threadIdx.x == 0) {
        arguments.sample.token[row] = token;
        arguments.frame[row] = frame;
        seen[token] = true;
        if (token == end_token) {
            arguments.ended[row] = true;
        }
    }
}
