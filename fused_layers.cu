// One token through every decoder layer in one launch. fused_layers.py defines the sizes in capitals that are not here.
// GRID blocks stay on the GPU for the whole token; each owns some rows of every matrix. Two ideas make it fast:
//
// 1. Weights do not depend on the token. They flow through a ring in shared memory in the order of their use, STAGES
//    ahead, so that memory stays busy while the blocks wait for each other.
// 2. Reading is waiting. What one block computes and others need travels in words: a bfloat16 and, in the other 16
//    bits, the turn in which it was written. A reader loads a word until it is of this turn: no other barrier.
//
// Sums are float, rounded to bfloat16 where the model's own forward rounds.
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; ++i)
using bf16 = unsigned short; using u32 = unsigned; using u64 = unsigned long long;

constexpr int WARPS = 8, THREADS = WARPS * 32, HALVES = THREADS / 16, SCORES = VOCAB / THREADS;
constexpr int HEADS = 16, KV_HEADS = 8, HEAD = 128, QUERY = HEADS * HEAD, QKV = QUERY + 2 * KV_HEADS * HEAD;
constexpr int SPLITS = CODES == 1 ? GRID / KV_HEADS : 1, AHEAD = SPLITS == 1 ? 1 : 2;
constexpr int MATRICES = LAYERS * 5 * (CODES == 1 ? 1 : CODES + 1) + CODES + 1;
constexpr int COPIES = 4;                                         // of the words: many readers of one make it slow
constexpr float NOTHING = -1e30f;

struct Matrix { const char *address; u64 share; };                // bytes of an eighth of a block's rows
struct Layer { const u32 *input_norm, *post_norm, *q_norm, *k_norm; u32 *keys, *values; };
struct Exchange {
    u32 hidden[HIDDEN], attended[HIDDEN], qkv[QKV], heads[QUERY], inner[INNER], logits[CODES][VOCAB];
    u64 partial[HEADS][SPLITS][HEAD + 1];
    __device__ const Exchange &mine() const { return this[blockIdx.x / 8 % COPIES]; }
};
struct Arguments {                                                // length: of the cache; sin: its first half negated
    const Matrix *matrices; const Layer *layers; u64 length; const u32 *norm, *cos, *sin; Exchange *exchange; u32 *turn;
    const float *temperature; const u64 *kth; const float *tail; const bool *greedy; const float *noise;
    u64 *token, *frame; u32 *hidden; bf16 *embedding;
#if CODES == 1
    const u64 *start; bool *seen; const bool *suppressed; const float *penalty; const u64 *end_token, *min_tokens;
    u64 *lengths; volatile u64 *lengths_on_host;
#else
    const u32 *input, *const *inputs; const bf16 *const *embeddings, *text; bf16 *hiddens; u64 *codes;
#endif
};
struct Shared {
    char ring[STAGES][8][2048 + 64];                              // 64 more, and eight rows lie in different banks
    u64 full[STAGES], empty[STAGES], reduced[2][WARPS];
    u32 hidden[HIDDEN / 2], attended[HIDDEN / 2], heads[QUERY / 2], inner[INNER / 2], logits[VOCAB / 2];
    u32 key[HEAD / 2], value[HEAD / 2];
    float squares[WARPS], partial[WARPS][2 * (INNER > QUERY ? INNER : QUERY) / GRID];
    float query[2][HEAD], sum[HALVES][2][HEAD], best[HALVES][2], weight[HALVES][2];
    Matrix matrices[MATRICES]; Layer layers[LAYERS]; int code[CODES + 1];
};
extern __shared__ Shared shared[];
static_assert(sizeof(Shared) <= MEMORY && VOCAB <= 4096, "sizes that are not known");

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ float squares(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ u32 pack(float x, float y) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
__device__ float rounded(float x) { return low(pack(x, 0)); }
__device__ void sync() { asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory"); }
__device__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
template <int LANES = 32> __device__ float add_lanes(float x) {
    _Pragma("unroll") for (int other = LANES / 2; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

// ---- words
__device__ void publish(u32 *word, float x, u32 turn) {
    EACH(i, COPIES) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"((char *)word + i * sizeof(Exchange)),
                                 "r"(turn << 16 | pack(x, 0)) : "memory");
}
__device__ void publish(u64 *word, float x, u32 turn) {           // a whole float
    const u64 w = (u64)turn << 32 | __float_as_uint(x);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(word), "l"(w) : "memory");
}
__device__ void look(u64 &x, u64 &y, const u64 *at, int apart) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%2]; ld.relaxed.gpu.global.u64 %1, [%3];"
                 : "=l"(x), "=l"(y) : "l"(at), "l"(at + apart) : "memory");
}
__device__ bool stale(u64 x, u64 y, u32 turn) {                   // two words each
    const u64 tag = (u64)turn << 48 | turn << 16;
    return ((x ^ tag) | (y ^ tag)) & 0xffff0000ffff0000;
}
__device__ u32 pair(u64 words) { return __byte_perm((u32)words, (u32)(words >> 32), 0x5410); }

__device__ void finish(bool norm, float sum) {                    // leaves the sum of squares to the norm that follows
    if (norm && (sum = add_lanes(sum), threadIdx.x % 32 == 0)) shared->squares[threadIdx.x / 32] = sum;
    sync();
}
template <int N> __device__ void gather(u32 (&to)[N], const u32 (&words)[2 * N], u32 turn, bool norm = false) {
    u64 x[N / THREADS];
    float sum = 0;
    const auto load = [&](int i) { look(x[i], x[i + 1], (const u64 *)words + i * THREADS + threadIdx.x, THREADS); };
    EACH(i, N / THREADS / 2) load(2 * i);
    EACH(i, N / THREADS / 2) while (stale(x[2 * i], x[2 * i + 1], turn)) load(2 * i);
    EACH(i, N / THREADS) sum += squares(to[i * THREADS + threadIdx.x] = pair(x[i]));
    finish(norm, sum);
}

// ---- matrices
__device__ void wait(const u64 &barrier, int parity) {
    for (u32 done = 0; !done;)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(address(&barrier)), "r"(parity) : "memory");
}
__device__ void bring_weights() {                                 // the ninth warp's work; n counts stages
    const int lane = threadIdx.x % 32;
    u64 used_once, n = 0;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(used_once));
    for (const Matrix *matrix = shared->matrices; matrix->share; ++matrix) {
        const char *from = matrix->address + (blockIdx.x * 8 + lane % 8) * matrix->share;
        for (const char *end = from + matrix->share; from < end; from += 2048, ++n) {    // 1024 columns of 8 rows
            const u32 slot = n % STAGES, full = address(&shared->full[slot]);
            wait(shared->empty[slot], ~(n / STAGES) & 1);
            if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 16384;" :: "r"(full) : "memory");
            __syncwarp();
            if (lane < 8)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                             "[%0], [%1], 2048, [%2], %3;" :: "r"(address(shared->ring[slot][lane])), "l"(from),
                             "r"(full), "l"(used_once) : "memory");
        }
    }
}

// A lane holds 8 columns of a row of weights. The tensor core takes four of them as part of one of its 16 rows, four as
// part of another, and x is laid out to match in two of its 8 columns: d[0] + d[3] is the product.
__device__ void multiply_add(float (&d)[4], uint4 w, uint2 x) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x.x), "r"(x.y));
}
// The next matrix times x. Warp w takes 128 of every 1024 columns, eight rows at a time, one of each eighth.
template <int ROWS, int N> __device__ void multiply(const uint2 (&x)[N], u32 &n, int first = 0) {
    constexpr int TILES = ROWS / (GRID * 8);
    const int warp = threadIdx.x / 32, eighth = threadIdx.x % 32 / 4;
    float sums[TILES];
    EACH(tile, TILES) {
        float d[2][4] = {};
        _Pragma("unroll") for (int stage = 0; stage < N / 4; ++stage, ++n) {
            const u32 slot = n % STAGES, empty = address(&shared->empty[slot]);
            wait(shared->full[slot], n / STAGES & 1);
            const uint4 *w = (const uint4 *)(shared->ring[slot][eighth] + warp * 256) + threadIdx.x % 4;
            EACH(i, 4) multiply_add(d[i % 2], w[i * 4], x[stage * 4 + i]);
            __syncwarp();
            if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(empty) : "memory");
        }
        sums[tile] = d[0][0] + d[1][0] + (d[0][3] + d[1][3]);
    }
    if (threadIdx.x % 4 == 0) EACH(tile, TILES) shared->partial[warp][first + eighth * TILES + tile] = sums[tile];
}
__device__ float total(int row) {
    float sum = 0;
    EACH(w, WARPS) sum += shared->partial[w][row];
    return rounded(sum);
}
template <int ROWS, class Of> __device__ void publish_rows(u32 (&words)[ROWS], u32 turn, Of of) {  // a thread each
    sync();
    const int row = blockIdx.x * (ROWS / GRID) + threadIdx.x;
    if (threadIdx.x < ROWS / GRID) publish(&words[row], of(row, total(threadIdx.x)), turn);
}

__device__ int at(int i) {                                        // a lane's part i of x is the words at(i) and two on
    return i / 4 * 512 + threadIdx.x / 32 * 64 + i % 4 * 16 + threadIdx.x % 4 * 4 + threadIdx.x / 4 % 2;
}
template <int N> __device__ void read(uint2 (&x)[N], const u32 *vector) {
    EACH(i, N) {
        const uint4 v = ((const uint4 *)vector)[at(i) / 4];
        x[i] = at(i) % 2 ? uint2{v.y, v.w} : uint2{v.x, v.z};
    }
}
__device__ u32 scaled(u32 pair, float r, u32 scale) {
    return pack(rounded(low(pair) * r) * low(scale), rounded(high(pair) * r) * high(scale));
}
template <int N> __device__ void read_normed(uint2 (&x)[N], const u32 *vector, const uint2 (&scale)[N]) {
    float sum = 0;
    EACH(w, WARPS) sum += shared->squares[w];
    const float r = rsqrtf(sum / HIDDEN + EPSILON);
    read(x, vector);
    EACH(i, N) x[i] = {scaled(x[i].x, r, scale[i].x), scaled(x[i].y, r, scale[i].y)};
}

// ---- attention
__device__ u32 rotated(u32 x, u32 other, u32 cos, u32 sin) {
    return pack(rounded(low(x) * low(cos)) + rounded(low(other) * low(sin)),
                rounded(high(x) * high(cos)) + rounded(high(other) * high(sin)));
}
// A block takes one key head, its two query heads, and every so many positions, a position for each half of a warp.
struct Attention {
    const Arguments &a;
    const int position, kv = blockIdx.x % KV_HEADS, split = blockIdx.x / KV_HEADS, half = threadIdx.x / 16,
              used = min(SPLITS, position / HALVES + 1), part = threadIdx.x % 16, lane = threadIdx.x % 32;
    u32 cos[2], sin[2], scale[2];
    uint4 k[AHEAD], v[AHEAD];

    __device__ void load(const Layer &layer, int from) {
        EACH(i, AHEAD) {
            const int p = from + i * used * HALVES;
            const u64 place = (kv * a.length + p) * 16 + part;
            k[i] = p < position ? ((const uint4 *)layer.keys)[place] : uint4{};
            v[i] = p < position ? ((const uint4 *)layer.values)[place] : uint4{};
        }
    }
    __device__ void prefetch(const Layer &layer) {
        if (split < used) load(layer, split * HALVES + half);
        EACH(i, 2) {
            const int d = lane + i * 32, place = position * (HEAD / 2) + d;
            cos[i] = a.cos[place], sin[i] = a.sin[place];
            scale[i] = (threadIdx.x < 64 ? layer.q_norm : layer.k_norm)[d];
        }
    }
    // Warps 0 and 1 norm and rotate the queries, warp 2 the new key; warp 3 has the new value.
    __device__ void prepare(const Layer &layer, int warp, u32 turn) {
        const int head = warp < 2 ? 2 * kv + warp : HEADS + (warp - 2) * KV_HEADS + kv;
        const u64 *words = (const u64 *)(a.exchange->mine().qkv + head * HEAD) + lane;
        u64 first, second;
        do look(first, second, words, 32); while (stale(first, second, turn));
        u32 x = pair(first), y = pair(second);
        if (warp < 3) {
            const float r = rsqrtf(add_lanes(squares(x) + squares(y)) / HEAD + EPSILON);
            const u32 p = scaled(x, r, scale[0]), q = scaled(y, r, scale[1]);
            x = rotated(p, q, cos[0], sin[0]), y = rotated(q, p, cos[1], sin[1]);
        }
        if (warp < 2) {
            float2 *query = (float2 *)shared->query[warp];
            query[lane] = {low(x), high(x)}, query[lane + 32] = {low(y), high(y)};
        } else {
            u32 *here = warp == 2 ? shared->key : shared->value, *cache = warp == 2 ? layer.keys : layer.values;
            cache += (kv * a.length + position) * (HEAD / 2), here[lane] = x, here[lane + 32] = y;
            if (split == 0) cache[lane] = x, cache[lane + 32] = y;
        }
    }
    __device__ void run(const Layer &layer, u32 turn) {
        float q[2][8], sum[2][8] = {}, best[2] = {NOTHING, NOTHING}, weight[2] = {};
        if (threadIdx.x < 128) prepare(layer, threadIdx.x / 32, turn);
        sync();
        EACH(i, 16) q[i / 8][i % 8] = shared->query[i / 8][part * 8 + i % 8];
        for (int from = split * HALVES + half; from - half <= position; load(layer, from += AHEAD * used * HALVES))
            EACH(i, AHEAD) {
                const int p = from + i * used * HALVES;
                if (p == position) k[i] = ((uint4 *)shared->key)[part], v[i] = ((uint4 *)shared->value)[part];
                const u32 key[4] = {k[i].x, k[i].y, k[i].z, k[i].w}, value[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
                EACH(h, 2) {
                    float score = 0;
                    EACH(d, 8) score += q[h][d] * (d % 2 ? high(key[d / 2]) : low(key[d / 2]));
                    score = add_lanes<16>(score) * rsqrtf(HEAD);
                    const float top = p <= position ? fmaxf(best[h], score) : best[h], kept = expf(best[h] - top);
                    const float w = p <= position ? expf(score - top) : 0;
                    best[h] = top, weight[h] = weight[h] * kept + w;
                    EACH(d, 8) sum[h][d] = sum[h][d] * kept + w * (d % 2 ? high(value[d / 2]) : low(value[d / 2]));
                }
            }
        EACH(i, 16) shared->sum[half][i / 8][part * 8 + i % 8] = sum[i / 8][i % 8];
        if (part == 0) EACH(h, 2) shared->best[half][h] = best[h], shared->weight[half][h] = weight[h];
        sync();
        const int h = threadIdx.x / HEAD, d = threadIdx.x % HEAD, head = 2 * kv + h;
        float top = NOTHING, total = 0, out = 0;
        EACH(i, HALVES) top = fmaxf(top, shared->best[i][h]);
        EACH(i, HALVES) {
            const float kept = expf(shared->best[i][h] - top);
            total += shared->weight[i][h] * kept, out += shared->sum[i][h][d] * kept;
        }
        if (SPLITS == 1) return publish(&a.exchange->heads[head * HEAD + d], out / total, turn);
        publish(&a.exchange->partial[head][split][d], out / total, turn);
        if (d == 0) publish(&a.exchange->partial[head][split][HEAD], top + logf(total), turn);
    }
    __device__ void join_splits(u32 turn) {                       // each block joins the splits of some dimensions
        const int out = (blockIdx.x * THREADS + threadIdx.x) / SPLITS, other = threadIdx.x % SPLITS;
        const u64 *partial = a.exchange->partial[out / HEAD][other];
        u64 x = 0, y = __float_as_uint(NOTHING);
        if (other < used)
            do look(x, y, partial + out % HEAD, HEAD - out % HEAD); while (x >> 32 != turn || y >> 32 != turn);
        float top = __uint_as_float((u32)y);
        _Pragma("unroll") for (int i = SPLITS / 2; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        const float weight = expf(__uint_as_float((u32)y) - top);
        const float sum = add_lanes<SPLITS>(weight * __uint_as_float((u32)x)) / add_lanes<SPLITS>(weight);
        if (other == 0) publish(&a.exchange->heads[out], sum, turn);
    }
};

// ---- layers: what does not depend on the input is loaded long before its use
__device__ void run_layers(const Arguments &a, const u32 *input, int position, uint2 (&x)[HIDDEN / 256], u32 &n,
                           u32 &turn) {
    Exchange &exchange = *a.exchange;
    Attention attention{a, position};
    uint2 scale[HIDDEN / 256], post[HIDDEN / 256], heads[QUERY / 256], inner[INNER / 256];
    read(scale, shared->layers[0].input_norm);
    float sum = 0;
    for (int i = threadIdx.x; i < HIDDEN / 2; i += THREADS) sum += squares(shared->hidden[i] = input[i]);
    finish(true, sum);
#pragma unroll 1
    for (int l = 0; l < LAYERS; ++l) {
        const Layer &layer = shared->layers[l];
        read(post, layer.post_norm);
        attention.prefetch(layer);
        if (l > 0) gather(shared->hidden, exchange.mine().hidden, turn, true);
        ++turn;
        read_normed(x, shared->hidden, scale);
        multiply<QKV>(x, n);
        publish_rows(exchange.qkv, turn, [](int, float y) { return y; });

        if (attention.split < attention.used) attention.run(layer, turn);
        if (SPLITS > 1) attention.join_splits(turn);
        gather(shared->heads, exchange.mine().heads, turn);
        read(heads, shared->heads);
        multiply<HIDDEN>(heads, n);
        publish_rows(exchange.attended, turn, [](int row, float y) { return low(((bf16 *)shared->hidden)[row]) + y; });

        read(scale, l + 1 < LAYERS ? shared->layers[l + 1].input_norm : a.norm);
        gather(shared->attended, exchange.mine().attended, turn, true);
        read_normed(x, shared->attended, post);
        multiply<INNER>(x, n);
        multiply<INNER>(x, n, INNER / GRID);
        publish_rows(exchange.inner, turn, [](int, float gate) {
            const float up = total(INNER / GRID + threadIdx.x);
            return rounded(gate / (1 + expf(-gate))) * up; });

        gather(shared->inner, exchange.mine().inner, turn);
        read(inner, shared->inner);
        multiply<HIDDEN>(inner, n);
        publish_rows(exchange.hidden, turn, [](int row, float y) { return low(((bf16 *)shared->attended)[row]) + y; });
    }
    gather(shared->hidden, exchange.mine().hidden, turn, true);
    read_normed(x, shared->hidden, scale);
}

// ---- sampling: sample() of cudagraph_talker.py, by a block
__device__ int id(int i) { return i * THREADS + threadIdx.x; }    // of a thread's score i

template <class T, class Join> __device__ T join(T x, int &round, Join with) {           // over the warps of a block
    T *all = (T *)shared->reduced[round++ % 2];
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = x;
    sync();
    x = all[0];
    EACH(w, WARPS - 1) x = with(x, all[w + 1]);
    return x;
}
template <class Holds> __device__ u64 search(u64 found, int bit, int last, Holds holds) {
    for (; bit >= last; --bit) found |= holds(found | 1ull << bit) ? 1ull << bit : 0;
    return found;                                                 // the largest number for which it holds
}
__device__ int choose(const Arguments &a, const float (&score)[SCORES], const float (&noise)[SCORES]) {
    const int top_k = VOCAB - (int)*a.kth;
    const float temperature = *a.temperature, tail = *a.tail;
    u64 rank[SCORES], winner = VOCAB;                             // rank: 32 bits of score, 12 of id; NaN elects id 0
    float weight[SCORES];
    u32 best = 0;
    int round = 0;
    EACH(i, SCORES) {
        const u32 u = __float_as_uint(score[i]), key = u >> 31 ? ~u : u | 1u << 31;
        rank[i] = (u64)key << 12 | id(i), best = max(best, key);
    }
    u32 sure = join(__reduce_min_sync(~0u, best), round, [](u32 x, u32 y) { return min(x, y); });
    if (top_k > THREADS) sure = 0;                                // else each thread has one that is as good
    best = join(__reduce_max_sync(~0u, best), round, [](u32 x, u32 y) { return max(x, y); });
    const int same = __clz(best ^ sure);                          // bits that all of the best top_k begin with
    const u64 known = best & ~(0xffffffffull >> same);
    const u64 kth = search(known << 12, 43 - same, CODES == 1 ? 12 : 28, [&](u64 candidate) {      // bfloat16: 28
        int count = 0;
        EACH(i, SCORES) count += rank[i] >= candidate;
        return join(__reduce_add_sync(~0u, count), round, [](int x, int y) { return x + y; }) >= top_k;
    });
    const float top = __uint_as_float(best >> 31 ? best & ~(1u << 31) : ~best) / temperature;
    EACH(i, SCORES) weight[i] = rank[i] < kth ? 0 : expf(score[i] / temperature - top);
    const auto below = [&](u64 candidate) {
        float sum = 0;
        EACH(i, SCORES) sum += rank[i] < candidate ? weight[i] : 0;
        return join(add_lanes(sum), round, [](float x, float y) { return x + y; });
    };
    const float limit = tail > 0 ? tail * below(~0ull) : 0;
    const u64 least = tail > 0 ? search(0, 43, 0, [&](u64 candidate) { return below(candidate) <= limit; }) : 0;
    EACH(i, SCORES) if (rank[i] >= least && weight[i] > 0)
        winner = max(winner, (u64)__float_as_uint(weight[i] / noise[i]) << 32 | VOCAB - id(i));
    for (int other = 16; other; other /= 2) winner = max(winner, __shfl_xor_sync(~0u, winner, other));
    return VOCAB - (int)join(winner, round, [](u64 x, u64 y) { return max(x, y); });
}

// ---- the kernel
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) step(const Arguments *arguments) {
    const Arguments a = *arguments;
    for (int i = threadIdx.x; i < MATRICES; i += blockDim.x) shared->matrices[i] = a.matrices[i];
    for (int i = threadIdx.x; i < LAYERS; i += blockDim.x) shared->layers[i] = a.layers[i];
    if (threadIdx.x < STAGES)
        asm volatile("mbarrier.init.shared.b64 [%0], 1; mbarrier.init.shared.b64 [%1], 8;" :: "r"(
            address(&shared->full[threadIdx.x])), "r"(address(&shared->empty[threadIdx.x])) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x >= THREADS) return bring_weights();

    uint2 x[HIDDEN / 256];
    u32 n = 0, turn = *a.turn, frame = *a.frame;
    float score[SCORES], noise[SCORES];
    const auto head = [&](int i) {
        multiply<VOCAB>(x, n);
        publish_rows(a.exchange->logits[i], turn, [](int, float y) { return y; });
        EACH(j, SCORES) noise[j] = *a.greedy ? 1 : a.noise[i * VOCAB + id(j)];
        gather(shared->logits, a.exchange->mine().logits[i], turn);
        EACH(j, SCORES) score[j] = low(((bf16 *)shared->logits)[id(j)]);
    };
#if CODES == 1
    run_layers(a, (const u32 *)a.embedding, *a.start + frame, x, n, turn);
    head(0), ++frame;
    if (blockIdx.x > 0) return;
    EACH(i, SCORES) {
        if (a.seen[id(i)]) score[i] = score[i] < 0 ? score[i] * *a.penalty : score[i] / *a.penalty;
        const bool too_early = frame < *a.min_tokens && id(i) == *a.end_token;
        if (a.suppressed[id(i)] || too_early) score[i] = __uint_as_float(0xff800000);    // -infinity
    }
    const u64 token = choose(a, score, noise);
    if (threadIdx.x % 32 < 8) EACH(i, HIDDEN / 256) a.hidden[at(i)] = x[i].x, a.hidden[at(i) + 2] = x[i].y;
    if (threadIdx.x > 0) return;
    *a.token = token, *a.frame = frame, a.seen[token] = true, *a.turn = turn;
    if (token == *a.end_token) *a.lengths = min(*a.lengths, (u64)frame);
    *a.lengths_on_host = *a.lengths;
#else
    if (threadIdx.x == 0) shared->code[0] = *a.token;
#pragma unroll 1
    for (int i = 0; i <= CODES; ++i) {
        run_layers(a, i == 0 ? a.input : a.inputs[i - 1] + shared->code[i - 1] * (HIDDEN / 2), i, x, n, turn);
        if (i == 0) continue;
        head(i - 1);
        const int code = choose(a, score, noise);
        if (threadIdx.x == 0) shared->code[i] = code;
        sync();
    }
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < WIDTH; i += GRID * THREADS) {
        float sum = 0;
        EACH(c, CODES + 1) sum += low(a.embeddings[c][shared->code[c] * WIDTH + i]);
        a.embedding[i] = pack(rounded(sum) + low(a.text[frame * WIDTH + i]), 0);
        a.hiddens[frame * WIDTH + i] = ((const bf16 *)a.hidden)[i];
    }
    if (blockIdx.x > 0) return;
    if (threadIdx.x <= CODES) a.codes[frame * (CODES + 1) + threadIdx.x] = shared->code[threadIdx.x];
    if (threadIdx.x == 0) *a.turn = turn;
#endif
}
