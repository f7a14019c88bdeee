// The small kernels between the matrix products when B rows decode one position each, every row at its own.
//
// batched.py compiles this file with NVRTC for one GPU and one model. It puts these definitions before it:
//
//     HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM, EPSILON     of the stack of decoder layers
//     THREADS            of a block of qk_norm_rope_store, attention and silu_and_multiply
//     SAMPLER_THREADS    of a block of sample and choose
//     SMALLEST_SPLIT     positions that are not worth splitting in attention
//
// batched_reference.py has the kernels of a layer in a few lines of torch. Sums are float; values are rounded
// to bfloat16 where the model's own forward rounds them. No block waits for another one.
//
//
// One layer
// ---------
//     kernel                reads                   writes                          blocks, threads of each
//     -------------------   ---------------------   -----------------------------   -------------------------
//     (GEMM)                normalized              qkv
//     qk_norm_rope_store    qkv, cos, sin           query; one position of keys     (all heads / 8, B), 128
//                                                   and of values
//     attention             query, keys, values     output                          (KV_HEADS * splits, B), 128
//     (GEMM)                output                  x
//     add_and_norm          x, residual             residual, normalized            B, HIDDEN / 8
//     (GEMM)                normalized              gate_up
//     silu_and_multiply     gate_up                 inner                           B * INNER / 1024, 128
//     (GEMM)                inner                   x
//     add_and_norm          x, residual             residual, normalized            B, HIDDEN / 8
//
// The last kernel of a layer has the norm weight of the next layer, or of the final norm. Before the first
// layer comes `first_norm`, which adds nothing. After a head comes `sample`, or `choose` for the talker: a
// block of 256 threads for each row.
//
// In the comments, a vector is 8 consecutive bfloat16: 16 bytes, what a thread loads at once (uint4). A head
// of 128 dimensions is 16 vectors, for the 16 lanes of a half-warp.

using bf16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;


// ---- Sizes

constexpr int VECTORS_OF_ROW = HIDDEN / 8;
constexpr int VECTORS_OF_HEAD = 16;                   // and lanes of a half-warp
constexpr int VECTORS_OF_INNER = INNER / 8;
constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;       // of q, k and v
constexpr int GROUP = HEADS / KV_HEADS;               // query heads that share a KV head
constexpr int HALF_WARPS = THREADS / 16;              // of a block
constexpr int POSITIONS_IN_FLIGHT = 4;                // loaded by a half-warp before it uses the first
constexpr int POSITIONS_OF_BLOCK = HALF_WARPS * POSITIONS_IN_FLIGHT;     // ... by all half-warps
constexpr int NORM_WARPS = VECTORS_OF_ROW / 32;
constexpr int SAMPLER_WARPS = SAMPLER_THREADS / 32;
constexpr int SCORES_PER_THREAD = VOCAB / SAMPLER_THREADS;
constexpr int TOKEN_BITS = 12;
constexpr float LOWEST_SCORE = -1e30f;

static_assert(HEAD_DIM == 8 * VECTORS_OF_HEAD, "unsupported sizes: HEAD_DIM must be 128");
static_assert(HEADS % KV_HEADS == 0, "unsupported sizes: HEADS must be a multiple of KV_HEADS");
static_assert(GROUP <= 4, "unsupported sizes: HEADS must be at most 4 * KV_HEADS");         // registers
static_assert(ALL_HEADS % HALF_WARPS == 0, "unsupported sizes: heads of q, k and v must be a multiple of 8");
static_assert(HIDDEN % 256 == 0, "unsupported sizes: HIDDEN must be a multiple of 256");    // whole warps
static_assert(HIDDEN <= 8192, "unsupported sizes: HIDDEN must be at most 8192");            // threads
static_assert(INNER % 8 == 0, "unsupported sizes: INNER must be a multiple of 8");
static_assert(VOCAB % SAMPLER_THREADS == 0, "unsupported sizes: VOCAB must be a multiple of 256");
static_assert(VOCAB <= 1 << TOKEN_BITS, "unsupported sizes: VOCAB must be at most 4096");


// ---- Arguments, a struct for each kernel. batched.py writes them and checks their layout when it compiles.

#ifdef __CUDACC_RTC__  // NVRTC of CUDA 12 does not know __builtin_offsetof
#define OFFSET_OF(type, field) __INTADDR__(&((type *)0)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif

struct FirstNorm {
    const uint4 *x;                                   // (B, HIDDEN)
    const uint4 *weight;                              // (HIDDEN)
    uint4 *normalized;                                // (B, HIDDEN)
};

struct AddAndNorm {
    const uint4 *x;                                   // (B, HIDDEN)
    const uint4 *residual;                            // (B, HIDDEN)
    const uint4 *weight;                              // (HIDDEN)
    uint4 *sum;                                       // (B, HIDDEN), may be `residual`
    uint4 *normalized;                                // (B, HIDDEN)
};

struct QkNormRopeStore {
    const uint4 *qkv;                                 // (B, ALL_HEADS, HEAD_DIM)
    const uint4 *q_norm;                              // (HEAD_DIM)
    const uint4 *k_norm;                              // (HEAD_DIM)
    const uint4 *cos;                                 // (cache_length, HEAD_DIM)
    const uint4 *sin;                                 // (cache_length, HEAD_DIM), its first half negated
    const i64 *positions;                             // (B)
    const i64 *slots;                                 // (B), each row's place in the cache
    u64 cache_length;
    uint4 *query;                                     // (B, HEADS, HEAD_DIM)
    uint4 *keys;                                      // (slots, KV_HEADS, cache_length, HEAD_DIM)
    uint4 *values;                                    // (slots, KV_HEADS, cache_length, HEAD_DIM)
};

struct Attention {
    const uint4 *query;                               // (B, HEADS, HEAD_DIM)
    const uint4 *keys;                                // (slots, KV_HEADS, cache_length, HEAD_DIM)
    const uint4 *values;                              // (slots, KV_HEADS, cache_length, HEAD_DIM)
    const i64 *positions;                             // (B)
    const i64 *slots;                                 // (B)
    u64 cache_length;
    u64 splits;                                       // the most parts that a row's positions are split into
    float *split_best;                                // (B, HEADS, splits), highest score of a split
    float *split_weight;                              // (B, HEADS, splits), sum of its weights
    float *split_sum;                                 // (B, HEADS, splits, HEAD_DIM), of values times weights
    u32 *finished_splits;                             // (B, KV_HEADS), 0 before and after a launch
    bf16 *output;                                     // (B, HEADS, HEAD_DIM)
};

struct SiluAndMultiply {
    const uint4 *gate_up;                             // (B, 2, INNER)
    u64 rows;
    uint4 *inner;                                     // (B, INNER)
};

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
    const bool *advance;                              // (B), rows that take part
    i64 *frame;                                       // (B)
    bool *seen;                                       // (B, VOCAB), tokens to apply the penalty to
    bool *ended;                                      // (B)
};


// ---- PTX instructions, and memory of a block
// For a run on a CPU, tests/gpu_on_cpu.h, included before this file, defines functions of the same names.

#ifdef BATCHED_ON_CPU
template <class T>
T &shared() {
    return *(T *)dynamic_shared_memory();
}
#else

// The shared memory of a block, as the one type T that its kernel has there.
template <class T>
__device__ T &shared() {
    __shared__ T memory;
    return memory;
}

// Two floats, rounded to nearest even, as low and high half of a register.
__device__ u32 pack_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif


// ---- Small helpers

__device__ u32 warp_index() {
    return threadIdx.x / 32;
}

__device__ u32 lane_index() {
    return threadIdx.x % 32;
}

__device__ float low_half(u32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ float high_half(u32 pair) {
    return __uint_as_float(pair & 0xffff0000);
}

__device__ float round_to_bf16(float x) {
    return low_half(pack_bf16x2(x, 0));
}

// A vector as floats
struct alignas(16) Eight {
    float v[8];
};

__device__ Eight unpack(uint4 x) {
    return {low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y),
            low_half(x.z), high_half(x.z), low_half(x.w), high_half(x.w)};
}

__device__ uint4 pack(Eight x) {
    return {pack_bf16x2(x.v[0], x.v[1]), pack_bf16x2(x.v[2], x.v[3]),
            pack_bf16x2(x.v[4], x.v[5]), pack_bf16x2(x.v[6], x.v[7])};
}

__device__ float dot(Eight x, Eight y) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum += x.v[i] * y.v[i];
    }
    return sum;
}

// Sum over each aligned group of LANES lanes; every lane gets it.
template <int LANES, class T>
__device__ T sum_of_lanes(T x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(~0u, x, distance);
    }
    return x;
}

// Combines a value that all lanes of a warp have over the warps of the block. Every thread gets the result.
// There is one barrier, so `of_warp` must not be what the previous call used: slow threads may still read it.
template <int WARPS, class T, class Combine>
__device__ T combine_warps(T x, T (&of_warp)[WARPS], Combine combine) {
    if (lane_index() == 0) {
        of_warp[warp_index()] = x;
    }
    __syncthreads();
    x = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) {
        x = combine(x, of_warp[warp]);
    }
    return x;
}


// ---- RMS norm, of rows and of heads

// Rounded after the division by the root mean square, and after the multiplication by the weight.
__device__ uint4 normalize(Eight x, float factor, uint4 weight) {
    const Eight w = unpack(weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x.v[i] = round_to_bf16(x.v[i] * factor) * w.v[i];
    }
    return pack(x);
}

struct NormShared {
    float squares[NORM_WARPS];
};

// Block b has row b, thread t its vector t.
__device__ uint4 norm_of_row(Eight x, uint4 weight) {
    const float of_warp = sum_of_lanes<32>(dot(x, x));
    const float squares = combine_warps(of_warp, shared<NormShared>().squares, [](float a, float b) {
        return a + b;
    });
    return normalize(x, rsqrtf(squares / HIDDEN + EPSILON), weight);
}

extern "C" __global__ void __launch_bounds__(VECTORS_OF_ROW) first_norm(FirstNorm arguments) {
    const u64 vector = (u64)blockIdx.x * VECTORS_OF_ROW + threadIdx.x;
    const uint4 weight = arguments.weight[threadIdx.x];
    arguments.normalized[vector] = norm_of_row(unpack(arguments.x[vector]), weight);
}

extern "C" __global__ void __launch_bounds__(VECTORS_OF_ROW) add_and_norm(AddAndNorm arguments) {
    const u64 vector = (u64)blockIdx.x * VECTORS_OF_ROW + threadIdx.x;
    const uint4 weight = arguments.weight[threadIdx.x];
    const Eight x = unpack(arguments.x[vector]);
    Eight sum = unpack(arguments.residual[vector]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum.v[i] = round_to_bf16(sum.v[i] + x.v[i]);
    }
    arguments.sum[vector] = pack(sum);
    arguments.normalized[vector] = norm_of_row(sum, weight);
}


// ---- Norm and RoPE of queries and keys; keys and values to the cache

// Half-warp h of block (b, row) has head 8 b + h of that row, in the order of qkv: queries, keys, values.
// Lane l of 16 has dimensions 8 l .. 8 l + 7. RoPE pairs dimension d with (d + 64) % 128, 8 lanes away.
extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope_store(QkNormRopeStore arguments) {
    const int row = blockIdx.y;
    const int head = blockIdx.x * HALF_WARPS + threadIdx.x / 16;
    const int lane = threadIdx.x % 16;
    const u64 position = arguments.positions[row];
    const u64 slot = arguments.slots[row];
    const bool is_query = head < HEADS;
    const bool is_value = head >= HEADS + KV_HEADS;

    const uint4 x = arguments.qkv[((u64)row * ALL_HEADS + head) * VECTORS_OF_HEAD + lane];
    const uint4 weight = is_query ? arguments.q_norm[lane] : arguments.k_norm[lane];
    const Eight cos = unpack(arguments.cos[position * VECTORS_OF_HEAD + lane]);
    const Eight sin = unpack(arguments.sin[position * VECTORS_OF_HEAD + lane]);

    // The half-warps of values take part for the sake of their warp, and then store what they loaded.
    const float squares = sum_of_lanes<16>(dot(unpack(x), unpack(x)));
    const Eight normalized = unpack(normalize(unpack(x), rsqrtf(squares / HEAD_DIM + EPSILON), weight));
    Eight rotated;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float partner = __shfl_xor_sync(~0u, normalized.v[i], VECTORS_OF_HEAD / 2);
        const float straight = round_to_bf16(normalized.v[i] * cos.v[i]);
        const float crossed = round_to_bf16(partner * sin.v[i]);
        rotated.v[i] = straight + crossed;
    }

    const auto in_cache = [&](int kv_head) {
        return ((slot * KV_HEADS + kv_head) * arguments.cache_length + position) * VECTORS_OF_HEAD + lane;
    };
    if (is_query) {
        arguments.query[((u64)row * HEADS + head) * VECTORS_OF_HEAD + lane] = pack(rotated);
    } else if (is_value) {
        arguments.values[in_cache(head - HEADS - KV_HEADS)] = x;
    } else {
        arguments.keys[in_cache(head - HEADS)] = pack(rotated);
    }
}


// ---- Attention

// Of a half-warp's positions, for each query head of the group: the sum of values times weights, the highest
// score, the sum of weights. A weight is exp(score - best).
struct alignas(16) AttentionShared {
    float sum[HALF_WARPS][GROUP][HEAD_DIM];
    float best[HALF_WARPS][GROUP];
    float weight[HALF_WARPS][GROUP];
    bool is_last;
};

// The positions 0 .. length - 1 of a row are split into equal parts (as in flash-decoding), a block each:
//
//     row of 50      |split 0|                                  splits 1, 2, ... exit at once
//     row of 2,048   |  split 0  |  split 1  |  split 2  | ...
//
// So the grid does not depend on the lengths, but the work of a block does. Block (b, row) has KV head
// b % KV_HEADS with its GROUP query heads, and split b / KV_HEADS. Half-warp h of 8 takes, 4 at a time,
//
//     positions first + h, first + h + 8, first + h + 16, first + h + 24,   then all of them 32 later, ...
//
// and lane l of 16 the dimensions 8 l .. 8 l + 7. Softmax is online. The half-warps are merged in shared
// memory; the splits in global memory, by the block of a row and KV head that finishes last.
extern "C" __global__ void __launch_bounds__(THREADS) attention(Attention arguments) {
    AttentionShared &merge = shared<AttentionShared>();
    const int row = blockIdx.y;
    const int kv_head = blockIdx.x % KV_HEADS;
    const int split = blockIdx.x / KV_HEADS;
    const int splits = arguments.splits;
    const int half_warp = threadIdx.x / 16;
    const int lane = threadIdx.x % 16;

    const int length = arguments.positions[row] + 1;
    const int equal_parts = (length + splits - 1) / splits;
    const int whole_loops = (equal_parts + POSITIONS_OF_BLOCK - 1) / POSITIONS_OF_BLOCK;
    const int split_length = max(SMALLEST_SPLIT, whole_loops * POSITIONS_OF_BLOCK);
    const int splits_in_use = (length + split_length - 1) / split_length;
    const int first = split * split_length;
    const int end = min(first + split_length, length);
    if (split >= splits_in_use) {
        return;
    }

    const u64 head_in_cache = arguments.slots[row] * KV_HEADS + kv_head;
    const uint4 *keys = arguments.keys + head_in_cache * arguments.cache_length * VECTORS_OF_HEAD;
    const uint4 *values = arguments.values + head_in_cache * arguments.cache_length * VECTORS_OF_HEAD;
    const u64 first_head = (u64)row * HEADS + kv_head * GROUP;              // of all rows
    Eight query[GROUP];
    Eight sum[GROUP] = {};
    float best[GROUP];
    float weight[GROUP] = {};
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        query[g] = unpack(arguments.query[(first_head + g) * VECTORS_OF_HEAD + lane]);
        best[g] = LOWEST_SCORE;
    }

    for (int next = first; next < end; next += POSITIONS_OF_BLOCK) {
        // Issue all loads before using any of them. Behind the end, the last position is loaded again, and
        // has no weight.
        uint4 k[POSITIONS_IN_FLIGHT];
        uint4 v[POSITIONS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < POSITIONS_IN_FLIGHT; ++i) {
            const int position = min(next + i * HALF_WARPS + half_warp, end - 1);
            k[i] = keys[position * VECTORS_OF_HEAD + lane];
            v[i] = values[position * VECTORS_OF_HEAD + lane];
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float score[POSITIONS_IN_FLIGHT];
            float new_best = best[g];
#pragma unroll
            for (int i = 0; i < POSITIONS_IN_FLIGHT; ++i) {
                const bool visible = next + i * HALF_WARPS + half_warp < end;
                const float product = sum_of_lanes<16>(dot(query[g], unpack(k[i])));
                score[i] = visible ? product * rsqrtf(HEAD_DIM) : LOWEST_SCORE;
                new_best = fmaxf(new_best, score[i]);
            }
            const float rescale = expf(best[g] - new_best);
            best[g] = new_best;
            weight[g] *= rescale;
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                sum[g].v[d] *= rescale;
            }
#pragma unroll
            for (int i = 0; i < POSITIONS_IN_FLIGHT; ++i) {
                const bool visible = next + i * HALF_WARPS + half_warp < end;
                const float new_weight = visible ? expf(score[i] - new_best) : 0;
                const Eight value = unpack(v[i]);
                weight[g] += new_weight;
#pragma unroll
                for (int d = 0; d < 8; ++d) {
                    sum[g].v[d] += new_weight * value.v[d];
                }
            }
        }
    }

    // Merge the half-warps: thread t has the outputs t, t + THREADS, ... of the GROUP * HEAD_DIM of a block.
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        *(Eight *)&merge.sum[half_warp][g][8 * lane] = sum[g];
        if (lane == 0) {
            merge.best[half_warp][g] = best[g];
            merge.weight[half_warp][g] = weight[g];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const int g = i / HEAD_DIM;
        const int dimension = i % HEAD_DIM;
        float block_best = LOWEST_SCORE;
#pragma unroll
        for (int h = 0; h < HALF_WARPS; ++h) {
            block_best = fmaxf(block_best, merge.best[h][g]);
        }
        float block_weight = 0;
        float block_sum = 0;
#pragma unroll
        for (int h = 0; h < HALF_WARPS; ++h) {
            const float rescale = expf(merge.best[h][g] - block_best);
            block_weight += merge.weight[h][g] * rescale;
            block_sum += merge.sum[h][g][dimension] * rescale;
        }
        if (splits_in_use == 1) {
            arguments.output[first_head * HEAD_DIM + i] = pack_bf16x2(block_sum / block_weight, 0);
            continue;
        }
        const u64 this_split = (first_head + g) * splits + split;
        arguments.split_sum[this_split * HEAD_DIM + dimension] = block_sum;
        if (dimension == 0) {
            arguments.split_best[this_split] = block_best;
            arguments.split_weight[this_split] = block_weight;
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
        u32 *finished = &arguments.finished_splits[row * KV_HEADS + kv_head];
        merge.is_last = atomicInc(finished, splits_in_use - 1) == splits_in_use - 1;
        __threadfence();
    }
    __syncthreads();
    if (!merge.is_last) {
        return;
    }
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const u64 first_split = (first_head + i / HEAD_DIM) * splits;
        float row_best = LOWEST_SCORE;
        for (int s = 0; s < splits_in_use; ++s) {
            row_best = fmaxf(row_best, arguments.split_best[first_split + s]);
        }
        float row_weight = 0;
        float row_sum = 0;
        for (int s = 0; s < splits_in_use; ++s) {
            const float rescale = expf(arguments.split_best[first_split + s] - row_best);
            row_weight += arguments.split_weight[first_split + s] * rescale;
            row_sum += arguments.split_sum[(first_split + s) * HEAD_DIM + i % HEAD_DIM] * rescale;
        }
        arguments.output[first_head * HEAD_DIM + i] = pack_bf16x2(row_sum / row_weight, 0);
    }
}


// ---- MLP

// Thread t of all has vector t of (B, INNER). silu(gate) is rounded, and so is its product with up.
extern "C" __global__ void __launch_bounds__(THREADS) silu_and_multiply(SiluAndMultiply arguments) {
    const u64 vector = (u64)blockIdx.x * THREADS + threadIdx.x;
    const u64 row = vector / VECTORS_OF_INNER;
    if (row >= arguments.rows) {
        return;
    }
    const u64 gate_vector = vector + row * VECTORS_OF_INNER;
    const Eight gate = unpack(arguments.gate_up[gate_vector]);
    const Eight up = unpack(arguments.gate_up[gate_vector + VECTORS_OF_INNER]);
    Eight inner;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float silu = round_to_bf16(gate.v[i] / (1 + expf(-gate.v[i])));
        inner.v[i] = silu * up.v[i];
    }
    arguments.inner[vector] = pack(inner);
}


// ---- Sampling

// Score i of a thread belongs to this token.
__device__ int token_of_score(int i) {
    return i * SAMPLER_THREADS + threadIdx.x;
}

// Floats as unsigned integers of the same order, and back. Add 0 first: it makes -0, which equals 0, the same.
__device__ u32 ordered_bits(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ float from_ordered_bits(u32 ordered) {
    return __uint_as_float(ordered >> 31 ? ordered & ~(1u << 31) : ~ordered);
}

struct SamplerShared {
    u32 reduced[2][SAMPLER_WARPS];                    // taken in turn, so that one barrier is enough
    u64 reduced_wide[2][SAMPLER_WARPS];
};

// `sample` of cudagraph_talker.py for the scores of one row, by one block: top-k, top-p, and the largest
// weight / noise. Instead of sorting, it finds the two thresholds bit by bit.
//
// Ranks are in the order of a stable sort: 32 bits of the score, divided by the temperature, then 12 of the
// token, so that no two are equal. Torch's sort is stable on a GPU for this many scores, but does not promise
// it. A NaN leads to some token of the vocabulary.
//
// SCORE_BITS is how many of the ordered bits of a score differ: 16 for scores that are bfloat16, else 32.
template <int SCORE_BITS>
__device__ int sample_row(const float (&score)[SCORES_PER_THREAD], const Sample &settings, int row) {
    constexpr int N = SCORES_PER_THREAD;
    SamplerShared &in_shared = shared<SamplerShared>();
    const float temperature = settings.temperature[row];
    const float one_minus_top_p = settings.one_minus_top_p[row];
    const i64 topk_rank = settings.topk_rank[row];
    const bool greedy = settings.greedy[row];
    float noise[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        noise[i] = greedy ? 1 : settings.noise[row * settings.noise_stride + token_of_score(i)];
    }

    int reduction = 0;
    const auto sum_of_block = [&](u32 x) {
        ++reduction;
        return combine_warps(__reduce_add_sync(~0u, x), in_shared.reduced[reduction % 2], [](u32 a, u32 b) {
            return a + b;
        });
    };
    const auto max_of_block = [&](u32 x) {
        ++reduction;
        return combine_warps(__reduce_max_sync(~0u, x), in_shared.reduced[reduction % 2], [](u32 a, u32 b) {
            return max(a, b);
        });
    };
    const auto wide_sum_of_block = [&](u64 x) {
        ++reduction;
        return combine_warps(sum_of_lanes<32>(x), in_shared.reduced_wide[reduction % 2], [](u64 a, u64 b) {
            return a + b;
        });
    };
    const auto wide_min_of_block = [&](u64 x) {
        ++reduction;
        for (int distance = 16; distance > 0; distance /= 2) {
            x = min(x, __shfl_xor_sync(~0u, x, distance));
        }
        return combine_warps(x, in_shared.reduced_wide[reduction % 2], [](u64 a, u64 b) { return min(a, b); });
    };

    // Top-k: the k-th best score is the highest number with at most `topk_rank` scores below it. Scores that
    // equal it stay.
    u32 key[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        key[i] = ordered_bits(score[i]) >> (32 - SCORE_BITS);
    }
    u32 threshold = 0;
    for (int bit = SCORE_BITS - 1; bit >= 0; --bit) {
        const u32 candidate = threshold | 1u << bit;
        u32 below = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            below += key[i] < candidate;
        }
        if (sum_of_block(below) <= topk_rank) {
            threshold = candidate;
        }
    }
    if (SCORE_BITS == 16) {
        threshold = threshold << 16 | (threshold >> 15 ? 0 : 0xffff);   // ordered_bits inverts a negative score's zeros
    }
    const float threshold_score = from_ordered_bits(threshold) / temperature;

    u32 ordered[N];
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        ordered[i] = ordered_bits(score[i] / temperature);
        best = max(best, ordered[i]);
    }
    const float best_score = from_ordered_bits(max_of_block(best));
    float weight[N];                                  // softmax without its denominator
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float this_score = from_ordered_bits(ordered[i]);
        weight[i] = this_score < threshold_score ? 0 : expf(this_score - best_score);
    }
    const auto rank = [&](int i) {
        return (u64)ordered[i] << TOKEN_BITS | token_of_score(i);
    };

    // Top-p drops the lowest ranks, as many as have at most 1 - p of the weight together. Weights are summed
    // as integers, 2^40 for the best, so that every order of summation gives the same sum. All 4,096 together
    // have at most 2^52.
    u64 first_kept = 0;
    if (one_minus_top_p > 0) {
        const auto weight_below = [&](u64 candidate) {
            u64 sum = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum += rank(i) < candidate ? (u64)(weight[i] * (1ull << 40)) : 0;
            }
            return wide_sum_of_block(sum);
        };
        const u64 limit = one_minus_top_p * (float)weight_below(~0ull);
        for (int bit = 32 + TOKEN_BITS - 1; bit >= 0; --bit) {
            const u64 candidate = first_kept | 1ull << bit;
            if (weight_below(candidate) <= limit) {
                first_kept = candidate;
            }
        }
    }

    // The largest weight / noise, and of equals the lowest rank. Bits of floats from 0 on have their order.
    u32 ratio[N];
    u32 best_ratio = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        ratio[i] = rank(i) < first_kept ? 0 : __float_as_uint(weight[i] / noise[i]);
        best_ratio = max(best_ratio, ratio[i]);
    }
    best_ratio = max_of_block(best_ratio);
    u64 winner = ~0ull;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        winner = ratio[i] == best_ratio ? min(winner, rank(i)) : winner;
    }
    return wide_min_of_block(winner) % (1 << TOKEN_BITS);
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

// TalkerGraph.choose_token: the rules, the choice, and what follows from it. A row that may not advance stays
// as it is.
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
        if (seen[token]) {
            score[i] = score[i] < 0 ? score[i] * penalty : score[i] / penalty;
        }
        if (suppressed[token] || (too_early && token == end_token)) {
            score[i] = __uint_as_float(0xff800000);   // -infinity
        }
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
