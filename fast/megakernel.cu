// One token through every decoder layer in one launch. fused_layers.py defines the sizes in capitals that are not here.
// GRID blocks stay on the GPU for the whole token; each owns some rows of every matrix. Two ideas make it fast:
//
// 1. Weights do not depend on the token. They flow through a ring in shared memory in the order of their use, STAGES
//    ahead, so that memory stays busy while the blocks wait for each other.
// 2. Reading is waiting. What one block computes and others need travels in words: a bfloat16 and, in the other 16
//    bits, its turn: the layers begun so far, over all launches. A reader loads words until they are of this turn.
//
// Sums are float, rounded to bfloat16 where the model's own forward rounds.
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; ++i)
using bf16 = unsigned short; using u32 = unsigned; using u64 = unsigned long long;

constexpr int WARPS = 8, THREADS = WARPS * 32, SCORES = VOCAB / THREADS;
constexpr int QUERY = HEADS * HEAD, QKV = QUERY + 2 * KV_HEADS * HEAD;
constexpr int SPLITS = CODES == 1 ? GRID / KV_HEADS : 1, STEP = SPLITS * WARPS, SECOND = 2 * INNER / GRID;
constexpr int AHEAD = 2;                                          // keys and values on their way to a warp
constexpr int COPIES = 4;                                         // of the words: many readers of one make it slow
constexpr float NOTHING = -1e30f, KEPT = CODES == 1 ? 0.001f : 0.15f;     // KEPT: share of weights to stay in L2
static_assert(HEADS == 16 && KV_HEADS == 8 && HEAD == 128 && (HIDDEN | INNER | VOCAB) % 1024 == 0 && VOCAB <= 4096 &&
              QKV <= 2 * INNER, "the model's sizes are none that the kernel knows");

struct Matrix { const char *address; u64 share; };                // bytes of an eighth of a block's rows
struct Layer { const uint2 *input_norm, *post_norm, *q_norm, *k_norm; uint2 *keys, *values; };
struct Exchange {
    u32 logits[CODES][VOCAB], hidden[HIDDEN], attended[HIDDEN], qkv[QKV], heads[QUERY], inner[INNER];
    u32 splits[HEADS][SPLITS][HEAD][4];                           // output, log of the weights' sum: 2 bfloat16 each
    __device__ const Exchange &mine() const { return this[blockIdx.x / 8 % COPIES]; }
};
struct Arguments {                                                // length: of the cache; sin: its first half negated
    const Matrix *matrices; const Layer *layers; u64 length; const uint2 *norm, *cos, *sin; Exchange *exchange;
    u32 *turn; const float *temperature; const u64 *kth; const float *tail; const bool *greedy; const float *noise;
    u64 *token, *frame; uint2 *hidden; bf16 *embedding;
#if CODES == 1                                                    // the talker
    const u64 *start; bool *seen; const bool *suppressed; const float *penalty; const u64 *end_token, *min_tokens;
    u64 *lengths; volatile u64 *lengths_on_host;
#else                                                             // the predictor
    const bf16 *input, *const *inputs, *const *embeddings, *text; bf16 *hiddens; u64 *codes;
#endif
};
struct alignas(16) Four { float at[4]; };
struct Stage { char rows[8][2048 + 64]; u64 full, empty; };       // 64 more, and the rows lie in different banks
struct alignas(16) Shared {                                       // partial: from SECOND on, of o_proj and down_proj
    Four sum[WARPS][2][HEAD / 4];
    float best[WARPS][2], weight[WARPS][2], partial[WARPS][SECOND + HIDDEN / GRID]; u64 joined[WARPS];
};
extern __shared__ Shared shared[];                                // and behind it the ring
constexpr int STAGES = (MEMORY - sizeof(Shared)) / sizeof(Stage);
static_assert(STAGES > 1 && sizeof(Exchange) <= EXCHANGE, "too little memory");

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ u32 pack(float x, float y) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
__device__ float rounded(float x) { return low(pack(x, 0)); }
__device__ uint2 pack(Four x) { return {pack(x.at[0], x.at[1]), pack(x.at[2], x.at[3])}; }
__device__ Four floats(uint2 x) { return {low(x.x), high(x.x), low(x.y), high(x.y)}; }
__device__ float dot(Four x, Four y) { float sum = 0; EACH(i, 4) sum += x.at[i] * y.at[i]; return sum; }
template <int LANES = 32> __device__ float add_lanes(float x) {
    _Pragma("unroll") for (int other = LANES / 2; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}
__device__ void sync() { asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory"); }
__device__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
template <class T, class Join> __device__ T join(T x, Join with) {                       // over the warps of a block
    T *all = (T *)shared->joined;
    sync();                                                       // all have read the last ones
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = x;
    sync(), x = all[0];
    EACH(w, WARPS - 1) x = with(x, all[w + 1]);
    return x;
}

// ---- words: one is written anew only after later words of every block have come, so all have read the old one
template <int N = COPIES> __device__ void publish(u32 *word, float x, u32 turn) {
    EACH(i, N) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"((char *)word + i * sizeof(Exchange)),
                            "r"(turn << 16 | pack(x, 0)) : "memory");
}
// Part i of x is the four words at(i). All looks are on their way at once.
template <int N, class At> __device__ void receive(uint2 (&x)[N], const u32 *words, u32 turn, At at) {
    const u32 tag = turn << 16;
    uint4 w[N];
    u32 late;
    do {
        EACH(i, N) asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[i].x), "=r"(w[i].y),
                                "=r"(w[i].z), "=r"(w[i].w) : "l"(words + 4 * at(i)) : "memory");
        late = 0;
        EACH(i, N) late |= (w[i].x ^ tag) | (w[i].y ^ tag) | (w[i].z ^ tag) | (w[i].w ^ tag);
    } while (late >> 16);
    EACH(i, N) x[i] = {__byte_perm(w[i].x, w[i].y, 0x5410), __byte_perm(w[i].z, w[i].w, 0x5410)};
}

// ---- matrices
__device__ Stage &slot(u32 n) { return ((Stage *)(shared + 1))[n % STAGES]; }
__device__ void start(u64 &barrier) { asm("mbarrier.init.shared.b64 [%0], 8;" :: "r"(address(&barrier)) : "memory"); }
__device__ void wait(const u64 &barrier, int parity) {
    for (u32 done = 0; !done;)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(address(&barrier)), "r"(parity) : "memory");
}
// The work of eight threads, one for each eighth of the block's rows. A stage is 1024 columns of a row of each.
__device__ void bring_weights(const Matrix *matrix, int eighth) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, %1;" : "=l"(policy) : "f"(KEPT));
    for (u32 n = 0; matrix->share; ++matrix) {
        const char *from = matrix->address + (blockIdx.x * 8 + eighth) * matrix->share;
        for (const char *end = from + matrix->share; from < end; from += 2048, ++n) {
            wait(slot(n).empty, ~(n / STAGES) & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 2048; cp.async.bulk.shared::cluster.global"
                         ".mbarrier::complete_tx::bytes.L2::cache_hint [%1], [%2], 2048, [%0], %3;" :: "r"(address(
                         &slot(n).full)), "r"(address(slot(n).rows[eighth])), "l"(from), "l"(policy) : "memory");
        }
    }
}
// A lane holds 8 columns of a row of weights. The tensor core takes w.x and w.y as part of one of its 16 rows, w.z and
// w.w of another, and x is laid out to match in two of its 8 columns: d[0] + d[3] is the product.
__device__ void multiply_add(float (&d)[4], uint4 w, uint2 x) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(w.x), "r"(w.z), "r"(w.y), "r"(w.w), "r"(x.x), "r"(x.y));
}
// The next matrix times x. Warp w takes 128 of every 1024 columns, eight rows at a time, one of each eighth.
template <int ROWS, int N> __device__ void multiply(const uint2 (&x)[N], u32 &n, int first) {
    constexpr int TILES = ROWS / (GRID * 8);
    const int warp = threadIdx.x / 32, eighth = threadIdx.x % 32 / 4;
    EACH(tile, TILES) {
        float d[2][4] = {};
        _Pragma("unroll") for (int stage = 0; stage < N / 4; ++stage, ++n) {
            wait(slot(n).full, n / STAGES & 1);
            const uint4 *w = (const uint4 *)(slot(n).rows[eighth] + warp * 256) + threadIdx.x % 4;
            EACH(i, 4) multiply_add(d[i % 2], w[i * 4], x[stage * 4 + i]);
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(address(&slot(n).empty)) : "memory");
        }
        if (threadIdx.x % 4 == 0)
            shared->partial[warp][first + eighth * TILES + tile] = d[0][0] + d[1][0] + (d[0][3] + d[1][3]);
    }
}
__device__ float total(int row) {
    float sum = 0;
    EACH(w, WARPS) sum += shared->partial[w][row];
    return rounded(sum);
}
template <int ROWS, class Of> __device__ void publish_rows(u32 (&words)[ROWS], int first, u32 turn, Of of) {
    sync();                                                       // the sums of all warps are there
    if (threadIdx.x < ROWS / GRID)                                // a thread for each of this block's rows
        publish(&words[blockIdx.x * (ROWS / GRID) + threadIdx.x], of(total(first + threadIdx.x)), turn);
}

__device__ int column(int i) {                                    // part i of x: four columns, the same in 4 lanes
    return i / 4 * 256 + threadIdx.x / 32 * 32 + i % 4 * 8 + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2;
}
template <int N> __device__ void read(uint2 (&x)[N], const uint2 *from) { EACH(i, N) x[i] = from[column(i)]; }
__device__ uint2 scaled(uint2 x, float r, uint2 scale) {
    Four y = floats(x), by = floats(scale);
    EACH(i, 4) y.at[i] = rounded(y.at[i] * r) * by.at[i];
    return pack(y);
}
template <int N> __device__ void norm(uint2 (&x)[N], const uint2 (&scale)[N]) {
    float sum = 0;
    EACH(i, N) sum += dot(floats(x[i]), floats(x[i]));
    sum = join(add_lanes<8>(sum), [](float x, float y) { return x + y; });
    EACH(i, N) x[i] = scaled(x[i], rsqrtf(sum / HIDDEN + EPSILON), scale[i]);
}

// ---- attention
// A block takes a key head, its two query heads and some of the positions, a warp one of those, a lane four dimensions.
__device__ void attend(const Arguments &a, const Layer &layer, int position, u32 turn) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv = blockIdx.x % KV_HEADS;
    const int split = blockIdx.x / KV_HEADS, first = split * WARPS + warp;
    const auto at = [&](u64 row) { return row * (HEAD / 4) + lane; };
    uint2 *keys = layer.keys + kv * a.length * (HEAD / 4), *values = layer.values + kv * a.length * (HEAD / 4);
    uint2 k[AHEAD] = {}, v[AHEAD] = {}, x[4];                     // x: two queries, the new key, the new value
    const auto load = [&](int i, int p) { if (p < position) k[i] = keys[at(p)], v[i] = values[at(p)]; };
    EACH(i, AHEAD) load(i, first + i * STEP);
    const uint2 cos = a.cos[at(position)], sin = a.sin[at(position)], q_scale = layer.q_norm[lane],
                k_scale = layer.k_norm[lane];
    receive(x, a.exchange->mine().qkv, turn, [&](int i) {
        return at(i < 2 ? 2 * kv + i : HEADS + (i - 2) * KV_HEADS + kv); });
    EACH(i, 3) {
        const float squares = add_lanes(dot(floats(x[i]), floats(x[i])));
        const uint2 y = scaled(x[i], rsqrtf(squares / HEAD + EPSILON), i < 2 ? q_scale : k_scale);
        const Four there = floats({__shfl_xor_sync(~0u, y.x, 16), __shfl_xor_sync(~0u, y.y, 16)});
        Four here = floats(y);
        EACH(d, 4) here.at[d] = rounded(here.at[d] * floats(cos).at[d]) + rounded(there.at[d] * floats(sin).at[d]);
        x[i] = pack(here);
    }
    if (first == 0) keys[at(position)] = x[2], values[at(position)] = x[3];

    Four sum[2] = {};
    float best[2] = {NOTHING, NOTHING}, weight[2] = {1, 1};       // as of a key that scores NOTHING
    for (int next = first; next <= position; next += AHEAD * STEP) EACH(i, AHEAD) {
        const int p = next + i * STEP;
        if (p == position) k[i] = x[2], v[i] = x[3];
        EACH(h, 2) {
            const float match = add_lanes(dot(floats(x[h]), floats(k[i])));
            const float score = p <= position ? match * rsqrtf(HEAD) : NOTHING;
            const float top = fmaxf(best[h], score), kept = expf(best[h] - top), w = expf(score - top);
            best[h] = top, weight[h] = weight[h] * kept + w;
            EACH(d, 4) sum[h].at[d] = sum[h].at[d] * kept + w * floats(v[i]).at[d];
        }
        load(i, p + AHEAD * STEP);
    }
    EACH(h, 2) shared->sum[warp][h][lane] = sum[h];
    if (lane == 0) EACH(h, 2) shared->best[warp][h] = best[h], shared->weight[warp][h] = weight[h];
    sync();
    const int h = threadIdx.x / HEAD, d = threadIdx.x % HEAD, head = 2 * kv + h;
    float top = NOTHING, all = 0, out = 0;
    EACH(w, WARPS) top = fmaxf(top, shared->best[w][h]);
    EACH(w, WARPS) {
        const float kept = expf(shared->best[w][h] - top);
        all += shared->weight[w][h] * kept, out += shared->sum[w][h][d / 4].at[d % 4] * kept;
    }
    const float y = out / all, log = top + logf(all), words[4] = {y, y - rounded(y), log, log - rounded(log)};
    if (SPLITS == 1) return publish(&a.exchange->heads[head * HEAD + d], y, turn);
    EACH(i, 4) publish<1>(&a.exchange->splits[head][split][d][i], words[i], turn);
}
__device__ void join_splits(Exchange &exchange, u32 turn) {       // each block joins the splits of some dimensions
    const int out = (blockIdx.x * THREADS + threadIdx.x) / SPLITS, split = threadIdx.x % SPLITS;
    uint2 x[1];
    receive(x, exchange.splits[out / HEAD][split][out % HEAD], turn, [](int) { return 0; });
    const float y = low(x->x) + high(x->x), log = low(x->y) + high(x->y);
    float top = log;
    _Pragma("unroll") for (int i = SPLITS / 2; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
    const float sum = add_lanes<SPLITS>(expf(log - top) * y) / add_lanes<SPLITS>(expf(log - top));
    if (split == 0) publish(&exchange.heads[out], sum, turn);
}

// ---- layers: what does not depend on the words is loaded before the wait for them
__device__ void run_layers(const Arguments &a, const bf16 *input, int position, uint2 (&x)[HIDDEN / 256], u32 &n,
                           u32 &turn) {
    Exchange &to = *a.exchange;
    const Exchange &from = to.mine();
    uint2 scale[HIDDEN / 256], heads[QUERY / 256], inner[INNER / 256];
    float residual = low(input[min(blockIdx.x * (HIDDEN / GRID) + threadIdx.x, HIDDEN - 1)]);    // of a thread's row
    const auto add = [&](float y) { return residual = rounded(residual + y); };
    read(x, (const uint2 *)input);
#pragma unroll 1
    for (const Layer *layer = a.layers; layer < a.layers + LAYERS; ++layer) {
        read(scale, layer->input_norm);
        if (layer > a.layers) receive(x, from.hidden, turn, column);
        norm(x, scale), ++turn;
        multiply<QKV>(x, n, 0);
        publish_rows(to.qkv, 0, turn, [](float y) { return y; });

        if (blockIdx.x < KV_HEADS * SPLITS) attend(a, *layer, position, turn);
        if (SPLITS > 1) join_splits(to, turn);
        receive(heads, from.heads, turn, column);
        multiply<HIDDEN>(heads, n, SECOND);
        publish_rows(to.attended, SECOND, turn, add);

        read(scale, layer->post_norm), receive(x, from.attended, turn, column);
        norm(x, scale);
        multiply<INNER>(x, n, 0), multiply<INNER>(x, n, INNER / GRID);
        publish_rows(to.inner, 0, turn, [](float gate) {
            return rounded(gate / (1 + expf(-gate))) * total(INNER / GRID + threadIdx.x); });

        receive(inner, from.inner, turn, column);
        multiply<HIDDEN>(inner, n, SECOND);
        publish_rows(to.hidden, SECOND, turn, add);
    }
    read(scale, a.norm), receive(x, from.hidden, turn, column);
    norm(x, scale);
}

// ---- sampling: a head, and sample() of cudagraph_talker.py, by a block
__device__ int id(int i) { return i / 4 * 4 * THREADS + threadIdx.x * 4 + i % 4; }       // of a thread's score i
__device__ int choose(const Arguments &a, const uint2 (&x)[HIDDEN / 256], int head, u32 frame, u32 &n, u32 turn) {
    multiply<VOCAB>(x, n, 0);
    publish_rows(a.exchange->logits[head], 0, turn, [](float y) { return y; });
    if (CODES == 1 && blockIdx.x > 0) return 0;                   // the first block's choice is the talker's
    uint2 logits[SCORES / 4];
    u64 rank[SCORES], winner = VOCAB;         // rank: 32 bits of score, 12 of id; winner: weight / noise, VOCAB - id
    float score[SCORES], noise[SCORES];
    u32 mass[SCORES], best = 0;
    EACH(i, SCORES) noise[i] = *a.greedy ? 1 : a.noise[head * VOCAB + id(i)];
    receive(logits, a.exchange->mine().logits[head], turn, [](int i) { return id(4 * i) / 4; });
    EACH(i, SCORES) {
        score[i] = floats(logits[i / 4]).at[i % 4];
#if CODES == 1
        if (a.seen[id(i)]) score[i] = score[i] < 0 ? score[i] * *a.penalty : score[i] / *a.penalty;
        const bool too_early = frame < *a.min_tokens && id(i) == *a.end_token;
        if (a.suppressed[id(i)] || too_early) score[i] = __uint_as_float(0xff800000);    // -infinity
#endif
        const u32 u = __float_as_uint(score[i]), key = u >> 31 ? ~u : u | 1u << 31;
        rank[i] = (u64)key << 12 | id(i), best = max(best, key), mass[i] = 1;
    }
    best = join(__reduce_max_sync(~0u, best), [](u32 x, u32 y) { return max(x, y); });
    const auto below = [&](u64 candidate) {                       // how many at first, for top-k; how likely, for top-p
        u32 sum = 0;
        EACH(i, SCORES) sum += rank[i] < candidate ? mass[i] : 0;
        return join((u64)__reduce_add_sync(~0u, sum), [](u64 x, u64 y) { return x + y; });
    };
    const auto cut = [&](u64 limit, int last) {                   // the highest rank with no more mass below it
        u64 found = 0;
        for (int bit = 43; bit >= last; --bit) found |= below(found | 1ull << bit) <= limit ? 1ull << bit : 0;
        return found;
    };
    const u64 kth = cut(*a.kth, CODES == 1 ? 12 : 28);            // 12: with its equals; 28: bfloat16 has no more
    const float top = __uint_as_float(best >> 31 ? best & ~(1u << 31) : ~best) / *a.temperature;
    EACH(i, SCORES) score[i] = rank[i] < kth ? 0 : expf(score[i] / *a.temperature - top);
    EACH(i, SCORES) mass[i] = score[i] * (1 << 22) + 0.5f;
    const u64 least = *a.tail > 0 ? cut(*a.tail * below(~0ull), 0) : 0;
    EACH(i, SCORES) if (rank[i] >= least && score[i] > 0)
        winner = max(winner, (u64)__float_as_uint(score[i] / noise[i]) << 32 | VOCAB - id(i));
    for (int other = 16; other; other /= 2) winner = max(winner, __shfl_xor_sync(~0u, winner, other));
    return VOCAB - (int)join(winner, [](u64 x, u64 y) { return max(x, y); });
}

// ---- the kernel
extern "C" __global__ void __launch_bounds__(THREADS + 8, 1) step(const Arguments *arguments) {
    const Arguments a = *arguments;
    if (threadIdx.x < STAGES) start(slot(threadIdx.x).full), start(slot(threadIdx.x).empty);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x >= THREADS) return bring_weights(a.matrices, threadIdx.x - THREADS);

    uint2 x[HIDDEN / 256];
    u32 n = 0, turn = *a.turn, frame = *a.frame;
#if CODES == 1                                                    // the talker
    run_layers(a, a.embedding, *a.start + frame, x, n, turn);
    const u64 token = choose(a, x, 0, ++frame, n, turn);
    if (blockIdx.x > 0) return;
    if (threadIdx.x % 32 < 8) EACH(i, HIDDEN / 256) a.hidden[column(i)] = x[i];
    if (threadIdx.x > 0) return;
    *a.token = token, *a.frame = frame, a.seen[token] = true, *a.turn = turn;
    if (token == *a.end_token) *a.lengths = min(*a.lengths, (u64)frame);
    *a.lengths_on_host = *a.lengths;
#else                                                             // the predictor
    const int at = blockIdx.x * THREADS + threadIdx.x;
    u64 code = *a.token;
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i <= CODES; ++i) {
        run_layers(a, i == 0 ? a.input : a.inputs[i - 1] + code * HIDDEN, i, x, n, turn);
        if (i > 0) code = choose(a, x, i - 1, frame, n, turn);
        if (at < WIDTH) sum += low(a.embeddings[i][code * WIDTH + at]);
        if (at == 0) a.codes[frame * (CODES + 1) + i] = code, *a.turn = turn;
    }
    if (at >= WIDTH) return;
    a.embedding[at] = pack(rounded(sum) + low(a.text[frame * WIDTH + at]), 0);
    a.hiddens[frame * WIDTH + at] = ((const bf16 *)a.hidden)[at];
#endif
}
