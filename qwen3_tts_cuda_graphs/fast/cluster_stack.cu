// A pass of ROWS rows, a token of each, through a stack of decoder layers as one launch: on Hopper GPUs.
//
// cluster_stack.py compiles this file with NVRTC for one model. It puts these definitions before it:
//
//     HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, EPSILON, LAYERS     of the stack
//     ROWS               32 or 64
//     CLUSTERS           which the GPU runs at once, of CLUSTER blocks each
//     THREADS            of a block
//     SLAB               inputs that are copied and multiplied at once
//     SQUARES            sums of squares of a row: one for each tile of HIDDEN, and some that are 0
//     SHARING_WARPS      that share the positions of a token and KV head
//     SHARED_BYTES       of a block
//     EXCHANGED_BYTES    of what blocks exchange in global memory
//
//
// Who has what
// ------------
// For each matrix a cluster, or each half of one, has some of the outputs (a tile), and each of its blocks some of the
// inputs of these (a slice): so a block reads few activations. What the blocks of a tile have summed they send each
// other, each the rows that another block finishes:
//
//     matrix     tiles           blocks of a tile    and then
//     qkv        2 * CLUSTERS    4
//     output     CLUSTERS        8                   + residual
//     gate, up   2 * CLUSTERS    4                   silu(gate) * up
//     down       CLUSTERS        8                   + residual
//
// A tile has whole groups of 8 outputs, or of 8 gates and their 8 ups; the last tile may have fewer. Products of 4
// blocks are called wide, those of 8 narrow.
//
// The norm is part of the product after it: each tile of a sum is written with the sum of its squares in each row. In
// attention a block has some pairs of a row and a KV head. Results are rounded where the model's own forward
// rounds them.
//
//
// How blocks wait for each other
// ------------------------------
// What all blocks read of another's result is in global memory. It is EMPTY, all ones, which no kernel computes, until
// it is written. A reader loads it until it is not. Then it must be EMPTY again before it is written the next time, and
// before somebody waits for that:
//
//     phase        waits for             and when it has written its result, empties
//     qkv          output, its squares   inner, of the layer before
//     attention    qkv                   -
//     output       heads                 qkv
//     gate, up     middle, its squares   heads, the layer's input
//     down         inner                 middle
//
// By then all blocks have read what is emptied: for example, the sums of a qkv tile depend on all that `down` of the
// layer before has written, and who has written that has the sums of all blocks of a tile, which have read `inner`.
// And before it is written again, all blocks see it EMPTY, so that nobody takes old values for new ones: a block writes
// the result of a phase when all see what it has emptied in the phase before (`settled`). Who waits for `inner` again
// has the sums of a gate and up tile, which depend on all of `middle`, and that was written when `inner` was EMPTY.
//
//
// A block
// -------
// One thread copies the weights, as soon as there is room: those of a narrow product when the wide one before is
// multiplied, those of a wide one when the narrow one before begins or, where they overlap it, is multiplied. Each
// warpgroup multiplies 64 outputs by all rows with wgmma, with both operands in shared memory, and sends the sums with
// st.async. Then each warp has a row to finish. A block finishes the same outputs of `output` and `down`, so it keeps
// its part of the hidden states in registers.

#define BULK_COPIES 1

#include "kernels.h"
#include "attention.h"
#include "barriers.h"


// ---- Sizes

constexpr int BLOCKS = CLUSTERS * CLUSTER;
constexpr int WARPS = THREADS / 32;
constexpr int SETTLING_WARP = WARPS - 1;              // has no part in attention
constexpr int COPYING_WARP = WARPS - 2;
constexpr int LINE_BYTES = 2 * SLAB;                  // of a row of activations or weights in shared memory
constexpr int QUERY_SIZE = HEADS * HEAD_DIM;
constexpr int QKV_SIZE = QKV_HEADS * HEAD_DIM;
constexpr int PAIRS = ROWS * KV_HEADS;                // of a row and a KV head
constexpr int PAIRS_AT_ONCE = WARPS / SHARING_WARPS;  // in a block

constexpr int HIDDEN_VECTORS = HIDDEN / 8;

constexpr int largest(int a, int b) {
    return a > b ? a : b;
}

constexpr int divide_up(int a, int b) {
    return (a + b - 1) / b;
}

// The four products of a layer. The first and third are wide: 4 blocks share a tile; the others narrow: 8 do.
enum : int { QKV, OUTPUT, GATE_UP, DOWN };

struct Product {
    int groups;                                       // of a tile: of 8 outputs, or of 8 gates and then 8 ups
    int tile;                                         // outputs; the last tile may have fewer
    int warps;                                        // that have outputs of a tile, 16 each
    int input_vectors;                                // of a row
    int slabs;                                       // of a block's slice of the inputs
    int result_groups;                                // of all tiles: vectors of a row of the result
};

constexpr Product product(int index, int outputs, int inputs) {
    const int splits = index % 2 ? 8 : 4;
    const int lines = index == GATE_UP ? 16 : 8;      // of a group
    const int groups = divide_up(outputs / lines, BLOCKS / splits);
    const int tile = groups * lines;
    return {groups, tile, divide_up(tile, 16), inputs / 8, inputs / splits / SLAB, outputs / lines};
}

constexpr Product QKV_PRODUCT = product(QKV, QKV_SIZE, HIDDEN);
constexpr Product OUTPUT_PRODUCT = product(OUTPUT, HIDDEN, QUERY_SIZE);
constexpr Product GATE_UP_PRODUCT = product(GATE_UP, 2 * INNER, HIDDEN);
constexpr Product DOWN_PRODUCT = product(DOWN, HIDDEN, INNER);
__constant__ constexpr Product PRODUCTS[4] = {QKV_PRODUCT, OUTPUT_PRODUCT, GATE_UP_PRODUCT, DOWN_PRODUCT};

// Of the larger of the wide and of the narrow products.
constexpr int WIDE_WARPS = largest(QKV_PRODUCT.warps, GATE_UP_PRODUCT.warps);
constexpr int NARROW_WARPS = largest(OUTPUT_PRODUCT.warps, DOWN_PRODUCT.warps);
constexpr int SLABS = largest(QKV_PRODUCT.slabs, largest(OUTPUT_PRODUCT.slabs, DOWN_PRODUCT.slabs));
static_assert(QKV_PRODUCT.slabs == GATE_UP_PRODUCT.slabs, "both have HIDDEN inputs");

constexpr int LINES = THREADS / 8;                    // that are loaded at once
static_assert(HIDDEN % (4 * LINES / ROWS * SLAB) == 0, "unsupported sizes: slices of HIDDEN");
static_assert(QUERY_SIZE % (8 * LINES / ROWS * SLAB) == 0, "unsupported sizes: slices of HEADS * HEAD_DIM");
static_assert(INNER % (8 * LINES / ROWS * SLAB) == 0, "unsupported sizes: slices of INNER");
static_assert(largest(WIDE_WARPS, NARROW_WARPS) < COPYING_WARP, "unsupported sizes: too many outputs for a block");
static_assert(largest(QKV_PRODUCT.groups, GATE_UP_PRODUCT.groups) <= 32, "unsupported sizes: a lane for each group");
static_assert(CLUSTERS <= SQUARES && OUTPUT_PRODUCT.groups <= 16, "unsupported sizes: tiles of HIDDEN");


// ---- Arguments. cluster_stack.py writes them and checks their layout when it compiles.

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Layer {
    const uint4 *input_norm;
    const uint4 *post_norm;
    const uint4 *q_norm;
    const uint4 *k_norm;
    uint4 *keys;                                      // (rows, KV_HEADS, cache_length, HEAD_DIM)
    uint4 *values;
};

// Hidden states, and the sums of their squares in each tile.
struct Hidden {
    uint4 values[ROWS * HIDDEN_VECTORS];
    u32 squares[ROWS * SQUARES];
};

// What blocks write for all others, see above.
struct Exchanged {
    uint4 qkv[ROWS * QKV_SIZE / 8];
    uint4 heads[ROWS * QUERY_SIZE / 8];
    uint4 inner[ROWS * INNER / 8];
    Hidden middle;
    Hidden output[2];                                 // of odd and even layers: the input of even and odd ones
};
static_assert(sizeof(Exchanged) == EXCHANGED_BYTES, "cluster_stack.py counts other bytes");

struct RunStack {
    const TensorMap *matrices;                        // (LAYERS, 4): boxes of a tile x SLAB inputs
    const Layer *layers;                              // (LAYERS)
    u64 cache_length;
    const uint4 *cos;                                 // (cache_length, HEAD_DIM)
    const uint4 *sin;                                 // the first half negated
    const uint4 *embeds;                              // (ROWS, HIDDEN), or a table
    const i64 *tokens;                                // (ROWS): their rows of that table, or null
    const i64 *positions;                             // (ROWS)
    uint4 *result;                                    // (ROWS, HIDDEN), before the final norm
    Exchanged *exchanged;
    u32 *failed;                                      // 0, or what a thread has waited for too long, now or before
    volatile u32 *failed_on_host;                     // the same in pinned memory
};


// ---- Shared memory

struct MergeShared {
    float sum[WARPS][GROUP][HEAD_DIM];
    float best[WARPS][GROUP];
    float weight[WARPS][GROUP];
};

struct Barriers {
    u64 copied[3];                                    // weights, by NARROW, EARLY, LATE
    u64 received[2];                                  // sums of the wide and of the narrow products
    u64 multiplied;                                   // by all warps
    u64 settled;                                      // all blocks see what this one has emptied
};

constexpr int WIDE_X = QKV_PRODUCT.slabs * ROWS * LINE_BYTES;
constexpr int NARROW_X = largest(OUTPUT_PRODUCT.slabs, DOWN_PRODUCT.slabs) * ROWS * LINE_BYTES;
constexpr int WIDE_SUMS = largest(ROWS * WIDE_WARPS * 4 * sizeof(Quad), NARROW_X);
constexpr int NARROW_SUMS = ROWS * NARROW_WARPS * 4 * sizeof(Quad);
constexpr int SUMS = largest(ROWS / 4 * (WIDE_WARPS * 16 + 4), ROWS / 8 * (NARROW_WARPS * 16 + 4));
constexpr int FIRST = divide_up(largest(WIDE_X, largest(SUMS * 4, sizeof(MergeShared))), 1024) * 1024;
constexpr int ROOM = SHARED_BYTES - FIRST - WIDE_SUMS - NARROW_SUMS - ROWS * 4 - (int)sizeof(Barriers);
constexpr int WEIGHT_BYTES = ROOM / 1024 * 1024;

struct alignas(1024) Shared {
    unsigned char weights[WEIGHT_BYTES];              // lines of 128 bytes, swizzled as wgmma wants them
    union {                                           // one after the other
        unsigned char wide_x[WIDE_X];                 // (inputs / 64, ROWS) lines, swizzled
        float sums[SUMS];                             // (own rows, outputs of all warps + 4)
        MergeShared merge;
        unsigned char all[FIRST];
    };
    union {                                           // a narrow product begins when these sums are added up, and has
        Quad wide[WIDE_SUMS / sizeof(Quad)];          // ended in all blocks of the tile when those of the next one come
        unsigned char narrow_x[NARROW_X];
    };
    Quad narrow[NARROW_SUMS / sizeof(Quad)];
    float factor[ROWS];                               // of the norm
    Barriers barriers;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "more than a block may have");

// A wide product has its slabs at the start of the weights, the narrow one before it at their end. Early slabs are
// those that do not overlap it.
constexpr int narrow_at(Product narrow) {
    return (WEIGHT_BYTES - narrow.slabs * narrow.tile * LINE_BYTES) / 1024 * 1024;
}

constexpr int early_slabs(Product wide, Product narrow) {
    const int room = narrow_at(narrow) / (wide.tile * LINE_BYTES);
    return room < wide.slabs ? room : wide.slabs;
}

constexpr bool fits(Product wide) {
    return wide.slabs * wide.tile * LINE_BYTES <= WEIGHT_BYTES;
}
static_assert(fits(QKV_PRODUCT) && fits(GATE_UP_PRODUCT), "unsupported sizes: too many weights for a block");
static_assert(narrow_at(OUTPUT_PRODUCT) >= 0 && narrow_at(DOWN_PRODUCT) >= 0, "unsupported sizes: too many weights");

__device__ Shared &shared() {
    return dynamic_shared<Shared>();
}


// ---- PTX instructions. For a CPU, tests/gpu_on_cpu.h has functions of the same names.

#ifndef ON_CPU

__device__ void store_relaxed(uint4 *address, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ void store_relaxed(uint2 *address, uint2 v) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" :: "l"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A box of weights to shared memory.
__device__ void copy_box(void *to, const TensorMap &map, int input, int group, u64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5];"
                 :: "r"(shared_address(to)), "l"(&map), "r"(input), "r"(0), "r"(group), "r"(shared_address(&barrier))
                 : "memory");
}

// The address of the same variable in another block of the cluster.
__device__ u32 address_in(u32 address, u32 block) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    return remote;
}

__device__ void send(u32 to, float a, float b, float c, float d, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// Of lines of 128 bytes, swizzled, eight of them after each other.
__device__ u64 matrix_descriptor(const void *address) {
    return (u64)(shared_address(address) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// D[64 outputs][ROWS] += A[64 outputs][16 inputs] * B[16 inputs][ROWS]
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)

__device__ void wgmma(float (&d)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
                 : SIXTEEN(d, 0) : "l"(a), "l"(b));
}

__device__ void wgmma(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, 0;"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16) : "l"(a), "l"(b));
}

template <int N>
__device__ void begin_wgmma(float (&d)[N]) {
#pragma unroll
    for (float &value : d) {
        asm volatile("" : "+f"(value) :: "memory");
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <int N>
__device__ void end_wgmma(float (&d)[N]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (float &value : d) {
        asm volatile("" : "+f"(value) :: "memory");
    }
}

__device__ u64 clock_cycles() {
    u64 cycles;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
    return cycles;
}

#endif

__device__ uint4 load_relaxed(const uint4 *address) {
    return load_relaxed_x4((const u32 *)address);
}


// The compiler knows that it is the same for all lanes.
__device__ int uniform_warp_index() {
    return __shfl_sync(~0u, warp_index(), 0);
}


// ---- Waits, all with one time limit. After one has failed, later launches return at once.

constexpr u64 CYCLES_TO_WAIT = 4'000'000'000;         // 2 s
constexpr u32 EMPTY = ~0u;
enum WaitingFor : u32 { FOR_BLOCKS = 1, FOR_WEIGHTS = 2 };

struct Waits {
    u64 deadline;                                     // of the multiprocessor's clock
    u32 failed;                                       // 0, or a WaitingFor
};

// For all lanes of a warp, so that the compiler knows that they are together afterwards.
template <class Ready>
__device__ void wait_until(Waits &waits, WaitingFor waiting_for, Ready ready) {
    bool has_ended;
    do {
        has_ended = ready();
        if (!has_ended && clock_cycles() > waits.deadline) {
            waits.failed = waiting_for;
            has_ended = true;
        }
    } while (!__all_sync(~0u, has_ended));
}

__device__ void wait_for_phase(Waits &waits, u64 &barrier, u32 parity, WaitingFor waiting_for = FOR_BLOCKS) {
    wait_until(waits, waiting_for, [&] { return mbarrier_try_wait(&barrier, parity); });
}

__device__ bool is_there(u32 value) {
    return value != EMPTY;
}

__device__ bool is_there(uint4 v) {
    return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}

// Empties a part of an array: all blocks together all of it.
template <class T>
__device__ void empty(T &array) {
    constexpr int VECTORS = sizeof(T) / sizeof(uint4);
#pragma unroll 1
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < VECTORS; i += BLOCKS * THREADS) {
        store_relaxed((uint4 *)&array + i, uint4{EMPTY, EMPTY, EMPTY, EMPTY});
    }
}


// ---- Products

// Which of the products it is, and this block's part of it.
struct Work : Product {
    int index;
    bool is_narrow;
    int turn;                                         // 0 or 1: two products of a layer use each buffer and barrier
    int tile_index;
    int rank;                                         // of the block, among those of its tile
    int own_rows;                                     // that a block finishes
    int line;                                         // floats of a row of sums: rows begin in different banks

    unsigned char *weights;
    unsigned char *x;

    __device__ explicit Work(int index) : Product(PRODUCTS[index]), index(index) {
        is_narrow = index % 2;
        turn = index / 2;
        const int log_splits = is_narrow ? 3 : 2;
        tile_index = blockIdx.x >> log_splits;
        rank = blockIdx.x & ((1 << log_splits) - 1);
        own_rows = ROWS >> log_splits;
        line = warps * 16 + 4;
        weights = shared().weights + (index == OUTPUT ? narrow_at(OUTPUT_PRODUCT)
                                      : index == DOWN ? narrow_at(DOWN_PRODUCT)
                                                      : 0);
        x = is_narrow ? shared().narrow_x : shared().wide_x;
    }
    __device__ int early() const {
        return index == QKV ? early_slabs(QKV_PRODUCT, DOWN_PRODUCT) : early_slabs(GATE_UP_PRODUCT, OUTPUT_PRODUCT);
    }
};

enum : int { NARROW, EARLY, LATE };                   // barriers for weights

// A thread starts to copy some slabs of the block's weights.
__device__ void copy_weights(const Work &work, const TensorMap *maps, int first, int end, int which) {
    const int bytes = work.tile * LINE_BYTES;
    u64 &barrier = shared().barriers.copied[which];
    mbarrier_arrive_expect_tx(&barrier, (end - first) * bytes);
#pragma unroll 1
    for (int i = first; i < end; ++i) {
        const int input = (work.rank * work.slabs + i) * SLAB;
        copy_box(work.weights + i * bytes, maps[work.index], input, work.tile_index * work.groups, barrier);
    }
}

// Before a narrow product there is room for the early slabs of the wide one that follows. They are not copied sooner,
// as that would delay what other blocks read for attention.
__device__ void copy_weights_before(const Work &narrow, const TensorMap *maps_of_next) {
    const Work wide((narrow.index + 1) % 4);
    copy_weights(wide, maps_of_next, 0, wide.early(), EARLY);
}

// After a narrow product there is room for the late slabs, after a wide one for the narrow one.
__device__ void copy_weights_after(const Work &work, const TensorMap *maps_of_next) {
    const Work next((work.index + 1) % 4);
    copy_weights(next, maps_of_next, work.is_narrow ? next.early() : 0, next.slabs, work.is_narrow ? LATE : NARROW);
}

// What all threads have emptied is then EMPTY for all blocks. That takes up to 3 us, so nobody waits for it here.
__device__ void settle() {
    __syncthreads();
    if (threadIdx.x == SETTLING_WARP * 32) {
        __threadfence();
        mbarrier_arrive(&shared().barriers.settled);
    }
    __syncwarp();
}

__device__ u64 row_of_embeds(const RunStack &arguments, int row) {
    return arguments.tokens ? arguments.tokens[row] : row;
}

// The slice of all rows to shared memory, normalized if the product has a norm. Eight threads have a line. The first x
// of all, the embeddings, is there.
__device__ void load_x(const RunStack &arguments, const Work &work, const uint4 *x, const u32 *squares,
                       const uint4 *norm_weight, Waits &waits, bool is_there_now) {
    constexpr int LOADS = SLABS * ROWS / LINES;
    constexpr int NORM_LOADS = QKV_PRODUCT.slabs * ROWS / LINES;
    constexpr int TILES = ROWS * SQUARES / THREADS;   // sums of squares, for a thread
    static_assert(LINES % ROWS == 0 && ROWS * SQUARES % THREADS == 0, "unsupported sizes: 32 or 64 rows");
    const int t = threadIdx.x;
    const int row = t / 8 % ROWS;
    const int first = work.rank * work.slabs * 8 + t / 8 / ROWS * 8 + t % 8;
    const auto has_load = [&](int i) { return i < work.slabs * ROWS / LINES; };
    x += (is_there_now ? row_of_embeds(arguments, row) : row) * work.input_vectors + first;
    const auto load = [&](int i) {
        return load_relaxed(x + i * (LINES / ROWS * 8));
    };

    uint4 weight[NORM_LOADS] = {};
    if (norm_weight) {
#pragma unroll
        for (int i = 0; i < NORM_LOADS; ++i) {
            weight[i] = norm_weight[first + i * (LINES / ROWS * 8)];
        }
    }
    // One of the vectors first, as polling for all takes bandwidth from others.
    uint4 v[LOADS] = {};
    wait_until(waits, FOR_BLOCKS, [&] {
        v[0] = load(0);
        return is_there_now || is_there(v[0]);
    });
    u32 of_tile[TILES] = {};
    wait_until(waits, FOR_BLOCKS, [&] {
        bool are_there = true;
#pragma unroll
        for (int i = 1; i < LOADS; ++i) {
            if (has_load(i)) {
                v[i] = load(i);
            }
        }
        if (squares) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                of_tile[i] = load_relaxed(squares + t + i * THREADS);
                are_there &= is_there(of_tile[i]);
            }
        }
#pragma unroll
        for (const uint4 &vector : v) {
            are_there &= is_there_now || is_there(vector);
        }
        return are_there;
    });
    if (squares) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float sum = warp_sum<SQUARES>(__uint_as_float(of_tile[i]));
            if (t % SQUARES == 0) {
                shared().factor[(t + i * THREADS) / SQUARES] = rsqrtf(sum / HIDDEN + EPSILON);
            }
        }
        __syncthreads();
        const float factor = shared().factor[row];
#pragma unroll
        for (int i = 0; i < NORM_LOADS; ++i) {
            v[i] = normalize(v[i], factor, weight[i]);
        }
    }
    unsigned char *line = work.x + t / 8 * LINE_BYTES + (t % 8 ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        if (has_load(i)) {
            *(uint4 *)(line + i * LINES * LINE_BYTES) = v[i];
        }
    }
    for (int which = work.is_narrow ? NARROW : EARLY; which <= (work.is_narrow ? NARROW : LATE); ++which) {
        wait_for_phase(waits, shared().barriers.copied[which], work.turn, FOR_WEIGHTS);
    }
    fence_proxy_async();
    __syncthreads();
}

// Multiplies the block's slice, sends the sums to the blocks of the tile, and adds up those of its own rows, to
// shared().sums. When the weights are not needed any more, those of the next product take their place.
__device__ void multiply_and_exchange(const Work &work, const TensorMap *maps_of_next, Waits &waits) {
    const int t = threadIdx.x;
    const int warp = uniform_warp_index();
    const int of_pair = work.warps * 8;               // quads of two rows: outputs m and m + 8 of rows n and n + 1
    const int of_block = work.own_rows / 2 * of_pair;
    const int log_own_rows = (ROWS == 64 ? 6 : 5) - (work.is_narrow ? 3 : 2);
    Quad *received_sums = work.is_narrow ? shared().narrow : shared().wide;
    u64 &received = shared().barriers.received[work.is_narrow];
    if (t == 0) {
        mbarrier_arrive_expect_tx(&received, of_block * (work.is_narrow ? 8 : 4) * sizeof(Quad));
    }
    if (t == COPYING_WARP * 32 && work.is_narrow && maps_of_next) {
        copy_weights_before(work, maps_of_next);
    }
    __syncwarp();
    float sum[ROWS / 2] = {};
    if (warp / 4 * 4 < work.warps) {                  // a warpgroup has 64 outputs
        u64 a = matrix_descriptor(work.weights + warp / 4 * 64 * LINE_BYTES);
        u64 b = matrix_descriptor(work.x);
        begin_wgmma(sum);
#pragma unroll 1
        for (int slab = 0; slab < work.slabs; ++slab) {
#pragma unroll
            for (int k = 0; k < SLAB / 16; ++k) {
                wgmma(sum, a + 2 * k, b + 2 * k);     // 32 bytes further
            }
            a += work.tile * LINE_BYTES / 16;
            b += ROWS * LINE_BYTES / 16;
        }
        end_wgmma(sum);
    }
    if (lane_index() == 0) {
        mbarrier_arrive(&shared().barriers.multiplied);
    }
    if (warp == COPYING_WARP && maps_of_next) {
        wait_for_phase(waits, shared().barriers.multiplied, work.is_narrow);
        if (lane_index() == 0) {
            copy_weights_after(work, maps_of_next);
        }
        __syncwarp();
    }

    // Lane 4 r + q has the outputs m = r and r + 8 of its warp's 16, rows n = 8 i + 2 q and n + 1.
    if (warp < work.warps) {
        const u32 to = shared_address(received_sums + work.rank * of_block + warp * 8 + lane_index() / 4);
        const u32 to_barrier = shared_address(&received) - to;
        const u32 first_block = blockIdx.x % CLUSTER - work.rank;
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const int n = 8 * i + lane_index() % 4 * 2;
            const u32 in_block = address_in(to, first_block + (n >> log_own_rows));
            const u32 pair = (n & (work.own_rows - 1)) / 2;
            send(in_block + pair * of_pair * sizeof(Quad), sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3],
                 in_block + to_barrier);
        }
    }
    wait_for_phase(waits, received, work.turn);       // among them are the block's own sums

    const int item = t % 128;
    for (int pair = t / 128; pair < work.own_rows / 2; pair += THREADS / 128) {
        if (item < of_pair) {
            Quad total = {};
#pragma unroll
            for (int rank = 0; rank < 8; ++rank) {
                if (rank < 4 || work.is_narrow) {
                    const Quad &value = received_sums[rank * of_block + pair * of_pair + item];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        total.v[i] += value.v[i];
                    }
                }
            }
            float *sums = &shared().sums[2 * pair * work.line + item / 8 * 16 + item % 8];
            sums[0] = total.v[0];
            sums[work.line] = total.v[1];
            sums[8] = total.v[2];
            sums[work.line + 8] = total.v[3];
        }
    }
    __syncthreads();
}

// In `finish` a warp has one of the block's own rows, and a lane a group of 8 of the tile's outputs.
struct Place {
    int own_row;
    int row;
    int group;
    bool is_there;
    u64 index;                                        // in the result

    __device__ explicit Place(const Work &work) {
        own_row = uniform_warp_index();
        row = work.rank * work.own_rows + own_row;
        group = work.tile_index * work.groups + lane_index();
        is_there = own_row < work.own_rows && lane_index() < work.groups && group < work.result_groups;
        index = (u64)row * work.result_groups + group;
    }
};
static_assert(ROWS / 4 <= WARPS, "a warp for each row");

// The sum of squares of hidden states in this tile. The last tile has those that there are not, too.
__device__ void write_squares(const Work &work, const Place &place, uint4 v, u32 *squares) {
    const float sum = warp_sum(dot(unpack(v), unpack(v)));
    const int end = work.tile_index < CLUSTERS - 1 ? work.tile_index + 1 : SQUARES;
    const int index = work.tile_index + lane_index();
    if (place.own_row < work.own_rows && index < end) {
        store_relaxed(squares + place.row * SQUARES + index, lane_index() == 0 ? __float_as_uint(sum) : 0);
    }
}

// The block's own rows of its tile, rounded, to `result`: silu(gate) * up, or what is added to the hidden states, which
// the block keeps, and the sum of their squares.
__device__ void finish(const Work &work, uint4 *result, uint4 &hidden, u32 *squares) {
    const Place place(work);
    uint4 v = {};
    if (place.is_there) {
        const float *sums = &shared().sums[place.own_row * work.line];
        if (work.index == GATE_UP) {
            Eight gate = unpack(pack(*(const Eight *)(sums + 16 * lane_index())));
#pragma unroll
            for (float &value : gate.v) {
                value = silu(value);
            }
            v = multiply(pack(gate), pack(*(const Eight *)(sums + 16 * lane_index() + 8)));
        } else {
            v = pack(*(const Eight *)(sums + 8 * lane_index()));
            if (work.is_narrow) {
                v = add(v, hidden);
                hidden = v;
            }
        }
        store_relaxed(result + place.index, v);
    }
    if (squares) {
        write_squares(work, place, v, squares);
    }
}


// ---- Attention

__device__ void attention(const RunStack &arguments, const Layer &layer, Waits &waits) {
    constexpr int STRIDE = SHARING_WARPS * WARP_POSITIONS;
    const int lane = threadIdx.x % 16;
    const int warp_of_block = uniform_warp_index();
    const int warp = warp_of_block % SHARING_WARPS;
    const int pair = warp_of_block / SHARING_WARPS * BLOCKS + blockIdx.x;
    const int row = pair / KV_HEADS;
    const int kv_head = pair % KV_HEADS;
    const bool has_pair = warp_of_block < PAIRS_AT_ONCE * SHARING_WARPS && pair < PAIRS;
    const auto output = [&](int g) {
        return arguments.exchanged->heads + (row * HEADS + kv_head * GROUP + g) * HEAD_VECTORS;
    };
    if (has_pair) {
        const int position = arguments.positions[row];
        const u64 in_cache = ((u64)row * KV_HEADS + kv_head) * arguments.cache_length * HEAD_VECTORS;
        const u64 at_position = (u64)position * HEAD_VECTORS;
        const HeadOfToken head = {
            kv_head, position, layer.keys + in_cache, layer.values + in_cache, layer.q_norm, layer.k_norm,
            arguments.cos + at_position, arguments.sin + at_position, false};
        const uint4 *qkv = arguments.exchanged->qkv + row * QKV_HEADS * HEAD_VECTORS + lane;
        const auto load_own = [&](uint4 (&own)[OWN_HEADS]) {
            wait_until(waits, FOR_BLOCKS, [&] {
                bool are_there = true;
#pragma unroll
                for (int i = 0; i < OWN_HEADS; ++i) {
                    own[i] = load_relaxed(qkv + own_head(kv_head, i) * HEAD_VECTORS);
                }
#pragma unroll
                for (const uint4 &vector : own) {
                    are_there &= is_there(vector);
                }
                return are_there;
            });
        };
        WarpAttention attended =
            attend_positions(head, warp * WARP_POSITIONS, position, STRIDE, warp == 0, load_own);
        if constexpr (SHARING_WARPS == 1) {
            finish_attention(attended, [&](int g, uint4 vector) { store_relaxed(output(g) + lane, vector); });
        } else {
            MergeShared &merge = shared().merge;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                if (threadIdx.x % 32 < 16) {
                    *(Eight *)&merge.sum[warp_of_block][g][8 * lane] = attended.sum[g];
                }
                if (threadIdx.x % 32 == 0) {
                    merge.best[warp_of_block][g] = attended.best[g];
                    merge.weight[warp_of_block][g] = attended.weight[g];
                }
            }
        }
    }
    if constexpr (SHARING_WARPS > 1) {
        __syncthreads();
        const int first_warp = warp_of_block / SHARING_WARPS * SHARING_WARPS;
        const int in_group = threadIdx.x % (SHARING_WARPS * 32);
        for (int i = in_group; has_pair && i < GROUP * HEAD_DIM / 4; i += SHARING_WARPS * 32) {
            const int g = i / (HEAD_DIM / 4);
            const int quad = i % (HEAD_DIM / 4);
            const MergeShared &merge = shared().merge;
            Quad all;
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                const PartialAttention of_pair = merge_attention(SHARING_WARPS, [&](int w) -> PartialAttention {
                    return {merge.best[first_warp + w][g], merge.weight[first_warp + w][g],
                            merge.sum[first_warp + w][g][4 * quad + d]};
                });
                all.v[d] = of_pair.sum / of_pair.weight;
            }
            store_relaxed((uint2 *)output(g) + quad, pack(all));
        }
        __syncthreads();                               // shared().x is next
    }
}


// ---- All layers

__device__ void run_layers(const RunStack &arguments, Waits &waits) {
    Exchanged &exchanged = *arguments.exchanged;
    const Work output(OUTPUT);
    const Place place(output);
    uint4 hidden = {};
    if (place.is_there) {
        hidden = arguments.embeds[row_of_embeds(arguments, place.row) * HIDDEN_VECTORS + place.group];
    }
    write_squares(output, place, hidden, exchanged.output[0].squares);
#pragma unroll 1
    for (int i = 0; i < 4 * LAYERS; ++i) {
        const Work work(i % 4);
        const Layer &layer = arguments.layers[i / 4];
        Hidden &input = exchanged.output[i / 4 % 2];
        Hidden &next = exchanged.output[(i / 4 + 1) % 2];
        const bool is_first = i < 4;
        const bool is_last = i >= 4 * LAYERS - 4;
        const uint4 *x = work.index == QKV       ? (is_first ? arguments.embeds : input.values)
                         : work.index == OUTPUT  ? exchanged.heads
                         : work.index == GATE_UP ? exchanged.middle.values
                                                 : exchanged.inner;
        const u32 *squares = work.index == QKV ? input.squares : exchanged.middle.squares;
        const uint4 *norm_weight = work.index == QKV ? layer.input_norm : layer.post_norm;
        load_x(arguments, work, x, work.is_narrow ? nullptr : squares, work.is_narrow ? nullptr : norm_weight, waits,
               is_first && work.index == QKV);

        multiply_and_exchange(work, i + 1 < 4 * LAYERS ? arguments.matrices + (i + 1) / 4 * 4 : nullptr, waits);
        wait_for_phase(waits, shared().barriers.settled, !work.is_narrow);      // the first time at once
        if (work.index == QKV) {
            finish(work, exchanged.qkv, hidden, nullptr);
            empty(exchanged.inner);
            settle();
            attention(arguments, layer, waits);
        } else if (work.index == OUTPUT) {
            finish(work, exchanged.middle.values, hidden, exchanged.middle.squares);
            empty(exchanged.qkv);
            settle();
        } else if (work.index == GATE_UP) {
            finish(work, exchanged.inner, hidden, nullptr);
            empty(exchanged.heads);
            empty(input);
            settle();
        } else {
            finish(work, is_last ? arguments.result : next.values, hidden, is_last ? nullptr : next.squares);
            empty(exchanged.middle);
            settle();
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
run_stack(const __grid_constant__ RunStack arguments) {
    if (load_relaxed(arguments.failed)) {
        return;
    }
    Waits waits = {clock_cycles() + CYCLES_TO_WAIT, 0};
    if (threadIdx.x == 0) {
        Barriers &barriers = shared().barriers;
        for (u64 &barrier : barriers.copied) {
            mbarrier_init<1>(&barrier);
        }
        for (u64 &barrier : barriers.received) {
            mbarrier_init<1>(&barrier);
        }
        mbarrier_init<WARPS>(&barriers.multiplied);
        mbarrier_init<1>(&barriers.settled);
        fence_barrier_init();
        const Work first(QKV);
        copy_weights(first, arguments.matrices, 0, first.early(), EARLY);
        copy_weights(first, arguments.matrices, first.early(), first.slabs, LATE);
    }
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
    run_layers(arguments, waits);
    if (waits.failed) {
        store_relaxed(arguments.failed, waits.failed);
        *arguments.failed_on_host = waits.failed;
    }
    __syncwarp();
    arrive_at_cluster();                              // no block ends while another may send to it
    wait_for_cluster();
}
