// Attention of one token to the positions of its row, by warps, for batched.cu; overlapped_stack.cu shares only the
// sizes and the way warps are merged. It uses the definitions HEADS, KV_HEADS, HEAD_DIM and EPSILON.
//
// A warp processes 16 positions at a time, for all GROUP query heads of a KV head.
//
// Scores: a tensor core multiplies 16 keys by the queries, 16 dimensions at a time. Lane 4 r + q holds 8 consecutive
// dimensions of a key, as it loads them: the order in which dimensions are summed does not matter.
//
//     lane 4 r + q has     keys of the positions r and r + 8, dimensions 32 c + 8 q .. + 7, c = 0 .. 3
//                          query head r, the same dimensions; 0 from r = GROUP on
//                          scores of the positions r and r + 8, query heads 2 q and 2 q + 1
//
// Values: half-warp h takes the positions 2 i + h, lane l of 16 the dimensions 8 l .. 8 l + 7. The weights come from
// the lanes that hold the scores. Softmax is online.

constexpr int HEAD_VECTORS = 16;                      // of 8 elements, one for each lane of a half-warp
constexpr int QKV_HEADS = HEADS + 2 * KV_HEADS;       // of q, k and v
constexpr int GROUP = HEADS / KV_HEADS;               // query heads that share a KV head
constexpr int WARP_POSITIONS = 16;                    // that a warp processes at a time

static_assert(HEAD_DIM == 8 * HEAD_VECTORS, "unsupported sizes: HEAD_DIM must be 128");
static_assert(HEADS % KV_HEADS == 0, "unsupported sizes: HEADS must be a multiple of KV_HEADS");
static_assert(GROUP <= 4, "unsupported sizes: HEADS must be at most 4 * KV_HEADS");         // registers

constexpr int OWN_HEADS = GROUP + 2;

// The i-th of the heads that belong to a KV head: its query heads, the key, the value.
__device__ int own_head(int kv_head, int i) {
    return i < GROUP ? kv_head * GROUP + i : kv_head + HEADS + (i - GROUP) * KV_HEADS;
}

// A token's KV head.
struct HeadOfToken {
    int kv_head;
    int position;                                     // of the token
    uint4 *keys;                                      // (positions, HEAD_DIM), its row of the cache
    uint4 *values;
    const uint4 *q_norm;                              // (HEAD_DIM)
    const uint4 *k_norm;
    const uint4 *cos;                                 // (HEAD_DIM), at its position
    const uint4 *sin;                                 // the first half negated
    bool is_stored;                                   // whether its key is cached and the queries are rotated
};

// A warp's result over its positions, for each query head: the sum of values times weights (lanes l and l + 16 both
// hold dimensions 8 l .. 8 l + 7), the highest score, the sum of weights. A weight is exp(score - best).
struct WarpAttention {
    Eight sum[GROUP];
    float best[GROUP];
    float weight[GROUP];
};

// A warp's attention to 16 positions from `first` on, then to those `stride` later, and so on until `end`, and, if
// `has_own`, to the token's own position: then it also stores its key and value, unless they are stored already.
// load_own(own) loads the vectors of the token's heads: lane l of 16 gets dimensions 8 l .. 8 l + 7 of
// own_head(kv_head, i).
template <class LoadOwn>
__device__ WarpAttention attend_positions(const HeadOfToken &token, int first, int end, int stride, bool has_own,
                                          LoadOwn load_own) {
    const int half_warp = threadIdx.x / 16 % 2;
    const int lane = threadIdx.x % 16;
    const int r = lane_index() / 4;
    const int q = lane_index() % 4;

    // Issue all loads before using any of them. Past the end the last position is loaded again, with weight 0.
    const auto load_keys = [&](uint4 (&vectors)[2][HEAD_VECTORS / 4], int next) {
        if (next < end) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 *key = token.keys + min(next + 8 * i + r, end - 1) * HEAD_VECTORS + q;
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
                vectors[i] = token.values[min(next + 2 * i + half_warp, end - 1) * HEAD_VECTORS + lane];
            }
        }
    };
    uint4 k[2][HEAD_VECTORS / 4];
    uint4 v[WARP_POSITIONS / 2];
    load_keys(k, first);
    load_values(v, first);

    const uint4 q_norm = token.q_norm[lane];
    const uint4 k_norm = token.k_norm[lane];
    const uint4 cos = token.cos[lane];
    const uint4 sin = token.sin[lane];
    uint4 own[OWN_HEADS];
    load_own(own);
    uint4 (&own_query)[OWN_HEADS] = own;
    uint4 &own_key = own[GROUP];
    uint4 &own_value = own[GROUP + 1];
    if (token.is_stored) {
        own_key = token.keys[token.position * HEAD_VECTORS + lane];
        own_value = token.values[token.position * HEAD_VECTORS + lane];
    } else {
        own_key = norm_and_rope<16>(own_key, k_norm, cos, sin, EPSILON);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            own_query[g] = norm_and_rope<16>(own_query[g], q_norm, cos, sin, EPSILON);
        }
    }

    // `best` and `weight` belong to heads 2 q and 2 q + 1; `weight` covers only this lane's positions.
    uint4 query[HEAD_VECTORS / 4] = {};
    WarpAttention result = {};
    Eight (&sum)[GROUP] = result.sum;
    float best[2] = {LOWEST_SCORE, LOWEST_SCORE};
    float weight[2] = {};
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        const float product = warp_sum<16>(dot(unpack(own_query[g]), unpack(own_key)));
        if (has_own && q == g / 2) {
            best[g % 2] = product * rsqrtf(HEAD_DIM);
            weight[g % 2] = r == 0;
        }
        if (has_own && half_warp == 0) {
            sum[g] = unpack(own_value);
        }
#pragma unroll
        for (int c = 0; c < HEAD_VECTORS / 4; ++c) {
            const uint4 of_head = from_lane(own_query[g], 4 * c + q);
            query[c] = r == g ? of_head : query[c];
        }
    }

    if (has_own && half_warp == 0 && !token.is_stored) {
        token.keys[token.position * HEAD_VECTORS + lane] = own_key;
        token.values[token.position * HEAD_VECTORS + lane] = own_value;
    }

    for (int next = first; next < end; next += stride) {
        float low[4] = {};
        float high[4] = {};
#pragma unroll
        for (int c = 0; c < HEAD_VECTORS / 4; ++c) {
            mma_m16n8k16(low, k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y, query[c].x, query[c].y);
            mma_m16n8k16(high, k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w, query[c].z, query[c].w);
        }
        load_keys(k, next + stride);

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
        load_values(v, next + stride);
    }

    // All lanes get the results of all heads.
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
        result.best[g] = __shfl_sync(~0u, best[g % 2], g / 2);
        result.weight[g] = __shfl_sync(~0u, weight[g % 2], g / 2);
#pragma unroll
        for (float &value : sum[g].v) {
            value += __shfl_xor_sync(~0u, value, 16);
        }
    }
    return result;
}

// The rounded output of a warp that has attended to all positions alone: store(g, vector) is called for lane l's vector
// of query head g.
template <class Store>
__device__ void finish_attention(WarpAttention &attended, Store store) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (float &value : attended.sum[g].v) {
            value /= attended.weight[g];
        }
        if (threadIdx.x / 16 % 2 == g % 2) {
            store(g, pack(attended.sum[g]));
        }
    }
}
