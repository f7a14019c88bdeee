// A pass of ROWS rows, a token of each, through a stack of decoder layers: on Hopper GPUs, by kernels of which each
// begins while those before it still run.
//
// overlapped_stack.py compiles this file with NVRTC for one model. It puts these definitions before it:
//
//     HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, EPSILON     of the stack
//     ROWS               32, 64 or 128
//     SLAB               inputs of a matrix that are copied and multiplied at once
//     SPLITS             of the inputs of a product whose result is sums
//     QKV_TILE and so on: outputs of a block; QKV_WEIGHT_STAGES, QKV_X_STAGES: steps copied ahead
//     QKV_SHARED_BYTES   and so on, of a block
//     TILES_AHEAD        of a warp in attention
//
//
// One layer
// ---------
//     kernel               reads                    writes
//     ------------------   ----------------------   ------------------------------------------
//     qkv_product          x                        sums
//     attention            sums, keys, values       heads; one position of keys and of values
//     output_product       heads                    sums
//     sum_and_norm         sums, residual           residual, x
//     gate_up_product      x                        inner: silu(gate) * up
//     down_product         inner                    sums
//     sum_and_norm         sums, residual           residual, x
//
// `sums` are in float: one for each of SPLITS equal parts of a product's inputs, so that a block reads few rows of x.
// Whoever reads them adds and rounds them. Results are rounded where the model's own forward rounds them.
//
// A kernel lets the next one begin at once: its blocks come to a multiprocessor as soon as there is room. They copy
// what no kernel of this pass writes, weights or keys and values, as much as fits into their shared memory. Then they
// wait for the end of the kernel before, and so for all before that. What has been there since before the pass they
// may read at once, what a kernel of the pass writes only then; and only then may they write.
//
//
// A product
// ---------
// A block has TILE outputs of a part of the inputs. In each step it multiplies 64 inputs. One thread copies weights,
// another one x, both to a ring of stages. A warpgroup multiplies 64 outputs by all rows, with wgmma. If TILE is not a
// multiple of 64, the last one multiplies by some lines that are not weights, whose sums nobody reads.

#define BULK_COPIES 1

#include "kernels.h"
#include "attention.h"
#include "barriers.h"


// ---- Sizes

constexpr int LINE_BYTES = 2 * SLAB;                  // of a row of x or of weights in shared memory
constexpr int QUERY_SIZE = HEADS * HEAD_DIM;
constexpr int QKV_SIZE = QKV_HEADS * HEAD_DIM;
constexpr int HEAD_QUADS = HEAD_DIM / 4;              // four bfloat16 each, and lanes of a warp
constexpr int HIDDEN_QUADS = HIDDEN / 4;              // and threads of sum_and_norm
constexpr int ATTENTION_WARPS = OWN_HEADS;
constexpr int TILE_BYTES = WARP_POSITIONS * HEAD_DIM * 2;     // of keys, or of values

constexpr int COLUMNS = ROWS < 64 ? ROWS : 64;        // rows that a product takes at once
constexpr int COLUMN_PARTS = ROWS / COLUMNS;
using Sums = float[COLUMN_PARTS][COLUMNS / 2];        // of a thread

static_assert(ROWS == 32 || ROWS % 64 == 0, "unsupported sizes: ROWS must be 32 or a multiple of 64");
static_assert(GROUP == 2, "unsupported sizes: HEADS must be 2 * KV_HEADS");

// OUTPUTS times INPUTS, of these a block has TILE and INPUTS / PARTS. If it is gated, eight gates and their eight
// ups are next to each other.
template <int OUTPUTS_, int INPUTS_, int TILE_, int WEIGHT_STAGES_, int X_STAGES_, bool IS_GATED_ = false>
struct Matrix {
    static constexpr int OUTPUTS = OUTPUTS_, TILE = TILE_, WEIGHT_STAGES = WEIGHT_STAGES_, X_STAGES = X_STAGES_;
    static constexpr bool IS_GATED = IS_GATED_;
    static constexpr int PARTS = IS_GATED ? 1 : SPLITS;
    static constexpr int INPUTS = INPUTS_ / PARTS;
    static constexpr int STEPS = INPUTS / SLAB;
    static constexpr int WARPS = (TILE + 63) / 64 * 4;        // that multiply
    static constexpr int THREADS = WARPS * 32 + 64;
    static_assert(INPUTS_ % (PARTS * SLAB) == 0 && OUTPUTS % TILE == 0 && TILE % 16 == 0,
                  "unsupported sizes: a matrix");
};
using Qkv = Matrix<QKV_SIZE, HIDDEN, QKV_TILE, QKV_WEIGHT_STAGES, QKV_X_STAGES>;
using Output = Matrix<HIDDEN, QUERY_SIZE, OUTPUT_TILE, OUTPUT_WEIGHT_STAGES, OUTPUT_X_STAGES>;
using GateUp = Matrix<2 * INNER, HIDDEN, GATE_UP_TILE, GATE_UP_WEIGHT_STAGES, GATE_UP_X_STAGES, true>;
using Down = Matrix<HIDDEN, INNER, DOWN_TILE, DOWN_WEIGHT_STAGES, DOWN_X_STAGES>;

template <class M>
struct alignas(1024) ProductShared {
    unsigned char weights[M::WEIGHT_STAGES][M::TILE * LINE_BYTES];     // swizzled as wgmma wants them
    unsigned char x[M::X_STAGES][ROWS * LINE_BYTES];
    bf16 gated[M::IS_GATED ? M::TILE / 16 : 1][ROWS][8];      // what a warp has of each row
    u64 weights_here[M::WEIGHT_STAGES];
    u64 weights_read[M::WEIGHT_STAGES];
    u64 x_here[M::X_STAGES];
    u64 x_read[M::X_STAGES];
};
static_assert(sizeof(ProductShared<Qkv>) == QKV_SHARED_BYTES, "overlapped_stack.py counts other bytes");
static_assert(sizeof(ProductShared<Output>) == OUTPUT_SHARED_BYTES, "overlapped_stack.py counts other bytes");
static_assert(sizeof(ProductShared<GateUp>) == GATE_UP_SHARED_BYTES, "overlapped_stack.py counts other bytes");
static_assert(sizeof(ProductShared<Down>) == DOWN_SHARED_BYTES, "overlapped_stack.py counts other bytes");

struct alignas(1024) AttentionShared {
    unsigned char keys[ATTENTION_WARPS][TILES_AHEAD][TILE_BYTES];
    unsigned char values[ATTENTION_WARPS][TILES_AHEAD][TILE_BYTES];
    uint2 own[OWN_HEADS][HEAD_QUADS];
    float sum[ATTENTION_WARPS][GROUP][HEAD_DIM];
    float best[ATTENTION_WARPS + 1][GROUP];           // of the warps and of the own position
    float weight[ATTENTION_WARPS + 1][GROUP];
};
static_assert(sizeof(AttentionShared) == ATTENTION_SHARED_BYTES, "overlapped_stack.py counts other bytes");

struct NormShared {
    float squares[HIDDEN_QUADS / 32];                 // of each warp
};

// The shared memory of a block is one of these.
union Shared {
    ProductShared<Qkv> qkv;
    ProductShared<Output> output;
    ProductShared<GateUp> gate_up;
    ProductShared<Down> down;
    AttentionShared attention;
    NormShared norm;
};

struct alignas(64) TensorMap {
    u64 words[16];
};


// ---- Arguments

struct Product {
    const TensorMap *weights;                         // boxes of a tile x SLAB inputs
    const TensorMap *x;                               // boxes of all rows x SLAB inputs
    void *result;                                     // sums: (SPLITS, ROWS, outputs), or inner: (ROWS, INNER)
};

struct Attention {
    const float *sums;                                // (SPLITS, ROWS, QKV_SIZE)
    const uint2 *q_norm;                              // (HEAD_DIM)
    const uint2 *k_norm;
    const uint2 *cos;                                 // (cache_length, HEAD_DIM)
    const uint2 *sin;                                 // the first half of each negated
    const i64 *positions;                             // (ROWS)
    u64 cache_length;
    uint4 *keys;                                      // (ROWS, KV_HEADS, cache_length, HEAD_DIM)
    uint4 *values;
    bf16 *heads;                                      // (ROWS, HEADS, HEAD_DIM)
};

struct SumAndNorm {
    const float *sums;                                // (SPLITS, ROWS, HIDDEN)
    const uint2 *residual;                            // (ROWS, HIDDEN)
    const uint2 *weight;                              // (HIDDEN)
    uint2 *total;                                     // (ROWS, HIDDEN); may be `residual`
    uint2 *x;                                         // (ROWS, HIDDEN)
};


// ---- PTX instructions. For a CPU, tests/gpu_on_cpu.h has functions of the same names.

#ifndef ON_CPU

__device__ void let_next_kernel_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the kernel before has ended, and what it wrote can be read, also by copies.
__device__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;\nfence.proxy.async.global;" ::: "memory");
}

__device__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A box to shared memory.
__device__ void copy_box(void *to, const TensorMap &map, int input, int group, u64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5];"
                 :: "r"(shared_address(to)), "l"(&map), "r"(input), "r"(0), "r"(group), "r"(shared_address(&barrier))
                 : "memory");
}

// One that is read once in a pass: what others read again can stay in L2.
__device__ void copy_box_once(void *to, const TensorMap &map, int input, int group, u64 &barrier) {
    constexpr u64 EVICT_FIRST = 0x12f0000000000000;
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
                 :: "r"(shared_address(to)), "l"(&map), "r"(input), "r"(0), "r"(group), "r"(shared_address(&barrier)),
                    "l"(EVICT_FIRST)
                 : "memory");
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

__device__ void fence_wgmma() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ void commit_wgmma() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until no more than this many committed groups are left.
template <int GROUPS>
__device__ void wait_for_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory");
}

// The compiler may not move what these values depend on.
template <int N>
__device__ void pin(float (&d)[N]) {
#pragma unroll
    for (float &value : d) {
        asm volatile("" : "+f"(value) :: "memory");
    }
}

// A vector of a row of 16 bytes, asynchronously.
__device__ void copy_vector(void *to, const uint4 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

__device__ void commit_vectors() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int GROUPS>
__device__ void wait_for_vectors() {
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
}

// Four matrices of 8 rows of 8 bfloat16: lane l has the address of row l % 8 of matrix l / 8. Lane 4 r + q gets of each
// the elements 2 q and 2 q + 1 of row r, or of column r.
__device__ void load_matrices(u32 (&d)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}

__device__ void load_matrices_transposed(u32 (&d)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}

#endif

__device__ void wait_for_phase(u64 &barrier, u32 parity) {
    while (!mbarrier_try_wait(&barrier, parity)) {
    }
}

// A place in a ring of SIZE stages, and the parity of the phase in which it is full.
template <int SIZE>
struct Stage {
    int index = 0;
    u32 parity = 0;

    __device__ void advance() {
        if (++index == SIZE) {
            index = 0;
            parity ^= 1;
        }
    }
};

// Four of the SPLITS sums of a row of WIDTH values, added up.
template <int WIDTH>
__device__ Quad sum_of_parts(const float *sums, int quad) {
    Quad part[SPLITS];
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) {
        part[i] = ((const Quad *)sums)[i * (ROWS * WIDTH / 4) + quad];
    }
#pragma unroll
    for (int i = 1; i < SPLITS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            part[0].v[j] += part[i].v[j];
        }
    }
    return part[0];
}


// ---- Products

template <int STAGES, int WARPS>
__device__ void init_ring(u64 (&here)[STAGES], u64 (&read)[STAGES]) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init<1>(&here[i]);
        mbarrier_init<WARPS>(&read[i]);
    }
}

// All steps of a part of the inputs, by one thread: copy(stage, input, barrier).
template <class M, int STAGES, int BYTES, class Copy>
__device__ void copy_steps(unsigned char (&stages)[STAGES][BYTES], u64 (&here)[STAGES], u64 (&read)[STAGES],
                           int first_input, Copy copy) {
    Stage<STAGES> stage;
    for (int step = 0; step < M::STEPS; ++step) {
        if (step >= STAGES) {
            wait_for_phase(read[stage.index], stage.parity ^ 1);
        }
        mbarrier_arrive_expect_tx(&here[stage.index], BYTES);
        copy(stages[stage.index], first_input + step * SLAB, here[stage.index]);
        stage.advance();
    }
}

// Lane 4 r + q has the outputs r and r + 8 of its warp's 16, of the rows 8 i + 2 q and 8 i + 2 q + 1.
template <class M>
__device__ void write_sums(const Product &arguments, int tile, int part, const Sums &sum) {
    const int first_output = tile * M::TILE + warp_index() * 16 + lane_index() / 4;
    float *sums = (float *)arguments.result + (u64)part * ROWS * M::OUTPUTS + first_output;
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        const int row = i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
        sums[row * M::OUTPUTS + i / 2 % 2 * 8] = sum[i / (COLUMNS / 2)][i % (COLUMNS / 2)];
    }
}

// Those outputs are a gate and its up. A warp gathers its eight of each row, to write them at once.
template <class M>
__device__ void write_inner(const Product &arguments, int tile, const Sums &sum) {
    bf16 (&gated)[ROWS][8] = ((ProductShared<M> &)dynamic_shared<Shared>()).gated[warp_index()];
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) {
        const int row = i / 2 * 8 + lane_index() % 4 * 2 + i % 2;
        const int of_gate = (i / 2 * 4 + i % 2) % (COLUMNS / 2);
        const float (&of_part)[COLUMNS / 2] = sum[i / (COLUMNS / 4)];
        const float activated = round_to_bf16(silu(round_to_bf16(of_part[of_gate])));
        gated[row][lane_index() / 4] = pack_bf16x2(activated * round_to_bf16(of_part[of_gate + 2]), 0);
    }
    __syncwarp();
    bf16 *inner = (bf16 *)arguments.result + tile * (M::TILE / 2) + warp_index() * 8;
    for (int row = lane_index(); row < ROWS; row += 32) {
        *(uint4 *)(inner + row * INNER) = *(uint4 *)gated[row];
    }
}

// Block i has part i % PARTS of the inputs of tile i / PARTS.
template <class M>
__device__ void multiply(const Product &arguments) {
    constexpr int TILE_GROUPS = M::TILE / (M::IS_GATED ? 16 : 8);
    ProductShared<M> &shared = (ProductShared<M> &)dynamic_shared<Shared>();
    const int warp = __shfl_sync(~0u, warp_index(), 0);
    const int tile = blockIdx.x / M::PARTS;
    const int part = blockIdx.x % M::PARTS;
    let_next_kernel_begin();
    if (threadIdx.x == 0) {
        init_ring<M::WEIGHT_STAGES, M::WARPS>(shared.weights_here, shared.weights_read);
        init_ring<M::X_STAGES, M::WARPS>(shared.x_here, shared.x_read);
        fence_barrier_init();
    }
    __syncthreads();

    if (warp == M::WARPS) {
        if (lane_index() == 0) {
            copy_steps<M>(shared.weights, shared.weights_here, shared.weights_read, part * M::INPUTS,
                          [&](void *stage, int input, u64 &here) {
                copy_box_once(stage, *arguments.weights, input, tile * TILE_GROUPS, here);
            });
        }
        return;
    }
    if (warp > M::WARPS) {
        if (lane_index() == 0) {
            wait_for_kernel_before();
            copy_steps<M>(shared.x, shared.x_here, shared.x_read, part * M::INPUTS,
                          [&](void *stage, int input, u64 &here) {
                copy_box(stage, *arguments.x, input, 0, here);
            });
        }
        return;
    }

    Sums sum = {};
    Stage<M::WEIGHT_STAGES> of_weights;
    Stage<M::X_STAGES> of_x;
    u64 *read[2] = {};                                // of the step before
    for (auto &part : sum) {
        pin(part);
    }
#pragma unroll 1
    for (int step = 0; step < M::STEPS; ++step) {
        wait_for_phase(shared.weights_here[of_weights.index], of_weights.parity);
        wait_for_phase(shared.x_here[of_x.index], of_x.parity);
        __syncwarp();
        const u64 a = matrix_descriptor(shared.weights[of_weights.index] + warp / 4 * 64 * LINE_BYTES);
        const u64 b = matrix_descriptor(shared.x[of_x.index]);
        fence_wgmma();
#pragma unroll
        for (int k = 0; k < SLAB / 16; ++k) {
#pragma unroll
            for (int i = 0; i < COLUMN_PARTS; ++i) {  // 32 bytes further, and COLUMNS lines
                wgmma(sum[i], a + 2 * k, b + 2 * k + i * (COLUMNS * LINE_BYTES / 16));
            }
        }
        commit_wgmma();
        if (step > 0) {
            wait_for_wgmma<1>();
            if (lane_index() == 0) {
                mbarrier_arrive(read[0]);
                mbarrier_arrive(read[1]);
            }
        }
        read[0] = &shared.weights_read[of_weights.index];
        read[1] = &shared.x_read[of_x.index];
        of_weights.advance();
        of_x.advance();
    }
    wait_for_wgmma<0>();
    for (auto &part : sum) {
        pin(part);
    }
    if (warp * 16 < M::TILE) {
        if constexpr (M::IS_GATED) {
            write_inner<M>(arguments, tile, sum);
        } else {
            write_sums<M>(arguments, tile, part, sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(Qkv::THREADS) qkv_product(Product arguments) {
    multiply<Qkv>(arguments);
}

extern "C" __global__ void __launch_bounds__(Output::THREADS) output_product(Product arguments) {
    multiply<Output>(arguments);
}

extern "C" __global__ void __launch_bounds__(GateUp::THREADS) gate_up_product(Product arguments) {
    multiply<GateUp>(arguments);
}

extern "C" __global__ void __launch_bounds__(Down::THREADS) down_product(Product arguments) {
    multiply<Down>(arguments);
}


// ---- A product's sums + residual, rounded after both, and its RMS norm. Block b has row b, thread t four values.

extern "C" __global__ void __launch_bounds__(HIDDEN_QUADS) sum_and_norm(SumAndNorm arguments) {
    let_next_kernel_begin();
    const int quad = blockIdx.x * HIDDEN_QUADS + threadIdx.x;
    const uint2 weight = arguments.weight[threadIdx.x];
    wait_for_kernel_before();
    const uint2 total = add(pack(sum_of_parts<HIDDEN>(arguments.sums, quad)), arguments.residual[quad]);
    arguments.total[quad] = total;
    const float squares = block_sum(dot(unpack(total), unpack(total)), dynamic_shared<Shared>().norm.squares);
    arguments.x[quad] = normalize(total, rsqrtf(squares / HIDDEN + EPSILON), weight);
}


// ---- Attention

// A vector of a row of keys or values: the same one of eight rows in a row is in eight different places.
__device__ unsigned char *place_of(unsigned char *tile, int row, int vector) {
    return tile + (row * HEAD_VECTORS + (vector ^ row % 8)) * sizeof(uint4);
}

// The part of a head, 16 dimensions of 16 positions, as four matrices: the first eight dimensions of the positions 0 to
// 7, the others; then of the positions 8 to 15.
__device__ const void *matrices_of(unsigned char *tile, int part) {
    const int matrix = lane_index() / 8;
    return place_of(tile, matrix / 2 * 8 + lane_index() % 8, 2 * part + matrix % 2);
}

// Block i has KV head i % KV_HEADS of row i / KV_HEADS. Its warps take 16 positions each in turn, which they copy to
// shared memory TILES_AHEAD times ahead. Warp i also has the i-th of the own heads: queries, key and value of the row's
// own position. That position comes last, when the warps' results are merged.
//
// Tensor cores multiply queries by keys, and values by weights. A weight is rounded to bfloat16 for that, and what
// rounding takes from it becomes a weight of its own: of the rows of queries, 0 and 1 are the two heads, 2 and 3 the
// same ones again for the rest of their weights, the others 0.
//
//     lane 4 r + q has     scores of row r, of the positions 2 q, 2 q + 1, 2 q + 8, 2 q + 9
//                          sums of the dimensions r and r + 8 of each 16, of rows 2 q and 2 q + 1
extern "C" __global__ void __launch_bounds__(ATTENTION_WARPS * 32) attention(Attention arguments) {
    AttentionShared &shared = dynamic_shared<Shared>().attention;
    let_next_kernel_begin();
    const int row = blockIdx.x / KV_HEADS;
    const int kv_head = blockIdx.x % KV_HEADS;
    const int warp = __shfl_sync(~0u, warp_index(), 0);
    const int lane = lane_index();
    const int r = lane / 4;
    const int q = lane % 4;
    const int position = arguments.positions[row];
    const u64 in_cache = blockIdx.x * arguments.cache_length * HEAD_VECTORS;
    uint4 *keys = arguments.keys + in_cache;
    uint4 *values = arguments.values + in_cache;
    const int tiles = (position + WARP_POSITIONS - 1) / WARP_POSITIONS;

    // Past the end the last position is copied again, with weight 0.
    const auto copy_tile = [&](int tile, int stage) {
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < WARP_POSITIONS / 2; ++i) {
                const int line = 2 * i + lane / 16;
                const int vector = lane % 16;
                const int from = min(tile * WARP_POSITIONS + line, position - 1) * HEAD_VECTORS + vector;
                copy_vector(place_of(shared.keys[warp][stage], line, vector), keys + from);
                copy_vector(place_of(shared.values[warp][stage], line, vector), values + from);
            }
        }
        commit_vectors();
    };
    for (int i = 0; i < TILES_AHEAD; ++i) {
        copy_tile(warp + i * ATTENTION_WARPS, i);
    }

    const uint2 norm_weight = (warp < GROUP ? arguments.q_norm : arguments.k_norm)[lane];
    const uint2 cos = arguments.cos[position * HEAD_QUADS + lane];
    const uint2 sin = arguments.sin[position * HEAD_QUADS + lane];
    wait_for_kernel_before();
    const int own_quad = (row * QKV_HEADS + own_head(kv_head, warp)) * HEAD_QUADS + lane;
    uint2 own = pack(sum_of_parts<QKV_SIZE>(arguments.sums, own_quad));
    if (warp <= GROUP) {
        own = norm_and_rope<32>(own, norm_weight, cos, sin, EPSILON);
    }
    shared.own[warp][lane] = own;
    if (warp >= GROUP) {
        ((uint2 *)(warp == GROUP ? keys : values))[position * HEAD_QUADS + lane] = own;
    }
    __syncthreads();

    u32 query[HEAD_DIM / 16][2];
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 16; ++part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            query[part][i] = r < 2 * GROUP ? ((const u32 *)shared.own[r % GROUP])[8 * part + 4 * i + q] : 0;
        }
    }
    float sum[HEAD_DIM / 16][4] = {};
    float best = LOWEST_SCORE;
    float weight = 0;                                 // of this lane's positions
    int stage = 0;
#pragma unroll 1
    for (int tile = warp; tile < tiles; tile += ATTENTION_WARPS) {
        wait_for_vectors<TILES_AHEAD - 1>();
        __syncwarp();
        float product[2][4] = {};                     // of the positions 0 to 7 and 8 to 15
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 16; ++part) {
            u32 key[4];
            load_matrices(key, matrices_of(shared.keys[warp][stage], part));
            mma_m16n8k16(product[0], query[part][0], 0, query[part][1], 0, key[0], key[1]);
            mma_m16n8k16(product[1], query[part][0], 0, query[part][1], 0, key[2], key[3]);
        }

        float score[4];
        float new_best = best;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = tile * WARP_POSITIONS + i / 2 * 8 + 2 * q + i % 2;
            score[i] = at < position ? product[i / 2][i % 2] * rsqrtf(HEAD_DIM) : LOWEST_SCORE;
            new_best = fmaxf(new_best, score[i]);
        }
        new_best = warp_max<4>(new_best);
        const float rescale = expf(best - new_best);
        best = new_best;
        weight *= rescale;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[i] = expf(score[i] - best);         // 0 past the end
            weight += score[i];
        }
        const float rescale_of_heads[2] = {__shfl_sync(~0u, rescale, 0), __shfl_sync(~0u, rescale, 4)};
        u32 of_values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 rounded = pack_bf16x2(score[2 * i], score[2 * i + 1]);
            const u32 rest = pack_bf16x2(score[2 * i] - low_half(rounded), score[2 * i + 1] - high_half(rounded));
            of_values[i] = r < GROUP ? rounded : rest;
        }
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 16; ++part) {
            u32 value[4];
            load_matrices_transposed(value, matrices_of(shared.values[warp][stage], part));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[part][i] *= rescale_of_heads[i % 2];
            }
            mma_m16n8k16(sum[part], value[0], value[1], value[2], value[3], of_values[0], of_values[1]);
        }
        __syncwarp();
        copy_tile(tile + TILES_AHEAD * ATTENTION_WARPS, stage);
        stage = (stage + 1) % TILES_AHEAD;
    }

    weight = warp_sum<4>(weight);
    if (q == 0 && r < GROUP) {
        shared.best[warp][r] = best;
        shared.weight[warp][r] = weight;
    }
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 16; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float both = sum[part][i] + __shfl_xor_sync(~0u, sum[part][i], 1);
            if (q == 0) {
                shared.sum[warp][i % 2][16 * part + i / 2 * 8 + r] = both;
            }
        }
    }
    if (warp < GROUP) {
        const float own_product = warp_sum(dot(unpack(shared.own[warp][lane]), unpack(shared.own[GROUP][lane])));
        if (lane == 0) {
            shared.best[ATTENTION_WARPS][warp] = own_product * rsqrtf(HEAD_DIM);
            shared.weight[ATTENTION_WARPS][warp] = 1;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += ATTENTION_WARPS * 32) {
        const int head = i / HEAD_DIM;
        const int dimension = i % HEAD_DIM;
        const float own_value = low_half(((const bf16 *)shared.own[GROUP + 1])[dimension]);
        const PartialAttention all = merge_attention(ATTENTION_WARPS + 1, [&](int i) -> PartialAttention {
            return {shared.best[i][head], shared.weight[i][head],
                    i < ATTENTION_WARPS ? shared.sum[i][head][dimension] : own_value};
        });
        arguments.heads[blockIdx.x * GROUP * HEAD_DIM + i] = pack_bf16x2(all.sum / all.weight, 0);
    }
}
