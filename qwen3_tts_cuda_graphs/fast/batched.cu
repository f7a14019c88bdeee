// The small kernels between the matrix products of a decoding step of B tokens, each at its own position: one of
// each row, or several of a row's prompt.
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
// If several tokens are of the same row, keys and values of all of them must be in the cache before one attends
// to them. Then qk_norm_rope_store comes before attention and does its first part: norm and RoPE of queries and
// keys, in place; keys and values to the cache.
//
// The last kernel of a layer has the norm weight of the next layer, or of the final norm. Before the first
// layer comes `add_and_norm` without a residual. After a head comes `sample`, or `choose` for the talker: a
// block of 256 threads for each row.
//
// In the comments, a vector is 8 consecutive bfloat16: 16 bytes, what a thread loads at once (uint4). A head
// of 128 dimensions is 16 vectors, for the 16 lanes of a half-warp.

#include "kernels.h"
#include "layer_kernels.h"
#include "sampler.h"


// ---- Sizes

constexpr int HEAD_VECTORS = 16;                      // and lanes of a half-warp
constexpr int QKV_HEADS = HEADS + 2 * KV_HEADS;       // of q, k and v
constexpr int GROUP = HEADS / KV_HEADS;               // query heads that share a KV head
constexpr int WARPS = THREADS / 32;                   // of a block
constexpr int WARP_POSITIONS = 16;                    // that a warp attends to at a time
constexpr int ATTENTION_BLOCKS = 4;                   // on a multiprocessor: as many as registers for all loads allow
constexpr int SAMPLER_WARPS = SAMPLER_THREADS / 32;
constexpr int SCORES_PER_THREAD = VOCAB / SAMPLER_THREADS;

static_assert(HEAD_DIM == 8 * HEAD_VECTORS, "unsupported sizes: HEAD_DIM must be 128");
static_assert(HEADS % KV_HEADS == 0, "unsupported sizes: HEADS must be a multiple of KV_HEADS");
static_assert(GROUP <= 4, "unsupported sizes: HEADS must be at most 4 * KV_HEADS");         // registers
static_assert(QKV_HEADS % (THREADS / 16) == 0, "unsupported sizes: heads of q, k and v must be a multiple of 8");
static_assert(VOCAB % SAMPLER_THREADS == 0, "unsupported sizes: VOCAB must be a multiple of 256");
static_assert(VOCAB <= 1 << TOKEN_BITS, "unsupported sizes: VOCAB must be at most 4096");


// ---- Arguments, a struct for each kernel. batched.py writes them and checks their layout when it compiles.

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
    u64 is_stored;                                    // whether qk_norm_rope_store has had this input
    u64 splits;                                       // maximum number of splits of a token's positions
    u64 min_split_length;                             // positions of a split, at least
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

// Half-warp h of block (b, token) has head 8 b + h of that token, in the order of qkv: queries, keys, values.
// Lane l of 16 has dimensions 8 l .. 8 l + 7.
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

    // Half-warps with a value compute this as well, because all lanes of a warp take part in shuffles.
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

// What a warp has computed of its positions, for each query head of the group: the sum of values times weights,
// the highest score, the sum of weights. A weight is exp(score - best).
struct alignas(16) AttentionShared {
    float sum[WARPS][GROUP][HEAD_DIM];
    float best[WARPS][GROUP];
    float weight[WARPS][GROUP];
    bool is_last;
};

// Merges the warps of a block in shared memory, and the blocks of a token and KV head, one for each split, in
// global memory: the block that finishes last does that.
__device__ void merge_warps(const Attention &arguments, const Eight (&sum)[GROUP], const float (&best)[GROUP],
                            const float (&weight)[GROUP], u64 first_head, int split, int splits_in_use) {
    AttentionShared &merge = static_shared<AttentionShared>();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        if (lane < 16) {
            *(Eight *)&merge.sum[warp_index()][g][8 * lane] = sum[g];
        }
        if (lane == 0) {
            merge.best[warp_index()][g] = best[g];
            merge.weight[warp_index()][g] = weight[g];
        }
    }
    __syncthreads();

    // Thread t has the outputs t, t + THREADS, ... of the GROUP * HEAD_DIM of a block.
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

// A token attends to its own position and to those before it, which are in the cache. If tokens have a row each,
// its own key and value need not be there yet: this kernel computes them and stores them.
//
// The positions in the cache are split into equal parts (as in flash-decoding), a block each:
//
//     token at 50      |split 0|                                splits 1, 2, ... exit at once
//     token at 2,048   |  split 0  |  split 1  |  split 2  | ...
//
// So the grid does not depend on the lengths, but the work of a block does. Blocks (i, split) of higher splits come
// last: if they exit, they do so beside others that work. A KV head with its GROUP query heads is shared by all warps
// of a block. For short caches one warp has it, and there is one split. A warp takes 16 positions at a time.
//
// Scores: a tensor core multiplies 16 keys by the queries, 16 dimensions at a time. Of a row of keys lane 4 r + q has 8
// dimensions in a row, as it loads them; in which order dimensions are summed does not matter.
//
//     lane 4 r + q has     keys of the positions r and r + 8, dimensions 32 c + 8 q .. + 7, c = 0 .. 3
//                          query head r, the same dimensions; 0 from r = GROUP on
//                          scores of the positions r and r + 8, query heads 2 q and 2 q + 1
//
// Values: half-warp h has the positions 2 i + h, lane l of 16 the dimensions 8 l .. 8 l + 7. Weights come from the lanes
// that have the scores. Softmax is online. The last split begins with the token's own position.
template <int SHARING_WARPS>
__device__ void attend(const Attention &arguments) {
    constexpr int LOOP_POSITIONS = SHARING_WARPS * WARP_POSITIONS;
    constexpr int HEADS_OF_BLOCK = WARPS / SHARING_WARPS;
    constexpr int BLOCKS = (KV_HEADS + HEADS_OF_BLOCK - 1) / HEADS_OF_BLOCK;     // of a split of a token
    const QkNormRopeStore &input = arguments.input;
    const int token = blockIdx.x / BLOCKS;
    const int kv_head = blockIdx.x % BLOCKS * HEADS_OF_BLOCK + warp_index() / SHARING_WARPS;
    const int split = blockIdx.y;
    const int warp = warp_index() % SHARING_WARPS;
    const int half_warp = threadIdx.x / 16 % 2;
    const int lane = threadIdx.x % 16;
    const int r = lane_index() / 4;
    const int q = lane_index() % 4;
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

    // Issue all loads before using any of them. Past the end the last position is loaded again, with weight 0.
    const u64 row = input.row_indices[token];
    const u64 head_in_cache = (row * KV_HEADS + kv_head) * input.cache_length * HEAD_VECTORS;
    uint4 *keys = input.keys + head_in_cache;
    uint4 *values = input.values + head_in_cache;
    const auto load_keys = [&](uint4 (&vectors)[2][HEAD_VECTORS / 4], int next) {
        if (next < end) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 *key = keys + min(next + 8 * i + r, end - 1) * HEAD_VECTORS + q;
#pragma unroll
                for (int c = 0; c < HEAD_VECTORS / 4; ++c) {
                    vectors[i][c] = key[4 * c];
                }
            }
        }
    };
    const auto load_values = [&](uint4 (&vectors)[WARP_POSITIONS / 2], int next) {
        if (next < end) {
#pragma unroll
            for (int i = 0; i < WARP_POSITIONS / 2; ++i) {
                vectors[i] = values[min(next + 2 * i + half_warp, end - 1) * HEAD_VECTORS + lane];
            }
        }
    };
    uint4 k[2][HEAD_VECTORS / 4];
    uint4 v[WARP_POSITIONS / 2];
    load_keys(k, first);
    load_values(v, first);

    const u64 first_head = (u64)token * HEADS + kv_head * GROUP;            // of all tokens
    const uint4 *of_token = input.qkv + (u64)token * QKV_HEADS * HEAD_VECTORS + lane;
    uint4 own_query[GROUP];
    uint4 own_key;
    uint4 own_value;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        own_query[g] = of_token[(kv_head * GROUP + g) * HEAD_VECTORS];
    }
    if (arguments.is_stored) {
        own_key = keys[own_position * HEAD_VECTORS + lane];
        own_value = values[own_position * HEAD_VECTORS + lane];
    } else {
        const uint4 cos = input.cos[own_position * HEAD_VECTORS + lane];
        const uint4 sin = input.sin[own_position * HEAD_VECTORS + lane];
        own_key = of_token[(HEADS + kv_head) * HEAD_VECTORS];
        own_value = of_token[(HEADS + KV_HEADS + kv_head) * HEAD_VECTORS];
        own_key = norm_and_rope<16>(own_key, input.k_norm[lane], cos, sin, EPSILON);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            own_query[g] = norm_and_rope<16>(own_query[g], input.q_norm[lane], cos, sin, EPSILON);
        }
    }

    // `best` and `weight` are those of the heads 2 q and 2 q + 1, the latter of this lane's positions.
    const bool has_own_position = split == splits_in_use - 1 && warp == 0;
    uint4 query[HEAD_VECTORS / 4] = {};
    Eight sum[GROUP] = {};
    float best[2] = {LOWEST_SCORE, LOWEST_SCORE};
    float weight[2] = {};
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        const float product = warp_sum<16>(dot(unpack(own_query[g]), unpack(own_key)));
        if (has_own_position && q == g / 2) {
            best[g % 2] = product * rsqrtf(HEAD_DIM);
            weight[g % 2] = r == 0;
        }
        if (has_own_position && half_warp == 0) {
            sum[g] = unpack(own_value);
        }
#pragma unroll
        for (int c = 0; c < HEAD_VECTORS / 4; ++c) {
            const uint4 of_head = from_lane(own_query[g], 4 * c + q);
            query[c] = r == g ? of_head : query[c];
        }
    }

    if (has_own_position && half_warp == 0 && !arguments.is_stored) {
        keys[own_position * HEAD_VECTORS + lane] = own_key;
        values[own_position * HEAD_VECTORS + lane] = own_value;
    }

    for (int next = first; next < end; next += LOOP_POSITIONS) {
        float low[4] = {};
        float high[4] = {};
#pragma unroll
        for (int c = 0; c < HEAD_VECTORS / 4; ++c) {
            mma_m16n8k16(low, k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y, query[c].x, query[c].y);
            mma_m16n8k16(high, k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w, query[c].z, query[c].w);
        }
        load_keys(k, next + LOOP_POSITIONS);

        float score[2][2];                            // of the positions r and r + 8
        float rescale[2];
        float new_weight[2][2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float new_best = best[head];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float product = low[2 * i + head] + high[2 * i + head];
                score[i][head] = next + 8 * i + r < end ? product * rsqrtf(HEAD_DIM) : LOWEST_SCORE;
                new_best = fmaxf(new_best, score[i][head]);
            }
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                new_best = fmaxf(new_best, __shfl_xor_sync(~0u, new_best, distance));
            }
            rescale[head] = expf(best[head] - new_best);
            best[head] = new_best;
            weight[head] *= rescale[head];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                new_weight[i][head] = expf(score[i][head] - new_best);       // 0 past the end
                weight[head] += new_weight[i][head];
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const float of_head = __shfl_sync(~0u, rescale[g % 2], g / 2);
#pragma unroll
            for (float &value : sum[g].v) {
                value *= of_head;
            }
        }
#pragma unroll
        for (int i = 0; i < WARP_POSITIONS / 2; ++i) {
            const Eight value = unpack(v[i]);
            const int row_of_scores = (2 * i + half_warp) % 8;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const float of_value = __shfl_sync(~0u, new_weight[i / 4][g % 2], 4 * row_of_scores + g / 2);
#pragma unroll
                for (int d = 0; d < 8; ++d) {
                    sum[g].v[d] += of_value * value.v[d];
                }
            }
        }
        load_values(v, next + LOOP_POSITIONS);
    }

    // All lanes get the results of all heads.
    float best_of_head[GROUP];
    float weight_of_head[GROUP];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            best[head] = fmaxf(best[head], __shfl_xor_sync(~0u, best[head], distance));
            weight[head] += __shfl_xor_sync(~0u, weight[head], distance);
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        best_of_head[g] = __shfl_sync(~0u, best[g % 2], g / 2);
        weight_of_head[g] = __shfl_sync(~0u, weight[g % 2], g / 2);
#pragma unroll
        for (float &value : sum[g].v) {
            value += __shfl_xor_sync(~0u, value, 16);
        }
    }
    if constexpr (SHARING_WARPS > 1) {
        merge_warps(arguments, sum, best_of_head, weight_of_head, first_head, split, splits_in_use);
    } else {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (float &value : sum[g].v) {
                value /= weight_of_head[g];
            }
            if (half_warp == g % 2) {
                *(uint4 *)&arguments.output[(first_head + g) * HEAD_DIM + 8 * lane] = pack(sum[g]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ATTENTION_BLOCKS) attention(Attention arguments) {
    attend<WARPS>(arguments);
}

// For caches so short that a warp is enough for a KV head.
extern "C" __global__ void __launch_bounds__(THREADS, ATTENTION_BLOCKS) short_attention(ShortAttention arguments) {
    attend<1>(arguments);
}


// ---- Sampling

// Score i of a thread belongs to this token.
__device__ int token_of_score(int i) {
    return i * SAMPLER_THREADS + threadIdx.x;
}

// The choice of a row.
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

// Block b has row b.
extern "C" __global__ void __launch_bounds__(SAMPLER_THREADS) sample(Sample arguments) {
    const int row = blockIdx.x;
    float score[SCORES_PER_THREAD];
    load_logits(score, arguments.logits, row);
    const int token = sample_row<16>(score, arguments, row);
    if (threadIdx.x == 0) {
        arguments.token[row] = token;
    }
}

// TalkerGraph.choose_token: the rules, the choice, and the new state. A row that may not advance is not
// changed.
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
